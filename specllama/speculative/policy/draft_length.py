"""The length of a draft: decisions of one round on what joins it, and which copy is sent.

A further guess is worth its expected tokens, less what its time gives elsewhere; a round that
risks much of what may be lost is worth less (``budget.growth``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul

import numpy as np

from specllama.arrays import FloatArray
from specllama.events import NO_GUESS, RoundDone
from specllama.speculative.budget import Bid, growth
from specllama.speculative.effects import Offer
from specllama.speculative.policy.constants import AHEAD, BEHIND, EPSILON, MEAN, MEMORY, RECENT
from specllama.speculative.policy.costs import Costs, CostTable
from specllama.speculative.policy.learned import (
    Acceptance,
    Learned,
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


def affordable(text: Text, target: CostTable, most: int, covers: float) -> int:
    """Return how many guesses, ``most`` at most, risk no more than ``covers`` plain steps of all
    whose pass it is."""
    all_, depth = 1 + text.others, text.depth
    one = target.ms(all_, depth)
    may = one + covers * one / all_
    return next((n for n in range(most, 0, -1) if target.most(n + all_, depth) <= may), 0)


class Weighing(DraftJudge):
    """The answers of one round; born when it opens, and gone when it is over. Times in
    milliseconds.

    Args:
        booking: who drafts.
        most: guesses at most. longest: of these, see ``affordable``.
        peek: decisions may look at drawn tokens.
        clock: seconds.

    Attributes:
        one: of a plain step. due: expected of the draft passes.
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
        longest: int,
        *,
        peek: bool,
        clock: Callable[[], float],
    ) -> None:
        self._text, self._ledger, self._booking = text, ledger, booking
        self._target, self._draft = target, draft = costs.target, costs.steps(booking)
        self._most, self.longest, self._peek, self._clock = most, longest, peek, clock
        assert target.level is not None
        draft.guess(target.level * costs.draft_share)
        all_ = 1 + text.others
        # by rows of its own, where each of the others has as many: a row that is dear alone can be
        # cheap where all take one
        self._v = [0.0, *self._passes((most + 1) * all_)[all_::all_]]
        self.one = self._v[1]
        # of the first draft step, and of each behind it
        self._step = draft.ms(all_, text.depth)
        self._next = 0.0 if booking.at_once else self._step
        tokens, steps = text.learned.pace
        self._rate = max(tokens / steps, 1.0) / self.one  # tokens that a millisecond gives
        # what may be lost: as many conversations as now may lose it, which share one balance, but
        # their guesses do not fail together
        self._stake = ledger.covers(booking.payer) * self.one / all_
        self._balance = max(self._rate * self._stake * all_, EPSILON)  # in tokens
        self._seen: list[Trial] = []  # all guesses that were seen
        self._copies: list[Trial] = []
        self.drafting: Trial | None = None  # by the paying source
        self._sending: Trial | None = None  # the copy that goes
        self._reached = [1.0]  # probability that the target comes to guess 1, 2, ... and behind
        self._n = self._beside = 0  # rows of guesses; of them, off the path of the drafted ones
        self._expected = 1.0
        self._rows = 1  # of the draft pass that runs
        self._since: float | None = None  # when it began
        self._spent = self.due = 0.0  # by draft passes, and what was expected
        self._exploring = False
        self._why = ""

    def _passes(self, rows: int) -> list[float]:
        """Return the milliseconds of passes of 0, 1, ... rows."""
        return self._target.upto(rows, self._text.depth)

    def _fits(self, guesses: int, further: float = 0.0) -> bool:
        """True if N guesses, and ``further`` ms for them, risk no more than the stake."""
        if guesses > self._most:
            return False
        rows = guesses + 1 + self._text.others
        worst = self._target.most(rows, self._text.depth) - self.one
        return self._spent + further + worst <= self._stake

    # -- what a further guess gains --

    def _lines(self, mean: float, spent: float, stake: float) -> tuple[FloatArray, FloatArray]:
        """Return the gain of 1, 2, ... further guesses over stopping now: ``slopes * a - prices``
        tokens.

        ``a`` is the acceptance of the next guess; guesses after it use the mean acceptance.

        Args:
            spent: drafting when the next guess has been seen. stake: may be lost.
        """
        reached, depth = self._reached, len(self._reached) - 1
        rows = self._beside + len(reached)
        v = np.array(self._v[rows : rows + min(self._most - rows + 1, AHEAD) + 1])
        took = spent + (v - self.one)
        took[1:] += self._next * _COUNT[: len(took) - 1]  # the first is that of stopping here
        if took[-1] > stake:
            took = took[: max(int(np.argmax(took > stake)), 1)]
        more, here = _COUNT[: len(took) - 1], reached[-1]
        survival = [*reached[1:], *(here * mean**more)]
        worth = growth(survival, self._rate * took, self._balance)[:, depth:]
        return worth[more + 1, more + 1] - worth[1:, 0], worth[0, 0] - worth[1:, 0]

    def _look(self, source: Acceptance, spent: float, stake: float) -> float:
        """Return the tokens gained by seeing the next guess before deciding, without its step."""
        slopes, prices = self._lines(source.mean, spent, stake)
        acceptance, weights = source.spread()
        gains = acceptance[:, None] * slopes - prices
        return float(weights @ gains.max(axis=1, initial=0.0))

    # -- what asking the paying source promises --

    def _promise(self, source: Acceptance, read: int, stake: float) -> tuple[float, float]:
        """Return (ms that asking the paying source gains in a round, rounds that are left), if it
        reads ``read`` tokens first."""
        gained = self._look(source, self._step, stake) / self._rate - self._step
        left = min(self._text.left, 2 * MEMORY) * (1.0 - MEAN)
        # where a look does not pay its step it will not be repeated
        rounds = max(left, 1.0) if gained > 0.0 else 1.0
        # nobody shares what is read, and all who share a pass wait for it
        waits = max(self._draft.ms(read, self._text.depth) - self._step, 0.0)
        return gained - (1 + self._text.others) * waits / rounds, rounds

    def model_gain(self) -> float:
        """Return the milliseconds that asking the paying source should gain in this round."""
        source = self._text.learned.sources.get(self._booking.payer)
        return self._promise(source, max(self._text.lag, 1), self._stake)[0] if source else 0.0

    # -- the answers --

    def read(self, source: str, tokens: int) -> int:
        if not source:
            return self._scouts(tokens)
        text, n = self._text, self._n
        trial = Trial(text.learned.source(source, "draft"))
        if self._sending:  # a copy goes: a branch beside it pays where its first guess fails
            self._reached, self._beside = [1.0 - self._sending.survival[0]], n
        text.lag = tokens
        rows = self._readable(trial.state, tokens) if n < self._most else 0
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
        draft, one, depth, n = self._draft, self.one, self._text.depth, self._n
        rest, full, row = self._v[n + 2] - one, BEHIND * one, self._v[n + 2] - self._v[n + 1]
        gained, rounds = self._promise(source, draft.within(lag, full - rest, depth), full)
        if gained <= 0.0:
            blind = 0.0 if self._peek else row  # see ``take``
            if n or blind - rounds * gained > self._ledger.balance(self._booking.payer) * one:
                self._why = f"drafting would not pay: {self._dear(source, row)}"
                return 0
            self._exploring = True
        least, read = min(lag, RECENT), draft.within(lag, self._stake - rest, depth)
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
        cost = (self._step + row) * self._rate
        if source.mean <= cost:
            return f"a guess takes the time of {cost:.2f} tokens and brings {source.mean:.2f}"
        if self._look(source, self._step, self._stake) > self._step * self._rate:
            return "reading the text first would take longer than guesses save"
        return "a refused guess may cost more than can be risked now"

    def _scouts(self, rows: int) -> int:
        """Return how many scout rows a pass may have in addition to its own."""
        ledger, target, payer = self._ledger, self._target, self._booking.payer
        trusted = self._text.learned.gained(self._booking.method).value > 0.0
        balance = ledger.covers(payer) if trusted else ledger.balance(payer)
        cost, least = (target.most if trusted else target.ms), 1 + self._text.others
        within = self.one * (1.0 + balance)
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
        need = 1.0  # acceptance from which on it goes
        if self._fits(self._n + 1):
            slopes, prices = self._lines(trial.state.mean, self._spent, self._stake)
            need = min((p / s for s, p in zip(slopes, prices, strict=True) if s > 0.0), default=1.0)
            if self._exploring and token is None and not self._n:
                need = 0.0  # what may not be looked at teaches nothing unless it is sent
        if wanted := a > need:
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

    def further(self, likely: float | None = None, rows: int = 0) -> bool:
        if self.drafting is None:
            return True
        if not rows:
            self._ran()
        source, price = self.drafting.state, self._next
        if price and likely is not None:
            depth = self._text.depth
            price = self._draft.ms(rows + 1, depth) - self._draft.ms(rows, depth)
        if not self._fits(self._n + 1, price):
            return False
        if likely is None:
            worth = self._look(source, self._spent + price, self._stake)
        else:
            worth = likely * float(np.dot(*source.spread()))
        if worth <= self._rate * price:
            return False
        self._rows = rows + 1 if self._next else 0
        if not rows:
            self._since = self._clock()
        return True

    def _ran(self) -> None:
        """Book the time of the finished draft pass of ``_rows`` tokens; 0: nothing ran."""
        if self._since is None:
            return
        ms, self._since = (self._clock() - self._since) * 1e3, None
        self._spent += ms
        if not self._rows:
            self.due += ms
            return
        self.due += self._draft.most(self._rows, self._text.depth)
        if not self._text.others:  # whose steps shared or delayed this one
            self._draft.observe(self._rows, ms, self._text.depth)

    def row(self, likely: float, *, keep: bool = True) -> bool:
        n, v = self._n, self._v
        if not (self._fits(n + 1) and likely > self._rate * (v[n + 2] - v[n + 1])):
            return False
        if keep:
            self._n += 1
            self._beside += 1
            self._expected += likely
        return True

    def pick(self, guesses: Sequence[Guess]) -> tuple[int, int]:
        again = self._copies  # the paying source had its turn
        copies = self._copies = again or [self._weigh(guess) for guess in guesses]
        balance = max(self._balance - self._rate * self._spent * (1 + self._text.others), EPSILON)
        costs = self._rate * (np.array(self._v[1 : self.longest + 2]) - self.one)
        which, length, best = 0, 0, 0.0
        for i, copy in enumerate(copies):
            survival = copy.survival[: self.longest]
            worth = growth(survival, costs[: len(survival) + 1], balance).diagonal()
            n = int(worth.argmax())
            if worth[n] > best and self._fits(n):
                which, length, best = i, n, float(worth[n])
        if length and not again and best < self.model_gain() * self._rate:
            length = 0
            self._why = "the draft model promises more than repeated text"
        elif not length:
            likely = max(copy.survival[0] for copy in copies)
            self._why = f"repeated text, {likely:.0%} likely to go on alike, would not pay"
        if not length:
            return which, 0
        self._sending = copy = copies[which]
        self._exploring = False
        copy.sent = self._n = length
        self._expected = 1.0 + sum(copy.survival[:length])
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
        reached = self._sending.survival[: offer.size] if self._sending else self._reached[1:]
        if not self._peek and self.drafting:
            mean = self.drafting.state.mean
            reached = [mean**i for i in range(1, offer.size + 1)]
        if len(reached) != offer.size:  # branches, or room for more than was drafted
            reached = sorted(offer.survival, reverse=True)
        return Bid(reached, self._rate, self._balance, self._passes)

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
        steps = (self._spent + self._v[min(n + 1, len(self._v) - 1)]) / self.one
        took = f"in the time of {max(steps, 1.0):.1f} steps"
        return f"{self._expected:.1f} tokens expected {took}"

    @property
    def explores(self) -> bool:
        """True if the round promised no gain and was tried from the source's own balance."""
        idle = self._text.learned.gained(self._booking.method).value < 0.0 and not self._sending
        return self._exploring if self.drafting else idle
