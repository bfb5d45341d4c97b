"""The memory that a model or a pair needs, from the headers alone.

Per model: the weights; the KV cache (or recurrent states); the compute buffer of the largest pass;
the output rows; the tokenizer's tables. The compute formula follows llama.cpp's graph (attention
scores, feed-forward, output) and was fitted to what it reports; sizes are bytes throughout.
"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specllama.errors import DoesNotFit, UsageError
from specllama.models import running_state
from specllama.models.companions import find, require_head
from specllama.models.ggml_types import KV_BYTES
from specllama.models.kernel_limits import ROOT, MemoryLimit, memory_limits, text_in
from specllama.models.nextn_blocks import lacks_trunk, trunk_blocks, why_not
from specllama.text import size

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

MIB = 1 << 20
CTX_PADDING = 256
F32 = 4
DEFAULT_CTX = 8192
PASS_TOKENS, PASS_ROWS = 256, 65  # of the engine's passes on CPUs, unless it is told otherwise
TREE_ROWS = 16  # of a pass in which a draft grows a tree, unless it is told otherwise
HEAD_BATCH = 128  # tokens of a pass of an EAGLE-3 head: each costs a row of the output matrix

# Python, numpy, llama.cpp's libraries and our own code and buffers (measured with the tiny pair)
PROCESS_BYTES = 60 * MIB
# hash maps and strings of the tokenizer, fitted to seven vocabularies of 32 k to 262 k tokens
BPE_TOKEN_BYTES, MERGE_BYTES = 220, 105
OTHER_TOKEN_BYTES = 120
# the share of the available memory that a pair may take
MARGIN = 0.95
SPARE = 256 * MIB  # that idle conversations leave to other programs


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The memory of one loaded model.

    Attributes:
        repacked: weights that llama.cpp rearranges for this CPU. The mapped originals stay resident
            until the system reclaims their pages: they count in ``total``, not in ``required``.
        reading: a second cache and its buffers, in which a long prompt is read while other
            conversations go on.
        checkpoints: copies of a running state, to go back to.
    """

    weights: int
    repacked: int
    kv: int
    compute: int
    output: int
    tokenizer: int
    n_ctx: int
    reading: int = 0
    checkpoints: int = 0

    @property
    def total(self) -> int:
        """Resident size once everything was touched."""
        return self.required + self.repacked

    @property
    def required(self) -> int:
        """The memory that cannot be given back: the amount that has to fit."""
        buffers = self.kv + self.compute + self.output + self.reading + self.checkpoints
        return self.weights + buffers + self.tokenizer

    def to_dict(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**fields, "required": self.required, "total": self.total}


@dataclass(frozen=True, slots=True)
class PairMemory:
    """The memory of a target, a draft and drafting heads in one process."""

    target: ModelMemory
    draft: ModelMemory | None
    heads: tuple[ModelMemory, ...] = ()
    process: int = PROCESS_BYTES

    @property
    def parts(self) -> tuple[ModelMemory, ...]:
        """Everything that is loaded."""
        return (self.target, *((self.draft,) if self.draft else ()), *self.heads)

    @property
    def total(self) -> int:
        """Resident size of the process once everything was touched."""
        return sum(part.total for part in self.parts) + self.process

    @property
    def required(self) -> int:
        """The memory that cannot be given back: the amount that has to fit."""
        return sum(part.required for part in self.parts) + self.process

    def to_dict(self) -> dict[str, Any]:
        return {
            "target": self.target.to_dict(),
            "draft": None if self.draft is None else self.draft.to_dict(),
            "heads": [head.to_dict() for head in self.heads],
            "process": self.process,
            "required": self.required,
            "total": self.total,
        }


