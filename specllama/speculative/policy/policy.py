"""The policy of how far to draft in each round, from measured costs, lessons, gains and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from specllama.speculative.budget import Bid
from specllama.speculative.effects import Offer
from specllama.speculative.policy.baseline import PlainSteps
from specllama.speculative.policy.constants import BEHIND, OUTLIER
from specllama.speculative.policy.costs import Costs
from specllama.speculative.policy.gain import Terms
from specllama.speculative.policy.learned import Learned
from specllama.speculative.policy.ledger import Ledger
from specllama.speculative.policy.weighing import Text, Weighing
from specllama.speculative.types import Booking
from specllama.speculative.window import Outcome, Plan, no_room

MEASURING = "measuring a plain step"
CHECKING = "checking whether plain steps are slow, too"


@dataclass(frozen=True, slots=True)
class _Unbooked:
    """A round that took longer than could be foreseen, in plain steps; the next one is plain, and
    shows if the machine is slow or the draft.

    ``gain`` is what it would have gained in the time that was ``foreseen``, beyond which it took
    ``overrun``.
    """

    gain: float
    exploring: bool
    foreseen: float
    overrun: float


class Policy:
    """A window that drafts as far as it pays, and never loses more than the ledger holds.

    A guess is sent when its expected tokens (calibrated acceptance times the survival of the
    guesses before it) are worth more than what the same time gives at the present throughput,
    looking ahead over the steps of the cost table. A draft step is run when an average look at its
    result is worth its price, and a text is read into the draft model when that pays over the rest
    of the reply. What promises no gain is explored from the source's own balance.

    Under ``match`` the output cannot depend on any of this. Under ``rejection`` and ``block`` no
    decision looks at a token that was sampled this round (``peek`` False).

    Args:
        learned, costs, ledger: what earlier requests taught; updated in place.
        draft_max: most tokens drafted per round.
        peek: decisions may look at drawn tokens (rule ``match``, or greedy).
        tokens: most that the reply may have, None where the context alone ends it.
        steps: the plain steps of the engine.
        clock: seconds; injected in tests.
        on_finish: called when the reply is over (to keep what was learnt).
    """

    def __init__(
        self,
        learned: Learned,
        costs: Costs,
        ledger: Ledger,
        *,
        draft_max: int,
        peek: bool = True,
        tokens: int | None = None,
        steps: PlainSteps | None = None,
        clock: Callable[[], float] = perf_counter,
        on_finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._costs, self._ledger = costs, ledger
        self._draft_max, self._peek = draft_max, peek
        self._clock, self._on_finish = clock, on_finish
        self._plain_steps = steps or PlainSteps(clock)
        self._text = Text(learned, math.inf if tokens is None else float(tokens))
        self._booking = Booking()
        self._weighing: Weighing | None = None  # of the round that is under way
        self._forgone = 0.0  # plain steps that drafting would have saved in it
        self._unbooked: _Unbooked | None = None

    def drafts_with(self, booking: Booking) -> None:
        """Set the booking of the drafts, before the first round."""
        self._booking = booking

    def prefilled(self, tokens: int, depth: int) -> None:
        """Note a prompt of ``depth`` tokens in the cache; ``tokens`` of them were read now."""
        self._text.depth = depth
        self._text.lag += tokens

    def finish(self) -> None:
        """Finish the reply."""
        self._book()
        if self._text.written:
            self._text.learned.reply.add(self._text.written)
        self._on_finish()

    def plan(self, room: int) -> Plan:
        """Plan a round; ``room`` bounds the draft."""
        self._weighing, self._forgone = None, 0.0
        if none := no_room(room, self._draft_max):
            return none
        text, target, payer = self._text, self._costs.target, self._booking.payer
        tokens, steps = text.learned.pace
        forgone = max(1.0 - steps / tokens, 0.0)
        if not target.known(1):
            return Plan(0, MEASURING)
        if self._unbooked:
            return Plan(0, CHECKING)
        due = not text.others and self._plain_steps.is_due(forgone, settled=target.settled)
        if due and self._ledger.covers(payer) >= forgone:
            self._forgone = forgone  # what drafts are compared with may have changed
            return Plan(0, MEASURING)
        weighing = self._weigh(min(self._draft_max, room))
        if not weighing.longest:
            return Plan(0, "drafting is over its budget; plain decoding until it recovers")
        looking = -text.asked(self._booking).value
        if looking > self._ledger.balance(payer) and weighing.model_gain() < looking * weighing.one:
            return Plan(0, "looking for drafts costs more than it saves")
        self._weighing = weighing
        return Plan(weighing.longest, "", weighing)

    def _weigh(self, most: int) -> Weighing:
        """Open a round of at most ``most`` guesses."""
        costs, text, booking = self._costs, self._text, self._booking
        target, draft, all_ = costs.target, costs.steps(booking), 1 + text.others
        assert target.level is not None
        draft.guess(target.level * costs.draft_share)
        v = [0.0, *target.upto((most + 1) * all_, text.depth)[all_::all_]]
        tokens, steps = text.learned.pace
        step = draft.ms(all_, text.depth)
        terms = Terms(
            most=most,
            v=v,
            step=step,
            further=0.0 if booking.at_once else step,
            rate=max(tokens / steps, 1.0) / v[1],
            # as many conversations as now may lose it
            stake=self._ledger.covers(booking.payer) * v[1] / all_,
            others=text.others,
            depth=text.depth,
            peek=self._peek,
        )
        return Weighing(text, terms, target, draft, self._ledger, booking, self._clock)

    def bid(self, offer: Offer) -> Bid:
        """Return the worth of this round's draft in a pass that others share."""
        assert self._weighing is not None
        return self._weighing.bid(offer)

    @property
    def balance(self) -> float | None:
        """Plain steps that the next round may lose."""
        return self._ledger.covers(self._booking.payer)

    def shortfall_ms(self) -> float | None:
        """Return how much more a guess costs than it is expected to save."""
        text, target = self._text, self._costs.target
        source = text.learned.sources.get(text.named(self._booking.payer))
        if source is None or target.level is None:
            return None
        one, two = target.ms(1, text.depth), target.ms(2, text.depth)
        return self._costs.steps(self._booking).ms(1, text.depth) + two - one - source.mean * one

    def observe(self, outcome: Outcome) -> Plan | None:
        """Learn from a round and book it."""
        text, target, depth = self._text, self._costs.target, self._text.depth
        weighing, n, shared = self._weighing, outcome.drafted, outcome.shared
        told = weighing.explain(n) if weighing else None
        # until a plain step was timed, a shared pass stands for one
        rows = shared.tokens if shared and target.known(1) else n + 1
        verify = outcome.round_ms - outcome.draft_ms
        expected, most = target.ms(rows, depth), target.most(rows, depth)
        if not shared or shared.first:
            target.observe(rows, verify, depth)
        if weighing:
            weighing.learn(outcome)
        text.wrote(outcome.emitted, shared.lanes - 1 if shared else 0)
        if outcome.plain_ms is not None:
            self._plain_steps.took(outcome.plain_ms, depth)
        if target.level is None:
            return told
        one = target.ms(1 + text.others, depth)
        if self._unbooked and not n:
            self._book(max(verify / expected, 1.0 / BEHIND))
        if shared and (without := shared.tokens - shared.guesses) > shared.lanes:
            # a prompt is read in the same pass, as it would be without any draft
            verify = expected - target.ms(without, depth) + one
        text.learned.wrote(outcome.emitted, (outcome.draft_ms + verify) / one)
        self._ledger.earn(outcome.emitted, self._booking.payer)
        if n:
            self._plain_steps.drafted(outcome.round_ms / one)
        if self._forgone:
            self._plain_steps.paid(self._forgone)
            self._ledger.book(self._booking.payer, -self._forgone)
        longest = OUTLIER * most
        waited = _waited(outcome, min(verify, longest) - one) / one
        if weighing:
            # without a draft the pass was a plain step, however long it took
            checking = min(verify, longest) if n else one
            drafting = min(outcome.draft_ms, OUTLIER * (weighing.due or one))
            foreseen = drafting + checking
            overrun = outcome.draft_ms + (verify if n else one) - foreseen
            gain, exploring = outcome.emitted - foreseen / one, weighing.explores
            if weighing.drafted is None:
                text.asked(self._booking).add(gain)
            elif weighing.drafted.sent:
                text.learned.round.add(outcome.emitted)
            self._ledger.excuse(self._plain_steps.beyond * outcome.emitted)
            self._unbooked = _Unbooked(gain - waited, exploring, foreseen / one, overrun / one)
            if overrun < one:  # a plain step to find out why would take longer
                self._book()
        elif waited:
            self._ledger.book(self._booking.payer, -waited)
        return told

    def _book(self, slower: float = 1.0) -> None:
        """Book the last round that asked for drafts; plain steps now take ``slower`` times their
        known time.

        A pass that takes much longer than drafting may ever lose is not a draft's doing: the
        machine slept, or the program was stopped.
        """
        if (last := self._unbooked) is not None:
            overrun = (last.foreseen + last.overrun) / slower - last.foreseen
            overrun = min(max(overrun, 0.0), BEHIND)
            self._ledger.book(
                self._booking.payer, last.gain, exploring=last.exploring, overrun=overrun
            )
        self._unbooked = None


def _waited(outcome: Outcome, longer: float) -> float:
    """Return the milliseconds that a conversation lost to others' drafts: it waits for their
    drafting, and without a guess of its own it pays for their rows, with which its pass takes
    ``longer``."""
    shared = outcome.shared
    if shared is None:
        return 0.0
    rows = longer if shared.guesses and not outcome.drafted else 0.0
    return max(shared.drafting_ms - outcome.draft_ms, 0.0) + max(rows, 0.0)
