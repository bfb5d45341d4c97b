"""The card of a trained head: its texts, figures, time, seed and versions.

It stands in the training folder, where a training that goes on finds it, beside the head, and in
the head's own file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Literal, get_args

import msgspec

from specllama.errors import SpecllamaError
from specllama.files import DAMAGE, read_json
from specllama.models.companions import CARD
from specllama.models.gguf import read_header
from specllama.paths import replace_file

NAME = "card.json"
METADATA = CARD
Phase = Literal["write", "read", "train"]


@dataclass(frozen=True, slots=True)
class Milestone:
    """A head in training: how well it guesses in texts that it does not learn from.

    Attributes:
        minutes: of all phases so far. tokens: that it was trained on, each as often as it was.
        loss: of the first guess, in nats; None before the first step. step: minibatches so far.
        right: the share of right first, second, … guesses at temperature 0, each given that those
            before it were; empty before the first measurement.
        per_pass: tokens of a pass with chains of three guesses.
    """

    minutes: float = 0.0
    tokens: int = 0
    loss: float | None = None
    right: tuple[float, ...] = ()
    per_pass: float = 0.0
    step: int = 0

    @property
    def survival(self) -> list[float]:
        """The share of drafts that are right up to each guess."""
        return list(accumulate(self.right, mul))

    @property
    def learned(self) -> str:
        return f"{self.tokens:,} tokens learned, {self.words}"

    @property
    def words(self) -> str:
        names = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
        said = ", ".join(f"{name} {one:.0%}" for name, one in zip(names, self.right, strict=False))
        return f"right guesses: {said}; {self.per_pass:.2f} tokens a pass"


@dataclass(slots=True)
class TrainingCard:
    """A record of what a head learned from, and of its figures.

    Attributes:
        target: the name of its file. fingerprint: of the file itself.
        words: that the head can guess.
        start: words on the head that it started from, "" without one; first: its figures here.
        sources: of questions, in words. replies: to learn from, by kind. held_out: others, which
            only judge. written: tokens of them all.
        trained: tokens seen in training, each as often as it was.
        seconds: of each phase, in all runs. memory: bytes of the process, at most.
        course: figures at the end of each cycle.
        best: figures of the head that was written; ``own``: by this training. latest: those of
            the training.
        pays: words on what it brings on this machine.
        doing: what went on when this was written.
    """

    target: str
    fingerprint: str
    kind: str = "eagle3"
    seed: int = 0
    words: int = 0
    start: str = ""
    first: Milestone | None = None
    sources: list[str] = field(default_factory=list)
    replies: dict[str, int] = field(default_factory=dict)
    written: int = 0
    held_out: int = 0
    trained: int = 0
    seconds: dict[Phase, float] = field(default_factory=lambda: dict.fromkeys(get_args(Phase), 0.0))
    memory: int = 0
    course: list[Milestone] = field(default_factory=list)
    best: Milestone | None = None
    own: bool = False
    latest: Milestone | None = None
    pays: str = ""
    doing: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def spent_s(self) -> float:
        return sum(self.seconds.values())

    def encoded(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1)

    def save(self, path: Path) -> None:
        """Write it as a file, whole or not at all.

        Raises:
            OSError: the disk refuses.
        """
        replace_file(path, self.encoded())


def read_training_card(path: Path) -> TrainingCard | None:
    """Read a card; None if there is none, or it cannot be read."""
    try:
        found: TrainingCard | None = read_json(path, TrainingCard)
        return found
    except (OSError, *DAMAGE):
        return None


def card_inside(head: Path) -> TrainingCard | None:
    """Read the card in a head's file; None if there is none, or no such file."""
    try:
        return msgspec.json.decode(read_header(head).text(CARD) or "", type=TrainingCard)
    except (SpecllamaError, *DAMAGE):
        return None


def beside(head: Path) -> Path:
    """Return the path of the card next to a head."""
    return head.with_suffix(".card.json")
