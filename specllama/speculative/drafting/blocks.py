"""A block of guesses: the distribution of each place, given the guesses before it.

DFlash     nothing but its row: every place was guessed without the others
DSpark     its row after the likeliest guesses; after another token the bias of that takes the
           place of theirs, in the logits of the likeliest tokens
DFlash2    a few candidates, and how well each follows each of the place before
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from specllama.arrays import IntArray, Row, Rows
from specllama.backend.base import Out
from specllama.speculative.selection import Peaks

_MOVED = 256  # of a row's likeliest tokens, whose bias is computed; others are hardly drawn


class Markov(Protocol):
    """A bias by the token before."""

    def bias(self, ids: IntArray, behind: int) -> Row:
        """Return the bias that a token adds to the logits of ``ids`` [n] in the place after it."""
        ...

    def trust(self, behind: int) -> float:
        """Return the value that it adds to the log odds that the guess for that place is right."""
        ...


@dataclass(frozen=True, slots=True)
class Filled:
    """A drafter's output for n consecutive places, all at once; views.

    Attributes:
        rows: logits [n, n_vocab].
        sure: how likely the guess for each is right [n]; None of one that was not trained to say.
        candidates: the k tokens [n, k] that alone may stand there, where it says how they follow
            each other; ``rows`` is empty then.
        scores: of candidate j after candidate i of the place before, [n, i, j].
        scale, cap: what the target does to its logits, and the rows still lack; 0 for no cap.
    """

    rows: Rows
    sure: Row | None = None
    candidates: IntArray | None = None
    scores: Rows | None = None
    scale: float = 1.0
    cap: float = 0.0


@dataclass(frozen=True, slots=True)
class Places:
    """The layout of a drafter's input and output for a block.

    Attributes:
        guesses: most places of a block.
        mask: the token that stands where one is to be guessed.
        anchored: the place of the last token guesses what follows it; else the masks guess what
            stands in their own places.
        candidates: tokens among which each place chooses; 0 where rows say it.
        confident: it says how sure its guesses are.
        scale, cap: see ``Filled``.
    """

    guesses: int
    mask: int
    anchored: bool = True
    candidates: int = 0
    confident: bool = False
    scale: float = 1.0
    cap: float = 0.0

    def tokens(self, token: int, n: int) -> list[int]:
        """Return the tokens that a pass reads to guess ``n`` places after ``token``."""
        return [token] + [self.mask] * (n - self.anchored)

    def filled(self, out: Out) -> Filled:
        """Return the output of such a pass by place."""
        k, first = self.candidates, 0 if self.anchored else 1
        beside = out.states[first:]
        if k:  # tokens, which are exact as floats, and how each follows each
            scores = beside[:, k : k + k * k].reshape(-1, k, k)
            return Filled(beside[:0], None, beside[:, :k].astype(np.int32), scores)
        sure = beside[:, 0] if self.confident else None
        return Filled(out.rows[first:], sure, scale=self.scale, cap=self.cap)


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
        """Return the logits [n_vocab] of the place after these guesses."""
        filled, place = self._filled, len(before)
        if filled.candidates is not None and filled.scores is not None:
            # the first place is the same after all
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
        """Return the probability that the guess for that place is right; None if untrained for
        that."""
        if self._filled.sure is None:
            return None
        likely, markov = float(self._filled.sure[len(before)]), self._markov
        if markov is None or self._follows(before):
            return likely
        more = markov.trust(before[-1]) - markov.trust(self._likeliest[len(before) - 1])
        odds = math.exp(min(more, 50.0)) * likely / max(1.0 - likely, 1e-9)
        return odds / (1.0 + odds)

    def _follows(self, before: Sequence[int]) -> bool:
        """True if the computed rows belong after these guesses."""
        return not before or before[-1] == self._likeliest[len(before) - 1]

    @cached_property
    def _likeliest(self) -> list[int]:
        return [int(token) for token in self._filled.rows.argmax(axis=1)]
