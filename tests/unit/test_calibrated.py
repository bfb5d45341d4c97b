"""The intervals of live verdicts on a machine whose speed drifts, that hesitates, and that is busy
with other things for a while: how often they hold what the same tokens take without all that."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
from replay import VirtualClock

from specllama.events import Payoff
from specllama.speculative.policy.baseline import PlainSteps
from specllama.verdict import TimedRound, judge

PLAIN_MS = 30.0
REPLIES = 20  # of each kind, in turn


class Machine:
    """Slower and faster by ``drift`` over ``slow_s`` seconds; ``busy`` with others now and then."""

    def __init__(self, seed: str, drift: float, slow_s: float, busy: float) -> None:
        self.rng, self.clock = random.Random(seed), VirtualClock()
        self.drift, self.slow_s, self.busy = drift, slow_s, busy
        self._level = self.rng.gauss(0.0, drift)
        self._until, self._load = 0.0, 1.0
        self.steps = PlainSteps(self.clock)
        self.depth = 0

    def takes(self, ms: float) -> float:
        """What that takes now."""
        rng, now = self.rng, self.clock.now
        if now >= self._until:
            self._load = rng.choice((1.0, 1.0 + self.busy))
            self._until = now + rng.uniform(5.0, 40.0)
        hiccup = 4.0 if rng.random() < 0.03 else 1.0
        took = ms * math.exp(self._level + rng.gauss(0.0, 0.05)) * self._load * hiccup
        self.clock.now += took / 1e3
        kept = math.exp(-took / 1e3 / self.slow_s)
        self._level = kept * self._level + rng.gauss(0.0, self.drift) * math.sqrt(1 - kept**2)
        return took

    def plain(self) -> TimedRound:
        ms = self.takes(PLAIN_MS)
        self.steps.took(ms, self.depth)
        self.depth += 1
        return TimedRound("none", 1, 0, 0, 0, False, 0, 0.0, ms, None)

    def drafted(self, cost: float) -> TimedRound:
        """A round of ``cost`` plain steps, a third of which is drafting."""
        kept = self.rng.choice((0, 0, 1, 2, 3))
        draft_ms, pass_ms = self.takes(PLAIN_MS * cost / 3), self.takes(PLAIN_MS * cost * 2 / 3)
        self.depth += kept + 1
        self.steps.drafted(cost)
        found = self.steps.typical(self.depth, 0.0)
        judged = min(kept + 1, 3)
        one = TimedRound("draft", kept + 1, 3, kept, judged, False, 0, draft_ms, pass_ms, None)
        if found is None:
            return one
        return one._replace(
            plain_ms=found.ms,
            plain_age_s=found.age_s,
            plain_n=found.n,
            plain_spread=found.spread,
        )

    def reply(self, tokens: int, cost: float, *, forced: bool) -> tuple[Payoff, float]:
        """A drafted one, with plain steps among its rounds where they are due (``auto``): the
        verdict, and the truth."""
        passes: list[TimedRound] = []
        while sum(one.tokens for one in passes) < tokens:
            if forced and self.steps.is_due(0.3, settled=True):
                self.steps.paid(0.3)
                passes.append(self.plain())
            else:
                passes.append(self.drafted(cost))
        rounds = sum(one.drafted > 0 for one in passes)
        return judge(passes), sum(one.tokens for one in passes) / (
            cost * rounds + len(passes) - rounds
        )


def alternating(machine: Machine, cost: float, tokens: int) -> list[tuple[Payoff, float]]:
    """Plain and drafted replies in turn, as a fixed window has it."""
    found = []
    for _ in range(REPLIES):
        for _ in range(tokens):
            machine.plain()
        found.append(machine.reply(tokens, cost, forced=False))
    return found


def interleaved(machine: Machine, cost: float, tokens: int) -> list[tuple[Payoff, float]]:
    """Drafted replies alone, whose own plain steps are all that they are compared with."""
    return [machine.reply(tokens, cost, forced=True) for _ in range(REPLIES)]


MACHINES = {
    "quiet": (0.02, 10.0, 0.0),
    "drifting": (0.25, 8.0, 0.0),
    "busy": (0.10, 5.0, 0.8),
}


@pytest.mark.parametrize("ways", [alternating, interleaved])
@pytest.mark.parametrize("kind", list(MACHINES))
@pytest.mark.parametrize("tokens", [48, 240])
def test_nine_of_ten_intervals_hold_the_truth(
    ways: Callable[[Machine, float, int], list[tuple[Payoff, float]]], kind: str, tokens: int
) -> None:
    found = [
        one
        for seed in range(2)
        for cost in (1.2, 1.8, 2.6)
        for one in ways(Machine(f"{seed} {cost} {kind}", *MACHINES[kind]), cost, tokens)
    ]
    told = [(one, truth) for one, truth in found if one.low is not None and one.high is not None]
    assert len(told) >= 0.7 * len(found)
    held = [one for one, truth in told if (one.low or 0.0) <= truth <= (one.high or 0.0)]

    assert len(held) >= 0.9 * len(told)
