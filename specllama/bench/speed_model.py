"""The textbook model of speculation, and the figures of a pair in it.

``SpeedModel`` is what the sliders play with; a pair's own figures can be put into it. The formula
itself is in ``fixed_gain``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from specllama.fixed_gain import fixed_speeds, pays_above, steady
from specllama.verdict import TimedRound

MAX_K = 16
ENOUGH = 3  # passes of a width before their cost counts as measured


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Speculation with independent acceptance (Leviathan et al. 2023), extended by β.

    ``alpha``: a drafted token is accepted. ``c``: one draft step, in target steps. ``beta``: each
    further row of a target pass, in target steps, so a pass of n rows costs 1 + β(n - 1).
    """

    alpha: float
    c: float
    beta: float = 0.0

    def speedups(self, limit: int = MAX_K) -> list[float]:
        """Return the speed-up of every k from 0, which is plain decoding."""
        passes = [1.0 + self.beta * (n - 1) for n in range(limit + 2)]
        return [1.0, *fixed_speeds(steady(self.alpha, limit), self.c, passes).values()]

    def cost(self, k: int) -> float:
        return 1.0 + k * self.c + k * self.beta

    def best(self, limit: int = MAX_K) -> tuple[int, float]:
        """Return the k with the highest speed-up; 0 (plain decoding) if nothing beats it."""
        speedups = self.speedups(limit)
        return speedups.index(max(speedups)), max(speedups)

    def collapse(self, limit: int = 64) -> int | None:
        """Return the first k that is slower than plain decoding, None if none is within
        ``limit``."""
        return next((k for k, one in enumerate(self.speedups(limit)) if one < 1.0), None)

    @property
    def pays(self) -> bool:
        """True if some k beats plain decoding: exactly if α > c + β."""
        return self.alpha > pays_above(self.c, 1.0, self.beta)

    @property
    def bound(self) -> float:
        """The limit, 1 / (c + β), of the speed-up at any acceptance."""
        total = self.c + self.beta
        return 1.0 / total if total > 0 else math.inf

    @staticmethod
    def of(passes: Sequence[TimedRound], singles: Sequence[float] = ()) -> SpeedModel | None:
        """Return the pair's own figures; None until some rounds drafted and a plain step is known.

        α is a property of guesses that the target judged. Costs are medians: typical, no totals.

        Args:
            passes: of drafted runs. singles: steps of plain runs, in milliseconds.
        """
        drafted = [one for one in passes if one.drafted]
        step = median(singles) if singles else None
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
