"""How far to draft in a round: one throughput, one gain formula, one balance."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from time import perf_counter
from typing import TypeAlias

import numpy as np

from specllama.arrays import FloatArray
from specllama.events import NO_GUESS
from specllama.speculative.budget import Bid, growth
from specllama.speculative.drafting.method import drafts_at_once
from specllama.speculative.effects import Offer
from specllama.speculative.policy.acceptance import (
    Acceptance,
    Kind,
    Trial,
    draft_features,
    match_features,
)
from specllama.speculative.policy.baseline import PlainSteps
from specllama.speculative.policy.costs import OUTLIER, Costs
from specllama.speculative.policy.ledger import BEHIND, Ledger
from specllama.speculative.types import Draft, Guess, Room
from specllama.speculative.window import Outcome, Plan, no_room

_MEMORY = 64  # values that a running mean remembers
_BEGIN = 12  # rounds that were as good as plain: what a mean begins with
_AHEAD = 8  # guesses that a decision looks ahead
_READ = 32  # tokens of a text that a draft model needs to guess well
_COUNT = np.arange(_AHEAD)
MEASURING = "measuring a plain step"

Lines: TypeAlias = tuple[FloatArray, FloatArray]


@dataclass
class Mean:
    """A running mean."""

    value: float = 0.0
    n: int = 0

    def add(self, value: float) -> None:
        self.n = min(self.n + 1, _MEMORY)
        self.value += (value - self.value) / self.n


@dataclass
class Learned:
    """What is learnt of a pair at one rule and temperature, and kept between requests.

    Attributes:
        asked: by method, what rounds that asked for copies or rows gained, in plain steps.
        pace: tokens written of late, and the plain steps that they took.
        reply: tokens of a reply. round: tokens of a round that the paying source drafted.
    """

    sources: dict[str, Acceptance] = field(default_factory=dict)
    asked: dict[str, Mean] = field(default_factory=dict)
    pace: tuple[float, float] = (_BEGIN, _BEGIN)
    reply: Mean = field(default_factory=lambda: Mean(128.0, 1))
    round: Mean = field(default_factory=lambda: Mean(3.0, 1))

    def source(self, name: str, kind: Kind) -> Acceptance:
        if name not in self.sources:
            self.sources[name] = Acceptance(kind)
        return self.sources[name]


class Controller:
    """Drafts as far as it pays, measured, and never loses more than the ledger holds.

    A guess is sent when its expected tokens (calibrated acceptance times the survival of the
    guesses before it) are worth more than what the same time gives at the present throughput,
    looking ahead over the steps of the cost table. A draft step is run when an average look at its
    result is worth its price, and a text is read into the draft model when that pays over the rest
    of the reply. What promises no gain is explored from the source's own balance.

    Under ``match`` the output cannot depend on any of this. Under ``rejection`` and ``block`` no
    decision looks at a token that was sampled this round (``peek`` False).

    Args:
        learned, costs, ledger: what earlier requests taught; updated in place.
        draft_max: most tokens drafted per round. draft_min: fewer are not worth a round.
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
        draft_min: int = 0,
        peek: bool = True,
        tokens: int | None = None,
        steps: PlainSteps | None = None,
        clock: Callable[[], float] = perf_counter,
        on_finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._learned, self._costs, self._ledger = learned, costs, ledger
        self._draft_max, self._draft_min, self._peek = draft_max, draft_min, peek
        self._clock, self._on_finish = clock, on_finish
        self._plain_steps = steps or PlainSteps(clock)
        self._left = math.inf if tokens is None else float(tokens)
        self._depth = self._lag = 0  # tokens of context; of them unread by the paying source
        self._written = 0
        self._part = False  # whether the paying source reads only a part of the text
        self._others = 0  # conversations that shared the last pass
        self.drafts_with("")
        for source in learned.sources.values():
            source.fresh()
        self._begin_round()

    def drafts_with(self, method: str, paid: str = "") -> None:
        """Before the first round: who drafts; ``paid`` is what of it costs time, "" for nothing."""
        self._payer = paid or method
        self._draft = self._costs.steps(paid)
        self._at_once = drafts_at_once(paid)
        self._asked = self._learned.asked.setdefault(method, Mean(0.0, _BEGIN))

    def prefilled(self, tokens: int, depth: int) -> None:
        """A prompt of ``depth`` tokens is in the cache; ``tokens`` of them were read now."""
        self._depth = depth
        self._lag += tokens

    def finish(self) -> None:
        """The reply is over."""
        if self._written:
            self._learned.reply.add(self._written)
        self._on_finish()

    # -- before a round --

    def _begin_round(self) -> None:
        self._trials: list[Trial] = []  # all that was seen
        self._copies: list[Trial] = []
        self._drafting: Trial | None = None  # by the paying source
        self._sending: Trial | None = None  # the copy that goes
        self._reached = [1.0]  # probability that the target comes to guess 1, 2, ... and behind
        self._n = self._beside = 0  # rows of guesses; of them, off the path of the drafted ones
        self._expected = 1.0
        self._rows = 1  # of the draft pass that runs
        self._since: float | None = None  # when it began
        self._spent = self._due = 0.0  # ms of draft passes, and what was expected
        self._exploring = self._asking = False
        self._forgone = 0.0  # plain steps that drafting would have saved in this round
        self._why = ""

    def plan(self, room: int) -> Plan:
        self._begin_round()
        if none := no_room(room, self._draft_max, self._draft_min):
            return none
        target, ledger, asked = self._costs.target, self._ledger, self._asked
        others = self._others
        tokens, steps = self._learned.pace
        forgone = max(1.0 - steps / tokens, 0.0)
        if not target.known(1):
            return Plan(0, MEASURING)
        due = not others and self._plain_steps.is_due(forgone, settled=target.settled)
        if due and ledger.covers(self._payer) >= forgone:
            self._forgone = forgone  # what drafts are compared with may have changed
            return Plan(0, MEASURING)
        assert target.level is not None
        self._draft.guess(target.level * self._costs.draft_share)
        self._most = most = min(self._draft_max, room)
        self._v = target.upto(most + 1 + others, self._depth)[others:]  # by rows of its own
        self._one = one = self._v[1]
        self._over = np.array(self._v) - one
        self._step = self._draft.ms(1, self._depth)
        self._further = 0.0 if self._at_once else self._step
        self._rate = max(tokens / steps, 1.0) / one
        # as many conversations as now may lose it
        self._stake = ledger.covers(self._payer) * one / (1 + others)
        self._longest = longest = next((n for n in range(most, 0, -1) if self._fits(n)), 0)
        if not longest:
            return Plan(0, "drafts lost time of late: plain steps make up for it")
        looking = -asked.value
        if looking > ledger.balance(self._payer) and self._model_gain() < looking * one:
            return Plan(0, "looking for drafts costs more than they save")
        self._asking = True
        asked_on_the_way = Room(
            longest,
            keep_going=self.keep_going,
            begin=self.begin,
            include=self.include,
            pick=self.pick,
            beside=self.beside,
            worth=self.worth,
            ride=self.ride,
            rows=self.rows,
        )
        return Plan(longest, "", room=asked_on_the_way, explain=self.explain)

    def _fits(self, guesses: int, further: float = 0.0) -> bool:
        """Whether so many guesses, and ``further`` ms for them, risk no more than the stake."""
        if guesses > self._most:
            return False
        worst = self._costs.target.most(guesses + 1 + self._others, self._depth) - self._one
        return self._spent + further + worst <= self._stake

    # -- the gain of a further guess --

    def _lines(self, spent: float, stake: float) -> Lines:
        """For 1, 2, ... more guesses: slope and price of the gain ``slope * a - price``, in tokens.

        ``a`` is the acceptance of the next guess, which has been seen after ``spent`` ms of
        drafting; those behind it count with the mean. The gain is over stopping here.
        """
        assert self._drafting is not None
        depth, rows = len(self._reached) - 1, self._beside + len(self._reached)
        took = spent + self._over[rows : rows + min(self._most - rows + 1, _AHEAD) + 1]
        took[1:] += self._further * _COUNT[: len(took) - 1]  # the first is that of stopping here
        if took[-1] > stake:
            took = took[: max(int(np.argmax(took > stake)), 1)]
        more, here = _COUNT[: len(took) - 1], self._reached[-1]
        survival = [*self._reached[1:], *(here * self._drafting.state.mean**more)]
        worth = growth(survival, self._rate * took, max(self._rate * stake, 0.1))[:, depth:]
        return worth[more + 1, more + 1] - worth[1:, 0], worth[0, 0] - worth[1:, 0]

    def _look(self, lines: Lines) -> float:
        """Expected gain of seeing the next guess and then deciding, its own step not deducted."""
        assert self._drafting is not None
        slopes, prices = lines
        acceptance, weights = self._drafting.state.spread()
        gains = acceptance[:, None] * slopes - prices
        return float(weights @ gains.max(axis=1, initial=0.0))

    def _promise(self, lines: Lines, read: int) -> tuple[float, float]:
        """(ms that asking the paying source gains in a round, rounds that are left), where it has
        to read so many tokens first."""
        learned, draft = self._learned, self._draft
        gain = self._look(lines) / self._rate - self._step
        usual = learned.reply.value
        left = min(self._left, max(usual - self._written, (usual + self._written) / 4.0))
        # where a look does not pay its step it will not be repeated
        rounds = max(left / learned.round.value, 1.0) if gain > 0.0 else 1.0
        return gain - max(draft.ms(read, self._depth) - self._step, 0.0) / rounds, rounds

    # -- within a round: the answers of ``Room`` --

    def begin(self, source: str, lag: int) -> int:
        self._part = self._part or self._draft.ms(lag, self._depth) > BEHIND * self._one
        self._drafting = trial = Trial(self._learned.source(self._named(source), "draft"))
        if self._sending:  # a copy goes: a branch beside it pays where its first guess fails
            self._reached = [1.0 - self._sending.survival[0]]
            self._beside = self._n
        self._lag = lag
        self._rows = self._readable(lag) if self._n < self._most else 0
        if not self._rows:
            self._drafting = None
            self._exploring = False
            return 0
        self._part = self._part or self._rows < lag
        self._lag = 0
        self._trials.append(trial)
        self._since = self._clock()
        return self._rows

    def _named(self, source: str) -> str:
        """Who has read a part of a text guesses otherwise than who has read all of it."""
        return f"{source} (part)" if self._part else source

    def _readable(self, lag: int) -> int:
        """How many of the newest ``lag`` tokens to read; 0, and why, where it is to stay out.

        What reading leaves of a balance has to pay for the draft that promises most.
        """
        assert self._drafting is not None
        one, draft, n, depth = self._one, self._draft, self._n, self._depth
        mean, full = self._drafting.state.mean, BEHIND * one
        lines = slopes, prices = self._lines(self._step, full)
        best = int(np.argmax(slopes * mean - prices)) if len(slopes) else 0
        rest = best * self._further + self._v[n + 2 + best] - one
        gain, rounds = self._promise(lines, draft.within(lag, full - rest, depth))
        if gain <= 0.0 and self._part:  # the newest tokens will do to find out
            lag = min(lag, _READ)
            gain, rounds = self._promise(lines, lag)
        if gain <= 0.0:
            row = self._v[n + 2] - self._v[n + 1]
            forced = 0.0 if self._peek else row
            if n or forced - rounds * gain > self._ledger.balance(self._payer) * one:
                cost = (self._step + row) * self._rate
                self._why = (
                    f"draft too slow here: {mean:.2f} tokens in the time of {cost:.2f} plain ones"
                )
                return 0
            self._exploring = True
        read = draft.within(lag, self._stake - rest, depth)
        if read < min(lag, _READ):
            need = (draft.ms(min(lag, _READ), depth) + rest) / one
            self._why = f"saving up: reading and drafting may cost {need:.1f} steps"
            return 0
        return read

    def include(self, confidence: float | None, lead: float | None, token: int | None) -> bool:
        self._ran()
        trial = self._drafting
        if trial is None:
            return True  # a proposer that did not ask to begin
        features = draft_features(confidence, lead if self._peek else None)
        a = trial.state.predict(features)
        trial.state.look(features)
        fits = self._fits(self._n + 1)
        # the emitted text tells what a drawn guess was worth: to learn that it need not be sent
        forced = self._exploring and not self._n and not (self._peek and token is not None)
        need = 1.0  # acceptance from which on it goes
        if fits and not forced:
            slopes, prices = self._lines(self._spent, self._stake)
            need = min((p / s for s, p in zip(slopes, prices, strict=True) if s > 0.0), default=1.0)
        wanted = fits and (forced or a > need)
        if wanted:
            self._reached.append(self._reached[-1] * a)
            self._expected += self._reached[-1]
            trial.sent += 1
            self._n += 1
        elif not self._n:
            unsure = f"unsure: {a:.0%} likely, {min(need, 1.0):.0%} needed"
            self._why = "probing" if self._exploring else unsure
        if wanted or token is not None:
            trial.tokens.append(token)
            trial.features.append(features)
        return wanted

    def keep_going(self, drafted: int, confidence: float | None) -> bool:
        if self._drafting is None:
            return True
        self._ran()
        further = self._further
        if not self._fits(self._n + 1, further):
            return False
        lines = self._lines(self._spent + further, self._stake)
        if self._look(lines) <= self._rate * further:
            return False
        self._rows = 0 if self._at_once else 1
        self._since = self._clock()
        return True

    def ride(self, likely: float, rows: int) -> bool:
        trial, draft, n = self._drafting, self._draft, self._n
        if trial is None:
            return True
        if not rows:
            self._ran()
        price = 0.0
        if not self._at_once:
            price = draft.ms(rows + 1, self._depth) - draft.ms(rows, self._depth)
        if not self._fits(n + 1, price):
            return False
        acceptance, weights = trial.state.spread()
        row = self._v[n + 2] - self._v[n + 1]
        gains = likely * acceptance - self._rate * row
        if float(weights @ gains.clip(min=0.0)) <= self._rate * price:
            return False
        self._rows = 0 if self._at_once else rows + 1
        if not rows:
            self._since = self._clock()
        return True

    def _ran(self) -> None:
        """The draft pass of ``_rows`` tokens is over, if there was one; of 0: nothing was run."""
        if self._since is None:
            return
        ms, self._since = (self._clock() - self._since) * 1e3, None
        self._spent += ms
        if not self._rows:
            self._due += ms
            return
        self._due += self._draft.most(self._rows, self._depth)
        if not self._others:  # whose steps shared or delayed this one
            self._draft.observe(self._rows, ms, self._depth)

    def pick(self, guesses: Sequence[Guess]) -> tuple[int, int]:
        again = self._copies  # the paying source had its turn
        copies = self._copies = again or [self._weigh(guess) for guess in guesses]
        # of several copies that begin differently one at most can be right
        openings: dict[int | None, float] = {}
        for copy in copies:
            first = copy.tokens[0]
            openings[first] = max(openings.get(first, 0.0), copy.survival[0])
        fair = 1.0 / max(sum(openings.values()), 1.0)
        balance = max(self._rate * (self._stake - self._spent), 0.1)
        costs = self._rate * self._over[1 : self._longest + 2]
        which, length, best = 0, 0, 0.0
        for i, copy in enumerate(copies):
            survival = [fair * s for s in copy.survival[: self._longest]]
            worth = growth(survival, costs[: len(survival) + 1], balance).diagonal()
            n = int(worth.argmax())
            if worth[n] > best and self._fits(n):
                which, length, best = i, n, float(worth[n])
        if length and not again and best < self._model_gain() * self._rate:
            length = 0
            self._why = "the draft model promises more than a copy"
        elif length < max(self._draft_min, 1):
            length = 0
            self._why = f"copy unsure: {fair * max(c.survival[0] for c in copies):.0%} likely"
        if not length:
            return which, 0
        self._sending = copy = copies[which]
        self._exploring = False
        copy.sent = self._n = length
        self._expected = 1.0 + fair * sum(copy.survival[:length])
        return which, length

    def _weigh(self, guess: Guess) -> Trial:
        """How far the target would follow a copy."""
        copy = Trial(self._learned.source(guess.source, "copy"))
        self._trials.append(copy)
        n = len(guess.tokens)
        copy.tokens += guess.tokens
        habits = zip(guess.shares or (1.0,) * n, guess.endings or (0.0,) * n, strict=True)
        for i, (share, ending) in enumerate(habits):
            copy.features.append(match_features(guess.match_length, i, share, ending))
        copy.survival = list(accumulate(map(copy.state.predict, copy.features), mul))
        return copy

    def _model_gain(self) -> float:
        """Milliseconds that asking the paying source is expected to gain in this round."""
        state = self._learned.sources.get(self._named(self._payer))
        if state is None:
            return 0.0
        self._drafting = Trial(state)
        gain, _ = self._promise(self._lines(self._step, self._stake), max(self._lag, 1))
        self._drafting = None
        return gain

    def worth(self, likely: float) -> bool:
        n = self._n
        return self._fits(n + 1) and likely > self._rate * (self._v[n + 2] - self._v[n + 1])

    def beside(self, likely: float) -> bool:
        if not self.worth(likely):
            return False
        self._n += 1
        self._beside += 1
        self._expected += likely
        return True

    def rows(self, most: int) -> int:
        target, ledger, payer = self._costs.target, self._ledger, self._payer
        trusted = self._asked.value > 0.0
        stake = self._one * (1.0 + (ledger.covers if trusted else ledger.balance)(payer))
        cost, others, depth = (target.most if trusted else target.ms), self._others, self._depth
        return max((n for n in range(2, most + 1) if cost(n + others, depth) <= stake), default=1)

    # -- a pass that others share --

    def bid(self, offer: Offer) -> Bid:
        """What was decided for a conversation alone, as far as a cut may depend on it."""
        reached = self._sending.survival[: offer.size] if self._sending else self._reached[1:]
        if not self._peek and self._drafting:
            mean = self._drafting.state.mean
            reached = [mean**i for i in range(1, offer.size + 1)]
        if len(reached) != offer.size:  # branches, or room for more than was drafted
            reached = sorted(offer.survival, reverse=True)
        return Bid(reached, self._rate, max(self._rate * self._stake, 0.1))

    def passes(self, rows: int) -> Sequence[float]:
        return self._costs.target.upto(rows, self._depth)

    @property
    def balance(self) -> float | None:
        return self._ledger.covers(self._payer)

    def shortfall_ms(self) -> float | None:
        state = self._learned.sources.get(self._named(self._payer))
        target, depth = self._costs.target, self._depth
        if state is None or target.level is None:
            return None
        one = target.ms(1, depth)
        return self._draft.ms(1, depth) + target.ms(2, depth) - one - state.mean * one

    # -- after a round --

    def explain(self, draft: Draft) -> Plan:
        """The plan in the light of the draft: what was sent and the reason in words."""
        n = len(draft)
        if n == 0:
            return Plan(0, self._why or NO_GUESS)
        if self._exploring:
            return Plan(n, "probing")
        if not self._trials:
            return Plan(n, "drafting")
        steps = (self._spent + self._v[min(n + 1, len(self._v) - 1)]) / self._one
        took = f"in the time of {max(steps, 1.0):.1f} plain ones"
        return Plan(n, f"{self._expected:.1f} tokens expected {took}")

    def observe(self, outcome: Outcome) -> None:
        target, depth, learned = self._costs.target, self._depth, self._learned
        n, emitted, shared = outcome.drafted, outcome.emitted, outcome.shared
        # until a plain step was timed, a shared pass stands for one
        rows = shared.tokens if shared and target.known(1) else n + 1
        verify = outcome.round_ms - outcome.draft_ms
        # what a busy machine adds is not the draft's fault, nor what a plain pass takes
        charged = min(verify, OUTLIER * target.most(rows, depth)) if n else 0.0
        if not shared or shared.first:
            target.observe(rows, verify, depth)
        self._others = shared.lanes - 1 if shared else 0
        for trial in self._trials:
            trial.sent = min(trial.sent, n)  # others may have needed the rows
            trial.judge(outcome.tokens, outcome.accepted)
        self._written += emitted
        self._depth += emitted
        self._lag += emitted
        self._left -= emitted
        if outcome.plain_ms is not None:
            self._plain_steps.took(outcome.plain_ms, depth)
        if target.level is None:
            return
        one = target.ms(1 + self._others, depth)
        (tokens, steps), keep = learned.pace, 1.0 - 1.0 / _MEMORY
        learned.pace = keep * tokens + emitted, keep * steps + outcome.round_ms / one
        self._ledger.earn(emitted, self._payer)
        if n:
            self._plain_steps.drafted(outcome.round_ms / one)
        if self._forgone:
            self._plain_steps.paid(self._forgone)
            self._ledger.book(self._payer, -self._forgone)
        if not self._asking:
            return
        drafting = min(outcome.draft_ms, OUTLIER * (self._due or one))
        gain = emitted - (drafting + (charged or one)) / one
        exploring = self._exploring
        if self._drafting is None:
            exploring = self._asked.value < 0.0 and not self._sending
            self._asked.add(gain)
        elif self._drafting.sent:
            learned.round.add(emitted)
        self._ledger.book(self._payer, gain, exploring=exploring)
