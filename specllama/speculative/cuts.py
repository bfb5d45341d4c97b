"""The distance of a drawn token from another outcome of top-k, typical, top-p, min-p and XTC.

Rounding moves logits. It changes which token is drawn where a rival is close (``noise.draw`` tells
that lead), and where a token is close to a cut: the drawn one may fall out, and one that was left
out may come in and win. Both are measured here, in logits.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from specllama.arrays import FloatArray, IntArray
from specllama.settings.params import SamplingParams
from specllama.speculative.noise import coin, exp_noise
from specllama.speculative.selection import Peaks

REACH = 0.3  # logits beyond which nothing is called close: more than rounding explains

# The top-k set of a row: its ids, ascending, and their logits; the sum of exp(logit - top) over it,
# and the mean of logit - top.
Candidates = tuple[IntArray, FloatArray, float, float]


def margins(
    peaks: Peaks, cut: Candidates, params: SamplingParams
) -> tuple[IntArray, FloatArray, FloatArray]:
    """Return (ids, logits, margins): a token survives by its margin; a negative one is left out.

    Tokens further than ``REACH`` outside are not among them.
    """
    p, top = params, peaks.top
    ids, logits, total, mean = cut
    margin = np.full(len(ids), np.inf)
    if 0 < p.top_k < len(peaks.values):
        last = float(logits.min())
        near = peaks.reaching(last - REACH)
        near = np.delete(near, near.searchsorted(ids))
        if len(near):
            outside = peaks.values[near].astype(np.float64)
            margin = np.concatenate((logits - outside.max(), outside - last - 1e-12))
            ids = np.concatenate((ids, near.astype(np.int32)))
            logits = np.concatenate((logits, outside))
    weights = np.exp(logits - top) / total
    whole = 1.0
    if p.typical_p < 1.0:
        off = np.abs(logits - top - mean)
        moves = 2.0 + float(weights @ off)  # a logit and the mean, per logit
        typical = _by_mass(-off, weights, margin > 0, p.typical_p)
        margin = np.minimum(margin, typical / moves)
        whole = float(weights[margin > 0].sum())
    if p.min_p > 0.0:
        margin = np.minimum(margin, logits - logits[margin > 0].max() - math.log(p.min_p))
    if p.top_p < 1.0:
        close = margin > -REACH
        ids, logits, weights, margin = ids[close], logits[close], weights[close], margin[close]
        margin = np.minimum(margin, _by_mass(logits, weights, margin > 0, p.top_p * whole))
    close = margin > -REACH
    return ids[close], logits[close], margin[close]


def _by_mass(
    keys: FloatArray, weights: FloatArray, inside: npt.NDArray[np.bool_], mass: float
) -> FloatArray:
    """Return the margins of a cut that keeps the largest keys until their weights reach ``mass``.

    A change of d logits moves a sum w of probabilities by at most w (1 - w) d, and exchanges
    neighbours that are closer than d.
    """
    order = np.argsort(-keys, kind="stable")
    kept = np.where(inside[order], weights[order], 0.0)
    before = np.minimum(np.cumsum(kept) - kept, 1.0)
    spread = np.maximum(before * (1.0 - before), 1e-12)
    margin = (mass - 1e-12 - before) / spread
    margin[0] = np.inf
    out = margin <= 0.0
    if out.any() and not out.all():
        last, first = float(keys[order][~out].min()), float(keys[order][out].max())
        swap = np.where(out, keys[order] - last, keys[order] - first)
        margin = np.where(out, np.maximum(margin, swap), np.minimum(margin, swap))
    found: FloatArray = np.empty_like(margin)
    found[order] = margin
    return found


def slack(
    peaks: Peaks, cut: Candidates, params: SamplingParams, seed: int, position: int, winner: int
) -> float:
    """Return the change of logits at which a cut lets a token other than ``winner`` be drawn, inf
    for a large one."""
    ids, logits, margin = margins(peaks, cut, params)
    gap = math.inf
    if params.xtc_probability > 0.0 and coin(seed, position) < params.xtc_probability:
        shares = np.exp(logits - peaks.top)
        over = np.log(shares / shares[margin > 0].sum() / max(params.xtc_threshold, 1e-9))
        # a token may cross the threshold, or another one may be the least likely above it
        above = np.sort(logits[over >= 0.0])
        gap = min(float(np.abs(over).min()), float(np.diff(above[:2]).min(initial=math.inf)))
    at = np.flatnonzero(ids == winner)
    if not len(at):
        return 0.0  # XTC or a grammar brought it in: nothing is known of its rivals
    gap = min(gap, float(margin[at[0]]))
    outside = margin <= 0.0
    if outside.any():
        score = logits / params.temperature - np.log(exp_noise(seed, position, ids))
        lead = (score[at[0]] - score[outside]) * params.temperature
        gap = min(gap, float(np.maximum(-margin[outside], lead).min()))
    return gap if gap < REACH else math.inf
