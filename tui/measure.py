"""What was measured on this machine in this session, and the textbook model of it.

The strip's verdict and the chart's points come from here, all of them by ``verdict.judge``.
``SpeedModel`` is what the sliders play with; a pair's own figures can be put into it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from specllama.events import RoundDone, Verdict
from specllama.params import GenerateParams
from specllama.tui.record import depth_of
from specllama.verdict import Pass, judge

RECENT = 32  # rounds whose acceptance by position is shown
LIVE = 128  # rounds that are judged, of all lengths and of each
MAX_K = 16
ENOUGH = 3  # passes of a width before their cost counts as measured


def drafts_differently(a: GenerateParams, b: GenerateParams) -> bool:
    """Whether measurements of one say nothing about the other."""
    same = ("speculate", "proposer", "verify", "window", "draft_max", "draft_min", "draft_p_min")
    return any(getattr(a, name) != getattr(b, name) for name in same)


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Speculation with independent acceptance (Leviathan et al. 2023), extended by β.

    ``alpha``: a drafted token is accepted. ``c``: one draft step, in target steps. ``beta``: each
    further row of a target pass, in target steps, so a pass of n rows costs 1 + β(n - 1).
    """

    alpha: float
    c: float
    beta: float = 0.0

    def tokens(self, k: int) -> float:
        """Expected tokens per round, (1 - α^(k+1)) / (1 - α)."""
        if self.alpha >= 1.0:
            return k + 1.0
        return (1.0 - self.alpha ** (k + 1)) / (1.0 - self.alpha)

    def cost(self, k: int) -> float:
        return 1.0 + k * self.c + k * self.beta

    def speedup(self, k: int) -> float:
        return self.tokens(k) / self.cost(k)

    def best(self, limit: int = MAX_K) -> tuple[int, float]:
        """The k with the highest speed-up; 0 (plain decoding) when nothing beats it."""
        k = max(range(limit + 1), key=lambda n: (self.speedup(n), -n))
        return k, self.speedup(k)

    def collapse(self, limit: int = 64) -> int | None:
        """The first k beyond the peak that is slower than plain decoding, None within ``limit``."""
        for k in range(1, limit + 1):
            if self.speedup(k) < 1.0:
                return k
        return None

    @property
    def pays(self) -> bool:
        """Some k beats plain decoding if and only if α > c + β."""
        return self.alpha > self.c + self.beta

    @property
    def bound(self) -> float:
        """No acceptance, however high, gets past 1 / (c + β)."""
        total = self.c + self.beta
        return 1.0 / total if total > 0 else math.inf


def _pass_deques() -> dict[int, deque[Pass]]:
    return defaultdict(lambda: deque(maxlen=LIVE))


@dataclass(slots=True)
class Meter:
    """Running measurement over one loaded pair. ``clear()`` when the pair changes, ``restart()``
    when only the way of drafting does: plain steps cost what they did."""

    recent: deque[RoundDone] = field(default_factory=lambda: deque(maxlen=RECENT))
    passes: deque[Pass] = field(default_factory=lambda: deque(maxlen=LIVE))
    by_length: dict[int, deque[Pass]] = field(default_factory=_pass_deques)
    plain: list[float] = field(default_factory=list)  # steps of a race
    _verdict: Verdict | None = None

    def clear(self) -> None:
        self.restart()
        self.plain = []

    def restart(self) -> None:
        for values in (self.recent, self.passes, self.by_length):
            values.clear()
        self._verdict = None

    def observe(self, done: RoundDone) -> None:
        self.recent.append(done)
        if done.index == 0:
            return  # its row came with the prompt
        one = Pass.of(done)
        self.passes.append(one)
        if one.drafted:
            self.by_length[max(depth_of(done))].append(one)
        self._verdict = None

    def measured(self, plain_ms: Sequence[float]) -> None:
        """Plain steps that were taken on purpose."""
        self.plain, self._verdict = list(plain_ms), None

    @property
    def _singles(self) -> Sequence[float]:
        """For rounds that the engine gave no figure with."""
        return () if any(one.plain_ms for one in self.passes) else self.plain

    @property
    def verdict(self) -> Verdict:
        """On the newest rounds, plain ones among them."""
        if self._verdict is None:
            self._verdict = judge(list(self.passes), self._singles)
        return self._verdict

    @property
    def tokens_per_s(self) -> float | None:
        """Over the rounds that are judged. Round 0 belongs to the time to the first token."""
        ms = sum(one.draft_ms + one.pass_ms for one in self.passes)
        return 1000.0 * sum(one.tokens for one in self.passes) / ms if ms > 0 else None

    def verdicts_by_length(self) -> dict[int, Verdict]:
        """On the rounds that drafted exactly this far (to this depth, in a tree), if enough were
        seen."""
        found = {k: judge(list(some), self._singles) for k, some in sorted(self.by_length.items())}
        return {k: one for k, one in found.items() if one.ratio is not None}

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted ÷ drafted at each depth."""
        drafted: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        for done in self.recent:
            drafted.update(depth_of(done))
            accepted.update(range(1, done.accepted + 1))
        return [accepted[depth] / drafted[depth] for depth in sorted(drafted)]

    def model(self) -> SpeedModel | None:
        """The pair's own figures; None until some rounds drafted and a plain step is known.

        α is a property of guesses that the target judged. Costs are medians: typical, no totals.
        """
        drafted = [one for some in self.by_length.values() for one in some]
        step = median(self._singles) if self._singles else None
        units = [(one, one.plain_ms or step) for one in drafted]
        known = [(one, ms) for one, ms in units if ms]
        judged = sum(one.judged for one in drafted)
        if len(known) < ENOUGH or not judged:
            return None
        by_rows: dict[int, list[float]] = defaultdict(list)
        for one, ms in known:
            by_rows[one.drafted].append(one.pass_ms / ms)
        # A pass that seems to cost less than a single one was timed on a quieter machine.
        wider = [
            (n, max(0.0, median(costs) - 1.0))
            for n, costs in by_rows.items()
            if len(costs) >= ENOUGH
        ]
        return SpeedModel(
            alpha=sum(one.accepted for one in drafted) / judged,
            c=median(one.draft_ms / one.drafted / ms for one, ms in known),
            beta=sum(n * cost for n, cost in wider) / sum(n * n for n, _ in wider)
            if wider
            else 0.0,
        )
