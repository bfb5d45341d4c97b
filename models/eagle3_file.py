"""EAGLE-3 head files: checks that llama.cpp can run one.

The format is llama.cpp's own (``general.architecture = "eagle3"``), as its converter writes it from
published checkpoints: one decoder layer that reads the target's token embeddings beside a fusion of
three of its hidden states. Whatever llama.cpp would abort on, or turn into nonsense, is refused.
"""

from __future__ import annotations

from specllama.errors import BadGguf, PairIncompatible
from specllama.models.gguf import GgufHeader
from specllama.models.heads import Head
from specllama.models.layer_inputs import (
    HINT,
    HeadFacts,
    check_target,
    draft_vocab,
    memory,
    read_layers,
)
from specllama.models.loadable import check_loadable

ARCHITECTURE = "eagle3"
LAYERS_READ = 3


def read_facts(header: GgufHeader) -> HeadFacts:
    """Read the facts of a head file.

    Raises:
        PairIncompatible: the file is no EAGLE-3 head.
        BadGguf, UnsupportedModel: it is one that llama.cpp cannot run.
    """
    name = header.path.name
    if header.architecture != ARCHITECTURE:
        raise PairIncompatible(
            f"{name} is a {header.architecture or 'nameless'} file, not an EAGLE-3 head", HINT
        )
    check_loadable(header, "head")
    if header.block_count != 1:
        raise BadGguf(f"{name}: an EAGLE-3 head has one layer, this one {header.block_count}")
    if header.key_length != header.value_length or header.key_length < 1 or not header.head_count:
        raise BadGguf(f"{name}: its attention heads have no size, or K and V of different ones")
    layers = read_layers(header, LAYERS_READ)
    if len(layers) != LAYERS_READ:
        raise BadGguf(f"{name}: eagle3.target_layers is not a list of {LAYERS_READ} layers")
    target_width = header.integer("eagle3.target_hidden_size") or 0
    fusion = header.by_name.get("fc.weight")
    if fusion is None or fusion.shape != (LAYERS_READ * target_width, header.embedding_length):
        raise BadGguf(f"{name}: its fusion matrix (fc.weight) does not fit the widths it states")
    return HeadFacts(
        width=header.embedding_length,
        target_width=target_width,
        layers=layers,
        draft_vocab=draft_vocab(header),
        own_embedding="token_embd.weight" in header.by_name,
        own_output="output.weight" in header.by_name,
    )


def check(head: GgufHeader, target: GgufHeader) -> HeadFacts:
    """Check that a head belongs to a target, see ``models.heads.Head``."""
    facts = read_facts(head)
    check_target(facts, head, target)
    return facts


HEAD = Head(
    check=check,
    open="specllama.backend.heads.eagle3:open_eagle3",
    memory=memory,
    convert="specllama.models.convert_eagle3:convert_eagle3",
    published=("eagle3",),
)
