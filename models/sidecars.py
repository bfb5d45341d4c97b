"""Files that come with a model but are not models: drafting heads, projectors, importance matrices.

A listing of the hub has only names; a file on disk also has a header, which wins if the two
disagree. Names follow llama.cpp's own (``mtp-…``, ``eagle3-…``, ``dflash-…``,
``dspark-…``, ``mmproj…``, ``imatrix…``; common/download.cpp).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from specllama.models.heads import HEADS
from specllama.models.nextn import lacks_trunk

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

# kind -> what it is
SIDECARS = {kind: head.says for kind, head in HEADS.items()} | {
    "mmproj": "a vision projector (mmproj)",
    "imatrix": "an importance matrix for quantizing",
}

# These words name nothing else. "mtp" also occurs in names of whole models, "medusa" in a few.
_ASSISTANT = re.compile(r"^mtp-gemma|gemma-?4.*assistant")
_WORD = re.compile(r"(?<![a-z0-9])(eagle3|dflash|dspark|mmproj)(?![a-z0-9])")
_QUANT = re.compile(r"(?<![a-z0-9])i?q\d(?![a-z0-9])")


def kind_of_name(name: str) -> str:
    """Which sidecar a file name names, "" for a model's."""
    lowered = Path(name).name.lower()
    if _ASSISTANT.search(lowered):
        return "gemma4-assistant"
    if lowered.startswith("mtp-"):
        return "mtp"
    if found := _WORD.search(lowered):
        return found[1]
    # a model quantized with an importance matrix may say so in its name
    return "imatrix" if "imatrix" in lowered and not _QUANT.search(lowered) else ""


def kind_of(header: GgufHeader) -> str:
    """Which sidecar a file is, "" for one that may be a model."""
    arch, kind = header.architecture, header.kind
    if arch == "clip" or kind == "mmproj" or "clip.has_vision_encoder" in header.metadata:
        return "mmproj"
    if kind == "imatrix" or arch == "imatrix" or "imatrix.chunk_count" in header.metadata:
        return "imatrix"
    if arch == "dflash":
        return "dspark" if "markov_w1.weight" in header.by_name else "dflash"
    if arch in HEADS:
        return arch
    return "mtp" if lacks_trunk(header) else ""


def advice(kind: str) -> str:
    """What to do with such a file."""
    if kind in HEADS:
        return "give it beside its target: specllama chat -m TARGET --head FILE"
    return "give the language model that it belongs to"
