"""Servers of a scripted law, off by a known total variation, many side by side.

A *world* is a pool of positions, each with the target's law and a draft's. A server draws a
position and a token of it, from the target's law or from one that is wrong in a known way.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from specllama.arrays import FloatArray
from specllama.bench.law import ALARM, RIVALS, STAKES, Spot, bets, evidence, growth


@dataclass(frozen=True)
class World:
    """plain, draft: [positions, n]. copied: [positions] what a copy of the text would guess."""

    plain: FloatArray
    draft: FloatArray
    copied: np.ndarray


def world(seed: int, positions: int = 2048, n: int = 64) -> World:
    """Laws as peaked as those of a small chat model; the draft is off by 0.2 to 0.3 on average."""
    rng = np.random.default_rng(seed)
    logits = rng.uniform(0.5, 5.0, (positions, 1)) * rng.standard_normal((positions, n))
    near = logits + 0.8 * rng.standard_normal((positions, n))
    plain, draft = softmax(logits), softmax(near)
    return World(plain, draft, drawn(draft, rng.random(positions)))


def softmax(z: FloatArray) -> FloatArray:
    weights = np.exp(z - z.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def drawn(laws: FloatArray, u: FloatArray) -> np.ndarray:
    """[...] tokens by inverse distribution functions."""
    return np.minimum((np.cumsum(laws, axis=-1) < u[..., None]).sum(-1), laws.shape[-1] - 1)


def apart(p: FloatArray, q: FloatArray) -> float:
    """Total variation, on average over the positions."""
    return float(0.5 * np.abs(p - q).sum(-1).mean())


def mixed(toward: Callable[[World], FloatArray]) -> Callable[[World, float], FloatArray]:
    return lambda w, share: (1.0 - share) * w.plain + share * toward(w)


def _fixed(w: World) -> FloatArray:
    """A residual that is not renormalised: what is left over falls to the last token."""
    lost = np.maximum(w.plain - w.draft, 0.0).sum(-1, keepdims=True)
    out = np.minimum(w.plain, w.draft) + lost * np.maximum(w.plain - w.draft, 0.0)
    out[:, -1] += (lost * (1.0 - lost))[:, 0]
    return out


def _again(w: World) -> FloatArray:
    """A recovered token that is drawn from the target's law instead of the residual."""
    both = np.minimum(w.plain, w.draft)
    return np.asarray(both + (1.0 - both.sum(-1, keepdims=True)) * w.plain)


def _points(w: World, at: np.ndarray) -> FloatArray:
    return np.eye(w.plain.shape[1])[at]


SHAPES: Mapping[str, Callable[[World, float], FloatArray]] = {
    "drafts accepted too often": mixed(lambda w: w.draft),
    "recovered from the whole law": mixed(_again),
    "residual not renormalised": mixed(_fixed),
    "copies accepted too often": mixed(lambda w: _points(w, w.copied)),
    "greedy now and then": mixed(lambda w: _points(w, w.plain.argmax(-1))),
    "temperature ignored": lambda w, t: softmax(np.log(w.plain) * (1.0 + 3.0 * t)),
    "noise": mixed(lambda w: np.full_like(w.plain, 1.0 / w.plain.shape[1])),
}


def wrong(w: World, shape: str, variation: float) -> FloatArray:
    """The laws of a server that is wrong in this way by this total variation."""
    if not variation:
        return w.plain
    low, high = 0.0, 1.0
    if apart(w.plain, SHAPES[shape](w, high)) < variation:
        raise ValueError(f"{shape} cannot be off by {variation}")
    for _ in range(40):
        share = 0.5 * (low + high)
        off = apart(w.plain, SHAPES[shape](w, share)) > variation
        low, high = (low, share) if off else (share, high)
    return SHAPES[shape](w, high)


def found(
    w: World,
    laws: FloatArray,
    *,
    runs: int,
    most: int,
    seed: int,
    with_draft: bool = True,
    slack: float = 0.0,
    rounding: float = 0.0,
    stray: float = 0.0,
) -> tuple[np.ndarray, list[str]]:
    """Of each run, after how many tokens it was shown, ``most`` + 1 where it was not; and by which
    bets. ``rounding``: the plain law that the test knows has logits that are off by up to this."""
    rng = np.random.default_rng(seed)
    known = w.plain
    if rounding:
        known = softmax(np.log(w.plain) + rng.uniform(-rounding, rounding, w.plain.shape))
    at_last, by = np.full(runs, most + 1), [""] * runs
    left = np.arange(runs)
    wealth = np.zeros((runs, len(RIVALS), len(STAKES)))
    excess = np.zeros((runs, w.plain.shape[1]))
    for token in range(1, most + 1):
        at = rng.integers(len(w.plain), size=len(left))
        seen = drawn(laws[at], rng.random(len(left)))
        total = excess.sum(-1, keepdims=True)
        flat = np.full_like(excess, 1.0 / excess.shape[1])
        habit = np.where(total > 0.0, 0.5 * flat + 0.5 * excess / np.maximum(total, 1e-300), flat)
        spot = Spot(
            known[at],
            seen,
            draft=w.draft[at] if with_draft else None,
            habit=habit,
            copied=w.copied[at],
        )
        ratios, swings = bets(spot, rng.random(len(left)))
        wealth += growth(ratios, swings, slack=slack, stray=stray)
        rows = np.arange(len(left))
        excess[rows, seen] += np.maximum(1.0 - known[at, seen], 0.0)
        done = evidence(wealth) >= -np.log(ALARM)
        if done.any():
            leaders = wealth[done].max(-1).argmax(-1)
            for run, leader in zip(left[done], leaders, strict=True):
                at_last[run], by[run] = token, tuple(RIVALS)[leader]
            left, wealth, excess = left[~done], wealth[~done], excess[~done]
            if not len(left):
                break
    return at_last, by
