"""What a block of guesses says of a place, given the guesses before it.

DFlash     nothing but its row: every place was guessed without the others
DFlash2    a few candidates, and how well each follows each of the place before
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specllama.arrays import Row
from specllama.backend.base import Filled


class Block:
    """A block of guesses.

    Args:
        filled: what the drafter says. n_vocab: of the target.
    """

    def __init__(self, filled: Filled, n_vocab: int) -> None:
        self._filled = filled
        self._n_vocab = n_vocab

    def row(self, before: Sequence[int]) -> Row:
        """Logits [n_vocab] of the place behind these guesses for the places before it."""
        filled, place = self._filled, len(before)
        if filled.candidates is None or filled.scores is None:
            plain: Row = filled.rows[place, : self._n_vocab]
            return plain
        behind = (
            0  # the first place is the same behind all, a token that is none like the likeliest
        )
        if place:
            behind = int(np.argmax(filled.candidates[place - 1] == before[-1]))
        row = np.full(self._n_vocab, -np.inf, np.float32)
        row[filled.candidates[place]] = filled.scores[place, behind]
        return row
