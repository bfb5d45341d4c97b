"""The map from a source's evidence for a guess to the probability that the target accepts it.

One online logistic regression per source (recursive least squares on the logistic loss, with
forgetting), five weights: bias, three features, and what sets the present text apart, which starts
at zero with every text. Only tested guesses are learnt from: what lies behind a rejection was never
judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Literal

import numpy as np

from specllama.arrays import FloatArray
from specllama.speculative.policy.constants import (
    CERTAIN,
    EPSILON,
    FIRST_LOOKS,
    FORGET,
    MEAN,
    MEMORY,
    PRIOR,
    RECENT,
    SETTLE,
)

Kind = Literal["draft", "copy", "prediction"]
Features = tuple[float, float, float]


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def logit(p: float) -> float:
    """Return log(p / (1 - p)), clipped."""
    p = min(sigmoid(CERTAIN), max(sigmoid(-CERTAIN), p))
    return math.log(p / (1.0 - p))


def draft_features(confidence: float | None, lead: float | None) -> Features:
    """Return the features of a drafted token.

    Args:
        confidence: the draft's largest probability (known before the token is drawn).
        lead: of the drawn token over the runner-up, in logits when greedy, in perturbed log
            scores under common noise; None where no decision may look at the drawn token.
    """
    z = 0.0 if confidence is None else logit(confidence) / 2.0
    return (0.0 if lead is None else min(max(lead, 0.0), CERTAIN) / 2.0, z, 0.0)


def match_features(
    match_length: int, depth: int, share: float = 1.0, ending: float = 0.0
) -> Features:
    """Return the features of a copied token.

    Where it is tested, the ``depth`` tokens before it were right, so they lengthen the match: one
    number says what both do.

    Args:
        match_length: tokens that agree before the first copied one.
        depth: copied tokens before this one.
        share: how likely this token follows those before it, by what followed them in the text.
        ending: how likely a passage ends before it, see ``Request.endings``.
    """
    matched = min(max(match_length + depth, 1), MEMORY)  # a longer match says nothing more
    return (math.log2(matched) / 2.0, logit(share) / 2.0, ending)


@dataclass
class Acceptance:
    """Learned facts about one source's guesses, kept between requests; ``InText`` learns into it.

    Attributes:
        theta, p: the weights and their covariance, as a new text begins with them.
        mean: how often guesses behind an accepted one are accepted.
        labels: guesses that were tested.
        looks: features of the latest guesses that were seen, sent or not.
    """

    kind: Kind = "draft"
    theta: list[float] = field(default_factory=list)
    p: list[list[float]] = field(default_factory=list)
    mean: float = MEAN
    labels: int = 0
    looks: list[Features] = field(default_factory=list)

    def __post_init__(self) -> None:
        weights, variances = PRIOR[self.kind]
        prior = np.diag(variances).tolist()
        self.theta = self.theta or list(weights)
        self.p = self.p or prior
        sizes = {len(self.p), len(self.theta), *map(len, self.p)}
        if sizes != {len(weights)} or np.diag(self.p)[:-1].min() <= 0.0:
            raise ValueError("not a regression")
        self.theta[-1] = 0.0
        self.p = [*([*row[:-1], 0.0] for row in self.p[:-1]), prior[-1]]

    def predict(self, features: Features, here: float = 0.0) -> float:
        """Return the acceptance of a guess in a text of that weight."""
        bias, a, b, c, _ = self.theta
        x, y, z = features
        return sigmoid(bias + a * x + b * y + c * z + here)


class InText:
    """One source's guesses in one text: the lessons of all texts, and the bias of this one.

    Texts that are written at once share the former and keep the latter to themselves.
    """

    def __init__(self, state: Acceptance) -> None:
        self.state = state
        self._here = 0.0  # the weight of this text
        self._own = list(state.p[-1])  # its covariances
        self._most = sum(PRIOR[state.kind][1])  # of all variances
        self._looks: list[Features] = []  # the newest of this text
        self._known = state.labels  # what was learnt when those covariances were
        self._spread: tuple[FloatArray, FloatArray] | None = None
        self._of = 0  # labels that it was told from

    @property
    def mean(self) -> float:
        return self.state.mean

    def predict(self, features: Features) -> float:
        return self.state.predict(features, self._here)

    def look(self, features: Features) -> None:
        """Record the features of a seen guess (they count from the next lesson on)."""
        for looks, most in ((self.state.looks, SETTLE * RECENT), (self._looks, RECENT)):
            looks.append(features)
            del looks[:-most]

    def spread(self) -> tuple[FloatArray, FloatArray]:
        """Return acceptances that the next guess may show, and their weights, which sum to 1.

        The guesses of this text under the present calibration, over those of other texts and a
        broad prior, which fade behind them.
        """
        if self._spread is None or self._of != self.state.labels:
            n = len(FIRST_LOOKS)
            fade = 1.0 - len(self._looks) / (RECENT + 1.0)
            mine = set(map(id, self._looks))
            others = [features for features in self.state.looks if id(features) not in mine]
            known = len(others) / (len(others) + RECENT)
            bins = [fade * (1.0 - known) * first for first in FIRST_LOOKS]
            each = fade * known * sum(FIRST_LOOKS) / max(len(others), 1)
            for looks, weight in ((others, each), (self._looks, 1.0)):
                for features in looks:
                    bins[min(int(n * self.predict(features)), n - 1)] += weight
            self._of = self.state.labels
            self._spread = (np.arange(n) + 0.5) / n, np.array(bins) / sum(bins)
        return self._spread

    def learn(self, features: Features, accepted: bool, depth: int = 0) -> None:
        """Learn from one tested guess, after ``depth`` accepted ones."""
        state, x, y = self.state, (1.0, *features, 1.0), 1.0 if accepted else 0.0
        if self._known != state.labels:  # another text taught: how ours goes with it is not known
            self._own[:-1] = [0.0] * (1 + len(features))
        p = [[*row[:-1], c] for row, c in zip(state.p, self._own[:-1], strict=False)] + [self._own]
        a = self.predict(features)
        w = max(a * (1.0 - a), EPSILON)
        px = [sum(map(mul, row, x)) for row in p]
        scale = w / (1.0 + w * sum(map(mul, px, x)))
        # forgetting must not blow up what is never tested
        keep = FORGET if sum(p[i][i] for i in range(len(p))) < self._most else 1.0
        for i, row in enumerate(p):
            p[i] = [(v - px[i] * scale * q) / keep for v, q in zip(row, px, strict=True)]
        theta = [
            min(max(t + sum(map(mul, row, x)) * (y - a), -CERTAIN), CERTAIN)
            for t, row in zip((*state.theta[:-1], self._here), p, strict=True)
        ]
        bias, lead, sure, ending, self._here = theta
        # confidence never counts against a guess, nor an ending for it
        state.theta[:-1] = bias, max(lead, 0.0), max(sure, 0.0), min(ending, 0.0)
        for known, row in zip(state.p, p[:-1], strict=False):
            known[:-1] = row[:-1]
        self._own = p[-1]
        if depth or not state.labels:
            state.mean += (y - state.mean) / RECENT
        state.labels += 1
        self._known = state.labels


@dataclass
class Trial:
    """Guesses of one source in a round, sent or not, in order; the emitted text judges them.

    ``tokens`` are None where no decision may look at them; ``sent`` of them were sent.
    ``survival`` are the probabilities that the target comes to each and accepts it.
    """

    state: InText
    tokens: list[int | None] = field(default_factory=list)
    features: list[Features] = field(default_factory=list)
    survival: list[float] = field(default_factory=list)
    sent: int = 0

    def judge(self, emitted: Sequence[int], accepted: int) -> None:
        """Learn from every guess that the emitted text tests."""
        if None in self.tokens:
            for i in range(min(self.sent, accepted + 1)):
                self.state.learn(self.features[i], i < accepted, i)
            return
        for i, (token, truth) in enumerate(zip(self.tokens, emitted, strict=False)):
            self.state.learn(self.features[i], token == truth, i)
            if token != truth:
                return
