"""The contract of draft windows, which plan how far the next round drafts, and one of fixed length.

How far the adaptive window drafts is decided in ``policy/draft_length``. The reason of a plan is
shown to people.
"""

from __future__ import annotations

from dataclasses import dataclass

from specllama.backend.base import Shared
from specllama.speculative.budget import Bid
from specllama.speculative.effects import Offer
from specllama.speculative.policy.baseline import PlainSteps
from specllama.speculative.types import Booking, DraftJudge

_PLENTY = 1e6  # tokens that may be lost: nothing is weighed


@dataclass(frozen=True, slots=True)
class Plan:
    """``draft_max`` nodes at most; 0 is a plain step. ``reason`` is a short phrase.

    A window that goes on deciding while the draft is made gives the ``judge`` that answers.
    """

    draft_max: int
    reason: str
    judge: DraftJudge | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The costs and gains of a round, for windows that learn. Times in milliseconds.

    ``tokens`` are the tokens the round added (accepted drafts, then the target token). Of a
    ``shared`` pass the times are those of its own drafting and of the pass alone.
    ``wait_ms`` went by between the round before and this one.
    """

    drafted: int
    accepted: int
    tokens: tuple[int, ...]
    draft_ms: float
    round_ms: float
    shared: Shared | None = None
    wait_ms: float = 0.0

    @property
    def emitted(self) -> int:
        return len(self.tokens)

    @property
    def plain_ms(self) -> float | None:
        """The time of a plain step, with the wait for it; None if the round was no plain step."""
        if self.drafted or self.shared is not None:
            return None
        return self.round_ms - self.draft_ms + self.wait_ms


class Window:
    """A window of always up to ``draft_max`` tokens; others plan and learn.

    Args:
        steps: what plain steps take, of all replies.
    """

    def __init__(self, draft_max: int, steps: PlainSteps | None = None) -> None:
        self._draft_max = draft_max
        self._plain_steps = steps or PlainSteps()
        self._depth = 0

    def drafts_with(self, booking: Booking) -> None:
        """Set the booking of the drafts, before the first round."""

    def prefilled(self, tokens: int, depth: int) -> None:
        """Note a prompt of ``depth`` tokens in the cache; ``tokens`` of them were read now."""
        self._depth = depth

    def plan(self, room: float) -> Plan:
        """Plan a round; ``room``: guesses that there is room for."""
        if self._draft_max == 0:
            return Plan(0, "off")
        return self.decide(int(min(self._draft_max, room))) if room > 0 else Plan(0, "last token")

    def decide(self, most: int) -> Plan:
        """Plan a round of at most ``most`` guesses, at least one."""
        return Plan(most, "fixed" if most == self._draft_max else "room")

    def observe(self, outcome: Outcome) -> Plan | None:
        """Learn from a round. Return the plan in the light of the draft; None: it stands."""
        if outcome.plain_ms is not None:
            self._plain_steps.took(outcome.plain_ms, self._depth)
        self._depth += outcome.emitted
        return None

    @property
    def balance(self) -> float | None:
        """Plain steps that the next round may lose; None if nothing is weighed."""
        return None

    def shortfall_ms(self) -> float | None:
        """Return how much more a guess costs than it is expected to save; None if unknown."""
        return None

    def finish(self) -> None:
        """Finish the reply."""

    def bid(self, offer: Offer) -> Bid:
        """Return the worth of this round's draft in a pass that others share."""
        return Bid(sorted(offer.survival, reverse=True), 0.0, _PLENTY)
