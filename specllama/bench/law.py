"""A test, valid at any time, that tokens are drawn from the right law.

At a position the plain law ``p`` is known and a token ``x`` is seen. A *bet* names a rival law
``q`` before the token is seen and multiplies its wealth by

    f(x) = 1 - s + s q(x) / p(x),        0 < s <= 1, the stake.

Where x is drawn from p, the mean of f is at most 1, so wealth is a nonnegative supermartingale that
begins at 1, whatever q and s were chosen from the past. So is the mean of the wealth of many bets,
here of every rival with every stake: no bet has to be chosen beforehand. By Ville's inequality the
chance that it ever reaches 1/a is at most a. One may look after every token, stop when one likes,
and go on later: the rate of false alarms stays below a. A law that is (1 - e) p + e q is bet
against best with s = e, and then wealth grows by KL(law, p) a token.

A rival may also be a *tilt*: f = 1 + s h(u), where u is how far up in p, sorted by probability, the
token stands (a randomised probability integral: uniform under p) and h = +-cos(pi j u).

Two allowances widen the hypothesis, so that what is no fault raises no alarm. Both divide f by the
largest mean that it can have under a law of the wider hypothesis.

*slack* d: the server's logits, divided by the temperature, differ from ours by up to d, as other
kernels round. Then its law is p r with exp(-2d) <= r <= exp(2d) and mean of r 1, so the mean of f
is at most 1 + s (exp(2d) - 1) E|f - 1| / s, which is 2 TV(p, q) for a law.

*stray* w: of the tokens a share of up to w is read wrongly, where text has to be split into tokens
again. Ratios are cut at ``CAP`` there, so the mean of f is at most 1 + s w (CAP - 1).

Sources: Ville, Etude critique de la notion de collectif, 1939; Shafer, Testing by betting, 2021;
Ramdas, Gruenwald, Vovk and Shafer, Game-theoretic statistics and safe anytime-valid inference,
2023; Waudby-Smith and Ramdas, Estimating means of bounded random variables by betting, 2024 (the
mixture over stakes); Huber, A robust version of the probability ratio test, 1965 (the two
allowances).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specllama.arrays import FloatArray

ALARM = 0.01  # the largest rate of false alarms
CAP = 16.0  # of a ratio, where a token may have been read wrongly
STAKES = np.array([1.0, 0.3, 0.1, 0.03, 0.01, 0.003])
_TILTS = 3
_SWING = 2.0 / math.pi  # the mean of |cos(pi j u)|

RIVALS = {
    "greedy": "the likeliest token is taken too often",
    "second": "the likeliest token is taken too rarely",
    "colder": "likely tokens are taken too often, as at a lower temperature",
    "hotter": "unlikely tokens are taken too often, as at a higher temperature",
    "untempered": "the temperature is ignored",
    "noise": "tokens are taken that have nearly no chance",
    "habit": "some tokens are taken too often, wherever they stand",
    "copied": "copies of the earlier text are taken too often",
    "uncopied": "copies of the earlier text are taken too rarely",
    "draft": "the draft's tokens are taken too often",
    "overlap": "where both laws agree, tokens are taken too often",
    "residual": "tokens that the draft would not write are taken too often",
    **{
        f"tilt {sign}{j}": "tokens of some ranks are taken too often, of others too rarely"
        for j in range(1, _TILTS + 1)
        for sign in "+-"
    },
}
"""What is bet on, and what it means where that bet has won."""


@dataclass(frozen=True, slots=True)
class Spot:
    """One position, or R alike ones in front: the laws that a token was drawn from.

    Attributes:
        plain: [..., n] the plain law, of tokens or of classes of them; sums to 1.
        emitted: [...] which of them was seen.
        temperature: that ``plain`` was made at.
        draft: [..., n] the law that drafts are made from, where it is known.
        habit: [..., n] of earlier tokens that had little chance, see ``Habit``.
        copied: [...] the token that follows the newest earlier place that reads like this one;
            -1 for none.
        sizes: [n] tokens in each class; None: one each.
    """

    plain: FloatArray
    emitted: npt.NDArray[np.int64]
    temperature: float = 1.0
    draft: FloatArray | None = None
    habit: FloatArray | None = None
    copied: npt.NDArray[np.int64] | None = None
    sizes: FloatArray | None = None


def bets(spot: Spot, coin: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the ratios q(x) / p(x) of all rivals, and E|ratio - 1| under p: both [..., K], in the
    order of ``RIVALS``. A rival without an opinion has ratio 1 and 0. ``coin``: [...] uniform."""
    p = spot.plain
    best = np.argmax(p, axis=-1)
    sizes = np.ones(p.shape[-1]) if spot.sizes is None else spot.sizes
    nothing = p
    laws = [
        _point(p, best),
        _without(p, best),
        _power(p, 2.0),
        _power(p, 0.5),
        nothing if spot.temperature == 1.0 else _power(p, spot.temperature),
        np.broadcast_to(sizes / sizes.sum(), p.shape),
        nothing if spot.habit is None else spot.habit,
    ]
    if spot.copied is None:
        laws += [nothing, nothing]
    else:
        none, at = (spot.copied < 0)[..., None], np.maximum(spot.copied, 0)
        laws += [np.where(none, p, law(p, at)) for law in (_point, _without)]
    if (q := spot.draft) is None:
        laws += [nothing] * 3
    else:
        laws += [q, _scaled(np.minimum(p, q), p), _scaled(np.maximum(p - q, 0.0), p)]
    seen = np.expand_dims(spot.emitted, -1)
    chance = np.take_along_axis(p, seen, -1)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        ratios = np.concatenate([np.take_along_axis(q, seen, -1) / chance for q in laws], axis=-1)
    # what has no chance at all ends the matter; 0/0 is a rival that names the law itself
    ratios = np.where(np.isnan(ratios), 1.0, ratios)
    swings = np.stack([np.abs(q - p).sum(-1) for q in laws], axis=-1)
    ahead = np.where(p > chance, p, 0.0).sum(-1)
    level = ahead + coin * np.where(p == chance, p, 0.0).sum(-1)
    waves = np.cos(math.pi * np.multiply.outer(level, np.arange(1, _TILTS + 1)))
    tilts = np.stack([1.0 + waves, 1.0 - waves], axis=-1).reshape(*level.shape, -1)
    return (
        np.concatenate([ratios, tilts], axis=-1),
        np.concatenate([swings, np.full(tilts.shape, _SWING)], axis=-1),
    )


