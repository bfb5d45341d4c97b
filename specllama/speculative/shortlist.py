"""The likeliest tokens of a row of logits, where they tell enough of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from specllama.arrays import IntArray, Row
from specllama.speculative.selection import Peaks, share

_LEAST = float(np.finfo(np.float32).min)
FEW = 16  # the best of a row, of which a greedy draft takes one or some


@dataclass(frozen=True, slots=True)
class Shortlist:
    """The tokens of a row with the best logits, and maybe some more.

    Attributes:
        sure: the probability of the best token under the plain softmax of the row, as far as it
            was summed; 0 for a row that cannot be sampled (NaN, +inf, all -inf).
    """

    ids: IntArray  # [n], ascending
    logits: Row  # [n]
    sure: float


Scores: TypeAlias = Row | Shortlist


def shortlist(row: Scores, k: int = FEW) -> Shortlist:
    """At least the ``k`` best tokens that are not forbidden.

    Of a row that cannot be sampled one that shows it.
    """
    if isinstance(row, Shortlist):
        return row
    peaks = Peaks(row)
    if not math.isfinite(peaks.top):
        at = int(row.argmax())
        return Shortlist(np.array([at], np.int32), row[at : at + 1], 0.0)
    ids = peaks.reaching(max(peaks.bar(k), _LEAST)).astype(np.int32)
    return Shortlist(ids, row[ids], share(row, peaks))


def confidence(row: Scores) -> float:
    """See ``Shortlist.sure``."""
    return row.sure if isinstance(row, Shortlist) else share(row)
