"""EAGLE-3 head files: checks that llama.cpp can run one, and published heads made into such files.

The format is llama.cpp's own (``general.architecture = "eagle3"``), as its converter writes it from
published checkpoints: one decoder layer that reads the target's token embeddings beside a fusion of
three of its hidden states. Whatever llama.cpp would abort on, or turn into nonsense, is refused.

Checkpoints of the ``speculators`` format, of EAGLE's authors, of SpecForge and others name the same
tensors: one decoder layer (``layers.0`` or ``midlayer``), the fusion ``fc``, the output matrix over
a vocabulary of its own. Rows of the query and key matrices go from halves to neighbouring pairs, as
llama.cpp turns them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specllama.arrays import FINAL
from specllama.errors import BadGguf
from specllama.models.companions import Head, require_architecture
from specllama.models.conversion import LAYER, Floats, Published, Shape
from specllama.models.gguf import GgufHeader
from specllama.models.layer_inputs import HINT, HeadFacts, check_target, memory, read_common
from specllama.models.nextn_blocks import trunk_blocks

ARCHITECTURE = "eagle3"
LAYERS_READ = 3


def read_facts(header: GgufHeader) -> HeadFacts:
    """Read the facts of a head file.

    Raises:
        PairIncompatible: the file is no EAGLE-3 head.
        BadGguf, UnsupportedModel: it is one that llama.cpp cannot run.
    """
    name = header.path.name
    require_architecture(header, ARCHITECTURE, "an EAGLE-3 head", HINT)
    facts = read_common(header, LAYERS_READ, header.integer("eagle3.target_hidden_size") or 0)
    if header.block_count != 1:
        raise BadGguf(f"{name}: an EAGLE-3 head has one layer, this one {header.block_count}")
    if len(facts.layers) != LAYERS_READ:
        raise BadGguf(f"{name}: eagle3.target_layers is not a list of {LAYERS_READ} layers")
    return facts


def check(head: GgufHeader, target: GgufHeader) -> HeadFacts:
    """Check that a head belongs to a target, see ``companions.Head``."""
    facts = read_facts(head)
    if set(facts.layers) == {target.block_count}:  # the input of a layer behind the last one
        facts = replace(facts, layers=(FINAL,) * LAYERS_READ)
    check_target(facts, head, target)
    return facts


# ---------------------------------------------------------------------- conversion

TOP = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "embed_tokens.weight": "token_embd.weight",
}
IN_LAYER = LAYER | {"hidden_norm.weight": "attn_norm_2.weight"}
_MAY_LACK = ("output.weight", "token_embd.weight", "enc.output_norm.weight")


def convert_eagle3(
    folder: Path, config: Mapping[str, Any], destination: Path, target: GgufHeader, kind: str
) -> None:
    """Write a published EAGLE-3 head for ``target``, see ``convert``."""
    head = Published(folder, config, ("llama",))
    if head.blocks != 1:
        raise head.bad(f"it has {head.blocks} layers; llama.cpp runs one")
    tensors = head.read(TOP, IN_LAYER)
    e = head.width
    shapes: dict[str, Shape] = {
        "fc.weight": (None, None),
        "enc.output_norm.weight": (LAYERS_READ * target.embedding_length,),
        "output_norm.weight": (e,), "output.weight": (None, e), "token_embd.weight": (None, e),
        "blk.0.attn_norm_2.weight": (e,), **head.attention("blk.0.", 2 * e),
    }  # fmt: skip
    head.require(tensors, shapes, _MAY_LACK)
    head.require_fusion(tensors["fc.weight"], LAYERS_READ, target)
    normed = config.get("norm_before_fc") is True
    if normed != ("enc.output_norm.weight" in tensors):
        raise head.bad("norm_before_fc and its tensors disagree")
    for part, heads in (("q", head.heads), ("k", head.heads_kv)):
        name = f"blk.0.attn_{part}.weight"
        tensors[name] = _pairs(np.asarray(tensors[name], np.float32), heads)
    ids = head.fit_vocabulary(tensors, target.vocab_size)
    values = {
        "target_layers": _layers(head, target),
        "target_hidden_size": target.embedding_length,
        "norm_before_residual": config.get("norm_before_residual") is True,
        "norm_before_fc": normed,
    }
    head.write(destination, target, kind, "eagle3", values, tensors, ids)


def _layers(head: Published, target: GgufHeader) -> Any:
    """Return the layers of the target whose inputs it reads; the usual ones if it names none."""
    key, n = "eagle_aux_hidden_state_layer_ids", trunk_blocks(target)
    said = head.config.get(key) or head.part("eagle_config").get(key)
    layers = head.layers(said or [2, n // 2, n - 3], LAYERS_READ)
    if len(layers) != LAYERS_READ:
        raise head.bad(f"it reads {len(layers)} layers; llama.cpp's graph takes {LAYERS_READ}")
    return layers


def _pairs(matrix: Floats, heads: int) -> Floats:
    """Reorder rows of [heads * size, in] so that values which turn together are neighbors."""
    halves = matrix.reshape(heads, 2, -1, matrix.shape[1])
    return halves.swapaxes(1, 2).reshape(matrix.shape)


HEAD = Head(
    check=check,
    open="specllama.backend.heads.llama_heads:open_eagle3",
    memory=memory,
    convert=convert_eagle3,
    published=("eagle3",),
)