def growth(
    ratios: FloatArray, swings: FloatArray, *, slack: float = 0.0, stray: float = 0.0
) -> FloatArray:
    """Return the logarithm of f for every rival and stake: [..., K, S]."""
    gain = np.minimum(ratios, CAP if stray else 1e300) - 1.0
    worst = np.where(swings > 0.0, CAP - 1.0, 0.0)  # of what is read wrongly
    worst[..., -2 * _TILTS :] = 1.0
    gain, allowed = gain[..., None], (math.expm1(2.0 * slack) * swings + stray * worst)[..., None]
    with np.errstate(divide="ignore"):  # a stake of 1 on a law without this token loses everything
        return np.asarray(np.log1p(STAKES * gain) - np.log1p(STAKES * allowed))


def evidence(wealth: FloatArray) -> FloatArray:
    """Return the logarithm of the mean wealth of all bets: [...] of [..., K, S] logarithms."""
    flat = wealth.reshape(*wealth.shape[:-2], -1)
    top = flat.max(-1)
    return np.asarray(top + np.log(np.exp(flat - top[..., None]).mean(-1)))


def _point(p: FloatArray, at: npt.NDArray[np.int64]) -> FloatArray:
    return np.asarray(np.arange(p.shape[-1]) == np.expand_dims(at, -1), np.float64)


def _without(p: FloatArray, at: npt.NDArray[np.int64]) -> FloatArray:
    return _scaled(p * (1.0 - _point(p, at)), p)


def _power(p: FloatArray, exponent: float) -> FloatArray:
    return _scaled(np.power(p / p.max(-1, keepdims=True), exponent), p)


def _scaled(weights: FloatArray, otherwise: FloatArray) -> FloatArray:
    """Scale weights to a law; use ``otherwise`` if nothing is left."""
    total = weights.sum(-1, keepdims=True)
    return np.where(total > 1e-12, weights / np.maximum(total, 1e-12), otherwise)


class Habit:
    """A record of tokens that came more often than they should have: each is noted with 1 minus its
    probability. Half of the law stays flat."""

    def __init__(self) -> None:
        self._excess: dict[Hashable, float] = {}

    def law(
        self, tokens: Mapping[Hashable, int] | int, sizes: FloatArray | None = None
    ) -> FloatArray:
        """Return the law [n] over the first n ids, or over tokens by their places; notes about
        other tokens count for nothing."""
        n = tokens if isinstance(tokens, int) else len(tokens)
        flat = np.ones(n) if sizes is None else sizes
        noted = np.zeros(n)
        for token, excess in self._excess.items():
            at = token if isinstance(tokens, int) else tokens.get(token)
            if isinstance(at, int) and at < n:
                noted[at] = excess
        total = float(noted.sum())
        flat = flat / flat.sum()
        return np.asarray(flat if total <= 0.0 else 0.5 * flat + 0.5 * noted / total)

    def note(self, token: Hashable, chance: float) -> None:
        self._excess[token] = self._excess.get(token, 0.0) + max(1.0 - chance, 0.0)


class LawTest:
    """A test that reads tokens one by one and reports if they come from another law.

    Args:
        slack: see the module.
        seed: of the coins that break ties between tokens of the same chance.
    """

    def __init__(self, *, slack: float = 0.0, seed: int = 0) -> None:
        self.slack = slack
        self.tokens = 0
        self.found_at: int | None = None
        self.most = 0.0  # the largest logarithm of evidence
        self.now = 0.0
        self._coins = np.random.default_rng(seed)
        self._wealth = np.zeros((len(RIVALS), len(STAKES)))
        self._by = ""

    @property
    def shown(self) -> bool:
        return self.found_at is not None

    @property
    def by(self) -> str:
        """The rival with the highest wealth, at the time of the proof or now."""
        return self._by or self._leader()

    def see(self, spot: Spot, stray: float = 0.0) -> bool:
        """Read one more token; return True if another law is shown by now."""
        ratios, swings = bets(spot, np.asarray(self._coins.random()))
        self._wealth += growth(ratios, swings, slack=self.slack, stray=stray)
        self.tokens += 1
        self.now = float(evidence(self._wealth))
        self.most = max(self.most, self.now)
        if self.found_at is None and self.now >= -math.log(ALARM):
            self.found_at, self._by = self.tokens, self._leader()
        return self.shown

    def _leader(self) -> str:
        return tuple(RIVALS)[int(np.argmax(self._wealth.max(-1)))]
