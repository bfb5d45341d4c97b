"""From what a source says about a guess to the probability that the target accepts it.

One online logistic regression per source (recursive least squares on the logistic loss, with
forgetting), five weights: bias, three features, and what sets the present text apart, which starts
at zero with every text. Only tested guesses are learnt from: what lies behind a rejection was never
judged.
"""

from __future__ import annotations

import math
from collections import deque
from operator import mul
from typing import Any

Features = tuple[float, float, float]

_WEIGHTS = 5
_SPREAD = (1.0, 0.25, 0.25, 0.25)  # prior variances of the weights that texts share
# Variance of the log odds from text to text; a copy's match says more than the texts before it.
_APART = {"draft": 0.5, "copy": 0.0}
_FORGET = 0.998
_MEAN_GAIN = 0.04
_NEW_TEXT = 5.0  # guesses of earlier texts that count as much as what a new text shows
_TRACE_LIMIT = 3.0
_LONG = 64  # beyond this a longer match says nothing more
_SURE = 4.0  # log odds of a share of 1
_BINS = 10
_RECENT = 24  # looks of this text that are remembered
_TEXTS = 8  # earlier texts whose looks are
_OF_TEXT = 12  # the last so many of each
_ENOUGH_LOOKS = 2  # fewer say nothing of a text
# Looks before the first one: many of a good draft model's guesses are all but certain, the others
# are anything.
_PRIOR_LOOKS = (*(0.4,) * (_BINS - 1), 1.6)
_PATIENCE = 6  # looks that a source is given before it may be laid to rest
_SECOND_CHANCE = 2  # and in a new text
_CHANCE_EVERY = 128  # tokens from one second chance to the next: short replies share one
_WAIT_LEAST = 2
_WAIT_MOST = 256


def sigmoid(x: float) -> float:
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    e = math.exp(x)
    return e / (1.0 + e)


def logit(p: float, limit: float = 6.0) -> float:
    """log(p / (1 - p)), clipped."""
    edge = 1.0 / (1.0 + math.exp(limit))
    p = min(1.0 - edge, max(edge, p))
    return math.log(p / (1.0 - p))


def draft_features(confidence: float | None, lead: float | None) -> Features:
    """Features of a drafted token.

    Args:
        confidence: the draft's largest probability (known before the token is drawn).
        lead: of the drawn token over the runner-up, in logits when greedy, in perturbed log
            scores under common noise; None where no decision may look at the drawn token.
    """
    z = 0.0 if confidence is None else logit(confidence) / 2.0
    return (0.0 if lead is None else min(max(lead, 0.0), 8.0) / 2.0, z, 0.0)


def match_features(
    match_length: int, depth: int, share: float = 1.0, ending: float = 0.0
) -> Features:
    """Features of a copied token.

    Where it is tested, the ``depth`` tokens before it were right, so they lengthen the match: one
    number says what both do.

    Args:
        match_length: tokens that agree before the first copied one.
        depth: copied tokens before this one.
        share: how likely this token follows those before it, by what followed them in the text.
        ending: how likely a passage ends before it, see ``Request.endings``.
    """
    matched = min(max(match_length + depth, 1), _LONG)
    return (math.log2(matched) / 2.0, logit(share, _SURE) / 2.0, ending)


# Priors: a draft model's confidence means roughly what it says, long matches copy well, and where a
# sentence or a line ends a quotation often does, too.
_PRIOR = {"draft": (-0.3, 0.5, 0.5, 0.0, 0.0), "copy": (-1.0, 1.4, 0.8, -2.5, 0.0)}


