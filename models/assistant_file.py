"""Gemma 4 assistants: checks that llama.cpp can run one, and that it belongs to a target.

MTP in a file of its own (``general.architecture = "gemma4-assistant"``): a few layers that have
queries only and look into the keys and values of the target's last layers, windowed ones into those
of its last windowed layer. llama.cpp takes the shapes on trust and would read beside the cache, so
they are compared here (``src/models/gemma4-assistant.cpp``, ``src/llama-model.cpp``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from specllama.errors import BadGguf
from specllama.models.companions import Head, other_tokens, require_same_target
from specllama.models.loadable import check_loadable
from specllama.models.memory import TREE_ROWS, ModelMemory, estimate_model

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

TARGET = "gemma4"


def check_target(head: GgufHeader, target: GgufHeader) -> None:
    """Refuse an assistant that could not be loaded, or that belongs to another target.

    Raises:
        BadGguf, UnsupportedModel: llama.cpp cannot run it.
        PairIncompatible: with the first difference found.
    """
    check_loadable(head, "head")
    name, of = head.path.name, target.path.name
    if head.integer(head.own("nextn_predict_layers")) != head.block_count:
        raise BadGguf(f"{name}: not all of its layers are prediction layers")
    if not any(head.windowed_layers):
        raise BadGguf(f"{name}: none of its layers sees a sliding window")

    width = head.integer(head.own("embedding_length_out")) or head.embedding_length
    its = target.embedding_length
    if target.architecture != TARGET:
        why = f"assistants belong to {TARGET} models, {of} is {target.architecture}"
    elif width != its:
        why = f"it reads hidden states of width {width}, those of {of} are {its} wide"
    elif target.windowed_layers[-2:] != (True, False):
        why = f"the last layers of {of} are not one with a window and one without"
    else:
        why = other_tokens(head, target) or _other_keys(head, target)
    require_same_target(head, why, "use the assistant that was published with this target")


def _other_keys(head: GgufHeader, target: GgufHeader) -> str:
    """Describe the first layer that would read keys of another shape; "" if there is none."""
    for i, windowed in enumerate(head.windowed_layers):
        mine, its = _keys(head, i, windowed), _keys(target, _source(target, windowed), windowed)
        if mine != its:
            return (
                f"its layer {i} reads {mine[0]} keys of width {mine[1]}, "
                f"{target.path.name} keeps {its[0]} of width {its[1]}"
            )
    return ""


def _source(target: GgufHeader, windowed: bool) -> int:
    """Return the target's layer whose keys and values its last such layer uses."""
    shared = target.integer(target.own("attention.shared_kv_layers")) or 0
    return target.block_count - shared - (2 if windowed else 1)


def _keys(header: GgufHeader, layer: int, windowed: bool) -> tuple[int, int, int]:
    """Return the heads of a layer's keys, their width, and that of values."""
    kind = "_swa" if windowed else ""
    widths = [
        header.integer(header.own(f"attention.{part}_length{kind}")) or 0
        for part in ("key", "value")
    ]
    heads = header.head_counts_kv[layer] if 0 <= layer < header.block_count else 0
    return heads, widths[0], widths[1]


def _memory(head: GgufHeader, target: GgufHeader, n_ctx: int) -> ModelMemory:
    passes = estimate_model(head, n_ctx=n_ctx, n_ubatch=TREE_ROWS, n_outputs=TREE_ROWS)
    return replace(passes, kv=0)  # it keeps no keys and values


HEAD = Head(
    check=check_target, open="specllama.backend.heads.llama_heads:open_assistant", memory=_memory
)
