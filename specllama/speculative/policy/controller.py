"""How far to draft in a round: one throughput, one gain formula, and a balance for every source."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import mul
from time import perf_counter

from specllama.speculative.asking import Offer
from specllama.speculative.policy.acceptance import (
    Acceptance,
    Kind,
    Trial,
    draft_features,
    match_features,
)
from specllama.speculative.policy.budget import Bid, allocate, growth, logs
from specllama.speculative.policy.costs import CLAMP, Costs
from specllama.speculative.policy.ledger import BEHIND, Ledger
from specllama.speculative.types import Draft, Guess, Room
from specllama.speculative.window import Outcome, Plan, no_room

_MEMORY = 64  # values that a running mean remembers; rounds until a plain step is timed anew
_BEGIN = 12.0  # tokens of usual pace that a text is thought to begin with
_AHEAD = 8  # guesses that a decision looks ahead
_READ = 32  # a draft model that has read less than this of a text cannot guess
_UNTIMED = 3.0  # times what is expected: what a first reading may really cost
_WORTH = 16  # rounds that asked for drafts before it is judged whether asking pays
_OUTLIER = math.exp(CLAMP)  # times what is expected: a round is charged no more than that
_BEHIND = "recent drafts cost time; decoding plainly to make it up"
_MEASURING = "measuring a plain step"


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
        asked: by method, what rounds that asked for drafts gained, in plain steps.
        speed: of replies, over plain decoding. reply: their tokens.
        round: tokens of a round that the paying source drafted.
    """

    sources: dict[str, Acceptance] = field(default_factory=dict)
    asked: dict[str, Mean] = field(default_factory=dict)
    speed: Mean = field(default_factory=lambda: Mean(1.0, 1))
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
        clock: Callable[[], float] = perf_counter,
        on_finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._learned, self._costs, self._ledger = learned, costs, ledger
        self._draft_max, self._draft_min, self._peek = draft_max, draft_min, peek
        self._clock, self._on_finish = clock, on_finish
        self._left = math.inf if tokens is None else float(tokens)
        self._depth = self._lag = 0  # tokens of context; of them unread by the paying source
        self._written = self._copied = 0  # tokens of this text
        self._steps = 0.0  # that they took
        self._pace = (0.0, 0.0)  # tokens and ms of late
        self._rounds = 0  # since a plain step was timed
        self._others = 0  # conversations that shared the last pass
        self.drafts_with("")
        for source in learned.sources.values():
            source.fresh()
        self._begin_round()

    def drafts_with(self, method: str, paid: str = "") -> None:
        """Before the first round: who drafts; ``paid`` is what of it costs time, "" for nothing."""
        self._method, self._paid = method, paid
        self._draft = self._costs.steps(paid)
        self._asked = self._learned.asked.setdefault(method, Mean())

    def prefilled(self, tokens: int, ms: float, depth: int = 0) -> None:
        """A prompt of ``depth`` tokens is in the cache; ``tokens`` of them were read in ``ms``."""
        self._lag += tokens
        self._depth = max(depth, tokens)
        target = self._costs.target
        if tokens >= _READ and target.level and not target.seen(2):  # a row costs no less
            target.slope = min(max(ms / tokens / target.level, 0.01), 0.4)

    def finish(self) -> None:
        """The reply is over."""
        if self._written:
            self._learned.reply.add(self._written)
        if self._steps:
            self._learned.speed.add(self._written / self._steps)
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
        self._since = self._spent = self._due = 0.0  # ms of draft passes, and what was expected
        self._exploring = self._asking = False
        self._why = ""

    def plan(self, room: int) -> Plan:
        self._begin_round()
        if none := no_room(room, self._draft_max, self._draft_min):
            return none
        target, ledger = self._costs.target, self._ledger
        if target.level is None or not target.known(1):
            return Plan(0, _MEASURING)
        others = self._others
        if not others and self._rounds >= min(1 << min(target.seen(1), 16), _MEMORY):
            return Plan(0, _MEASURING)  # what drafts are compared with may be wrong, or change
        self._draft.guess(target.level * self._costs.draft_share)
        self._most = most = min(self._draft_max, room)
        self._v = target.upto(most + 1 + others, self._depth)[others:]  # by rows of its own
        self._one = one = self._v[1]
        self._step = self._draft.ms(1, self._depth)
        usual = (1.0 + max(self._learned.speed.value, 1.0)) / (2.0 * one)
        tokens, ms = self._pace
        self._rate = max((tokens + _BEGIN) / (ms + _BEGIN / usual), 1.0 / one)
        asked = self._asked
        if asked.n >= _WORTH and asked.value < 0.0 and ledger.balance(self._method) < -asked.value:
            return Plan(0, "looking for drafts costs more than they save")
        self._stake = self._covers(self._method)
        longest = self._longest()
        self._stake = self._covers(self._paid or self._method)
        longest = max(longest, self._longest())
        if not longest:
            return Plan(0, _BEHIND)
        self._asking = True
        room_ = Room(
            longest, self.keep_going, self.begin, self.include, self.pick, self.beside, self.rows
        )
        return Plan(longest, "", room=room_, explain=self.explain)

    def _covers(self, source: str) -> float:
        """Milliseconds that a source may lose where as many conversations as now may lose them."""
        return self._ledger.covers(source) * self._one / (1 + self._others)

    def _longest(self) -> int:
        """The most guesses whose pass risks no more than the stake."""
        return next((n for n in range(self._most, 0, -1) if self._fits(n)), 0)

    def _fits(self, guesses: int, further: float = 0.0) -> bool:
        """Whether so many guesses, and ``further`` ms for them, risk no more than the stake."""
        if guesses > self._most:
            return False
        worst = self._costs.target.most(guesses + 1 + self._others, self._depth) - self._one
        return self._spent + further + worst <= self._stake

    # -- the gain of a further guess --

    def _lines(self, spent: float, stake: float) -> list[tuple[float, float]]:
        """For 1, 2, ... more guesses: (slope, price) of the gain ``slope * a - price``, in tokens.

        ``a`` is the acceptance of the next guess, which has been seen after ``spent`` ms of
        drafting; those behind it count with the mean. The gain is over stopping here.
        """
        assert self._drafting is not None
        mean, v, rate = self._drafting.state.mean, self._v, self._rate
        sent, here = self._reached[1:], self._reached[-1]
        depth, rows = len(sent), self._beside + len(self._reached)
        balance = max(rate * stake, 0.1)
        stop = growth(sent, rate * (spent + v[rows] - v[1]), balance)
        lines = []
        follow: list[float] = []
        for k in range(1, min(self._most - rows + 1, _AHEAD) + 1):
            took = spent + (k - 1) * self._step + v[rows + k] - v[1]
            if took > stake:
                break
            follow.append(here)
            here *= mean
            left = logs(balance, rate * took, depth + k)
            gains = [b - a for a, b in pairwise(left)]
            price = stop - left[0] - sum(map(mul, sent, gains))
            lines.append((sum(map(mul, follow, gains[depth:])), price))
        return lines

    def _look(self, spent: float, stake: float) -> float:
        """Expected gain of seeing the next guess and then deciding, its own step not deducted."""
        assert self._drafting is not None
        lines = self._lines(spent, stake)
        return sum(
            weight * max(0.0, *(slope * a - price for slope, price in lines), 0.0)
            for a, weight in self._drafting.state.spread()
        )

    def _worth(self, read: int, stake: float) -> tuple[float, float, float]:
        """(gain, price, rounds): tokens that asking the paying source is worth and costs in each of
        the rounds that are left, if it has to read so many tokens first."""
        learned, rate = self._learned, self._rate
        value = self._look(self._step, stake)
        usual = learned.reply.value
        left = min(self._left, max(usual - self._written, (usual + self._written) / 4.0))
        left *= 1.0 - self._copied / (self._written + _BEGIN)
        # where a look does not pay its step it will not be repeated
        rounds = max(left / learned.round.value, 1.0) if value > rate * self._step else 1.0
        reading = max(self._draft.ms(read, self._depth) - self._step, 0.0)
        return value, rate * (self._step + reading / rounds), rounds

    # -- within a round: the answers of ``Room`` --

    def begin(self, source: str, lag: int) -> int:
        self._lag = lag
        self._drafting = trial = Trial(self._learned.source(source, "draft"))
        if self._sending:  # a copy goes: a branch beside it pays where its first guess fails
            self._reached = [1.0 - self._sending.survival[0]]
            self._beside = self._n
        read = self._readable(source, lag)
        if not read:
            self._drafting = None
            self._exploring = False
            return 0
        self._trials.append(trial)
        self._rows, self._lag = read, 0
        self._since = self._clock()
        return read

    def _readable(self, source: str, lag: int) -> int:
        """How many of the newest ``lag`` tokens to read; 0, and why, where it is to stay out."""
        one, draft = self._one, self._draft
        if self._n >= self._most:
            return 0
        row = self._v[self._n + 2] - self._v[self._n + 1]
        full = (BEHIND - 1.0) * one  # what a full balance pays for
        read = draft.within(lag, full - row, self._depth)
        value, price, rounds = self._worth(read, full)
        if value <= price:
            own = self._ledger.balance(source) * one
            forced = 0.0 if self._peek else row
            if rounds * (price - value) / self._rate + forced > own:
                # the newest part of the text will do; looks that follow take the other half
                read = draft.within(read, own / 2 - forced, self._depth)
            if self._n or read < min(lag, _READ):
                cost = (self._step + row) * self._rate
                mean = self._learned.source(source, "draft").mean
                gives = f"{mean:.2f} tokens expected in the time of {cost:.2f}"
                self._why = f"draft too slow here: {gives}"
                return 0
            self._exploring = True
        if read > 1 and not any(draft.seen(n) for n in (_READ, read)):
            read = min(read, _READ)  # to find out what reading costs
            need = _UNTIMED * draft.ms(read, self._depth)
        else:
            need = draft.ms(read, self._depth)
        if need + row > self._stake:
            self._why = f"saving up: reading and drafting may cost {(need + row) / one:.1f} steps"
            return 0
        return read

    def include(self, confidence: float | None, lead: float | None, token: int | None) -> bool:
        self._ran((self._clock() - self._since) * 1e3)
        trial = self._drafting
        if trial is None:
            return True  # a proposer that did not ask to begin
        features = draft_features(confidence, lead if self._peek else None)
        a = trial.state.predict(features)
        trial.state.look(features)
        fits = self._fits(self._n + 1)
        # the emitted text tells what a drawn guess was worth: to learn that it need not be sent
        forced = self._exploring and not self._n and not (self._peek and token is not None)
        lines = self._lines(self._spent, self._stake) if fits and not forced else []
        wanted = fits and (forced or any(slope * a > price for slope, price in lines))
        if wanted:
            self._reached.append(self._reached[-1] * a)
            self._expected += self._reached[-1]
            trial.sent += 1
            self._n += 1
        elif not self._n:
            need = min((price / slope for slope, price in lines if slope > 0.0), default=1.0)
            unsure = f"unsure: {a:.0%} likely, {min(need, 1.0):.0%} needed"
            self._why = "probing" if self._exploring else unsure
        if wanted or token is not None:
            trial.tokens.append(token)
            trial.features.append(features)
        return wanted

    def keep_going(self, drafted: int, confidence: float | None) -> bool:
        if self._drafting is None:
            return True
        if not self._fits(self._n + 1, self._step):
            return False
        if self._look(self._spent + self._step, self._stake) <= self._rate * self._step:
            return False
        self._rows = 1
        self._since = self._clock()
        return True

    def _ran(self, ms: float) -> None:
        """A draft pass of ``_rows`` tokens took so long."""
        draft, rows, depth = self._draft, self._rows, self._depth
        self._due += draft.ms(rows, depth) if draft.known(rows) else draft.most(rows, depth)
        self._spent += ms
        if not self._others:  # whose steps shared or delayed this one
            draft.observe(rows, ms, depth)

    def pick(self, guesses: Sequence[Guess]) -> tuple[int, int]:
        first = not self._copies  # otherwise the paying source had its turn
        if first:
            self._copies = [self._weigh(guess) for guess in guesses]
        stake, self._stake = self._stake, self._covers(self._method)
        # of several copies that begin differently one at most can be right
        openings = {copy.tokens[0]: 0.0 for copy in self._copies}
        for copy in self._copies:
            openings[copy.tokens[0]] = max(openings[copy.tokens[0]], copy.survival[0])
        fair = 1.0 / max(sum(openings.values()), 1.0)
        balance = max(self._rate * (self._stake - self._spent), 0.1)
        which, length, best = 0, 0, 0.0
        longest = self._longest()
        for i, copy in enumerate(self._copies):
            bid = Bid([fair * s for s in copy.survival[:longest]], self._rate, balance)
            (n,), gain = allocate([bid], self._v[: len(bid.survival) + 2])
            if gain > best:
                which, length, best = i, n, gain
        if length and first and best < self._model_value():
            length = 0
            self._why = "the draft model promises more than a copy"
        elif not length and not self._why:
            self._why = f"copy unsure: {fair * max(c.survival[0] for c in self._copies):.0%} likely"
        if not length or length < self._draft_min:
            self._stake = stake
            return which, 0
        self._sending = copy = self._copies[which]
        copy.sent = self._n = length
        self._expected = 1.0 + fair * sum(copy.survival[:length])
        self._exploring = False
        return which, length

    def _weigh(self, guess: Guess) -> Trial:
        """How far the target would follow a copy."""
        copy = Trial(self._learned.source(guess.source, "copy"))
        self._trials.append(copy)
        copy.tokens += guess.tokens
        for i, share in enumerate(guess.shares or (1.0,) * len(guess.tokens)):
            copy.features.append(match_features(guess.match_length, i, share))
        copy.survival = list(accumulate(map(copy.state.predict, copy.features), mul))
        return copy

    def _model_value(self) -> float:
        """Tokens that the paying source is expected to gain this round beyond their price."""
        state = self._learned.sources.get(self._paid)
        if state is None:
            return 0.0
        self._drafting = Trial(state)
        stake = self._covers(self._paid)
        value, price, _ = self._worth(max(self._lag, 1), stake)
        self._drafting = None
        return value - price

    def beside(self, likely: float) -> bool:
        n = self._n
        if not self._fits(n + 1) or likely <= self._rate * (self._v[n + 2] - self._v[n + 1]):
            return False
        self._n += 1
        self._beside += 1
        self._expected += likely
        return True

    def rows(self, most: int) -> int:
        target, depth, asked = self._costs.target, self._depth, self._asked
        trusted = asked.n > 2 and asked.value > 0.0
        balance = self._ledger.covers if trusted else self._ledger.balance
        stake = self._one * (1.0 + balance(self._method))
        cost = target.most if trusted else target.ms
        others = self._others
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

    # -- after a round --

    def explain(self, draft: Draft) -> Plan:
        """The plan in the light of the draft: what was sent and the reason in words."""
        n = len(draft)
        if n == 0:
            return Plan(0, self._why or "no guess")
        if self._exploring:
            return Plan(n, "probing")
        if not self._trials:
            return Plan(n, "drafting")
        steps = (self._spent + self._v[min(n + 1, len(self._v) - 1)]) / self._one
        took = f"in the time of {max(steps, 1.0):.1f}"
        return Plan(n, f"{self._expected:.1f} tokens expected {took}")

    def observe(self, outcome: Outcome) -> None:
        target, depth, n = self._costs.target, self._depth, outcome.drafted
        shared, rows = outcome.shared, n + 1
        if shared and target.known(1):  # until then it stands for a plain step
            rows = shared.tokens
        verify = target.ms(rows, depth) if target.known(rows) else target.most(rows, depth)
        if not shared or shared.first:
            target.observe(rows, outcome.round_ms - outcome.draft_ms, depth)
        self._others = shared.lanes - 1 if shared else 0
        self._rounds = self._rounds + 1 if n else 0
        for trial in self._trials:
            trial.sent = min(trial.sent, n)  # others may have needed the rows
            trial.judge(outcome.tokens, outcome.accepted)
        emitted = outcome.emitted
        self._written += emitted
        self._left -= emitted
        self._depth += emitted
        self._lag += emitted
        self._copied += emitted if self._sending else 0
        keep = 1.0 - 1.0 / _MEMORY
        self._pace = self._pace[0] * keep + emitted, self._pace[1] * keep + outcome.round_ms
        if target.level is None:
            return
        one = target.ms(1 + self._others, depth)
        self._steps += outcome.round_ms / one
        self._ledger.earn(emitted, self._paid or self._method)
        if self._asking:
            self._book(outcome, one, verify)

    def _book(self, outcome: Outcome, one: float, verify: float) -> None:
        """Charge the sources for a round in which drafts were asked for."""
        ledger, asked, method = self._ledger, self._asked, self._method
        if not outcome.drafted and not self._due:
            # the pass cost what plain decoding costs, however long it took; looking for drafts did
            if self._n:
                return  # there was a draft, and no room for it
            looked = min(outcome.draft_ms / one, 1.0)
            ledger.book(method, -looked, exploring=asked.value < 0.0)
            asked.add(-looked)
            return
        # what a busy machine adds is not the draft's fault
        ms = min(outcome.round_ms, _OUTLIER * ((self._due or outcome.draft_ms) + verify))
        gain = outcome.emitted - ms / one
        if self._drafting is None:
            ledger.book(method, gain, exploring=asked.value < 0.0 and not self._sending)
            asked.add(gain)
            return
        if self._drafting.sent:
            self._learned.round.add(outcome.emitted)
        looked = min(self._spent, ms) / one if self._sending else 0.0
        if self._sending:  # looking elsewhere first is not the copy's fault
            ledger.book(method, gain + looked)
            asked.add(gain + looked)
            gain = -looked
        ledger.book(self._paid or method, gain, exploring=self._exploring)
