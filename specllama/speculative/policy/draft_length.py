"""The length of a draft: decisions of one round on what joins it, and which copy is sent.

A further guess is worth its expected tokens, less what its time gives elsewhere; a round that
risks much of what may be lost is worth less (``budget.growth``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from operator import mul

import numpy as np

from specllama.events import NO_GUESS, RoundDone
from specllama.speculative.budget import Bid, growth
from specllama.speculative.effects import Offer
from specllama.speculative.policy.constants import AHEAD, BEHIND, EPSILON, MEAN, MEMORY, RECENT
from specllama.speculative.policy.costs import Costs
from specllama.speculative.policy.learned import (
    Acceptance,
    Learned,
    Spread,
    Trial,
    draft_features,
    match_features,
)
from specllama.speculative.policy.ledger import Ledger
from specllama.speculative.types import Booking, Draft, DraftJudge, Guess

_COUNT = np.arange(AHEAD)


@dataclass
class Text:
    """The text of one conversation, as far as decisions depend on it.

    Attributes:
        left: tokens that the reply may still have.
        depth: tokens of context. lag: of them unread by the paying source.
        others: conversations that shared the last pass.
    """

    learned: Learned
    left: float
    depth: int = 0
    lag: int = 0
    others: int = 0

    def wrote(self, tokens: int, others: int) -> None:
        """Note that a round added tokens, in a pass shared with ``others`` conversations."""
        self.depth += tokens
        self.lag += tokens
        self.left -= tokens
        self.others = others


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs, and the balance that pays for them, when a round opens. Times in milliseconds.

    Attributes:
        passes: of 0, 1, ... rows of its own, where each of the others has as many: a row that is
            dear alone can be cheap where all take one.
        worst: cost of 0, 1, ... guesses at most, beyond a plain step.
        step: the first draft step. next: each behind it.
        rate: tokens that a millisecond gives.
        stake: loss that may be risked. balance: the same in tokens, of all whose pass it is.
    """

    passes: Sequence[float]
    worst: Sequence[float]
    step: float
    next: float
    rate: float
    stake: float
    balance: float

    @property
    def one(self) -> float:
        return self.passes[1]

    @property
    def longest(self) -> int:
        """The most guesses that risk no more than the stake."""
        return max((n for n, ms in enumerate(self.worst) if ms <= self.stake), default=0)

    def row(self, guesses: int) -> float:
        """Return the cost of a further row after N guesses."""
        return self.passes[guesses + 2] - self.passes[guesses + 1]


@dataclass(slots=True)
class SoFar:
    """The guesses of a round that go, so far.

    Attributes:
        reached: probability that the target comes to guess 1, 2, ... of the drafted path, and
            behind it.
        beside: rows off that path.
        expected: tokens. spent: milliseconds of draft passes.
    """

    reached: list[float] = field(default_factory=lambda: [1.0])
    beside: int = 0
    expected: float = 1.0
    spent: float = 0.0

    @property
    def n(self) -> int:
        return self.beside + len(self.reached) - 1

    def fits(self, prices: Prices, further: float = 0.0) -> bool:
        """True if one more guess, and ``further`` ms for it, risk no more than the stake."""
        if self.n + 1 >= len(prices.worst):
            return False
        return self.spent + further + prices.worst[self.n + 1] <= prices.stake


def further_guesses(
    prices: Prices, so_far: SoFar, mean: float, spread: Spread, step: float = 0.0
) -> tuple[float, float]:
    """Return (tokens gained over stopping now, acceptance from which on the next guess goes).

    Args:
        mean: acceptance of the guesses behind the next one.
        spread: acceptances that the next one has, or may show when it has been seen.
        step: milliseconds until it has been seen. The gain is that of deciding then.
    """
    reached, depth, rows = so_far.reached, len(so_far.reached) - 1, so_far.n + 1
    v = np.array(prices.passes[rows : rows + min(len(prices.worst) - rows, AHEAD) + 1])
    took = so_far.spent + step + (v - prices.one)
    took[1:] += prices.next * _COUNT[: len(took) - 1]  # the first is that of stopping here
    if took[-1] > prices.stake:
        took = took[: max(int(np.argmax(took > prices.stake)), 1)]
    more = _COUNT[: len(took) - 1]
    survival = [*reached[1:], *(reached[-1] * mean**more)]
    worth = growth(survival, prices.rate * took, prices.balance)[:, depth:]
    # each length gains its slope times the acceptance, less its price
    slopes, least = worth[more + 1, more + 1] - worth[1:, 0], worth[0, 0] - worth[1:, 0]
    acceptance, weights = spread
    gains = (acceptance[:, None] * slopes - least).max(axis=1, initial=0.0)
    need = min((p / s for s, p in zip(slopes, least, strict=True) if s > 0.0), default=1.0)
    return float(weights @ gains), need