def padded_ctx(n_ctx: int) -> int:
    """Return the context length that llama.cpp really allocates."""
    return -(-max(n_ctx, 1) // CTX_PADDING) * CTX_PADDING


def context_length(header: GgufHeader, asked: int | None = None) -> int:
    """Return the tokens of the context to open: None asks for no more than 8192, 0 for the trained
    length."""
    trained = header.context_length or DEFAULT_CTX
    return asked or (min(trained, DEFAULT_CTX) if asked is None else trained)


def kv_bytes(
    header: GgufHeader,
    n_ctx: int,
    *,
    type_k: str = "f16",
    type_v: str = "f16",
    max_rows: int = 1,
    lanes: int = 1,
) -> int:
    """Estimate the KV cache of ``n_ctx`` tokens, and the running states of layers without
    attention.

    Layers with a sliding window keep every cell (the binding's default), so that any depth of
    rollback stays possible.

    Args:
        max_rows: of a pass; some models keep a state for each of the last ones.
        lanes: conversations at once; with a running state each has cells of its own.

    Raises:
        UsageError: an unknown cache type.
    """
    for kind in (type_k, type_v):
        if kind not in KV_BYTES:
            raise UsageError(
                f"unknown KV cache type {kind!r}", f"choose one of {', '.join(KV_BYTES)}"
            )
    # NextN blocks have a cache of their own, and only where they are run
    blocks = trunk_blocks(header) if why_not(header) else header.block_count
    heads = list(header.head_counts_kv[:blocks])
    if lacks_trunk(header):
        heads = heads[trunk_blocks(header) :]
    elif 0 not in heads and header.integer(header.own("full_attention_interval")):
        trunk = running_state.recurrent_layers(header)
        heads = [0 if i < len(trunk) and trunk[i] else n for i, n in enumerate(heads)]
    per_head = header.key_length * KV_BYTES[type_k]
    if not header.one_kv_type:  # there V is a view of K
        per_head += header.value_length * KV_BYTES[type_v]
    cells = int(padded_ctx(n_ctx) * sum(heads) * per_head)
    return (cells + running_state.kept_bytes(header, max_rows)) * _apart(header, lanes)


@lru_cache(maxsize=1)
def repacked_types() -> frozenset[str]:
    """Return the tensor types that ggml rearranges on this CPU (repack.cpp, for AVX2 and for
    ARM)."""
    machine = platform.machine().lower()
    if machine in ("arm64", "aarch64"):
        return frozenset({"Q4_0", "Q4_K", "Q5_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"})
    lines = text_in(Path("/proc/cpuinfo")).splitlines()
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    if not lines and machine in ("x86_64", "amd64"):
        flags = ["avx2"]
    types = {"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"} if "avx2" in flags else set()
    return frozenset(types | ({"Q2_K"} if "avx512f" in flags else set()))


def repacked_bytes(header: GgufHeader, types: frozenset[str] | None = None) -> int:
    """Return the bytes of weights of which llama.cpp keeps a rearranged copy on the CPU."""
    types = repacked_types() if types is None else types
    return sum(
        tensor.n_bytes
        for tensor in header.tensors
        if tensor.type in types
        and tensor.is_matrix
        and tensor.shape[1] % 8 == 0
        # a row lookup reads the original
        and tensor.name != "token_embd.weight"
    )


def compute_bytes(
    header: GgufHeader,
    n_ctx: int,
    *,
    n_ubatch: int = PASS_TOKENS,
    n_outputs: int = PASS_ROWS,
    flash_attn: bool = True,
    on_cpu: bool = True,
    lanes: int = 1,
) -> int:
    """Estimate the buffer of the widest pass: the largest of attention scores, feed-forward and
    output.

    Args:
        n_ubatch: rows of a prefill pass.
        n_outputs: rows of a pass whose scores are wanted (drafts + 1).
        lanes: as for ``kv_bytes``.
    """
    cells = padded_ctx(n_ctx)
    rows = min(n_ubatch, cells)
    width, heads = header.embedding_length, header.head_count
    queries = heads * header.key_length
    keys = header.head_count_kv * (header.key_length + header.value_length)
    expert = header.experts_used * header.most("expert_feed_forward_length")
    hidden = max(header.feed_forward_length, expert)
    mask = rows * cells * (2 if flash_attn else F32)
    scores = 0 if flash_attn else rows * cells * heads * F32
    attention = scores + rows * (2 * width + 3 * queries + keys) * F32
    feed_forward = rows * (3 * hidden + 4 * width) * F32
    logits = n_outputs * (header.vocab_size + 2 * width) * F32
    # a CPU rounds activations to 8 bit in a scratch buffer before each matrix product
    scratch = rows * max(hidden, width) * 34 // 32 if on_cpu else 0
    # states that a layer computes, its planes among them
    layers = sum(running_state.recurrent_layers(header))
    states = running_state.kept_bytes(header, n_outputs) // max(layers, 1) * lanes
    return mask + max(attention, feed_forward, logits) + scratch + states


def pipelining_bytes(
    header: GgufHeader, n_ctx: int, *, n_ubatch: int = PASS_TOKENS, flash_attn: bool = True
) -> int:
    """Estimate what each of several devices takes on top of its buffer so that a pass can begin on
    one while another still computes the pass before: copies of the mask, and of data between
    layers."""
    cells = padded_ctx(n_ctx)
    rows = min(n_ubatch, cells)
    mask = rows * cells * (2 if flash_attn else F32)
    return 3 * mask + 6 * rows * header.embedding_length * F32


def window_bytes(
    header: GgufHeader, n_ctx: int, *, n_ubatch: int, type_k: str = "f16", type_v: str = "f16"
) -> int:
    """Return the bytes that the cache saves when windowed layers keep only their window."""
    gone = max(padded_ctx(n_ctx) - padded_ctx(header.sliding_window + n_ubatch), 0)
    per_cell = header.key_length * KV_BYTES[type_k] + header.value_length * KV_BYTES[type_v]
    layers = zip(header.head_counts_kv, header.windowed_layers, strict=False)
    return int(gone * per_cell * sum(heads for heads, windowed in layers if windowed))


def tokenizer_bytes(header: GgufHeader) -> int:
    """Estimate the memory of llama.cpp's vocabulary: 50 MB for 150 k tokens of byte-level BPE."""
    if not header.merges_count:
        return header.vocab_size * OTHER_TOKEN_BYTES
    return header.vocab_size * BPE_TOKEN_BYTES + header.merges_count * MERGE_BYTES


def estimate_model(
    header: GgufHeader,
    *,
    n_ctx: int | None = None,
    type_k: str = "f16",
    type_v: str = "f16",
    n_ubatch: int = PASS_TOKENS,
    n_outputs: int = PASS_ROWS,
    flash_attn: bool = True,
    lanes: int = 1,
    reads_apart: bool = False,
) -> ModelMemory:
    """Estimate the memory of one model; ``n_ctx`` as in ``context_length``.

    Args:
        n_ctx: of all conversations together, which share the cache; of each one of those that
            keep a running state.
        lanes: conversations at once.
        reads_apart: several conversations may go on, so that prompts are read in a second cache.

    Raises:
        UsageError: an unknown cache type.
    """
    n_ctx = padded_ctx(context_length(header, n_ctx))
    kv = kv_bytes(header, n_ctx, type_k=type_k, type_v=type_v, max_rows=n_outputs, lanes=lanes)
    state = running_state.state_bytes(header)

    def buffer(rows: int) -> int:
        return compute_bytes(
            header, n_ctx, n_ubatch=n_ubatch, n_outputs=rows, flash_attn=flash_attn, lanes=lanes
        )

    compute = buffer(n_outputs)
    apart = _apart(header, lanes)
    reading = kv + compute if reads_apart and apart == 1 < lanes else 0
    if not why_not(header):  # the context that runs the NextN block
        compute += buffer(TREE_ROWS)
    return ModelMemory(
        weights=header.tensor_bytes, repacked=repacked_bytes(header), kv=kv, compute=compute,
        output=n_outputs * header.vocab_size * F32, tokenizer=tokenizer_bytes(header),
        n_ctx=n_ctx, reading=reading,
        checkpoints=state * running_state.checkpoints(state) * apart,
    )  # fmt: skip


def _apart(header: GgufHeader, lanes: int) -> int:
    """Return the number of caches that some conversations at once take."""
    return lanes if header.is_recurrent or header.is_hybrid else 1


def estimate_head(header: GgufHeader, target: GgufHeader, *, n_ctx: int) -> ModelMemory:
    """Estimate the memory that a drafting head takes on top of its target.

    Raises:
        PairIncompatible, BadGguf: it is no head that could be loaded.
    """
    found: ModelMemory = find(require_head(header)).memory(header, target, n_ctx)
    return found


_beside = 0  # see ``leave``


def leave(beside: int) -> None:
    """Count this many bytes as taken in this process from now on: weights that other engines map
    and read in every pass, which the system calls available all the same."""
    global _beside
    _beside = beside


def available_memory() -> int:
    """Return the bytes that this process can still take without swapping, see ``room``, without the
    share left to other engines. At least 1.

    0 if the system does not report it.
    """
    free = room().free
    return max(free - _beside, 1) if free else 0


def total_memory() -> int:
    """Return the bytes of RAM that this process may use, 0 when the system does not report them."""
    return min((limit.total for limit in limits()), default=0)


def room() -> MemoryLimit:
    """Return the limit that leaves the least free, the machine's RAM if there is no other."""
    return min(limits(), key=lambda limit: limit.free, default=MemoryLimit(0, 0))


def limits() -> list[MemoryLimit]:
    """List the bounds on this process's memory: the machine's RAM, if it is known, and those limits
    that are not above it. Each leaves at least 1 byte free, since 0 means unknown."""
    total = _meminfo("MemTotal") or _from_sysconf()
    machine = MemoryLimit(total, _meminfo("MemAvailable") or total)
    found = [limit for limit in memory_limits(ROOT) if not total or limit.total <= total]
    known = [machine, *found] if total else found
    return [replace(limit, free=max(limit.free, 1)) for limit in known]


def _from_sysconf() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0


def _meminfo(name: str) -> int:
    with suppress(OSError, ValueError, IndexError):
        for line in (ROOT / "proc/meminfo").read_text("ascii").splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0


def fits(memory: PairMemory | ModelMemory) -> bool:
    """True if it fits the available memory with a small margin, or that is unknown."""
    free = available_memory()
    return free == 0 or memory.required <= free * MARGIN


def require_fit(memory: PairMemory | ModelMemory) -> None:
    """Refuse a pair that does not fit.

    Raises:
        DoesNotFit: with both figures and what to change.
    """
    if not fits(memory):
        raise DoesNotFit(
            f"this needs about {size(memory.required)} of memory, {free_words()}",
            "choose a smaller context (-c) or quantization; see also: specllama hub pairs --fits",
            needed=memory.required,
            free=available_memory(),
        )


def free_words() -> str:
    """Describe the available memory, and the limit that leaves no more."""
    limit = room()
    of = f" of the {size(limit.total)} that {limit.source} allows" if limit.source else ""
    return f"{size(available_memory())} are free{of}"
