"""Rates of what replies count and take, and the gain that drafting should have at given costs.

Every rate, ratio and share is derived here; what is unknown or undefined is None. The gain is the
one formula of every prediction, not of the window; its principle (maximise tokens per second as a
ratio of expectations, by Dinkelbach's transformation) is that of renewal-reward processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

Answer = Literal["faster", "slower", "unsure", "off", "unknown"]

LONGEST = 8  # guesses that are tried where it is asked whether a draft model can gain at all
_LEAST = 1.02  # gain that is worth a word


def share(part: float | None, whole: float | None) -> float | None:
    """Return a part of a whole; None if either is unknown, or there is no whole."""
    return None if part is None or not whole else part / whole


def total(counts: Collection[int | None]) -> int | None:
    """Add counts; return None if one of them is not known."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def speed(tokens: int | None, seconds: float, replies: int = 1) -> float | None:
    """Return tokens a second after the first of each reply, which comes with its prompt."""
    more = (tokens or 0) - replies
    return more / seconds if more > 0 and seconds > 0 else None


@dataclass(frozen=True, slots=True)
class Depth:
    """Guesses at one depth, from 1 on: how many were sent to the target and how many accepted, in
    how many rounds, including those that drafted less far."""

    depth: int
    rounds: int | None
    drafted: int
    accepted: int

    @property
    def of_rounds(self) -> float | None:
        return share(self.accepted, self.rounds)

    @property
    def of_drafted(self) -> float | None:
        return share(self.accepted, self.drafted)


class Kept:
    """The share of guesses that were kept, of counts that may be unknown."""

    __slots__ = ()
    drafted: int | None
    accepted: int | None

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted."""
        return share(self.accepted, self.drafted)

    @property
    def rejected(self) -> int | None:
        known = self.drafted is not None and self.accepted is not None
        return self.drafted - self.accepted if known else None  # type: ignore[operator]


class GuessShares(Kept):
    """Shares of guesses that were kept, by round and by depth as well."""

    __slots__ = ()
    rounds: int | None
    drafted_at: Sequence[int]
    accepted_at: Sequence[int]

    @property
    def by_depth(self) -> list[Depth]:
        pairs = zip(self.drafted_at, self.accepted_at, strict=False)
        return [Depth(at, self.rounds, *pair) for at, pair in enumerate(pairs, 1)]

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / rounds."""
        kept = share(self.accepted, self.rounds)
        return None if kept is None else 1 + kept


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that would make replies faster (see ``engine.remedies``).

    Attributes:
        change: as it is typed, or in words.
        speed: that is expected of it, over plain decoding as it is now; None if it is not known.
        then: what else it does.
    """

    change: str
    speed: float | None = None
    then: str = ""


@dataclass(frozen=True, slots=True)
class Payoff(Kept):
    """The verdict on drafting (see ``verdict``): over plain decoding, the true speed lies in
    ``low``..``high`` in 9 of 10 cases or more: the interval is computed for 19 of 20 and was tried
    at length.

    ``tokens`` came from ``passes`` of the target behind the first token. Of ``drafted`` guesses the
    target came to judge ``judged`` and kept ``accepted``. ``lost_ms`` is what drafting lost per
    token where it was tried. ``plain_age_s`` is how long ago,
    at worst, the newest plain step was when a round was compared with it; None where plain steps
    were measured for the verdict, or that is unknown. Where it is too long, no answer is sure.
    ``remedies`` would be faster, the fastest first.
    """

    answer: Answer
    ratio: float | None
    low: float | None
    high: float | None
    tokens: int
    passes: int
    drafted: int
    accepted: int
    judged: int
    lost_ms: float | None = None
    plain_age_s: float | None = None
    remedies: tuple[Remedy, ...] = ()

    @property
    def checked(self) -> float | None:
        """The share of the guesses that the target came to judge that were kept."""
        return share(self.accepted, self.judged)

    @property
    def per_pass(self) -> float | None:
        """The tokens of a pass of the target."""
        return share(self.tokens, self.passes)

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def steady(acceptance: float, length: int = LONGEST) -> list[float]:
    """Return the survival of drafts whose tokens are each accepted with this probability, given
    that those before them were."""
    return [acceptance**i for i in range(1, length + 1)]


def fixed_speeds(
    survival: Sequence[float], draft_ms: float, verify_ms: Sequence[float], late_ms: float = 0.0
) -> dict[int, float]:
    """Return the speed of every fixed draft length, relative to plain decoding.

    A round gives one token, plus every position that survives.

    Args:
        survival: ``survival[i]`` is the probability that drafts 1..i+1 are all accepted; its length
            bounds the lengths.
        draft_ms: one draft step.
        verify_ms: indexed by rows, ``verify_ms[1]`` is a plain step.
        late_ms: what a draft model pays after a round whose drafts were all accepted: it has not
            read the last of them yet.
    """
    found = {}
    for k in range(1, min(len(survival), len(verify_ms) - 2) + 1):
        ms = k * draft_ms + survival[k - 1] * late_ms + verify_ms[k + 1]
        found[k] = (1.0 + sum(survival[:k])) * verify_ms[1] / ms
    return found


def pays_above(draft_ms: float, step_ms: float, row_ms: float = 0.0) -> float:
    """Return the share of guesses to be kept for any gain: the cost of a guess, in plain steps.

    Args:
        row_ms: a further row of a pass; 0 gives a lower bound.
    """
    return (draft_ms + row_ms) / step_ms


def affordable_step(survival: Sequence[float], verify_ms: Sequence[float]) -> float:
    """Return the milliseconds that a draft step may take at most for a gain that is worth a word;
    0 where even free guesses would not give it. See ``fixed_speeds``."""
    left = [
        ((1.0 + sum(survival[:k])) * verify_ms[1] / _LEAST - verify_ms[k + 1]) / k
        for k in range(1, min(len(survival), len(verify_ms) - 2) + 1)
    ]
    return max(0.0, *left)
