"""The contract of draft windows, which plan how far the next round drafts, and one of fixed length.

How far the adaptive window drafts is decided in ``policy/draft_length``. The reason of a plan is
shown to people.
"""

from __future__ import annotations

from dataclasses import dataclass

from specllama.backend.base import Shared
from specllama.events import RoundDone
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


_OFF, _LAST = Plan(0, "off"), Plan(0, "last token")


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
            return _OFF
        return self.decide(int(min(self._draft_max, room))) if room > 0 else _LAST

    def decide(self, most: int) -> Plan:
        """Plan a round of at most ``most`` guesses, at least one."""
        return Plan(most, "fixed" if most == self._draft_max else "room")

    def explain(self, n: int) -> str:
        """Return the reason in the light of the draft, ``n`` guesses; "": the plan's stands."""
        return ""

    def observe(self, done: RoundDone, verify_ms: float, shared: Shared | None = None) -> None:
        """Learn from a round.

        Args:
            verify_ms: all but drafting. Of a ``shared`` pass the pass alone, and what came behind.
        """
        if not done.drafted and shared is None:
            self._plain_steps.took(verify_ms + done.wait_ms, self._depth)
        self._depth += len(done.emitted)

    @property
    def balance(self) -> float | None:
        """Plain steps that the next round may lose; None if nothing is weighed."""
        return None

    def finish(self) -> None:
        """Finish the reply."""

    def bid(self, offer: Offer) -> Bid:
        """Return the worth of this round's draft in a pass that others share."""
        return Bid(sorted(offer.survival, reverse=True), 0.0, _PLENTY)
