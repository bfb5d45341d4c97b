"""The likeliest tokens of a row of logits: what a draft reads of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from specllama.arrays import IntArray, Row
from specllama.speculative.selection import Peaks

SHORT = 40  # tokens of which a confidence is told
_LEAST = float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The tokens of a row with the best logits, and maybe some more."""

    ids: IntArray  # [n], ascending
    logits: Row  # [n]


Scores: TypeAlias = Row | Shortlist


def shortlist(row: Scores, k: int) -> Shortlist:
    """At least the ``k`` best tokens that are not forbidden.

    Of a row that cannot be sampled (NaN, +inf, all -inf) one that shows it.
    """
    if isinstance(row, Shortlist):
        return row
    peaks = Peaks(row)
    if math.isfinite(peaks.top):
        ids = peaks.reaching(max(peaks.bar(k), _LEAST)).astype(np.int32)
    else:
        ids = np.array([row.argmax()], np.int32)
    return Shortlist(ids, row[ids])


def confidence(row: Scores) -> float:
    """The probability of the best token among the ``SHORT`` likeliest or some more.

    0 for a row that cannot be sampled.
    """
    logits = shortlist(row, SHORT).logits
    top = logits.max()
    return float(1.0 / np.exp(logits - top).sum(dtype=np.float64)) if np.isfinite(top) else 0.0
