"""A pair's window in tests: what it knows, and the costs it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from replay import Replay, Spot, VirtualClock, replay

from specllama.speculative.drafting.method import find
from specllama.speculative.policy.costs import Costs
from specllama.speculative.policy.learned import Learned
from specllama.speculative.policy.ledger import Ledger
from specllama.speculative.policy.policy import Policy
from specllama.speculative.types import Booking, DraftJudge

READS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass
class Pair:
    """What is known of a pair at one rule and temperature."""

    costs: Costs = field(default_factory=Costs)
    ledger: Ledger = field(default_factory=Ledger)
    learned: Learned = field(default_factory=Learned)

    def tuned(self, verify: Sequence[float], step: float) -> Pair:
        """The costs are known as after ``specllama tune``; one plain step is one millisecond."""
        for rows in range(1, len(verify)):
            self.costs.target.set(rows, verify[rows])
        for tokens in READS:
            self.costs.draft.set(tokens, step * (1 + 0.35 * (tokens - 1)))
        return self

    def window(self, clock: VirtualClock | None = None, **changes: Any) -> Policy:
        options = {"draft_max": 8, "clock": clock or VirtualClock(), **changes}
        return Policy(self.learned, self.costs, self.ledger, **options)


def play(
    trace: Sequence[Spot],
    verify: Sequence[float],
    step: float,
    *,
    pair: Pair | None = None,
    peek: bool = True,
    prompt: int = 0,
    use_model: bool = True,
    clock: VirtualClock | None = None,
    **changes: Any,
) -> Replay:
    """A reply in simulated time, by a draft model and copies."""
    pair, clock = pair or Pair(), clock or VirtualClock()
    window = pair.window(clock, peek=peek, **changes)
    window.drafts_with(booking("mixed", model=use_model))
    done = replay(
        trace, window, clock,
        verify=verify, draft=step, prompt=prompt, peek=peek, use_model=use_model,
    )  # fmt: skip
    window.finish()
    return done


def booking(method: str, *, model: bool = True) -> Booking:
    """What a method's drafts are booked under; without a ``model`` a mixture has copies only."""
    entry = find(method)
    if entry is None or entry.cost == "free":
        return Booking(method)
    if entry.cost == "of its sources":
        return Booking(method, "draft" if model else "")
    return Booking(method, method, entry.cost == "own", entry.at_once)


class Answers(DraftJudge):
    """A judge that answers some questions as it is told, and says yes to the others."""

    def __init__(self, **answers: Callable[..., Any]) -> None:
        vars(self).update(answers)
        self.weighs = "pick" in answers