class Weighing(DraftJudge):
    """The answers of one round; born when it opens, and gone when it is over.

    Args:
        booking: who drafts.
        most: guesses at most.
        peek: decisions may look at drawn tokens.
        clock: seconds.

    Attributes:
        due: expected of the draft passes. Milliseconds.
        drafting: guesses of the paying source, None if it stayed out.
    """

    weighs = True

    def __init__(
        self,
        text: Text,
        costs: Costs,
        ledger: Ledger,
        booking: Booking,
        most: int,
        *,
        peek: bool,
        clock: Callable[[], float],
    ) -> None:
        self._text, self._ledger, self._booking = text, ledger, booking
        self._target, self._draft = costs.target, costs.steps(booking)
        self._peek, self._clock = peek, clock
        assert costs.target.level is not None
        self._draft.guess(costs.target.level * costs.draft_share)
        self.prices, self.so_far = self._prices(most), SoFar()
        self._seen: list[Trial] = []  # all guesses that were seen
        self._copies: list[Trial] = []
        self.drafting: Trial | None = None  # by the paying source
        self._sending: Trial | None = None  # the copy that goes
        self._rows = 1  # of the draft pass that runs
        self._since: float | None = None  # when it began
        self.due = 0.0
        self._exploring = False
        self._why = ""

    def _prices(self, most: int) -> Prices:
        all_, depth, one = self._all, self._text.depth, self._target.ms(self._all, self._text.depth)
        step = self._draft.ms(all_, depth)
        tokens, steps = self._text.learned.pace
        rate = max(tokens / steps, 1.0) / one
        # as many conversations as now may lose it, which share one balance, but their guesses do
        # not fail together
        stake = self._ledger.covers(self._booking.payer) * one / all_
        return Prices(
            passes=[0.0, *self._passes((most + 1) * all_)[all_::all_]],
            worst=[self._target.most(n + all_, depth) - one for n in range(most + 1)],
            step=step,
            next=0.0 if self._booking.at_once else step,
            rate=rate,
            stake=stake,
            balance=max(rate * stake * all_, EPSILON),
        )

    @property
    def _all(self) -> int:
        """Count the conversations whose pass it is."""
        return 1 + self._text.others

    def _passes(self, rows: int) -> list[float]:
        """Return the milliseconds of passes of 0, 1, ... rows."""
        return self._target.upto(rows, self._text.depth)

    # -- what asking the paying source promises --

    def _look(self, source: Acceptance, step: float, prices: Prices | None = None) -> float:
        """Return the tokens gained by seeing the next guess, without its step."""
        prices, spread = prices or self.prices, source.spread()
        return further_guesses(prices, self.so_far, source.mean, spread, step)[0]

    def _promise(self, source: Acceptance, read: int, prices: Prices) -> tuple[float, float]:
        """Return (ms that asking the paying source gains in a round, rounds that are left), if it
        reads ``read`` tokens first."""
        step = prices.step
        gained = self._look(source, step, prices) / prices.rate - step
        left = min(self._text.left, 2 * MEMORY) * (1.0 - MEAN)
        # where a look does not pay its step it will not be repeated
        rounds = max(left, 1.0) if gained > 0.0 else 1.0
        # nobody shares what is read, and all who share a pass wait for it
        waits = max(self._draft.ms(read, self._text.depth) - step, 0.0)
        return gained - self._all * waits / rounds, rounds

    def model_gain(self) -> float:
        """Return the milliseconds that asking the paying source should gain in this round."""
        source, lag = self._text.learned.sources.get(self._booking.payer), max(self._text.lag, 1)
        return self._promise(source, lag, self.prices)[0] if source else 0.0

    # -- the answers --

    def read(self, source: str, tokens: int) -> int:
        if not source:
            return self._scouts(tokens)
        text, so_far = self._text, self.so_far
        trial = Trial(text.learned.source(source, "draft"))
        if self._sending:  # a copy goes: a branch beside it pays where its first guess fails
            so_far.reached = [1.0 - self._sending.survival[0]]
        text.lag = tokens
        rows = self._readable(trial.state, tokens) if so_far.n + 1 < len(self.prices.worst) else 0
        if not rows:
            self.drafting, self._exploring = None, False
            return 0
        text.lag = 0
        self.drafting, self._rows = trial, rows
        self.granted += rows
        self._seen.append(trial)
        self._since = self._clock()
        return rows

    def _readable(self, source: Acceptance, lag: int) -> int:
        """Return how many of the newest ``lag`` tokens to read; 0 and a reason to stay out.

        What reading leaves of a balance has to pay for a guess: the others' gains fill it up.
        """
        draft, prices, depth, n = self._draft, self.prices, self._text.depth, self.so_far.n
        one, row = prices.one, prices.row(n)
        rest, full = prices.passes[n + 2] - one, replace(prices, stake=BEHIND * one)
        gained, rounds = self._promise(source, draft.within(lag, full.stake - rest, depth), full)
        if gained <= 0.0:
            blind = 0.0 if self._peek else row  # see ``take``
            if n or blind - rounds * gained > self._ledger.balance(self._booking.payer) * one:
                self._why = f"drafting would not pay: {self._dear(source, row)}"
                return 0
            self._exploring = True
        least, read = min(lag, RECENT), draft.within(lag, prices.stake - rest, depth)
        if read < least:
            need = (draft.ms(least, depth) + rest) / one
            dear = f"catching up would cost up to {need:.1f} steps, more than the budget"
            self._why = f"waiting: {dear}"
            return 0
        return read

    def _dear(self, source: Acceptance, row: float) -> str:
        """Return the reason why asking the paying source promises no gain.

        Args:
            row: milliseconds of a further row of the pass.
        """
        prices = self.prices
        cost = (prices.step + row) * prices.rate
        if source.mean <= cost:
            return f"a guess takes the time of {cost:.2f} tokens and brings {source.mean:.2f}"
        if self._look(source, prices.step) > prices.step * prices.rate:
            return "reading the text first would take longer than guesses save"
        return "a refused guess may cost more than can be risked now"

    def _scouts(self, rows: int) -> int:
        """Return how many scout rows a pass may have in addition to its own."""
        ledger, target, payer = self._ledger, self._target, self._booking.payer
        trusted = self._text.learned.gained(self._booking.method).value > 0.0
        balance = ledger.covers(payer) if trusted else ledger.balance(payer)
        cost, least = (target.most if trusted else target.ms), self._all
        within = self.prices.one * (1.0 + balance)
        fit = (n for n in range(1, rows + 1) if cost(n + least, self._text.depth) <= within)
        return max(fit, default=0)

    def take(self, confidence: float | None, lead: float | None, token: int | None) -> bool:
        self._ran()
        trial = self.drafting
        if trial is None:
            return True  # a drafter that did not ask to begin
        features = draft_features(confidence, lead if self._peek else None)
        a = trial.state.predict(features)
        trial.state.look(features, lesson=token is not None)
        so_far, gain, need = self.so_far, 0.0, 1.0
        if so_far.fits(self.prices):
            surely = np.array([a]), np.array([1.0])
            gain, need = further_guesses(self.prices, so_far, trial.state.mean, surely)
            if self._exploring and token is None and not so_far.n:
                gain = 1.0  # what may not be looked at teaches nothing unless it is sent
        if wanted := gain > 0.0:
            so_far.reached.append(so_far.reached[-1] * a)
            so_far.expected += so_far.reached[-1]
            trial.sent += 1
        elif not so_far.n:
            unsure = f"unsure: {a:.0%} likely, {min(need, 1.0):.0%} needed"
            self._why = "probing" if self._exploring else unsure
        if wanted or token is not None:
            trial.tokens.append(token)
            trial.features.append(features)
        return wanted

    def further(self, likely: float | None = None, rows: int = 0) -> bool:
        if self.drafting is None:
            return True
        if not rows:
            self._ran()
        source, prices, price = self.drafting.state, self.prices, self.prices.next
        if price and likely is not None:
            depth = self._text.depth
            price = self._draft.ms(rows + 1, depth) - self._draft.ms(rows, depth)
        if not self.so_far.fits(prices, price):
            return False
        if likely is None:
            worth = self._look(source, price)
        else:
            worth = likely * float(np.dot(*source.spread()))
        if worth <= prices.rate * price:
            return False
        self._rows = rows + 1 if prices.next else 0
        if not rows:
            self._since = self._clock()
        return True

    def _ran(self) -> None:
        """Book the time of the finished draft pass of ``_rows`` tokens; 0: nothing ran."""
        if self._since is None:
            return
        ms, self._since = (self._clock() - self._since) * 1e3, None
        self.so_far.spent += ms
        if not self._rows:
            self.due += ms
            return
        self.due += self._draft.most(self._rows, self._text.depth)
        if not self._text.others:  # whose steps shared or delayed this one
            self._draft.observe(self._rows, ms, self._text.depth)

    def row(self, likely: float, *, keep: bool = True) -> bool:
        so_far, prices = self.so_far, self.prices
        if not (so_far.fits(prices) and likely > prices.rate * prices.row(so_far.n)):
            return False
        if keep:
            so_far.beside += 1
            so_far.expected += likely
        return True

    def pick(self, guesses: Sequence[Guess]) -> tuple[int, int]:
        again = self._copies  # the paying source had its turn
        copies = self._copies = again or [self._weigh(guess) for guess in guesses]
        prices, spent = self.prices, self.so_far.spent
        balance = max(prices.balance - prices.rate * spent * self._all, EPSILON)
        costs = prices.rate * (np.array(prices.passes[1 : prices.longest + 2]) - prices.one)
        which, length, best = 0, 0, 0.0
        for i, copy in enumerate(copies):
            survival = copy.survival[: prices.longest]
            worth = growth(survival, costs[: len(survival) + 1], balance).diagonal()
            n = int(worth.argmax())
            if worth[n] > best and spent + prices.worst[n] <= prices.stake:
                which, length, best = i, n, float(worth[n])
        if length and not again and best < self.model_gain() * prices.rate:
            length = 0
            self._why = "the draft model promises more than repeated text"
        elif not length:
            likely = max(copy.survival[0] for copy in copies)
            self._why = f"repeated text, {likely:.0%} likely to go on alike, would not pay"
        if not length:
            return which, 0
        self._sending = copy = copies[which]
        self._exploring = False
        copy.sent = length
        expected = 1.0 + sum(copy.survival[:length])
        self.so_far = SoFar(beside=length, expected=expected, spent=spent)
        return which, length

    def weighed(self, draft: Draft) -> Draft:
        reached = self._sending.survival[: len(draft)] if self._sending else []
        if len(reached) != len(draft) or not draft.is_chain:
            return draft
        each = [now / before for before, now in pairwise([1.0, *reached])]
        return replace(draft, confidence=tuple(each))

    def _weigh(self, guess: Guess) -> Trial:
        """Weigh how far the target would follow a copy."""
        copy = Trial(self._text.learned.source(guess.source, guess.kind))
        self._seen.append(copy)
        copy.tokens += guess.tokens
        for i, share in enumerate(guess.shares or (1.0,) * len(guess.tokens)):
            copy.features.append(match_features(guess.match_length, i, share))
        copy.survival = list(accumulate(map(copy.state.predict, copy.features), mul))
        return copy

    # -- a pass that others share --

    def bid(self, offer: Offer) -> Bid:
        """Return the decision for a conversation alone, as far as a cut may depend on it."""
        reached = self._sending.survival[: offer.size] if self._sending else self.so_far.reached[1:]
        if not self._peek and self.drafting:
            mean = self.drafting.state.mean
            reached = [mean**i for i in range(1, offer.size + 1)]
        if len(reached) != offer.size:  # branches, or room for more than was drafted
            reached = sorted(offer.survival, reverse=True)
        return Bid(reached, self.prices.rate, self.prices.balance, self._passes)

    # -- after the round --

    def learn(self, done: RoundDone) -> None:
        """Learn from every guess that was seen and tested."""
        for trial in self._seen:
            trial.sent = min(trial.sent, len(done.drafted))  # others may have needed the rows
            trial.judge(done.emitted, done.accepted)

    def explain(self, n: int) -> str:
        """Return the reason why ``n`` guesses were sent."""
        if n == 0:
            return self._why or NO_GUESS
        if self._exploring or not self._seen:
            return "probing" if self._exploring else "drafting"
        passes, one = self.prices.passes, self.prices.one
        steps = (self.so_far.spent + passes[min(n + 1, len(passes) - 1)]) / one
        took = f"in the time of {max(steps, 1.0):.1f} steps"
        return f"{self.so_far.expected:.1f} tokens expected {took}"

    @property
    def explores(self) -> bool:
        """True if the round promised no gain and was tried from the source's own balance."""
        idle = self._text.learned.gained(self._booking.method).value < 0.0 and not self._sending
        return self._exploring if self.drafting else idle
