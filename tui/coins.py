"""The coins that rejection sampling threw, thrown again: the event ``started`` gives all of them.

The rule draws one uniform for each guess that it judges and one for the target token, in this
order (``speculative.rules``). Which guesses those were stands in the events. Where it does not (a
branch judged against what a sampled sibling left), nothing is said of the rest of the reply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specllama.events import RoundDone, Started
from specllama.tui.record import Record

if TYPE_CHECKING:
    from numpy.random import Generator


@dataclass(frozen=True, slots=True)
class Toss:
    """A guess is kept where ``u`` lies below ``ratio``, p/q of what earlier siblings left."""

    u: float
    ratio: float


class RecordedCoins:
    """Of one record, which may grow."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._tosses: list[dict[int, Toss]] = []  # by round
        self._rng: Generator | None = None

    def of(self, index: int) -> dict[int, Toss]:
        """The tosses of a round, by guess."""
        for at in range(len(self._tosses), index + 1):
            for first, started in self._record.starts:
                if first == at:
                    self._rng = _stream(started) if started.verify == "rejection" else None
            self._tosses.append(self._round(self._record.rounds[at]))
        return self._tosses[index]

    def _round(self, done: RoundDone) -> dict[int, Toss]:
        found: dict[int, Toss] = {}
        path, node = list(done.accepted_path), -1
        while self._rng is not None:
            kept = path.pop(0) if path else None
            left: float | None = 1.0  # of the law, after the siblings that were refused
            for i in (i for i, parent in enumerate(done.parents) if parent == node):
                p, q = done.p[i], done.q[i]
                if p is None:
                    break
                if left is None:
                    self._rng = None
                    return found
                if p > 0.0:
                    toss = Toss(self._rng.random(), min(1.0, p / left / (1.0 if q is None else q)))
                    if (toss.u < toss.ratio) != (i == kept):
                        self._rng = None  # not these coins
                        return found
                    found[i] = toss
                if i == kept:
                    break
                left = left - p if q is None else None
            if kept is None:
                break
            node = kept
        if self._rng is not None and done.target_token is not None:
            self._rng.random()
        return found


def _stream(started: Started) -> Generator:
    from numpy.random import default_rng

    return default_rng((started.seed, 1, started.position, started.prompt_n))
