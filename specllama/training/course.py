"""A course of training: cycles of writing, reading and training, within a person's time.

Each cycle writes replies, reads again what has no features any more, and trains. It is as long as
all before it, so that there is a usable head within minutes, and a cycle that gains nothing says
that twice the time gains nothing. All that lasts is in the training folder; the process may be
killed at any time. The head is written whenever it guesses better than the one before.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from specllama.rates import share
from specllama.training.training_card import NAME, Milestone, Phase, TrainingCard, beside

if TYPE_CHECKING:
    from specllama.training.phases import Over, TargetPhases

FIRST_S, LONGEST_S = 60.0, 1800.0  # of a cycle
LEAST_GAIN = 0.01  # tokens a pass that a cycle has to gain, or the last one was enough
BEGUN_S = 900.0  # before that is asked: slow machines take a few steps in the first cycles
_LEAST, _MOST = 1 / 6, 2 / 3  # of a cycle, for writing
VISITS = 5.0  # of each text: one that was learned more often teaches little more
SAVE_S = 20.0  # after which the card is written again
TRY_S, PATIENCE_S = 12.0, 240.0  # of a phase whose pace is measured; until something comes of it
_SHORT_S = 5.0  # a rest that is not worth a cycle
WAIT_S = 0.5  # between two looks whether to go on
DOING: dict[Phase, str] = {"write": "writing", "read": "reading", "train": "training"}

News = Literal["moved", "began", "figures"]
Why = Literal["time", "gain", "stopped"]


class Course:
    """A training that goes on for some seconds.

    Attributes:
        card: what is known so far. phase: that goes on, "" in between.
        rest: returns why to wait now; "" to go on.
        seconds: that it may take. done_s: of them, those that passed.

    Args:
        out: the head.
        stopped: True once the person wants it to end.
        tell: called with what is new, several times a second.
    """

    def __init__(
        self,
        work: TargetPhases,
        folder: Path,
        card: TrainingCard,
        out: Path,
        seconds: float,
        stopped: Over,
        tell: Callable[[News, Course], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.card, self.seconds = card, seconds
        self.rest: Callable[[], str] = str
        self.phase: Phase | None = None
        self._work, self._folder, self._out = work, folder, out
        self._stopped, self._tell, self._clock = stopped, tell, clock
        self._began_s = card.spent_s
        self._moved = self._saved = clock()

    @property
    def done_s(self) -> float:
        return self.card.spent_s - self._began_s

    @property
    def left_s(self) -> float:
        return self.seconds - self.done_s

    def pace(self, phase: Phase) -> float:
        """Return tokens a second of writing or training so far; 0 if that is not known."""
        tokens = self.card.written if phase == "write" else self.card.trained
        return share(tokens, self.card.seconds[phase]) or 0.0

    @property
    def writing_share(self) -> float:
        """The share of a cycle in which replies are written: each text is to be learned from
        ``VISITS`` times."""
        train = self.pace("train")
        wanted = share(train, train + VISITS * self.pace("write"))
        return 1 / 3 if wanted is None else min(max(wanted, _LEAST), _MOST)

    def outlook(self, disk: int) -> tuple[float, int, int]:
        """Return the expected seconds of writing, tokens of replies that there will be, and bytes
        on disk, ``disk`` at most."""
        found, write_s = self._work.amounts(), self.seconds * self.writing_share
        written = found.written + int(write_s * self.pace("write"))
        bytes_a_token = found.disk / max(found.read, 1)
        return write_s, written, min(int(written * bytes_a_token), disk)

    def keep(self) -> None:
        """Write the card into its folder and next to the head."""
        self._save()
        self.card.save(beside(self._out))

    def measure(self) -> None:
        """Write and train for some seconds, where their pace is not known; what was made stays."""
        if not self.pace("write"):
            self._run("write", TRY_S, PATIENCE_S)
        if not self.pace("train"):
            self._run("train", TRY_S)

    def run(self) -> Why:
        """Go on until the time is over, a cycle gains nothing, or it is stopped."""
        card = self.card
        while self.left_s > _SHORT_S and not self._stopped():
            seconds, before = cycle_s(card.spent_s, self.left_s), card.best
            whole = seconds >= min(card.spent_s, LONGEST_S) >= BEGUN_S
            end = card.spent_s + seconds
            self._run("write", seconds * self.writing_share)
            if self._work.amounts().unread:
                self._run("read", (end - card.spent_s) / 2)  # more of it in the next one
            self._run("train", end - card.spent_s)
            if card.best is not None:
                card.course.append(card.best)
            self._save()
            if whole and before is not None and not self._stopped():
                assert card.best is not None
                if card.best.per_pass < before.per_pass + LEAST_GAIN:
                    return "gain"
        return "stopped" if self._stopped() else "time"

    def _run(self, phase: Phase, seconds: float, patience_s: float = 0.0) -> None:
        """Run a phase for some seconds, or for ``patience_s`` until something comes of it."""
        if seconds <= 0 or self._stopped():
            return
        self.phase, self.card.doing, start = phase, DOING[phase], self.card.spent_s
        self._moved = self._clock()
        self._tell("began", self)
        before = self._done(phase)

        def over() -> bool:
            self._pass_time()
            self._wait()
            took = self.card.spent_s - start
            if took < seconds or self._stopped():
                return self._stopped()
            return took >= patience_s or self._done(phase) > before

        try:
            if phase == "train":
                self._work.train(over, self._report, lambda: share(self.left_s, self.seconds))
            else:
                getattr(self._work, phase)(over)
        finally:
            self._pass_time()
            self._save()
            self.phase = None

    def _done(self, phase: Phase) -> int:
        """Return a number that grows with a phase: of replies to learn from, else of tokens."""
        amounts, card = self._work.amounts(), self.card
        card.written, card.held_out = amounts.written, amounts.held_out
        card.replies = amounts.replies
        replies = sum(card.replies.values())
        return {"write": replies, "read": amounts.read, "train": card.trained}[phase]

    def _pass_time(self) -> None:
        now = self._clock()
        if self.phase is not None:
            self.card.seconds[self.phase] += now - self._moved
        self._moved = now
        self._tell("moved", self)
        if now - self._saved >= SAVE_S:
            self._save()

    def _wait(self) -> None:
        """Wait while there is a reason to; that time does not count."""
        assert self.phase is not None
        while not self._stopped():
            why = self.rest()
            doing = f"paused: {why}" if why else DOING[self.phase]
            if doing != self.card.doing:
                self.card.doing = doing
                self._save()
                self._tell("began", self)
            if not why:
                break
            time.sleep(WAIT_S)
        self._moved = self._clock()

    def _report(self, found: Milestone) -> None:
        card, latest = self.card, self.card.latest
        card.trained = found.tokens
        if not found.right or (latest is not None and latest.right == found.right):
            return  # nothing was measured since
        card.latest = found = replace(found, minutes=card.spent_s / 60)
        if card.start and not found.step:
            card.first = found
        if card.best is None or found.per_pass > card.best.per_pass:
            self._pass_time()
            card.best, card.own = found, True
            self._work.export(self._out, card)
            card.save(beside(self._out))
        self._save()
        self._tell("figures", self)

    def _save(self) -> None:
        self._done("write")
        self.card.memory = max(self.card.memory, peak_memory())
        self.card.save(self._folder / NAME)
        self._saved = self._clock()


def peak_memory() -> int:
    """Return the most bytes of memory that this process had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else 1024 * most


def cycle_s(spent_s: float, left_s: float) -> float:
    """Return the seconds of the next cycle; a short rest goes with it."""
    usual = min(max(FIRST_S, spent_s), LONGEST_S)
    return left_s if left_s < 1.5 * usual else usual
