"""The adaptive window: drafts as far as it pays, measured, and keeps the loss within a credit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from specllama.speculative.bets import Bets
from specllama.speculative.calibrate import SourceState, draft_features
from specllama.speculative.cost import CostTable, ceiling
from specllama.speculative.learned import CREDIT_FIRST, Blind, Learned, Pace
from specllama.speculative.offers import Copy, Offer, compare, weigh
from specllama.speculative.types import Draft, Guess, Room
from specllama.speculative.window import Outcome, Plan, no_room

_EPS = 0.01  # plain steps earn this share of a step of credit
_COPY_STAKE = 0.75  # share of the purse that a copy may risk: bad luck shrinks the stakes
_PLAIN = 12.0  # plain steps that a text is thought to begin with
_OUTLIER = 1.3  # a round is charged at most this multiple of what it should have cost
_OUTLIER_NEW = 4.0  # where no such pass was timed before
_LEAST_PURSE = 0.1  # plain steps: a credit below is as good as none
_LONGEST = 8  # guesses, for the can-it-gain-at-all test
_SAVED = 0.9  # share of the most that a credit can hold which is worth waiting for
_PROBE_STEPS = 0.8  # reading a probe may cost, in steps of the target
_PROBE_MOST = 2.0  # or this, where a draft model reads so slowly
_READ_LEAST = 16  # a draft model that has read less than this of a text cannot guess
_READ_FIRST = 24  # tokens read to find out what reading costs
_UNTIMED = 3.0  # times what is expected: what a first reading may really cost
_UNTIMED_MOST = 0.8 * CREDIT_FIRST  # steps: a source is tried for the first time with so much left
# Unmeasured costs are hoped to be low (a short or disturbed prompt pass says otherwise): too high a
# prior would never be put to the test, too low a one is corrected by the first rounds.
_HOPE = 0.4
_HOPE_READING = 0.2
_AMORTISE = 32  # rounds over which reading a backlog has to pay
_COPIED_PRIOR = 12.0  # tokens that what other texts let copies write counts for
_RESERVE = 1.5  # steps of credit that reading a backlog must leave at least
_ASK_AGAIN = 16  # rounds of a wait after which it is asked whether the source pays by now
_KNOWN = 12  # judged guesses after which a source is known
_SHORT = 0.1  # share of a reply's time that reading it anew may cost a source that did not pay
_BLIND_ROUNDS = 3  # that a proposer which never asks is given
_BLIND_STAKE = 1.5  # steps that each of them may cost beyond a plain one
_BLIND_GAIN = 0.08
_PROBING = 0.008  # share of the time that probes may take while nothing pays
_TRYING = 0.02  # and the first ones where copies are earning
_EARNING = 1.03  # times the speed of plain decoding
_BEST_ACCEPTANCE = 0.97  # what no draft model keeps up for long: for the can-it-gain-at-all test
_MIN_GAIN = 1.02
_BEHIND = "drafts lost time lately: plain decoding until that is made up"
_TOO_FAST = "a step is so short that looking for a copy costs more than copies gain"
_REST_MOST = 32  # rounds
_SAMPLED = 4  # one of so many of them is timed
_MEASURING = "measuring a plain step"
_AGAIN = 0.5  # rounds with drafts after which a plain step is measured again, doubled by each one
_STALE = 96  # at most
_SURE = 4  # passes of two rows before a machine is judged


@dataclass(slots=True)
class Rest:
    """Plain steps that are decided on together, and what they cost: deciding takes time, too."""

    left: int = 0
    rounds: int = 0
    tokens: int = 0
    ms: float = 0.0
    plan: Plan = field(default_factory=lambda: Plan(0, ""))

    def begin(self, rounds: float, why: str) -> Plan:
        """Of so many rounds, or the next one at least."""
        self.left = int(min(max(rounds, 1.0), _REST_MOST))
        if self.plan.reason != why:
            self.plan = Plan(0, why)
        return self.plan

    def step(self, outcome: Outcome) -> None:
        self.left -= 1
        self.rounds += 1
        self.tokens += outcome.emitted
        self.ms += outcome.round_ms

    def end(self) -> tuple[int, int, float]:
        """(rounds, tokens, ms) since it began."""
        took = self.rounds, self.tokens, self.ms
        self.left = self.rounds = self.tokens = 0
        self.ms = 0.0
        return took


class AdaptiveWindow:
    """Drafts as far as it pays, measured, and keeps the loss of trying within a credit.

    A guess is sent when that is a good bet (``Bets``): its expected tokens (calibrated acceptance
    times the survival of the guesses before it) against the tokens that the same time would give at
    the present throughput, looking ahead over the steps of the cost table. A draft step is run when
    an average look at its result is worth its price, and a prompt is read into the draft model when
    that pays over a usual reply. Every round's excess over plain decoding is paid from a balance
    that all methods, rules and temperatures of the pair share, and a round that could overdraw it
    is not begun: the pair is never more than 8 plain steps behind ``(1 + 0.01) * plain``, whatever
    the drafts are worth. Where the balance is too small for drafts that pay it is saved up, not
    spent on shorter ones. When nothing pays, a source is left
    alone for a while: looking may take 0.8 % of the time.

    Under ``match`` the output cannot depend on any of this. Under ``rejection`` and ``block`` no
    decision looks at a token that was sampled this round (``peek`` False).

    Args:
        learned: what earlier requests taught; updated in place.
        draft_max: most tokens drafted per round. draft_min: fewer are not worth a round.
        peek: decisions may look at drawn tokens (rule ``match``, or greedy).
        steps: what a step of the proposer costs; the draft model's table unless given.
        tokens: most that the reply may have, None where the context alone ends it.
        clock: seconds; injected in tests.
        on_finish: called when the reply is over (to keep what was learnt).
    """

    def __init__(
        self,
        learned: Learned,
        *,
        draft_max: int,
        draft_min: int = 0,
        peek: bool = True,
        steps: CostTable | None = None,
        tokens: int | None = None,
        clock: Callable[[], float] = perf_counter,
        on_finish: Callable[[], object] | None = None,
    ) -> None:
        self._learned = learned
        self._draft_max = draft_max
        self._draft_min = draft_min
        self._peek = peek
        self._steps_cost = steps or learned.costs.draft
        self._clock = clock
        self._on_finish = on_finish
        self._emitted = 0
        self._copied = 0  # of them in rounds that copied
        self._pace = Pace()  # of this text
        self._left = math.inf if tokens is None else float(tokens)
        self._prefill_row: float | None = None
        self._account = learned.account("")
        self._unmeasured = 0  # rounds since the last plain step
        self._lag = 0  # tokens that the paying source has not read
        self._stuck = ""
        self._dismissed = ""  # why the paying source is left alone, until it is looked at again
        self._v: list[float] = [0.0]
        self._rest = Rest()
        for state in learned.sources.values():
            state.fresh()
        self._reset()

    def _reset(self) -> None:
        self._limit = self._copy_limit = 0
        self._n = 0
        self._looked = False  # whether proposers were asked
        self._expected = 1.0
        self._read = 0
        self._steps = 0
        self._spent = 0.0  # ms of draft passes this round
        self._due = 0.0  # and what they should have cost
        self._read_before = True  # whether such a reading was timed before
        self._since = 0.0
        self._probing = False
        self._why = ""
        self._begun = 0.0
        self._offers: list[Offer] = []
        self._current: Offer | None = None  # of the paying source
        self._copies: list[Copy] = []
        self._sent: Offer | None = None  # the copy that goes

    def drafts_with(self, method: str, paid: str = "", *, copies: bool = False) -> None:
        """Before the first round: who drafts.

        Args:
            method: the account that pays.
            paid: the one of its sources that costs time, "" without one.
            copies: whether others of its sources copy from the text.
        """
        self._account = self._learned.account(method)
        if paid and copies:
            self._account.share()
        self._learned.paying = paid
        if paid:
            self._steps_cost = self._learned.costs.steps(paid)

    def finish(self) -> None:
        """The reply is over."""
        if self._rest.rounds:
            self._catch_up()
        if self._emitted:
            self._learned.ended(self._emitted)
        if self._on_finish is not None:
            self._on_finish()

    # -- before a round --

    def prefilled(self, tokens: int, ms: float) -> None:
        """A prompt was read: a lower bound of a row's cost in wide passes, before v(n) is known."""
        self._lag += tokens
        target = self._learned.costs.target
        if tokens >= 16 and ms > 0:
            self._prefill_row = ms / tokens
            if target.one:
                self._set_slope(target.one)

    def _set_slope(self, one: float) -> None:
        if self._prefill_row is not None:
            self._learned.costs.target.slope = min(max(self._prefill_row / one, 0.01), _HOPE)
            self._prefill_row = None

    def plan(self, room: int) -> Plan:
        if self._rest.left and room > 0:
            return self._rest.plan
        if self._rest.rounds:
            self._catch_up()
        self._reset()
        if none := no_room(room, self._draft_max, self._draft_min):
            return none
        limit = min(self._draft_max, room)
        if wait := self._account.looking.wait:
            return self._rest.begin(wait, _TOO_FAST)
        costs = self._learned.costs
        one = costs.target.one
        if one is None or not costs.target.known(1):
            return Plan(0, _MEASURING)
        if self._unmeasured >= min(_AGAIN * 2.0 ** min(costs.target.seen(1), 16), _STALE):
            return Plan(0, _MEASURING)  # what drafts are compared with may be wrong, or change
        if not self._steps_cost.measured:
            self._steps_cost.slope = min(costs.target.slope, _HOPE_READING)
            self._steps_cost.guess(one * costs.draft_share)
        self._v = costs.target.upto(limit + 1)
        self._one = one
        self._step = self._steps_cost.ms(1)
        account = self._account
        self._stake = account.credit * one
        self._full = _SAVED * account.most * one
        self._purse = account.purse
        # one guess is always worth its price; a longer copy risks a share of the purse only
        all_of_it = self._purse * one
        self._copy_stake = max(
            _COPY_STAKE * all_of_it, min(all_of_it, costs.target.most(2) - one + self._step)
        )
        self._usual_rate = max(account.pace.rate(), 1.0 / one)
        self._rate = max(self._pace.rate(_PLAIN, _PLAIN * one), 1.0 / one)
        self._limit = self._affordable(limit, self._stake)
        self._copy_limit = self._affordable(limit, self._copy_stake)
        self._bets = Bets(
            self._v,
            self._step,
            self._rate,
            purse=max(account.credit, _LEAST_PURSE),
            stake=self._stake,
            most=limit,
        )
        limit = max(self._limit, self._copy_limit)
        if limit == 0:
            short = (self._v[2] - one) / one - max(account.credit, self._purse)
            return self._rest.begin(short / _EPS, _BEHIND)
        if account.blind.rounds and not self._blind_pays(account.blind):
            return Plan(0, self._why)
        self._looked = True
        return Plan(
            limit,
            "",
            room=Room(
                limit,
                self.keep_going,
                self.begin,
                self.include,
                self.pick,
                self.beside,
                self.rows,
            ),
            explain=self.explain,
        )

    def _affordable(self, longest: int, stake: float) -> int:
        """The most tokens whose pass risks no more than ``stake``."""
        target = self._learned.costs.target
        while longest > 0 and target.most(longest + 1) - self._one > stake:
            longest -= 1
        return longest

    def cannot_gain(self) -> str:
        """Why no draft model can pay on this machine, "" if one could.

        At an acceptance a draft model hardly ever keeps up, no length beats plain decoding: the
        draft step plus an extra row cost nearly what a plain step does.
        """
        costs = self._learned.costs
        one = costs.target.one
        if one is None or costs.target.seen(2) < _SURE:
            return ""
        v = costs.target.upto(min(self._draft_max, _LONGEST) + 1)
        step = self._steps_cost.ms(1) or one * costs.draft_share
        if ceiling(_BEST_ACCEPTANCE, step, v, len(v) - 2) >= _MIN_GAIN:
            return ""
        return (
            f"a draft model cannot gain here: a draft step and an extra row cost "
            f"{(step + v[2] - v[1]) / v[1]:.2f} of a plain step"
        )

    # -- within a round: the answers of ``Room`` --

    def begin(self, source: str, lag: int) -> int:
        learned = self._learned
        learned.paying = source
        self._lag = lag
        state = learned.source(source, "draft")
        draft = self._steps_cost
        if self._limit == 0:
            self._why = _BEHIND
            return 0
        if state.wait % _ASK_AGAIN and self._dismissed and not self._sent:
            state.wait -= 1
            self._why = self._dismissed
            return 0
        wanted = self._wanted(lag)
        first = draft.ms(wanted)
        if self._sent:  # a copy goes already: a branch beside it pays where its first guess fails
            self._bets.reached = [1.0 - self._sent.state.predict(self._sent.features[0])]
        self._bets.taken = self._n
        price = self._price(first, self._rate)
        value, need = self._bets.promise(state, price)
        budget = self._stake - (self._v[2] - self._one)  # a first guess costs at least a row more
        if value <= price and self._n:
            return 0
        if value <= price:
            cheap = self._probe(state, wanted, first)
            if cheap is None:
                return 0
            budget = min(self._stake if self._peek else budget, cheap)
        elif first + need > self._stake:
            # drafts too short to pay would waste what there is
            if first + need <= self._full:
                steps = (first + need) / self._one
                self._why = f"saving up: reading and drafting may cost {steps:.1f} steps"
                return 0
            budget = min(budget, self._stake - need)
        read = self._readable(wanted, budget)
        if not draft.widest:  # file sizes told what it costs, and they may be far out
            worst = min(_UNTIMED * draft.ms(read), _UNTIMED_MOST * self._one)
            read = read if worst <= self._stake - (self._v[2] - self._one) else 0
        if read == 0:
            self._why = f"reading {lag} tokens into the draft model is too dear now"
            if self._probing:  # ask again later, not at every step that earns a little credit
                state.rest(0)
            self._probing = False
            return 0
        if self._probing:
            loss = (draft.ms(read) + (price - value) / self._rate - self._step) / self._one
            if self._earning and state.patience:
                state.wait = int(loss / _TRYING)  # copies do without: no hurry
            else:
                state.rest(loss / _PROBING)
        self._current = Offer(state)
        self._offers.append(self._current)
        self._read, self._lag = read, 0
        self._due = draft.ms(read)
        self._read_before = draft.known(read)
        self._since = self._begun = self._clock()
        return read

    @property
    def _earning(self) -> bool:
        """Whether drafts pay; asked of a source that does not, others do."""
        return self._rate * self._one > _EARNING

    def _probe(self, state: SourceState, wanted: int, first: float) -> float | None:
        """Milliseconds that a look at a source that does not pay may cost; None: leave it alone.

        ``first`` is what reading the ``wanted`` tokens costs.
        """
        one = self._one
        if state.wait > 0:
            state.wait -= 1
            cost = self._rate * (self._step + self._v[2] - one)
            gives = f"{state.mean:.2f} tokens expected in the time of {cost:.2f}"
            self._why = self._dismissed = self._stuck or f"draft too slow here: {gives}"
            return None
        if state.labels >= _KNOWN and first - self._step > _SHORT * self._horizon() * one:
            self._why = "too little left to write to try the draft again"
            return None
        self._probing = True
        self._stuck = self.cannot_gain()
        # the emitted text will tell what a drawn guess was worth: it need not be sent
        least = min(self._steps_cost.ms(min(wanted, _READ_FIRST)), _PROBE_MOST * one)
        budget = max(_PROBE_STEPS * one, least)
        if first <= 2.0 * self._step:
            return budget
        # what is read now must be put to use: keep enough to send a few guesses afterwards
        keep = _RESERVE * one
        if self._earning and not self._account.shared:
            keep = max(keep, self._v[self._limit + 1] - one)
        return min(budget, self._stake - keep)

    def _readable(self, lag: int, budget_ms: float) -> int:
        """How many of ``lag`` unread tokens the budget allows; 0 if too few to be of use."""
        draft = self._steps_cost
        if draft.widest < _READ_FIRST < lag:  # what reading costs is not known yet
            return _READ_FIRST if draft.ms(_READ_FIRST) <= budget_ms else 0
        n = self._within(lag, budget_ms)
        return n if n == lag or n >= _READ_LEAST else 0

    def _wanted(self, lag: int) -> int:
        """How much of a backlog is worth reading: what a full credit would pay for."""
        return max(self._within(lag, self._full - _RESERVE * self._one), min(lag, _READ_LEAST))

    def _within(self, tokens: int, budget_ms: float) -> int:
        """The most of so many tokens that are read in that time."""
        draft = self._steps_cost
        if draft.ms(tokens) <= budget_ms:
            return tokens
        low, high = 0, tokens  # ms(low) fits, ms(high) does not
        while high - low > 1:
            middle = (low + high) // 2
            if draft.ms(middle) <= budget_ms:
                low = middle
            else:
                high = middle
        return low

    def include(self, confidence: float | None, lead: float | None, token: int | None) -> bool:
        now = self._clock()
        ms = (now - self._since) * 1e3
        self._since = now
        self._spent = (now - self._begun) * 1e3
        self._steps += 1
        self._dismissed = ""
        self._steps_cost.observe(self._read, ms)
        self._read = 1
        offer = self._current
        if offer is None:
            return True  # a proposer that did not ask to begin
        features = draft_features(confidence, lead if self._peek else None)
        a = offer.state.predict(features)
        offer.state.look(features)
        n = self._n
        self._bets.spent = self._spent
        fits = self._fits(n + 1)
        forced = self._probing and n == 0 and (not self._peek or token is None)
        if fits and (forced or self._bets.gain(offer.state, a) > 0.0):
            offer.tokens.append(token)
            offer.features.append(features)
            offer.used += 1
            self._n += 1
            self._bets.send(a)
            self._expected += self._bets.survival
            return True
        if token is not None:  # what the target emits here will judge it all the same
            offer.tokens.append(token)
            offer.features.append(features)
        if n == 0:
            self._why = (
                "probing"
                if self._probing
                else f"unsure: {a:.0%} likely, {self._bets.needed(offer.state):.0%} needed"
            )
        return False

    def keep_going(self, drafted: int, confidence: float | None) -> bool:
        offer = self._current
        n = self._n
        if offer is None:
            return True
        if n >= self._limit or n + 2 >= len(self._v):
            return False
        if not self._fits(n + 1, self._step):
            return False
        self._bets.spent = self._spent + self._step
        if self._bets.look(offer.state) <= self._rate * self._step:
            return False
        self._since = self._clock()
        self._due += self._step
        return True

    def _fits(self, drafted: int, further: float = 0.0, *, copy: bool = False) -> bool:
        """Whether a draft of this length, and ``further`` ms for it, risk no more than they may."""
        stake = self._copy_stake if copy or self._sent else self._stake
        most = self._learned.costs.target.most(drafted + 1)
        return self._spent + further + most - self._one <= stake

    def rows(self, most: int) -> int:
        target = self._learned.costs.target
        blind = self._account.blind
        stake = self._stake
        gain = blind.accepted / self._usual_rate
        if blind.rounds < _BLIND_ROUNDS or gain < blind.excess * self._one:
            stake = min(stake, _BLIND_STAKE * self._one)
        fits = 1
        for n in range(2, most + 1):
            worst = min(target.most(n) - self._one, _UNTIMED_MOST * self._one)
            if target.ms(n) - self._one <= stake and worst <= self._stake:
                fits = n
        return fits

    def beside(self, likely: float) -> bool:
        n = self._n
        if n >= self._limit or n + 2 >= len(self._v):
            return False
        if not self._fits(n + 1):
            return False
        if likely <= self._rate * (self._v[n + 2] - self._v[n + 1]):
            return False
        self._n += 1
        self._bets.taken += 1
        self._expected += likely
        return True

    def pick(self, guesses: Sequence[Guess]) -> tuple[int, int]:
        first = not self._copies  # otherwise the paying source had its turn
        if first:
            self._copies = [self._weigh(guess) for guess in guesses]
            compare(self._copies, self._v, self._usual_rate, self._purse)
        which = max(range(len(guesses)), key=lambda i: self._copies[i].gain)
        best = self._copies[which]
        length = best.length
        if length and first and best.gain < self._model_value():
            length = 0
            self._why = "the draft model promises more than a copy"
        elif length == 0 and not self._why:
            likely = max(copy.likely for copy in self._copies)
            self._why = f"copy unsure: {likely:.0%} likely"
        if length < self._draft_min:
            length = 0
        if length and not self._fits(length, copy=True):
            length = 0  # looking at the draft model's guess took what the copy would have risked
        if length:
            self._sent, self._n, self._expected = best.offer, length, best.expected
            self._limit = self._copy_limit
            self._probing = False
            best.offer.used = length
        return which, length

    def _weigh(self, guess: Guess) -> Copy:
        copy = weigh(guess, self._learned.source(guess.source, "copy"), self._copy_limit)
        self._offers.append(copy.offer)
        return copy

    def _price(self, first: float, rate: float) -> float:
        """Tokens that the time of a look at the paying source's next guess is worth, ``first`` ms
        of it for reading the backlog."""
        left = self._horizon() * self._left_by_copies()
        rounds = min(_AMORTISE, max(left / self._account.a_round, 1.0))
        reading = self._bets.dear(max(first - self._step, 0.0))
        return rate * (self._step + reading / rounds)

    def _left_by_copies(self) -> float:
        """Share of the tokens to come that copies are not expected to write."""
        before = _COPIED_PRIOR * self._account.copied
        return 1.0 - (before + self._copied) / (_COPIED_PRIOR + self._emitted)

    def _horizon(self) -> float:
        """Tokens still to be written: what is left of a usual reply; a long one goes on."""
        usual = self._learned.reply
        return min(self._left, max(usual - self._emitted, (usual + self._emitted) / 4.0))

    def _model_value(self) -> float:
        """Expected tokens that the paying source would gain this round beyond their price."""
        state = self._learned.sources.get(self._learned.paying)
        if state is None:
            return 0.0
        # copies are weighed at the usual throughput, so the draft model is, too
        bets = replace(self._bets, rate=self._usual_rate)
        first = self._steps_cost.ms(self._wanted(max(self._lag, 1)))
        return bets.look(state) - self._price(first, self._usual_rate)

    def _blind_pays(self, blind: Blind) -> bool:
        """Whether to let a proposer that never asks draft this round, as far as it likes."""
        excess = blind.excess * self._one
        if excess > self._stake:
            self._why = _BEHIND
            return False
        loss = excess - blind.accepted / self._usual_rate
        if loss <= 0.0 or blind.rounds < _BLIND_ROUNDS:
            return True
        if blind.wait > 0:
            blind.wait -= 1
            self._why = f"drafts too costly here: {blind.accepted:.2f} accepted a round"
            return False
        blind.wait = int(loss / (_PROBING * self._one))
        self._probing = True
        return True

    # -- after a round --

    def explain(self, draft: Draft) -> Plan:
        """The plan in the light of the draft: what was sent and the reason in words."""
        n = len(draft)
        if n == 0:
            return Plan(0, self._why or "no guess")
        if self._probing:
            return Plan(n, "probing")
        if self._offers and self._one > 0:
            steps = (self._spent + self._v[min(n + 1, len(self._v) - 1)]) / self._one
            took = f"in the time of {max(steps, 1.0):.1f}"
            return Plan(n, f"{self._expected:.1f} tokens expected {took}")
        return Plan(n, "drafting")

    def _catch_up(self) -> None:
        """Account for the plain steps of a rest, which all cost about the same."""
        rounds, tokens, ms = self._rest.end()
        account = self._account
        self._unmeasured = 0
        self._count(tokens, ms, rounds)
        account.earn(_EPS * rounds)
        account.looking.wait = max(account.looking.wait - rounds, 0)

    def _count(self, tokens: int, ms: float, rounds: int = 1) -> None:
        """So many tokens were written in so many rounds."""
        self._pace.add(tokens, ms, rounds)
        self._account.pace.add(tokens, ms, rounds)
        self._left -= tokens
        self._emitted += tokens
        self._lag += tokens
        if state := self._learned.sources.get(self._learned.paying):
            state.unlooked += tokens

    def observe(self, outcome: Outcome) -> None:
        target = self._learned.costs.target
        verify_ms = outcome.round_ms - outcome.draft_ms
        if self._rest.left and not outcome.drafted:
            self._rest.step(outcome)
            if self._rest.rounds % _SAMPLED == 1:
                target.observe(1, verify_ms)
            return
        account = self._account
        n = outcome.drafted
        was, known = target.one, target.known(n + 1)
        expected = target.ms(n + 1)
        target.observe(n + 1, verify_ms)
        self._unmeasured = self._unmeasured + 1 if n else 0
        one = target.one
        if one is None:
            return
        if was is None:
            self._set_slope(one)
        for offer in self._offers:
            if self._probing and offer is self._current and offer.hit(outcome.tokens):
                offer.state.surprised(offer.state.predict(offer.features[0]))
            offer.judge(outcome.tokens, outcome.accepted)
        if n and not self._offers:
            self._judge_blind(account.blind, outcome, one)
        self._count(outcome.emitted, outcome.round_ms)
        self._copied += outcome.emitted if self._sent else 0
        account.wrote(outcome.emitted, n, copy=self._sent is not None)
        if n == 0 and self._steps == 0:
            # the pass cost what plain decoding costs, however long it took; looking for a draft did
            looked = min(outcome.draft_ms / one, 1.0)
            if self._looked:
                account.looking.missed(looked)
            account.earn(_EPS - looked)
        else:
            ms = outcome.round_ms
            # what a busy machine adds is not the draft's fault
            most = _OUTLIER if known and self._read_before else _OUTLIER_NEW
            ms = min(ms, most * ((self._due or outcome.draft_ms) + expected))
            gain = (1.0 + _EPS) * outcome.emitted - ms / one
            account.looking.found(gain)
            if self._sent:  # looking elsewhere first is not the copy's fault
                looked = min(self._spent, ms) / one
                account.book(-looked)
                account.book(gain + looked, copy=True)
            else:
                account.book(gain)
            sent = self._current is not None and self._current.used > 0
            if sent and self._current and outcome.accepted and outcome.emitted * one > ms:
                self._current.state.paid()
        self._reset()

    @staticmethod
    def _judge_blind(blind: Blind, outcome: Outcome, one: float) -> None:
        blind.rounds += 1
        gain = max(_BLIND_GAIN, 1.0 / blind.rounds)
        blind.accepted += gain * (outcome.accepted - blind.accepted)
        blind.excess += gain * (outcome.round_ms / one - 1.0 - blind.excess)
