"""Conversion of published heads into files that specllama loads, by the kind in the folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specllama.errors import CannotLoad, ModelUnavailable
from specllama.models.checkpoint import CONFIG, read_config
from specllama.models.gguf import GgufHeader
from specllama.models.heads import HEADS, find
from specllama.models.medusa_file import NAMES, convert_medusa
from specllama.models.quantize import check_destination


def convert(source: Path, destination: Path, target: GgufHeader, kind: str) -> None:
    """Write the head of a published checkpoint as a file for ``target``.

    Args:
        source: a folder, or a file of Medusa heads.
        kind: type of the matrices: "q8_0", "f16" or "f32".

    Raises:
        UsageError: the destination exists or has no folder.
        ModelUnavailable: nothing there.
        CannotLoad: damaged, or of a kind that is not converted here.
        PairIncompatible: a head of another target.
        SpecllamaError: the file cannot be written.
    """
    check_destination(destination)
    medusa = source if source.is_file() else _first(source, NAMES)
    if medusa is not None:
        convert_medusa(medusa, destination, target, kind)
        return
    if not source.is_dir():
        raise ModelUnavailable(
            f"there is no {source}", "download the repository first, and give its folder"
        )
    if not (source / CONFIG).is_file():
        raise ModelUnavailable(f"{source} contains none of {', '.join((CONFIG, *NAMES))}")
    config = read_config(source)
    held = published_kind(config)
    write = _writers().get(held)
    if write is None:
        raise CannotLoad(
            f"{source} holds {held or 'no drafting head, or one of an unknown kind'}; converted "
            "here are EAGLE-3, DFlash, DSpark and Medusa-1 heads",
            "for others try llama.cpp's convert_hf_to_gguf.py",
        )
    write(source, config, destination, target, kind)


def _writers() -> dict[str, Callable[..., None]]:
    """Return the converter of each kind of checkpoint, by the kind's own name."""
    found = map(find, HEADS)
    return {name: head.convert for head in found if head.convert for name in head.published}


def published_kind(config: dict[str, Any]) -> str:
    """Return the drafter that a repository declares, "" if it declares none.

    Repositories of the ``speculators`` format have a word for it, older ones an architecture.
    """
    word = config.get("speculators_model_type")
    if isinstance(word, str):
        return word
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    for kind in (*_writers(), "medusa", "eagle"):
        if any(kind in str(name).lower() for name in names):
            return kind
    # some EAGLE-3 heads call themselves LlamaForCausalLM
    small = "draft_vocab_size" in config and config.get("num_hidden_layers") == 1
    return "eagle3" if small else ""


def _first(folder: Path, names: tuple[str, ...]) -> Path | None:
    return next((folder / name for name in names if (folder / name).is_file()), None)
