"""Medusa head files, GGUF with ``general.architecture = "medusa"``, and their conversion.

| key | type | |
|---|---|---|
| medusa.head_count | u32 | heads; head 0 guesses the token after the target's own |
| medusa.block_count | u32 | residual blocks per head, 0 to 16 |
| medusa.embedding_length | u32 | hidden width of the target |
| medusa.vocab_size | u32 | tokens of the target |
| medusa.vocabulary | string | optional: SHA-256 over the target's token texts |

| tensor | shape [out, in] | |
|---|---|---|
| head.H.block.B.weight, .bias | [width, width], [width] | x <- x + SiLU(W x + b) |
| head.H.proj.weight | [width, width] | optional: a square matrix after the blocks |
| head.H.output.weight | [rows, width] | optional: without one, the target's output matrix is used |
| ids | I32 [rows] | optional: the token of each row, if not every token has one |

Matrices may be F32, F16, BF16, Q8_0, Q4_0 or Q6_K, the rest is F32. llama.cpp does not know this
architecture; specllama computes the heads itself.

Published Medusa-1 heads are a folder with ``medusa_lm_head.safetensors`` (or ``.pt``) whose names
are ``HEAD.LAYER.linear.weight``, ``HEAD.LAYER.linear.bias`` for the residual blocks and
``HEAD.LAYERS.weight`` for the head's output matrix; some tools put ``medusa_head.`` or ``heads.``
before the head's number.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from specllama.errors import BadGguf, CannotLoad, PairIncompatible
from specllama.models.checkpoint import read_tensors
from specllama.models.companions import Head, require_architecture
from specllama.models.gguf import GgufHeader
from specllama.models.gguf_writer import Tensor, Value, type_for, write_gguf
from specllama.models.memory import F32, MIB, ModelMemory
from specllama.models.tensors import read_ids

ARCHITECTURE = "medusa"
STATES = 8  # that a head reads at once, at most
MAX_HEADS, MAX_BLOCKS = 32, 16


@dataclass(frozen=True, slots=True)
class MedusaFacts:
    """Facts in a head file, checked against its tensors.

    ``rows`` is the height of the output matrices: ``vocab`` unless some tokens were left out.
    """

    heads: int
    blocks: int
    width: int
    vocab: int
    vocabulary: str | None
    rows: int
    own_output: tuple[bool, ...]

    @property
    def needs_target_output(self) -> bool:
        return not all(self.own_output)


def vocabulary_digest(header: GgufHeader) -> str:
    """Return the SHA-256 over the token texts, each ended by a NUL."""
    digest = hashlib.sha256()
    for token in header.token_bytes:
        digest.update(token + b"\0")
    return digest.hexdigest()


def read_facts(header: GgufHeader) -> MedusaFacts:
    """Read the facts of a head file.

    Raises:
        PairIncompatible: the file holds no Medusa heads.
        BadGguf: it holds some, but its contents do not fit together.
    """
    name = header.path.name
    hint = "make one from a checkpoint with: specllama convert"
    require_architecture(header, ARCHITECTURE, "Medusa heads", hint)

    def number(key: str, low: int, high: int) -> int:
        key = header.own(key)
        value = header.integer(key)
        if value is None or not low <= value <= high:
            raise BadGguf(f"{name}: {key} is {value}, not a number from {low} to {high}")
        return value

    heads = number("head_count", 1, MAX_HEADS)
    blocks = number("block_count", 0, MAX_BLOCKS)
    width = number("embedding_length", 1, 1 << 16)
    vocab = number("vocab_size", 1, 1 << 22)
    rows = vocab
    ids = header.by_name.get("ids")
    if ids is not None:
        if len(ids.shape) != 1 or not 1 <= ids.shape[0] <= vocab:
            raise BadGguf(f"{name}: {ids.shape} token ids for a vocabulary of {vocab}")
        rows = ids.shape[0]
    own = []
    for h in range(heads):
        for b in range(blocks):
            _require(header, f"head.{h}.block.{b}.weight", (width, width))
            _require(header, f"head.{h}.block.{b}.bias", (width,))
        if f"head.{h}.proj.weight" in header.by_name:
            _require(header, f"head.{h}.proj.weight", (width, width))
        own.append(f"head.{h}.output.weight" in header.by_name)
        if own[-1]:
            _require(header, f"head.{h}.output.weight", (width, rows))
    return MedusaFacts(
        heads=heads, blocks=blocks, width=width, vocab=vocab,
        vocabulary=header.text(header.own("vocabulary")), rows=rows, own_output=tuple(own),
    )  # fmt: skip


def _require(header: GgufHeader, name: str, shape: tuple[int, ...]) -> None:
    info = header.by_name.get(name)
    if info is None or info.shape != shape:
        have = "missing" if info is None else f"of shape {list(info.shape)}"
        raise BadGguf(f"{header.path.name}: {name} is {have}, expected {list(shape)}")


def check_target(facts: MedusaFacts, heads: GgufHeader, target: GgufHeader) -> None:
    """Check that these heads can read this target.

    Raises:
        PairIncompatible: another hidden width or another vocabulary.
    """
    name, of = heads.path.name, target.path.name
    hint = f"use heads that were trained for {target.name}"
    _check_width(f"{name} reads", facts.width, target, hint)
    if facts.vocab != target.vocab_size:
        raise PairIncompatible(
            f"{name} guesses among {facts.vocab} tokens, {of} has {target.vocab_size}", hint
        )
    if facts.vocabulary is not None and facts.vocabulary != vocabulary_digest(target):
        raise PairIncompatible(f"{name} was made for different tokens than those of {of}", hint)


def _check_width(reads: str, width: int, target: GgufHeader, hint: str | None = None) -> None:
    if width != (its := target.embedding_length):
        why = f"hidden states of width {width}, those of {target.path.name} are {its} wide"
        raise PairIncompatible(f"{reads} {why}", hint)


def output_name(target: GgufHeader) -> str:
    """Return the tensor that turns hidden states into logits: the embeddings if the two are
    tied."""
    return "output.weight" if "output.weight" in target.by_name else "token_embd.weight"


def read_output_ids(header: GgufHeader, facts: MedusaFacts) -> npt.NDArray[np.int32] | None:
    """Read the tokens of the output rows, None if row r is token r.

    Raises:
        BadGguf: a token twice, or one that does not exist.
    """
    if "ids" not in header.by_name:
        return None
    ids = read_ids(header, "ids")
    if len(np.unique(ids)) != len(ids) or ids.min() < 0 or ids.max() >= facts.vocab:
        raise BadGguf(f"{header.path.name}: its token ids are not ids of {facts.vocab} tokens")
    return ids


def write_heads(
    path: Path,
    arrays: Mapping[str, Tensor],
    *,
    name: str,
    heads: int,
    blocks: int,
    width: int,
    vocab: int,
    vocabulary: str | None = None,
    kind: str = "Q8_0",
    metadata: Mapping[str, Value] | None = None,
) -> None:
    """Write a head file.

    Args:
        arrays: by the tensor names above; biases are written as F32, matrices as ``kind`` (F16
            where rows do not fill blocks of 32).

    Raises:
        SpecllamaError: the file cannot be written.
    """
    keys: dict[str, Value] = {
        "general.architecture": ARCHITECTURE,
        "general.name": name,
        **(metadata or {}),
        "medusa.head_count": heads,
        "medusa.block_count": blocks,
        "medusa.embedding_length": width,
        "medusa.vocab_size": vocab,
    }
    if vocabulary is not None:
        keys["medusa.vocabulary"] = vocabulary
    tensors: dict[str, tuple[Tensor, str]] = {
        key: (array, "I32" if key == "ids" else type_for(array, kind))
        for key, array in arrays.items()
    }
    write_gguf(path, keys, tensors)


def _check(head: GgufHeader, target: GgufHeader) -> MedusaFacts:
    facts = read_facts(head)
    check_target(facts, head, target)
    return facts


def _memory(head: GgufHeader, target: GgufHeader, n_ctx: int) -> ModelMemory:
    facts, weights = read_facts(head), head.tensor_bytes
    if facts.needs_target_output:  # a copy of its rows
        output = target.by_name[output_name(target)]
        weights += output.n_bytes * facts.rows // max(output.shape[1], 1)
    values = STATES * ((8 * facts.blocks + 4) * facts.width + facts.rows) * F32
    return ModelMemory(weights, 0, 0, values + MIB, 0, 0, n_ctx)


# ---------------------------------------------------------------------- conversion

NAMES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt", "medusa_lm_head.bin")
MAX_PADDING = 128  # how many rows an output matrix may have more or fewer than the vocabulary

_KEY = re.compile(
    r"(?:.*\.)?(?P<head>\d+)\.(?P<layer>\d+)\.(?P<linear>linear\.)?(?P<part>weight|bias)"
)


@dataclass(frozen=True, slots=True)
class MedusaCheckpoint:
    """Arrays under the names of a head file."""

    arrays: Mapping[str, Tensor]
    heads: int
    blocks: int
    width: int
    rows: int


def read_checkpoint(path: Path) -> MedusaCheckpoint:
    """Read a published Medusa-1 checkpoint.

    Raises:
        ModelUnavailable: no such file.
        CannotLoad: not such a checkpoint, damaged, or a pickle that cannot be read safely here.
    """
    blocks: dict[tuple[int, int, str], Tensor] = {}
    outputs: dict[tuple[int, int], Tensor] = {}
    for key, tensor in read_tensors(path).items():
        match = _KEY.fullmatch(key)
        if match is None:
            continue
        at = int(match["head"]), int(match["layer"])
        if match["linear"]:
            blocks[*at, match["part"]] = tensor
        elif match["part"] == "weight":
            outputs[at] = tensor
    heads = len(outputs)
    depth = {layer for _, layer in outputs}
    numbers = {head for head, _ in outputs} | {head for head, _, _ in blocks}
    if not outputs or len(depth) != 1 or numbers != set(range(heads)):
        raise CannotLoad(
            f"{path.name} is not laid out as Medusa-1 heads: no output matrix per head "
            "(0.1.weight, 1.1.weight, …)"
        )
    n_blocks = depth.pop()
    if heads > MAX_HEADS or n_blocks > MAX_BLOCKS:
        raise CannotLoad(f"{path.name}: {heads} heads of {n_blocks} blocks are too many")
    rows, width = (*outputs[0, n_blocks].shape, 0, 0)[:2]
    arrays: dict[str, Tensor] = {}
    for h in range(heads):
        wanted: list[tuple[str, Tensor, tuple[int, ...]]] = [
            (f"head.{h}.output.weight", outputs[h, n_blocks], (rows, width))
        ]
        for b in range(n_blocks):
            for part, its in (("weight", (width, width)), ("bias", (width,))):
                block = blocks.get((h, b, part))
                if block is None:
                    raise CannotLoad(f"{path.name}: head {h} lacks {h}.{b}.linear.{part}")
                wanted.append((f"head.{h}.block.{b}.{part}", block, its))
        for name, tensor, shape in wanted:
            if tensor.shape != shape:
                raise CannotLoad(
                    f"{path.name}: {name} has the shape {list(tensor.shape)}, not {list(shape)}"
                )
            arrays[name] = tensor
    return MedusaCheckpoint(arrays, heads, n_blocks, width, rows)


def convert_medusa(source: Path, destination: Path, target: GgufHeader, kind: str) -> None:
    """Write a file of Medusa-1 heads as a head file for ``target``, see ``convert``.

    Args:
        kind: type of the matrices: "q8_0", "f16" or "f32".

    Raises:
        PairIncompatible: heads of another width or vocabulary.
        ModelUnavailable, CannotLoad, SpecllamaError: see ``read_checkpoint`` and ``write_heads``.
    """
    found = read_checkpoint(source)
    vocab = target.vocab_size
    _check_width("these heads read", found.width, target)
    if abs(found.rows - vocab) > MAX_PADDING:
        raise PairIncompatible(
            f"these heads guess among {found.rows} tokens, {target.path.name} has {vocab}"
        )
    arrays = dict(found.arrays)
    if found.rows > vocab:  # padding rows carry no token
        for name in [name for name in arrays if name.endswith("output.weight")]:
            arrays[name] = np.asarray(arrays[name], np.float32)[:vocab]
    elif found.rows < vocab:
        arrays["ids"] = np.arange(found.rows, dtype=np.int32)
    write_heads(
        destination, arrays, name=f"Medusa heads for {target.name}", heads=found.heads,
        blocks=found.blocks, width=found.width, vocab=vocab,
        vocabulary=vocabulary_digest(target), kind=kind.upper(),
    )  # fmt: skip


HEAD = Head(check=_check, open="specllama.backend.heads.medusa_head:open_medusa", memory=_memory)
