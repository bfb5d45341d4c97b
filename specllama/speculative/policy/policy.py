"""The policy of how far to draft in each round, from measured costs, lessons, gains and losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from time import perf_counter

from specllama.backend.base import Shared
from specllama.events import RoundDone
from specllama.speculative.budget import Bid
from specllama.speculative.effects import Offer
from specllama.speculative.policy.baseline import PlainSteps
from specllama.speculative.policy.constants import BEHIND, OUTLIER
from specllama.speculative.policy.costs import Costs
from specllama.speculative.policy.draft_length import Text, Weighing
from specllama.speculative.policy.learned import Learned
from specllama.speculative.policy.ledger import Ledger
from specllama.speculative.types import Booking
from specllama.speculative.window import Plan, Window

MEASURING = "measuring a plain step"
POOR = "looking for drafts costs more than it saves"


class Policy(Window):
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
        super().__init__(draft_max, steps or PlainSteps(clock))
        self._costs, self._ledger, self._on_finish = costs, ledger, on_finish
        self._text = Text(learned, math.inf if tokens is None else float(tokens))
        for source in learned.sources.values():
            source.forget_looks()
        self._weigh = partial(Weighing, self._text, costs, ledger, peek=peek, clock=clock)
        self._booking = Booking()
        self._weighing: Weighing | None = None  # of the round that is under way
        self._refused = (0.0, 0)  # the cost of looking, and the others, when it promised too little

    def drafts_with(self, booking: Booking) -> None:
        self._booking = booking

    def prefilled(self, tokens: int, depth: int) -> None:
        self._text.depth = depth
        self._text.lag += tokens

    def finish(self) -> None:
        self._on_finish()

    def plan(self, room: float) -> Plan:
        self._weighing = None
        return super().plan(room)

    def decide(self, most: int) -> Plan:
        text, target, payer = self._text, self._costs.target, self._booking.payer
        # what drafts are compared with may have changed
        due = not text.others and self._plain_steps.is_due(settled=target.settled)
        if due or not target.known(1):
            return Plan(0, MEASURING)
        now = -text.learned.gained(self._booking.method).value, text.others
        poor = now[0] > self._ledger.balance(payer)
        if poor and now == self._refused:  # nothing was looked at since, and more is unread
            return Plan(0, POOR)
        weighing = self._weigh(self._booking, most)
        if not (longest := weighing.prices.longest):
            return Plan(0, "drafting is over its budget; plain decoding until it recovers")
        if poor and weighing.model_gain() < now[0] * weighing.prices.one:
            self._refused = now
            return Plan(0, POOR)
        self._weighing = weighing
        return Plan(longest, "", weighing)

    def bid(self, offer: Offer) -> Bid:
        assert self._weighing is not None
        return self._weighing.bid(offer)

    @property
    def balance(self) -> float | None:
        return self._ledger.covers(self._booking.payer)

    def explain(self, n: int) -> str:
        return self._weighing.explain(n) if self._weighing else ""

    def observe(self, done: RoundDone, verify_ms: float, shared: Shared | None = None) -> None:
        text, target, depth = self._text, self._costs.target, self._text.depth
        weighing, n, emitted = self._weighing, len(done.drafted), len(done.emitted)
        draft_ms, verify = done.draft_ms, verify_ms
        # until a plain step was timed, a shared pass stands for one
        rows = shared.tokens if shared and target.known(1) else n + 1
        expected, most = target.ms(rows, depth), target.most(rows, depth)
        if not shared or shared.first:
            target.observe(rows, verify, depth)
        if weighing:
            weighing.learn(done)
        text.wrote(emitted, shared.lanes - 1 if shared else 0)
        if not (n or shared):
            self._plain_steps.took(verify_ms + done.wait_ms, depth)
        if target.level is None:
            return
        one = target.ms(1 + text.others, depth)
        if shared and (without := shared.tokens - shared.guesses) > shared.lanes:
            # a prompt is read in the same pass, as it would be without any draft
            verify = expected - target.ms(without, depth) + one
        text.learned.wrote(emitted, (draft_ms + verify) / one)
        payer = self._booking.payer
        self._ledger.earn(emitted, payer)
        if n:
            self._plain_steps.drafted((draft_ms + verify_ms) / one)
        longest = min(verify, OUTLIER * most)
        waited = 0.0
        if shared:  # for others' drafting; and without a guess of its own it pays for their rows
            rows_ms = longest - one if shared.guesses and not n else 0.0
            lag_ms = shared.drafting_ms - draft_ms
            waited = (max(lag_ms, 0.0) + max(rows_ms, 0.0)) / one
        if weighing:
            # without a draft the pass was a plain step, however long it took
            drafting = min(draft_ms, OUTLIER * (weighing.due or one))
            foreseen = drafting + (longest if n else one)
            # a pass that takes much longer than drafting may ever lose is not a draft's doing: the
            # machine slept, or the program was stopped
            overrun = min((draft_ms + (verify if n else one) - foreseen) / one, BEHIND)
            gain = emitted - foreseen / one
            if weighing.drafting is None:
                text.learned.gained(self._booking.method).add(gain)
            self._ledger.book(payer, gain - waited, exploring=weighing.explores, overrun=overrun)
        elif waited:
            self._ledger.book(payer, -waited)
