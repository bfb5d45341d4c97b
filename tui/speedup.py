"""Whether this is faster than plain decoding, and how sure that is: one estimator for every screen.

Both sides are the same statistic, total time over total tokens: a machine that stalls now and then
slows plain and drafted rounds alike, and a median on one side would see it only on the other. The
interval is that of a ratio of two such means, on a logarithmic scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from specllama.params import GenerateParams

ENOUGH_PLAIN = 4  # plain steps before anything is compared with them
ENOUGH_ROUNDS = 8
SIGMAS = 2.5  # half the interval, in deviations: times have a long tail, so more than the usual 2

Verdict = Literal["faster", "slower", "unsure"]


@dataclass(frozen=True, slots=True)
class Speedup:
    """Tokens per second over plain decoding; the true value lies in ``low``..``high``."""

    ratio: float
    low: float
    high: float

    @property
    def verdict(self) -> Verdict:
        if self.low > 1.0:
            return "faster"
        return "slower" if self.high < 1.0 else "unsure"


def drafts_differently(a: GenerateParams, b: GenerateParams) -> bool:
    """Whether measurements of one say nothing about the other."""
    same = ("speculate", "proposer", "verify", "window", "draft_max", "draft_min", "draft_p_min")
    return any(getattr(a, name) != getattr(b, name) for name in same)


def speedup(plain_ms: Sequence[float], rounds: Sequence[tuple[int, float]]) -> Speedup | None:
    """What ``rounds`` gain over plain steps; None where too little was seen.

    Args:
        plain_ms: milliseconds of plain steps, one token each.
        rounds: tokens and milliseconds of each round that is judged.
    """
    tokens = sum(n for n, _ in rounds)
    total_ms = sum(ms for _, ms in rounds)
    if len(plain_ms) < ENOUGH_PLAIN or len(rounds) < ENOUGH_ROUNDS or tokens <= 0 or total_ms <= 0:
        return None
    plain, now = fmean(plain_ms), total_ms / tokens
    if plain <= 0:
        return None
    here = _spread([ms for _, ms in rounds])
    there = _spread(plain_ms)
    # Stalls are the machine's: a side that had none so far is no more certain for it.
    noise = max(here, there)
    mean = total_ms / len(rounds)
    gain = sum((ms - now * n) ** 2 for n, ms in rounds) / (len(rounds) - 1) / mean**2
    variance = noise / len(plain_ms) + max(gain, noise) / len(rounds)
    ratio, factor = plain / now, math.exp(SIGMAS * math.sqrt(variance))
    return Speedup(ratio, ratio / factor, ratio * factor)


def _spread(values: Sequence[float]) -> float:
    """The variance over the squared mean."""
    mean = fmean(values)
    if mean <= 0:
        return 0.0
    return sum((v - mean) ** 2 for v in values) / (len(values) - 1) / mean**2
