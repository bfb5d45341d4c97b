"""What sources offer in a round: guesses, sent or not, weighed before and judged after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from specllama.speculative.bets import NEGLIGIBLE, growth
from specllama.speculative.calibrate import Features, SourceState, match_features
from specllama.speculative.types import Guess


@dataclass(slots=True)
class Offer:
    """Guesses of one source this round, sent or not, in order; judged by what was emitted.

    ``tokens`` are None where no decision may look at them; ``used`` of them were sent.
    """

    state: SourceState
    tokens: list[int | None] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    used: int = 0

    def hit(self, emitted: Sequence[int]) -> bool:
        """Whether the first guess was right."""
        return bool(self.tokens and emitted) and self.tokens[0] == emitted[0]

    def judge(self, emitted: Sequence[int], accepted: int) -> None:
        """Learn from every guess that the emitted text tests."""
        if any(token is None for token in self.tokens):
            for i in range(min(self.used, accepted + 1)):
                self.state.learn(self.features[i], i < accepted, i)
            return
        for i, (token, truth) in enumerate(zip(self.tokens, emitted, strict=False)):
            self.state.learn(self.features[i], token == truth, i)
            if token != truth:
                return


@dataclass(slots=True)
class Copy:
    """A free guess, weighed: its best length, and the tokens that gains and is expected to give."""

    offer: Offer
    survival: list[float] = field(default_factory=list)  # of the target following it so far
    gain: float = 0.0
    length: int = 0
    expected: float = 1.0
    likely: float = 0.0  # the first token alone


def weigh(guess: Guess, state: SourceState, limit: int) -> Copy:
    """How far the target would follow the first ``limit`` tokens of a guess."""
    copy = Copy(Offer(state))
    survival = 1.0
    for i, token in enumerate(guess.tokens[:limit]):
        share = guess.shares[i] if guess.shares else 1.0
        ending = guess.endings[i] if guess.endings else 0.0
        features = match_features(guess.match_length, i, share, ending)
        survival *= state.predict(features)
        copy.survival.append(survival)
        copy.offer.tokens.append(token)
        copy.offer.features.append(features)
        if survival < NEGLIGIBLE:
            break
    return copy


def compare(copies: Sequence[Copy], v: Sequence[float], rate: float, purse: float) -> None:
    """Set how far each copy should go and what that gains.

    Of the lengths that gain tokens the one is taken that lets the purse grow most, in the mean of
    its logarithm (Kelly 1956): a long draft that fails early could stop all others for a while.
    Of several copies that begin differently one at most can be right.

    Args:
        v: milliseconds of a pass by rows. rate: tokens that a millisecond is worth.
        purse: plain steps that may be lost.
    """
    first: dict[int | None, float] = {}
    for copy in copies:
        token = copy.offer.tokens[0]
        first[token] = max(first.get(token, 0.0), copy.survival[0])
    fair = 1.0 / max(sum(first.values()), 1.0)
    for copy in copies:
        survival = [fair * s for s in copy.survival]
        copy.likely = survival[0]
        best = 0.0
        for n, total in enumerate(accumulate(survival), 1):
            gain = total - rate * (v[n + 1] - v[1])
            cost = max(v[n + 1] / v[1] - 1.0, 0.0)
            if gain <= 0.0 or cost >= purse:
                continue
            grows = growth(survival[:n], cost, purse)
            if grows > best:
                best = grows
                copy.gain, copy.length, copy.expected = gain, n, 1.0 + total
