"""Medusa's mathematics: heads that read the target's hidden state.

    head d      x <- x + SiLU(W x + b) for every residual block, then (optionally) a square matrix
                in front of the target's own output matrix, or an output matrix of its own
    depth       head d guesses the token d places behind the pending one, from the hidden state
                that the pending token was drawn from; it never sees the tokens between

Source: Cai et al. 2024 (Medusa).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specllama.arrays import IntArray, Rows

Matrix = npt.NDArray[np.float32]  # [out, in]
Vector = npt.NDArray[np.float32]
# (depth, probability of that head's best token) to how often its guess of each rank was the
# target's greedy token; [] where nobody measured
Measured = Callable[[int, float], Sequence[float]]


@dataclass(frozen=True)
class MedusaHead:
    """One head. ``width`` is the target's hidden width.

    ``blocks`` are (weight [width, width], bias [width]); ``proj`` [width, width] and ``output``
    [rows, width] may be missing: then the identity and the shared output matrix stand for them.
    """

    blocks: tuple[tuple[Matrix, Vector], ...]
    proj: Matrix | None = None
    output: Matrix | None = None

    def state(self, hidden: Rows) -> Rows:
        """What the output matrix reads: [..., width] from [..., width]."""
        x = hidden
        for weight, bias in self.blocks:
            x = x + silu(x @ weight.T + bias)
        return x if self.proj is None else x @ self.proj.T


@dataclass(frozen=True)
class Heads:
    """All heads of a file, in float32.

    Attributes:
        heads: head d (from 1) is ``heads[d - 1]``.
        output: the matrix that heads without one of their own share [rows, width].
        ids: the token of each output row; None where row r is token r.
        n_vocab: tokens of the target.
        measured: see ``Measured``.
    """

    heads: tuple[MedusaHead, ...]
    output: Matrix | None
    ids: IntArray | None
    n_vocab: int
    measured: Measured

    def __len__(self) -> int:
        return len(self.heads)

    def logits(self, hidden: Rows, depth: int) -> Rows:
        """Logits [..., n_vocab] of head ``depth`` (from 1) on states [..., width]; -inf for tokens
        it cannot say."""
        head = self.heads[depth - 1]
        matrix = self.output if head.output is None else head.output
        if matrix is None:
            raise ValueError("a head without an output matrix")
        said: Rows = head.state(hidden) @ matrix.T
        if self.ids is None:
            return said
        rows: Rows = np.full((*hidden.shape[:-1], self.n_vocab), -np.inf, np.float32)
        rows[..., self.ids] = said
        return rows


def silu(x: Rows) -> Rows:
    """x times its logistic function; no overflow warning for large negative values."""
    one = np.float32(1.0)
    out: Rows = np.divide(x, one + np.exp(-np.maximum(x, np.float32(-80.0))), dtype=np.float32)
    return out
