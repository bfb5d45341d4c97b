"""Lessons about a pair at one rule and temperature, kept between requests.

How likely the target accepts a guess is told from its source's evidence: one online logistic
regression per source (recursive least squares on the logistic loss, with forgetting), three
weights: bias and two features. Only tested guesses are learnt from: what lies behind a rejection
was never judged.
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
    SINGLES,
    VARIANCES,
)

Kind = Literal["draft", "copy", "prediction"]
Features = tuple[float, float]
Spread = tuple[FloatArray, FloatArray]
"""Acceptances that the next guess may show, and how likely each is."""


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
    return (0.0 if lead is None else min(max(lead, 0.0), CERTAIN) / 2.0, z)


def match_features(match_length: int, depth: int, share: float = 1.0) -> Features:
    """Return the features of a copied token.

    Where it is tested, the ``depth`` tokens before it were right, so they lengthen the match: one
    number says what both do.

    Args:
        match_length: tokens that agree before the first copied one.
        depth: copied tokens before this one.
        share: how likely this token follows those before it, by what followed them in the text.
    """
    matched = min(max(match_length + depth, 1), MEMORY)  # a longer match says nothing more
    return (math.log2(matched) / 2.0, logit(share) / 2.0)


@dataclass
class Acceptance:
    """Learned facts about one source's guesses.

    Attributes:
        theta, p: the weights and their covariance.
        mean: how often guesses behind an accepted one are accepted.
        labels: guesses that were tested.
    """

    kind: Kind = "draft"
    theta: list[float] = field(default_factory=list)
    p: list[list[float]] = field(default_factory=list)
    mean: float = MEAN
    labels: int = 0

    def __post_init__(self) -> None:
        self.theta = self.theta or [*PRIOR[self.kind]]
        self.p = self.p or np.diag(VARIANCES).tolist()
        sizes = {len(self.p), len(self.theta), *map(len, self.p)}
        if sizes != {len(VARIANCES)} or np.diag(self.p).min() <= 0.0:
            raise ValueError("not a regression")
        self._deep = False  # whether a guess behind an accepted one was tested
        self._looks: list[Features] = []  # of the latest guesses that were seen, sent or not
        self._spread: tuple[int, Spread] | None = None  # and after how many labels it was told

    def predict(self, features: Features) -> float:
        bias, a, b = self.theta
        x, y = features
        return sigmoid(bias + a * x + b * y)

    def look(self, features: Features, *, lesson: bool = True) -> None:
        """Record the features of a seen guess. They count from the next lesson on; at once where
        there is no lesson unless the guess is sent."""
        self._looks.append(features)
        del self._looks[:-RECENT]
        self._spread = self._spread if lesson else None

    def forget_looks(self) -> None:
        """Begin a new text, which may be like any other."""
        self._looks, self._spread = [], None

    def spread(self) -> Spread:
        """Return the acceptances of the latest guesses under the present calibration; a broad prior
        stands for those that are missing."""
        if self._spread is None or self._spread[0] != self.labels:
            n, fade = len(FIRST_LOOKS), 1.0 - len(self._looks) / (RECENT + 1.0)
            bins = fade * np.array(FIRST_LOOKS)
            for features in self._looks:
                bins[min(int(n * self.predict(features)), n - 1)] += 1.0
            self._spread = self.labels, ((np.arange(n) + 0.5) / n, bins / bins.sum())
        return self._spread[1]

    def learn(self, features: Features, accepted: bool, depth: int = 0) -> None:
        """Learn from one tested guess, after ``depth`` accepted ones."""
        p, x, y = self.p, (1.0, *features), 1.0 if accepted else 0.0
        a = self.predict(features)
        w = max(a * (1.0 - a), EPSILON)
        px = [sum(map(mul, row, x)) for row in p]
        scale = w / (1.0 + w * sum(map(mul, px, x)))
        # forgetting must not blow up what is never tested
        keep = FORGET if sum(p[i][i] for i in range(len(p))) < sum(VARIANCES) else 1.0
        for i, row in enumerate(p):
            p[i] = [(v - px[i] * scale * q) / keep for v, q in zip(row, px, strict=True)]
        bias, *others = (
            min(max(t + sum(map(mul, row, x)) * (y - a), -CERTAIN), CERTAIN)
            for t, row in zip(self.theta, p, strict=True)
        )
        self.theta[:] = bias, *(max(t, 0.0) for t in others)  # evidence never counts against one
        self._deep = self._deep or depth > 0
        if depth or not self._deep:  # where one guess never pays, first ones stand for others
            self.mean += (y - self.mean) / RECENT
        self.labels += 1


@dataclass
class Trial:
    """Guesses of one source in a round, sent or not, in order; the emitted text judges them.

    ``tokens`` are None where no decision may look at them; ``sent`` of them were sent.
    ``survival`` are the probabilities that the target comes to each and accepts it.
    """

    state: Acceptance
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


@dataclass
class Mean:
    """A running mean."""

    value: float = 0.0
    n: int = 0

    def add(self, value: float) -> None:
        self.n = min(self.n + 1, MEMORY)
        self.value += (value - self.value) / self.n


@dataclass
class Learned:
    """The sources of a pair, and what its rounds gained.

    Attributes:
        asked: by method, what rounds that asked for copies or rows gained, in plain steps.
        pace: tokens written of late, and the plain steps that they took.
    """

    sources: dict[str, Acceptance] = field(default_factory=dict)
    asked: dict[str, Mean] = field(default_factory=dict)
    pace: tuple[float, float] = (SINGLES, SINGLES)

    def source(self, name: str, kind: Kind) -> Acceptance:
        if name not in self.sources:
            self.sources[name] = Acceptance(kind)
        return self.sources[name]

    def gained(self, method: str) -> Mean:
        """Return the mean gain of asking for drafts by this method."""
        return self.asked.setdefault(method, Mean(0.0, SINGLES))

    def wrote(self, tokens: int, steps: float) -> None:
        """Record that a round wrote some tokens in the time of some plain steps."""
        written, took = self.pace
        keep = 1.0 - 1.0 / MEMORY
        self.pace = keep * written + tokens, keep * took + steps