class SourceState:
    """What is known about one source of drafts, kept between requests.

    ``mean`` is the decayed acceptance of tested first guesses, ``mean_next`` of those behind an
    accepted one; ``weight`` and ``weight_next`` are the guesses behind them. ``recent`` are the
    features of the latest looks in this text, ``past`` of those in earlier ones: how predictions
    are spread over them prices a look at the next guess. A new text may be like any of the earlier
    ones, not like the last, so each counts alike until the new one has shown what it is. ``wait``
    is how many rounds to leave the source alone.
    """

    __slots__ = (
        "_spread",
        "kind",
        "labels",
        "mean",
        "mean_next",
        "p",
        "past",
        "patience",
        "recent",
        "theta",
        "unlooked",
        "wait",
        "weight",
        "weight_next",
    )

    def __init__(self, kind: str = "draft") -> None:
        self.kind = kind
        self.theta = list(_PRIOR[kind])
        spread = (*_SPREAD, _APART[kind])
        self.p = [[v * (i == j) for j in range(_WEIGHTS)] for i, v in enumerate(spread)]
        self.mean, self.mean_next = 0.7, 0.75
        self.weight = self.weight_next = _NEW_TEXT
        self.labels = 0
        self.recent: deque[Features] = deque(maxlen=_RECENT)
        self.past: deque[tuple[Features, ...]] = deque(maxlen=_TEXTS)
        self._spread: list[tuple[float, float]] | None = None
        self.wait = 0
        self.patience = _PATIENCE
        self.unlooked = 0  # tokens written since the last second chance

    def fresh(self) -> None:
        """A new text begins: it may be of another kind, so what it shows counts more."""
        if self.unlooked >= _CHANCE_EVERY:
            self.unlooked = self.wait = 0
            self.patience = max(self.patience, _SECOND_CHANCE)
        self.theta[-1] = 0.0
        for row in self.p:
            row[-1] = 0.0
        self.p[-1] = [0.0] * (_WEIGHTS - 1) + [_APART[self.kind]]
        if len(self.recent) >= _ENOUGH_LOOKS:
            self.past.append(tuple(self.recent)[-_OF_TEXT:])
        self.recent.clear()
        self._spread = None
        self.weight = min(self.weight, _NEW_TEXT)
        self.weight_next = min(self.weight_next, _NEW_TEXT)

    def predict(self, features: Features) -> float:
        t = self.theta
        x, y, z = features
        return sigmoid(t[0] + t[1] * x + t[2] * y + t[3] * z + t[4])

    def look(self, features: Features) -> None:
        """A guess was seen (it counts from the next ``learn`` on)."""
        self.patience = max(self.patience - 1, 0)
        self.recent.append(features)

    def spread(self) -> list[tuple[float, float]]:
        """(acceptance, weight) of a look at the next guess; weights sum to 1.

        The guesses of this text under the present calibration, over those of earlier texts and a
        broad prior, which fade behind them.
        """
        if self._spread is None:
            bins = [0.0] * _BINS
            for features in self.recent:
                a = self.predict(features)
                bins[min(int(a * _BINS), _BINS - 1)] += 1.0
            before = list(_PRIOR_LOOKS)
            if self.past:
                share = len(self.past) / (len(self.past) + 1.0)
                before = [(1.0 - share) * n for n in before]
                each = share * sum(_PRIOR_LOOKS) / len(self.past)
                for looks in self.past:
                    for features in looks:
                        a = self.predict(features)
                        before[min(int(a * _BINS), _BINS - 1)] += each / len(looks)
            fade = 1.0 - len(self.recent) / (_RECENT + 1.0)
            bins = [n + fade * prior for n, prior in zip(bins, before, strict=True)]
            total = sum(bins)
            self._spread = [((i + 0.5) / _BINS, n / total) for i, n in enumerate(bins) if n]
        return self._spread

    def learn(self, features: Features, accepted: bool, depth: int = 0) -> None:
        """One tested guess, ``depth`` accepted ones before it."""
        x = (1.0, *features, 1.0)
        y = 1.0 if accepted else 0.0
        p = self.p
        a = self.predict(features)
        w = max(a * (1.0 - a), 0.02)
        px = [sum(map(mul, r, x)) for r in p]
        scale = w / (1.0 + w * sum(map(mul, px, x)))
        for i in range(_WEIGHTS):
            for j in range(_WEIGHTS):
                p[i][j] = (p[i][j] - px[i] * px[j] * scale) / _FORGET
        trace = sum(p[i][i] for i in range(_WEIGHTS))
        if trace > _TRACE_LIMIT:
            shrink = _TRACE_LIMIT / trace
            for row in p:
                for j in range(_WEIGHTS):
                    row[j] *= shrink
        theta = self.theta
        for i in range(_WEIGHTS):
            theta[i] += sum(map(mul, p[i], x)) * (y - a)
        # confidence must never count against a guess
        theta[1] = min(max(theta[1], 0.02), 3.0)
        theta[2] = min(max(theta[2], 0.0), 3.0)
        theta[3] = min(max(theta[3], -8.0), 0.0)  # nor an ending for it
        theta[0] = min(max(theta[0], -8.0), 8.0)
        if depth:
            self.weight_next += 1.0
            self.mean_next += max(_MEAN_GAIN, 1.0 / self.weight_next) * (y - self.mean_next)
        else:
            self.weight += 1.0
            self.mean += max(_MEAN_GAIN, 1.0 / self.weight) * (y - self.mean)
            if self.labels < 8:  # nothing is known about later positions yet
                self.mean_next += 0.5 * _MEAN_GAIN * (y - self.mean_next)
        self.labels += 1
        self._spread = None

    def rest(self, rounds: float) -> None:
        """Not to be asked for so many rounds, within limits; at once while there is patience."""
        self.wait = 0 if self.patience else int(min(max(rounds, _WAIT_LEAST), _WAIT_MOST))

    def surprised(self, a: float) -> None:
        """A probe hit where ``a`` was expected: the less it was expected, the sooner the next."""
        self.wait = int(self.wait * a)

    def paid(self) -> None:
        """A round beat plain decoding: look again at once."""
        self.wait = 0

    # -- persistence --

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "theta": self.theta,
            "p": self.p,
            "mean": self.mean,
            "mean_next": self.mean_next,
            "labels": self.labels,
            "patience": self.patience,
            "unlooked": self.unlooked,
            "wait": self.wait,
            "recent": [list(f) for f in self.recent],
            "past": [[list(f) for f in looks] for looks in self.past],
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> SourceState:
        """The inverse.

        Raises:
            ValueError, TypeError, KeyError: the data is not such a state.
        """
        kind = str(data["kind"])
        if kind not in _PRIOR:
            raise ValueError("no such kind of source")
        state = SourceState(kind)
        state.theta = _numbers(data["theta"], _WEIGHTS)
        state.p = [_numbers(row, _WEIGHTS) for row in data["p"]]
        if len(state.p) != _WEIGHTS or any(state.p[i][i] <= 0 for i in range(_WEIGHTS - 1)):
            raise ValueError("not a covariance")
        mean, mean_next = _numbers([data["mean"], data["mean_next"]], 2)
        state.mean = min(max(mean, 0.0), 1.0)
        state.mean_next = min(max(mean_next, 0.0), 1.0)
        state.labels = int(data["labels"])
        state.patience = min(max(int(data.get("patience", 0)), 0), _PATIENCE)
        state.unlooked = max(int(data.get("unlooked", 0)), 0)
        state.wait = min(max(int(data.get("wait", 0)), 0), _WAIT_MOST)
        state.recent.extend(_looks(data["recent"]))
        state.past.extend(looks for p in data.get("past", ()) if (looks := tuple(_looks(p))))
        return state


def _looks(data: Any) -> list[Features]:
    looks = []
    for features in data:
        first, second, third = _numbers(features, 3)
        looks.append((first, second, third))
    return looks


def _numbers(values: Any, n: int) -> list[float]:
    out = [float(v) for v in values]
    if len(out) != n or not all(math.isfinite(v) for v in out):
        raise ValueError(f"expected {n} finite numbers")
    return out
