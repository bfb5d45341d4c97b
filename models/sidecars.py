"""Files that come with a model but are not models: drafting heads, projectors, importance matrices.

A listing of the hub has only names; a file on disk also has a header, which wins if the two
disagree. Names follow llama.cpp's own (``mtp-…``, ``eagle3-…``, ``dflash-…``,
``dspark-…``, ``mmproj…``, ``imatrix…``; common/download.cpp).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from specllama.errors import PairIncompatible
from specllama.models.heads import HEADS, find

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

# kind -> what it is
SIDECARS = {kind: head.says for kind, head in HEADS.items()} | {
    "mmproj": "a vision projector (mmproj)",
    "imatrix": "an importance matrix for quantizing",
}

_PROJECTOR = re.compile(r"(?<![a-z0-9])mmproj(?![a-z0-9])")
_QUANT = re.compile(r"(?<![a-z0-9])i?q\d(?![a-z0-9])")


def kind_of_name(name: str) -> str:
    """Return the kind of sidecar that a file name names, "" for a model's."""
    lowered = Path(name).name.lower()
    for kind, head in HEADS.items():
        if head.named and re.search(head.named, lowered):
            return kind
    if _PROJECTOR.search(lowered):
        return "mmproj"
    # a model quantized with an importance matrix may say so in its name
    return "imatrix" if "imatrix" in lowered and not _QUANT.search(lowered) else ""


def kind_of(header: GgufHeader) -> str:
    """Return the kind of sidecar that a file is, "" for one that may be a model."""
    arch, kind = header.architecture, header.kind
    if arch == "clip" or kind == "mmproj" or "clip.has_vision_encoder" in header.metadata:
        return "mmproj"
    if kind == "imatrix" or arch == "imatrix" or "imatrix.chunk_count" in header.metadata:
        return "imatrix"
    return next((kind for kind in HEADS if find(kind).recognise(header, kind)), "")


def require_head(header: GgufHeader) -> str:
    """Return the kind of head that a file is.

    Raises:
        PairIncompatible: it is none.
    """
    kind = kind_of(header)
    if kind and kind not in HEADS:
        raise PairIncompatible(
            f"{header.path.name} is {SIDECARS[kind]}, which --head does not take", advice(kind)
        )
    if kind not in HEADS:
        raise PairIncompatible(
            f"{header.path.name} is no drafting head but a model of the architecture "
            f"{header.architecture!r}",
            "give draft models with -d; --head takes "
            + ", ".join(head.says for head in HEADS.values()),
        )
    return kind


def advice(kind: str) -> str:
    """Return what to do with such a file."""
    if kind in HEADS:
        return "give it beside its target: specllama chat -m TARGET --head FILE"
    return "give the language model that it belongs to"
