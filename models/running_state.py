"""The running state that some models keep of a text besides its cells: its size, its copies.

Sources: llama.cpp's llama-arch.cpp (``llm_arch_supports_rs_rollback``), llama-hparams.cpp
(``n_embd_r``, ``n_embd_s``), llama-memory-recurrent.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specllama.models.nextn_blocks import lacks_trunk, trunk_blocks
from specllama.text import size

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

F32 = 4
PLANES = 6  # as far as is drafted unless a user asks for more; every one is as large as the state
# of these llama.cpp keeps the states after the last tokens of a pass
WITH_PLANES = frozenset(
    {
        "qwen35", "qwen35moe", "qwen4exp", "nemotron_h", "nemotron_h_moe", "lfm2", "lfm2moe",
        "kimi-k3", "bailingmoe3", "deepseek4", "glm5-next",
    }
)  # fmt: skip
# those of which llama.cpp was seen to compute several texts in one pass. It ends the process with
# plamo2 (ggml.c:1797, a view beyond its tensor), and with repacked weights of kimi-k3, kimi-linear,
# bailingmoe3 and minimax-01 (repack.cpp:4674, ``GGML_ASSERT(ne13 == 1)``); rwkv* were not tried
TOGETHER = frozenset(
    {
        "qwen35", "qwen35moe", "qwen3next", "qwen4exp", "nemotron_h", "nemotron_h_moe", "lfm2",
        "lfm2moe", "deepseek4", "glm5-next", "mamba", "mamba2", "jamba", "granitehybrid",
        "falcon-h1",
    }
)  # fmt: skip

CHECKPOINTS = 8  # copies of the state that are kept of a text
CHECKPOINT_BYTES = 256 << 20  # of all of them, but there are always two


def checkpoints(n_bytes: int) -> int:
    """Return the number of states to keep, by their size in bytes."""
    return max(2, min(CHECKPOINTS, CHECKPOINT_BYTES // max(n_bytes, 1)))


def rollback(header: GgufHeader) -> str:
    """Name how rejected tokens are undone: "cells" (attention: any depth), "planes" (as many tokens
    of a pass as there are) or "checkpoint" (a state is saved, accepted tokens are read again)."""
    if not (header.is_recurrent or header.is_hybrid):
        return "cells"
    return "planes" if header.architecture in WITH_PLANES else "checkpoint"


def planes(max_rows: int) -> int:
    """Return how many states after its last tokens a pass of at most ``max_rows`` rows keeps."""
    return min(PLANES, max_rows - 1)


def state_bytes(header: GgufHeader) -> int:
    """Return the bytes of one state of a text, of all layers; 0 for models without."""
    if not (header.is_recurrent or header.is_hybrid):
        return 0

    def of(name: str) -> int:
        return header.integer(header.own(name)) or 0

    width, heads = header.embedding_length, header.head_count
    inner, state, shift = of("ssm.inner_size"), of("ssm.state_size"), of("ssm.conv_kernel") - 1
    if wkv := of("wkv.head_size"):
        values = (of("token_shift_count") or 2) * width + width * wkv
    elif cached := of("shortconv.l_cache"):
        values = (cached - 1) * width
    elif kda := of("kda.head_dim"):
        values = 3 * max(shift, 0) * heads * kda + kda * kda * heads
    elif inner:
        values = max(shift, 0) * (inner + 2 * of("ssm.group_count") * state) + inner * state
    elif header.architecture == "deepseek4":  # what is not yet compressed: 128 rows, and scores
        values = 2 * 128 * header.key_length
    else:  # linear attention of plain heads
        values = header.key_length**2 * heads
    return sum(recurrent_layers(header)) * values * F32


def kept_bytes(header: GgufHeader, max_rows: int) -> int:
    """Return the bytes of a text's state and of the states that a pass of at most ``max_rows`` rows
    keeps."""
    count = 1 + planes(max_rows) if header.architecture in WITH_PLANES else 1
    return count * state_bytes(header)


def line(header: GgufHeader, max_rows: int) -> str:
    """Describe the memory of a model's states; "" for models without."""
    state = state_bytes(header)
    if not state:
        return ""
    copies = checkpoints(state)
    text = f"running state: {size(state)}"
    if (earlier := kept_bytes(header, max_rows) - state) > 0:
        text += f"; {earlier // state} earlier ones to undo guesses, {size(earlier)}"
    return text + f"; up to {copies} copies to go back to, {size(copies * state)}"


def recurrent_layers(header: GgufHeader) -> tuple[bool, ...]:
    """Return for each layer of the trunk whether it keeps a state."""
    blocks = trunk_blocks(header)
    if not (header.is_recurrent or header.is_hybrid) or lacks_trunk(header):
        return (False,) * blocks
    if every := header.integer(header.own("full_attention_interval")):
        return tuple((i + 1) % every != 0 for i in range(blocks))
    heads = header.head_counts_kv[:blocks]
    wide = header.per_layer(header.own("feed_forward_length"))
    alone = header.architecture.startswith("nemotron_h")  # a layer is of one kind
    found = tuple(n == 0 and not (alone and hidden) for n, hidden in zip(heads, wide, strict=False))
    return found if any(found) else (True,) * blocks
