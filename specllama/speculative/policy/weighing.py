"""One round's decisions: how far a draft goes, what joins it, and which copy is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np

from specllama.events import NO_GUESS
from specllama.speculative.budget import Bid, growth
from specllama.speculative.effects import Offer
from specllama.speculative.policy import gain
from specllama.speculative.policy.acceptance import (
    InText,
    Kind,
    Trial,
    draft_features,
    match_features,
)
from specllama.speculative.policy.constants import BEHIND, READ, SINGLES
from specllama.speculative.policy.costs import CostTable
from specllama.speculative.policy.gain import Lines, Terms
from specllama.speculative.policy.learned import Learned, Mean
from specllama.speculative.policy.ledger import Ledger
from specllama.speculative.types import Booking, Guess, Willing
from specllama.speculative.window import Outcome, Plan


@dataclass
class Text:
    """The text of one conversation, as far as decisions depend on it.

    Attributes:
        left: tokens that the reply may still have.
        depth: tokens of context. lag: of them unread by the paying source.
        part: that source reads only a part of the text.
        others: conversations that shared the last pass.
        sources: what is known of each source here.
    """

    learned: Learned
    left: float
    depth: int = 0
    lag: int = 0
    written: int = 0
    part: bool = False
    others: int = 0
    sources: dict[str, InText] = field(default_factory=dict)

    def source(self, name: str, kind: Kind) -> InText:
        if name not in self.sources:
            self.sources[name] = InText(self.learned.source(name, kind))
        return self.sources[name]

    def asked(self, booking: Booking) -> Mean:
        """Return the mean gain of asking for drafts under this booking."""
        return self.learned.asked.setdefault(booking.method, Mean(0.0, SINGLES))

    def named(self, source: str) -> str:
        """Return a source's name: a drafter that read only part of the text is calibrated
        separately."""
        return f"{source} (part)" if self.part else source

    def wrote(self, tokens: int, others: int) -> None:
        """Note that a round added tokens, in a pass shared with ``others`` conversations."""
        self.written += tokens
        self.depth += tokens
        self.lag += tokens
        self.left -= tokens
        self.others = others

    def usual_rest(self) -> float:
        """Return the expected number of tokens still to come, judged by other replies here."""
        usual = self.learned.reply.value
        return min(self.left, max(usual - self.written, (usual + self.written) / 2.0))


class Weighing(Willing):
    """The answers of one round; born when it opens, and gone when it is over.

    Args:
        target, draft: costs of their passes.
        booking: who drafts.
        clock: seconds.
    """

    weighs = True

    def __init__(
        self,
        text: Text,
        terms: Terms,
        target: CostTable,
        draft: CostTable,
        ledger: Ledger,
        booking: Booking,
        clock: Callable[[], float],
    ) -> None:
        self._text, self._terms = text, terms
        self._target, self._draft = target, draft
        self._ledger, self._booking = ledger, booking
        self._clock = clock
        self._seen: list[Trial] = []  # all guesses that were seen
        self._copies: list[Trial] = []
        self._drafting: Trial | None = None  # by the paying source
        self._sending: Trial | None = None  # the copy that goes
        self._reached = [1.0]  # probability that the target comes to guess 1, 2, ... and behind
        self._n = self._beside = 0  # rows of guesses; of them, off the path of the drafted ones
        self._expected = 1.0
        self._rows = 1  # of the draft pass that runs
        self._since: float | None = None  # when it began
        self._spent = self._due = 0.0  # ms of draft passes, and what was expected
        self._exploring = False
        self._why = ""
        self.longest = next((n for n in range(terms.most, 0, -1) if self._fits(n)), 0)

    @property
    def one(self) -> float:
        """Milliseconds of a plain step."""
        return self._terms.one

    def _fits(self, guesses: int, further: float = 0.0) -> bool:
        """True if N guesses, and ``further`` ms for them, risk no more than the stake."""
        terms = self._terms
        if guesses > terms.most:
            return False
        worst = self._target.most(guesses + 1 + terms.others, terms.depth) - terms.one
        return self._spent + further + worst <= terms.stake

    # -- what asking the paying source promises --

    def _lines(self, mean: float, spent: float, stake: float) -> Lines:
        return gain.lines(self._terms, self._reached, self._beside, mean, spent, stake)

    def _promise(self, lines: Lines, source: InText, read: int) -> tuple[float, float]:
        """Return (ms that asking the paying source gains in a round, rounds that are left), if it
        reads ``read`` tokens first."""
        terms, draft = self._terms, self._draft
        gained = gain.look(lines, source.spread()) / terms.rate - terms.step
        left = self._text.usual_rest()
        # where a look does not pay its step it will not be repeated
        rounds = max(left / self._text.learned.round.value, 1.0) if gained > 0.0 else 1.0
        # nobody shares what is read, and all who share a pass wait for it
        waits = (1 + terms.others) * max(draft.ms(read, terms.depth) - terms.step, 0.0)
        return gained - waits / rounds, rounds

    def model_gain(self) -> float:
        """Return the milliseconds that asking the paying source should gain in this round."""
        name, terms = self._text.named(self._booking.payer), self._terms
        if name not in self._text.learned.sources:
            return 0.0
        source = self._text.source(name, "draft")
        lines = self._lines(source.mean, terms.step, terms.stake)
        return self._promise(lines, source, max(self._text.lag, 1))[0]

    # -- the answers --

    def read(self, source: str, tokens: int) -> int:
        if not source:
            return self._scouts(tokens)
        text, terms = self._text, self._terms
        text.part = text.part or self._draft.ms(tokens, terms.depth) > BEHIND * terms.one
        trial = Trial(text.source(text.named(source), "draft"))
        if self._sending:  # a copy goes: a branch beside it pays where its first guess fails
            self._reached = [1.0 - self._sending.survival[0]]
            self._beside = self._n
        text.lag = tokens
        rows = self._readable(trial.state, tokens) if self._n < terms.most else 0
        if not rows:
            self._drafting = None
            self._exploring = False
            return 0
        text.part, text.lag = text.part or rows < tokens, 0
        self._drafting, self._rows = trial, rows
        self.granted += rows
        self._seen.append(trial)
        self._since = self._clock()
        return rows

    def _readable(self, source: InText, lag: int) -> int:
        """Return how many of the newest ``lag`` tokens to read; 0 and a reason to stay out.

        What reading leaves of a balance has to pay for the draft that promises most, and what it
        leaves of a share of one for a guess: the others' gains fill it up.
        """
        terms, draft, n = self._terms, self._draft, self._n
        one, depth, mean, full = terms.one, terms.depth, source.mean, BEHIND * terms.one
        lines = self._lines(mean, terms.step, full)
        rest = self._price(lines, mean)
        gained, rounds = self._promise(lines, source, draft.within(lag, full - rest, depth))
        if gained <= 0.0 and self._text.part:  # the newest tokens will do to find out
            lag = min(lag, READ)
            gained, rounds = self._promise(lines, source, lag)
        if gained <= 0.0:
            row = terms.row(n)
            forced = 0.0 if terms.peek else row
            if n or forced - rounds * gained > self._ledger.balance(self._booking.payer) * one:
                cost = (terms.step + row) * terms.rate
                earned = f"{mean:.2f} tokens expected for {cost:.2f} steps of time"
                self._why = f"drafting would not pay: {earned}"
                return 0
            self._exploring = True
        least = min(lag, READ)
        read = draft.within(lag, terms.stake - rest, depth)
        if read < least and not self._exploring:  # a shorter draft may do
            lines = self._lines(mean, terms.step, terms.stake - draft.most(least, depth))
            if self._promise(lines, source, least)[0] > 0.0:
                read = draft.within(lag, terms.stake - self._price(lines, mean), depth)
        if read < least:
            need = (draft.ms(least, depth) + rest) / one
            dear = f"catching up would cost up to {need:.1f} steps, more than the budget"
            self._why = f"waiting: {dear}"
            return 0
        return read

    def _price(self, lines: Lines, mean: float) -> float:
        """Return the milliseconds of the most promising draft after its first step. In company that
        is one guess: the others' gains pay for more."""
        terms = self._terms
        best = 0 if terms.others else gain.best(lines, mean)
        return best * terms.further + terms.v[self._n + 2 + best] - terms.one

    def _scouts(self, rows: int) -> int:
        """Return how many scout rows a pass may have in addition to its own."""
        terms, ledger, target = self._terms, self._ledger, self._target
        trusted = self._text.asked(self._booking).value > 0.0
        balance = (ledger.covers if trusted else ledger.balance)(self._booking.payer)
        cost, least = (target.most if trusted else target.ms), 1 + terms.others
        within = terms.one * (1.0 + balance)
        fit = (n for n in range(1, rows + 1) if cost(n + least, terms.depth) <= within)
        return max(fit, default=0)

    def take(self, confidence: float | None, lead: float | None, token: int | None) -> bool:
        self._ran()
        trial, terms = self._drafting, self._terms
        if trial is None:
            return True  # a drafter that did not ask to begin
        features = draft_features(confidence, lead if terms.peek else None)
        a = trial.state.predict(features)
        trial.state.look(features)
        fits = self._fits(self._n + 1)
        # the emitted text tells what a drawn guess was worth: to learn that it need not be sent
        forced = self._exploring and not self._n and not (terms.peek and token is not None)
        need = 1.0  # acceptance from which on it goes
        if fits and not forced:
            need = gain.needed(self._lines(trial.state.mean, self._spent, terms.stake))
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

    def further(self, likely: float | None = None, rows: int = 0) -> bool:
        if self._drafting is None:
            return True
        if not rows:
            self._ran()
        terms, source, n, price = self._terms, self._drafting.state, self._n, 0.0
        if likely is None:
            price = terms.further
        elif terms.further:
            draft = self._draft
            price = draft.ms(rows + 1, terms.depth) - draft.ms(rows, terms.depth)
        if not self._fits(n + 1, price):
            return False
        if likely is None:
            lines = self._lines(source.mean, self._spent + price, terms.stake)
            worth = gain.look(lines, source.spread())
        else:
            worth = gain.beside(likely, source.spread(), terms.rate, terms.row(n))
        if worth <= terms.rate * price:
            return False
        self._rows = rows + 1 if terms.further else 0
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
            self._due += ms
            return
        self._due += self._draft.most(self._rows, self._terms.depth)
        if not self._terms.others:  # whose steps shared or delayed this one
            self._draft.observe(self._rows, ms, self._terms.depth)

    def row(self, likely: float, *, keep: bool = True) -> bool:
        if not (self._fits(self._n + 1) and likely > self._terms.rate * self._terms.row(self._n)):
            return False
        if keep:
            self._n += 1
            self._beside += 1
            self._expected += likely
        return True

    def pick(self, guesses: Sequence[Guess]) -> tuple[int, int]:
        terms, again = self._terms, self._copies  # the paying source had its turn
        copies = self._copies = again or [self._weigh(guess) for guess in guesses]
        # of several copies that begin differently one at most can be right
        openings: dict[int | None, float] = {}
        for copy in copies:
            first = copy.tokens[0]
            openings[first] = max(openings.get(first, 0.0), copy.survival[0])
        fair = 1.0 / max(sum(openings.values()), 1.0)
        balance = terms.tokens(terms.stake - self._spent)
        costs = terms.rate * (np.array(terms.v[1 : self.longest + 2]) - terms.one)
        which, length, best = 0, 0, 0.0
        for i, copy in enumerate(copies):
            survival = [fair * s for s in copy.survival[: self.longest]]
            worth = growth(survival, costs[: len(survival) + 1], balance).diagonal()
            n = int(worth.argmax())
            if worth[n] > best and self._fits(n):
                which, length, best = i, n, float(worth[n])
        if length and not again and best < self.model_gain() * terms.rate:
            length = 0
            self._why = "the draft model promises more than a copy"
        elif not length:
            self._why = (
                f"the best copy is only {fair * max(c.survival[0] for c in copies):.0%} likely"
            )
        if not length:
            return which, 0
        self._sending = copy = copies[which]
        self._exploring = False
        copy.sent = self._n = length
        self._expected = 1.0 + fair * sum(copy.survival[:length])
        return which, length

    def _weigh(self, guess: Guess) -> Trial:
        """Weigh how far the target would follow a copy."""
        copy = Trial(self._text.source(guess.source, guess.kind))
        self._seen.append(copy)
        n = len(guess.tokens)
        copy.tokens += guess.tokens
        habits = zip(guess.shares or (1.0,) * n, guess.endings or (0.0,) * n, strict=True)
        for i, (share, ending) in enumerate(habits):
            copy.features.append(match_features(guess.match_length, i, share, ending))
        copy.survival = list(accumulate(map(copy.state.predict, copy.features), mul))
        return copy

    # -- a pass that others share --

    def bid(self, offer: Offer) -> Bid:
        """Return the decision for a conversation alone, as far as a cut may depend on it."""
        terms = self._terms
        reached = self._sending.survival[: offer.size] if self._sending else self._reached[1:]
        if not terms.peek and self._drafting:
            mean = self._drafting.state.mean
            reached = [mean**i for i in range(1, offer.size + 1)]
        if len(reached) != offer.size:  # branches, or room for more than was drafted
            reached = sorted(offer.survival, reverse=True)
        return Bid(
            reached,
            terms.rate,
            terms.tokens(terms.stake),
            lambda rows: self._target.upto(rows, terms.depth),
        )

    # -- after the round --

    def learn(self, outcome: Outcome) -> None:
        """Learn from every guess that was seen and tested."""
        for trial in self._seen:
            trial.sent = min(trial.sent, outcome.drafted)  # others may have needed the rows
            trial.judge(outcome.tokens, outcome.accepted)

    def explain(self, n: int) -> Plan:
        """Return the plan as it was carried out: ``n`` guesses, and the reason in words."""
        if n == 0:
            return Plan(0, self._why or NO_GUESS)
        if self._exploring:
            return Plan(n, "probing")
        if not self._seen:
            return Plan(n, "drafting")
        v = self._terms.v
        steps = (self._spent + v[min(n + 1, len(v) - 1)]) / self._terms.one
        took = f"in the time of {max(steps, 1.0):.1f} steps"
        return Plan(n, f"{self._expected:.1f} tokens expected {took}")

    @property
    def drafted(self) -> Trial | None:
        """The guesses of the paying source, None if it stayed out."""
        return self._drafting

    @property
    def explores(self) -> bool:
        """True if the round promised no gain and was tried from the source's own balance."""
        if self._drafting is None:
            return self._text.asked(self._booking).value < 0.0 and not self._sending
        return self._exploring

    @property
    def due(self) -> float:
        """The expected time of its draft passes."""
        return self._due
