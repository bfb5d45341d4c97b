"""The file of a training that goes on: weights, optimizers, dice and figures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specllama.arrays import IntArray
from specllama.errors import BadGguf, SpecllamaError
from specllama.models.gguf import GgufHeader
from specllama.models.layer_inputs import read_draft_ids
from specllama.training.eagle_head import EagleHead
from specllama.training.head_file import read_weights
from specllama.training.lessons import TargetFacts

OUTPUT = "output.weight"


def write_kept(path: Path, state: dict[str, Any]) -> None:
    """Write the file, whole or not at all.

    Raises:
        SpecllamaError: it cannot be written.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except (OSError, RuntimeError) as error:  # the second one is torch's, of a full disk
        part.unlink(missing_ok=True)
        why = getattr(error, "strerror", None) or error
        raise SpecllamaError(f"cannot write {path}: {why}", "free some room") from None


def read_kept(path: Path, header: GgufHeader) -> dict[str, Any]:
    """Read the file of a target's training; {} if there is none.

    Raises:
        SpecllamaError: it is damaged, or another target's.
    """
    if not path.exists():
        return {}
    try:
        found: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        of = found["target"]
    except Exception as error:  # torch has no type of its own for damage
        why = str(error).partition("\n")[0]
        raise SpecllamaError(
            f"{path} is damaged ({why})", "delete it to train a new head"
        ) from None
    if of != header.fingerprint:
        raise SpecllamaError(
            f"{path} belongs to another target than {header.path.name}",
            "give another --folder, or the target that it belongs to",
        )
    return found


def fit_words(found: dict[str, Any], target: TargetFacts) -> None:
    """Give what a file held the words of ``target``: new ones have the target's own rows."""
    before = found["words"].numpy()
    if np.array_equal(before, target.words):
        return
    for weights in (found["head"], found["average"], found["best"]):
        if weights:
            weights[OUTPUT] = _moved(weights[OUTPUT], before, target.words, target.output())
    for moments in found["adam"]["state"].values():
        for name in ("exp_avg", "exp_avg_sq"):
            if (rows := moments[name]).ndim == 2:
                none = torch.zeros(len(target.words), target.width)
                moments[name] = _moved(rows, before, target.words, none)


def _moved(rows: Tensor, before: IntArray, now: IntArray, start: Tensor) -> Tensor:
    """Return the rows of other words: those of ``start`` where a word had none before."""
    _, there, here = np.intersect1d(before, now, return_indices=True)
    start = start.to(rows.dtype)
    start[here] = rows[there]
    return start


def take_weights(head: EagleHead, start: GgufHeader, target: TargetFacts) -> None:
    """Give a head, whose ``scale`` is set, the weights of a file of its sizes. Call it without
    gradients.

    Raises:
        BadGguf, UnsupportedModel: the file is damaged, or of a type that is not read.
    """
    found = {name: torch.tensor(rows) for name, rows in read_weights(start).items()}
    scale = found["scale"] = head.get_buffer("scale")
    found["fc.weight"] = found["fc.weight"][:, : len(scale)] / scale  # it holds both
    trimmed = "d2t" in start.by_name
    words = read_draft_ids(start) if trimmed else np.arange(target.header.vocab_size)
    found[OUTPUT] = _moved(found[OUTPUT], words.astype(np.int32), target.words, target.output())
    try:
        head.load_state_dict(found)
    except RuntimeError as error:
        why = str(error).splitlines()[-1].strip()
        raise BadGguf(f"{start.path.name} is no whole head: {why}") from None
