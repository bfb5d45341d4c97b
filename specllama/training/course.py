"""A course of training: cycles of writing, reading and training, within a person's time.

All that lasts is in the training folder; the process may be killed at any time. The head is written
whenever it guesses better than the one that was written before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from specllama.training.timetable import (
    LEAST_GAIN,
    LONGEST_S,
    SEVERAL,
    Paces,
    cycle_s,
    writing_share,
)
from specllama.training.training_card import NAME, Milestone, Phase, TrainingCard, beside

SAVE_S = 20.0  # after which the card is written again
TRY_S, PATIENCE_S = 12.0, 90.0  # of a phase whose pace is measured; until something comes of it
_SHORT_S = 5.0  # a rest that is not worth a cycle
_READ_BY = 0.6  # of a cycle: what is not read by then is read in the next one

Over = Callable[[], bool]
"""True once a phase has to end: asked several times a second."""
News = Literal["moved", "began", "figures"]
Why = Literal["time", "gain", "stopped"]


@dataclass(frozen=True, slots=True)
class Amounts:
    """Tokens: of the replies that were written, of those held out, of those that were read (held
    out or not), and of those that wait for it; bytes of the folder; replies by kind."""

    written: int
    held_out: int
    read: int
    unread: int
    disk: int
    replies: dict[str, int]


class Work(Protocol):
    """The three phases over a training folder, and the head that comes of them."""

    def amounts(self) -> Amounts: ...

    def write(self, over: Over) -> None:
        """Let the target write replies."""

    def read(self, over: Over) -> None:
        """Compute the features of replies that have none."""

    def train(self, over: Over, report: Callable[[Milestone], None]) -> None:
        """Train; report figures now and then, and when it ends."""

    def export(self, path: Path, card: TrainingCard) -> None:
        """Write the head as it is."""


class Course:
    """A training that goes on for some seconds.

    Attributes:
        card: what is known so far. phase: that goes on, "" in between.
        seconds: that it may take. done_s: of them, those that passed.

    Args:
        out: the head.
        stopped: True once the person wants it to end.
        tell: called with what is new, several times a second.
    """

    def __init__(
        self,
        work: Work,
        folder: Path,
        card: TrainingCard,
        out: Path,
        seconds: float,
        *,
        stopped: Over,
        tell: Callable[[News, Course], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.card, self.seconds = card, seconds
        self.phase: Phase | None = None
        self._work, self._folder, self._out = work, folder, out
        self._stopped, self._tell, self._clock = stopped, tell, clock
        self._began_s = card.spent_s
        self._moved = self._saved = clock()
        if not out.exists():
            card.best = None  # nothing that a better one has to beat

    @property
    def done_s(self) -> float:
        return self.card.spent_s - self._began_s

    @property
    def left_s(self) -> float:
        return self.seconds - self.done_s

    @property
    def amounts(self) -> Amounts:
        return self._work.amounts()

    def paces(self) -> Paces | None:
        """Return the pace of each phase so far; None if one of them is not known."""
        card = self.card
        amounts = {"write": card.written, "read": card.read, "train": card.trained}
        if not all(amounts.values()) or not all(card.seconds.values()):
            return None
        return Paces(**{one: amounts[one] / card.seconds[one] for one in amounts})

    def measure(self) -> Paces | None:
        """Measure the paces that are not known, for some seconds each; what was made is kept.

        Returns None if it was stopped."""
        for phase in ("write", "read", "train"):
            if self.paces() is None and not self._stopped():
                self._run(phase, TRY_S, PATIENCE_S)
        return self.paces()

    def run(self) -> Why:
        """Go on until the time is over, a cycle gains nothing, or it is stopped."""
        card, cycles, passes = self.card, 0, None
        while self.left_s > _SHORT_S and not self._stopped():
            seconds, before = cycle_s(card.spent_s, self.left_s), card.best
            whole = seconds >= min(card.spent_s, LONGEST_S)
            end, trained = card.spent_s + seconds, card.trained
            self._run("write", seconds * writing_share(passes))
            if self.amounts.unread:
                self._run("read", end - (1 - _READ_BY) * seconds - card.spent_s)
            self._run("train", end - card.spent_s)
            passes = (card.trained - trained) / max(card.read, 1)
            cycles += 1
            if card.best is not None:
                card.course.append(card.best)
            self._save()
            gained = _gain(before, card.best)
            if whole and cycles >= SEVERAL and gained < LEAST_GAIN and not self._stopped():
                return "gain"
        return "stopped" if self._stopped() else "time"

    def _run(self, phase: Phase, seconds: float, patience_s: float = 0.0) -> None:
        """Run a phase for some seconds, or for ``patience_s`` until something comes of it."""
        if seconds <= 0 or self._stopped():
            return
        self.phase, start = phase, self.card.spent_s
        self._moved = self._clock()
        self._tell("began", self)
        before = self._done(phase)

        def over() -> bool:
            self._pass_time()
            took = self.card.spent_s - start
            if took < seconds or self._stopped():
                return self._stopped()
            return took >= patience_s or self._done(phase) > before

        try:
            if phase == "train":
                self._work.train(over, self._report)
            else:
                getattr(self._work, phase)(over)
        finally:
            self._pass_time()
            self._save()
            self.phase = None

    def _done(self, phase: Phase) -> int:
        """Return the tokens of a phase so far."""
        amounts, card = self._work.amounts(), self.card
        card.written, card.held_out, card.read = amounts.written, amounts.held_out, amounts.read
        card.replies = amounts.replies
        return {"write": card.written, "read": card.read, "train": card.trained}[phase]

    def _pass_time(self) -> None:
        now = self._clock()
        if self.phase is not None:
            self.card.seconds[self.phase] += now - self._moved
        self._moved = now
        self._tell("moved", self)
        if now - self._saved >= SAVE_S:
            self._save()

    def _report(self, found: Milestone) -> None:
        card = self.card
        card.trained = found.tokens
        if card.best is None or found.per_pass > card.best.per_pass:
            self._pass_time()
            card.best = found
            self._work.export(self._out, card)
            card.save(beside(self._out))
        self._save()
        self._tell("figures", self)

    def _save(self) -> None:
        self._done("write")
        self.card.save(self._folder / NAME)
        self._saved = self._clock()


def _gain(before: Milestone | None, after: Milestone | None) -> float:
    if after is None:
        return 0.0
    return after.per_pass - (1.0 if before is None else before.per_pass)
