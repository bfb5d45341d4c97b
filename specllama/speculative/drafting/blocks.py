"""What a block of guesses says of a place, given the guesses before it.

DFlash     nothing but its row: every place was guessed without the others
DSpark     its row behind the likeliest guesses; behind another token the bias of that takes the
           place of theirs, in the logits of the likeliest tokens
DFlash2    a few candidates, and how well each follows each of the place before
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from specllama.arrays import IntArray, Row
from specllama.backend.base import Filled
from specllama.speculative.asking import Markov
from specllama.speculative.selection import Peaks

_MOVED = 256  # of a row's likeliest tokens, whose bias is computed; others are hardly drawn


class Block:
    """A block of guesses.

    Args:
        filled: what the drafter says. n_vocab: of the target.
        markov: of a DSpark.
    """

    def __init__(self, filled: Filled, n_vocab: int, markov: Markov | None = None) -> None:
        self._filled = filled
        self._n_vocab = n_vocab
        self._markov = markov

    def row(self, before: Sequence[int]) -> Row:
        """Logits [n_vocab] of the place behind these guesses for the places before it."""
        filled, place = self._filled, len(before)
        if filled.candidates is not None and filled.scores is not None:
            # the first place is the same behind all
            behind = int(np.argmax(filled.candidates[place - 1] == before[-1])) if place else 0
            chosen: Row = np.full(self._n_vocab, -np.inf, np.float32)
            chosen[filled.candidates[place]] = filled.scores[place, behind]
            return chosen
        row: Row = filled.rows[place, : self._n_vocab]
        if filled.scale != 1.0:
            row = row * np.float32(filled.scale)
        if filled.cap:
            row = np.where(row > -np.inf, np.tanh(row / filled.cap) * filled.cap, row)
        if self._markov is None or self._follows(before):
            return row
        moved: Row = row.copy()
        peaks = Peaks(row)
        least = max(peaks.bar(_MOVED), float(np.finfo(np.float32).min))
        ids: IntArray = peaks.reaching(least).astype(np.int32)
        bias, instead = self._markov.bias, self._likeliest[place - 1]
        moved[ids] += bias(ids, before[-1])
        moved[ids] -= bias(ids, instead)
        return moved

    def sure(self, before: Sequence[int]) -> float | None:
        """How likely the guess for that place is right, where the drafter was trained to say."""
        if self._filled.sure is None:
            return None
        likely, markov = float(self._filled.sure[len(before)]), self._markov
        if markov is None or self._follows(before):
            return likely
        more = markov.trust(before[-1]) - markov.trust(self._likeliest[len(before) - 1])
        odds = math.exp(min(more, 50.0)) * likely / max(1.0 - likely, 1e-9)
        return odds / (1.0 + odds)

    def _follows(self, before: Sequence[int]) -> bool:
        """Whether what was computed is what follows these guesses."""
        return not before or before[-1] == self._likeliest[len(before) - 1]

    @cached_property
    def _likeliest(self) -> list[int]:
        return [int(token) for token in self._filled.rows.argmax(axis=1)]
