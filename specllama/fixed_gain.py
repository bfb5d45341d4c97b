"""The gain of drafting at given costs: the one formula of every prediction, not of the window.

The principle (maximise tokens per second as a ratio of expectations, by Dinkelbach's
transformation) is that of renewal-reward processes.
"""

from __future__ import annotations

from collections.abc import Sequence

LONGEST = 8  # guesses that are tried where it is asked whether a draft model can gain at all
_LEAST = 1.02  # gain that is worth a word


def steady(acceptance: float, length: int = LONGEST) -> list[float]:
    """Return the survival of drafts whose tokens are each accepted with this probability, given
    that those before them were."""
    return [acceptance**i for i in range(1, length + 1)]


def fixed_speeds(
    survival: Sequence[float],
    draft_ms: float,
    verify_ms: Sequence[float],
    late_ms: float = 0.0,
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


def affordable(survival: Sequence[float], verify_ms: Sequence[float]) -> float:
    """Return the milliseconds that a draft step may take at most for a gain that is worth a word;
    0 where even free guesses would not give it. See ``fixed_speeds``."""
    left = [
        ((1.0 + sum(survival[:k])) * verify_ms[1] / _LEAST - verify_ms[k + 1]) / k
        for k in range(1, min(len(survival), len(verify_ms) - 2) + 1)
    ]
    return max(0.0, *left)
