"""The folder of a training, which goes on where it was left, and the target that it is for."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from specllama import paths
from specllama.errors import SpecllamaError, UnsupportedModel, UsageError
from specllama.files import DAMAGE
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.layer_inputs import LAYER_INPUT_ARCHITECTURES, unexposed
from specllama.models.loadable import check_loadable
from specllama.store.rounds import package_versions
from specllama.text import size
from specllama.training.corpus import TEXTS
from specllama.training.features import layers_read
from specllama.training.training_card import (
    METADATA,
    NAME,
    Milestone,
    TrainingCard,
    read_training_card,
)

LOCK = ".lock"
_OF_FREE, _LEAST = 0.9, 64 << 20  # bytes
_A_SIXTH, _WHOLE, _FEW = 6, 1024, 2048  # words: of the vocabulary, in whole thousands


def require_trainable(target: GgufHeader) -> None:
    """Check that a head can be trained for a model.

    Raises:
        CannotLoad: it is no model, or split. PairIncompatible: llama.cpp does not give its states
            away. UsageError: it has too few layers.
    """
    check_loadable(target)
    if len(target.parts) > 1:
        raise UnsupportedModel(f"{target.path.name} is split; a head is trained for one file")
    if target.architecture not in LAYER_INPUT_ARCHITECTURES:
        first = f"no head can be trained for {target.path.name}: "
        raise unexposed(target.architecture, first=first)
    layers_read(target)


def head_there(out: Path, target: GgufHeader) -> Milestone | None:
    """Return the figures of the head that is there and that a better one may replace.

    Raises:
        UsageError: something else is there, or the folder cannot be written to.
    """
    if why := paths.barred(out.parent):
        raise UsageError(f"{out} cannot be written: {why}", "give another OUT")
    if not out.exists():
        return None
    try:
        made = msgspec.json.decode(read_header(out).text(METADATA) or "", type=TrainingCard)
    except (SpecllamaError, *DAMAGE):
        raise UsageError(
            f"{out} exists, and train-draft did not make it", "give another OUT"
        ) from None
    if made.fingerprint != target.fingerprint:
        raise UsageError(f"{out} is a head of another file, {made.target}", "give another OUT")
    return made.best


def usual(target: GgufHeader) -> Path:
    """Return the folder of a target's training."""
    return paths.cache_dir() / "training" / target.fingerprint


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made.

    Raises:
        UsageError: another one trains in it, or it cannot be written to.
    """
    from filelock import FileLock, Timeout

    if why := paths.barred(folder):
        raise UsageError(f"nothing can be kept in {folder}: {why}", "give another --folder")
    try:
        taken = FileLock(paths.private_folder(folder) / LOCK, timeout=0, mode=0o600).acquire()
    except Timeout:
        raise UsageError(f"another process trains in {folder}", "give another --folder") from None
    with taken:
        yield


def room(folder: Path, asked: int) -> int:
    """Return the bytes that a folder may hold: as many as were asked for, if the disk has them.

    Raises:
        SpecllamaError: the disk is full.
    """
    free = shutil.disk_usage(folder).free + sum(one.stat().st_size for one in folder.iterdir())
    most = min(asked, int(_OF_FREE * free))
    if most < _LEAST:
        raise SpecllamaError(
            f"{size(most)} may be kept in {folder}, which is too little", "free some room"
        )
    return most


def begin(
    folder: Path,
    target: GgufHeader,
    asked: Mapping[str, Any],
    there: Milestone | None,
    *,
    fresh: bool,
) -> TrainingCard:
    """Return the card of the training in a folder, or that of a new one.

    Args:
        asked: ``words``, ``seed`` as they were given.
        there: figures of the head that better ones replace, also if it is of another training.
        fresh: delete the former one.

    Raises:
        UsageError: the folder holds something else.
    """
    card = read_training_card(folder / NAME)
    inside = [one for one in folder.iterdir() if one.name != LOCK]
    if inside and card is None and not (folder / TEXTS).exists():
        raise UsageError(f"{folder} holds other files", "give another --folder")
    if fresh and inside:
        for one in inside:
            one.unlink()
        card = None
    if card is None:
        words = asked["words"] or max(target.vocab_size // _A_SIXTH // _WHOLE * _WHOLE, _FEW)
        return TrainingCard(
            target.path.name,
            target.fingerprint,
            seed=asked["seed"],
            words=min(words, target.vocab_size),
            best=there,
            versions=package_versions(),
        )
    if card.fingerprint != target.fingerprint:
        raise UsageError(
            f"{folder} holds a training for {card.target}, another file",
            "give another --folder, or --fresh to begin anew in this one",
        )
    if asked["words"] not in (None, card.words):
        raise UsageError(
            f"the head in {folder} guesses {card.words:,} words", "--fresh begins anew"
        )
    if there is None or card.best is None or there.tokens != card.best.tokens:
        card.best, card.own = there, False
    return card
