"""The folder of a training, which goes on where it was left, and the target that it is for."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from specllama import paths
from specllama.engine.target_heads import known_heads
from specllama.errors import SpecllamaError, UnsupportedModel, UsageError
from specllama.models import refs
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.loadable import check_loadable
from specllama.text import size
from specllama.training.corpus import TEXTS
from specllama.training.head_file import last_norm, layers_read, other_sizes, read_weights
from specllama.training.training_card import (
    NAME,
    Milestone,
    TrainingCard,
    beside,
    card_inside,
    read_training_card,
)

LOCK = ".lock"
START = "start.gguf"  # the head that the training started from
CHECKPOINT = "head.pt"
NOTHING = "none"  # instead of such a head
_OURS = (NAME, TEXTS, START, CHECKPOINT, ".copy.gguf", "shard-*.npz", "held-*.npz")
_OF_FREE, _LEAST = 0.9, 64 << 20  # bytes
_A_SIXTH, _WHOLE, _FEW = 6, 1024, 2048  # words: of the vocabulary, in whole thousands


def require_trainable(target: GgufHeader) -> None:
    """Check that a head can be trained for a model.

    Raises:
        CannotLoad: it is no model, split, or without a last norm. UsageError: it has too few
            layers.
    """
    check_loadable(target)
    if len(target.parts) > 1:
        raise UnsupportedModel(f"{target.path.name} is split; a head is trained for one file")
    layers_read(target)
    last_norm(target)


def started_from(folder: Path) -> GgufHeader | None:
    """Return the head that the training in a folder started from."""
    return read_header(folder / START) if (folder / START).exists() else None


def choose_start(asked: str | None, target: GgufHeader, folder: Path) -> GgufHeader | None:
    """Choose the head that a training starts from; without ``asked``, what it started from before,
    or a fitting one that is named after the target, or ships for it.

    Args:
        asked: its reference, or ``NOTHING``.

    Raises:
        UsageError: it has other sizes, or the training in the folder did not start from it.
        what reading it raises.
    """
    begun = (folder / NAME).exists()
    before, layers = started_from(folder) if begun else None, layers_read(target)
    if begun and asked in (None, NOTHING):
        return before
    for head in known_heads(target) if asked is None else ():
        with suppress(SpecllamaError):  # of another kind, or of a target that is not alike
            if not other_sizes(head, target, layers) and read_weights(head):
                return head
    if asked in (None, NOTHING):
        return None
    head = read_header(refs.resolve_heads(asked)[0])
    if why := other_sizes(head, target, layers):
        raise UsageError(
            f"{head.path.name} has other sizes than a head for {target.path.name}: {why}",
            "give another head, or leave --start-from out",
        )
    read_weights(head)
    if begun and (before is None or before.fingerprint != head.fingerprint):
        raise UsageError(
            f"the training in {folder} did not start from {head.path.name}",
            "leave --start-from out to go on; --forget deletes what was learned",
        )
    return head


def head_there(out: Path, target: GgufHeader, start: GgufHeader | None) -> Milestone | None:
    """Return the figures of the head that is there and that a better one may replace; None if it is
    the one to start from.

    Raises:
        UsageError: something else is there, or the folder cannot be written to.
    """
    if why := paths.barred(out.parent):
        raise UsageError(f"{out} cannot be written: {why}", "give another OUT")
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        return None
    made = card_inside(out)
    if made is not None and made.fingerprint == target.fingerprint:
        return made.best
    if start is not None and filecmp.cmp(start.path, out, shallow=False):
        return None
    mine = f"train-draft did not make it for {target.path.name}"
    raise UsageError(f"{out} exists, and {mine}", "give another OUT")


def files(folder: Path) -> list[Path]:
    """List the files of a training in a folder, those in the making as well."""
    return [one for name in _OURS for dot in ("", ".") for one in folder.glob(f"{dot}{name}*")]


def learned(folder: Path, out: Path, target: GgufHeader) -> list[Path]:
    """List all files of a target's training, the head that it made among them."""
    card = read_training_card(folder / NAME)
    own = folder == usual(target) if card is None else card.fingerprint == target.fingerprint
    found = files(folder) if own else []
    made = card_inside(out)
    if made is not None and made.fingerprint == target.fingerprint:
        found += [one for one in (out, beside(out)) if one.exists()]
    return found


def running() -> Iterator[TrainingCard]:
    """Read the cards of trainings that go on now, in the usual folders."""
    for path in (paths.cache_dir() / "training").glob(f"*/{NAME}"):
        with suppress(UsageError), held(path.parent):
            continue  # nobody else does
        if card := read_training_card(path):
            yield card


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
    start: GgufHeader | None,
) -> TrainingCard:
    """Return the card of the training in a folder, or that of a new one.

    Args:
        asked: ``words``, ``seed`` as they were given.
        there: figures of the head that better ones replace, also if it is of another training.
        start: the head that a new training starts from; a copy of it is kept.

    Raises:
        UsageError: the folder holds something else.
    """
    card = read_training_card(folder / NAME)
    if card is None and not {*folder.iterdir()} <= {folder / LOCK, *files(folder)}:
        raise UsageError(f"{folder} holds other files", "give another --folder")
    if card is None:
        (folder / START).unlink(missing_ok=True)
        if start is not None:
            paths.replace_file(folder / START, start.path.read_bytes())
        words = asked["words"] or max(target.vocab_size // _A_SIXTH // _WHOLE * _WHOLE, _FEW)
        return TrainingCard(
            target.path.name, target.fingerprint, seed=asked["seed"],
            words=min(words, target.vocab_size),
            start=f"{start.path.name} ({start.text('general.name')})" if start else "",
            best=there, versions=paths.package_versions(),
        )  # fmt: skip
    if card.fingerprint != target.fingerprint:
        raise UsageError(
            f"{folder} holds a training for {card.target}, another file", "give another --folder"
        )
    if asked["words"] not in (None, card.words):
        raise UsageError(
            f"the head in {folder} guesses {card.words:,} words", "--forget deletes it"
        )
    if there is None or card.best is None or there.tokens != card.best.tokens:
        card.best, card.own = there, False
    return card
