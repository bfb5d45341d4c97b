"""Medusa heads as a pool: nothing is kept between passes, so a lane is a name.

The heads of several conversations at one depth read the same matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from specllama.arrays import Row, Rows
from specllama.backend.base import Out, Part
from specllama.backend.kernels import Kernels


class MedusaHeads(Protocol):
    """Heads that can be asked, however they are computed."""

    def __len__(self) -> int:
        """How many heads: the deepest guess."""
        ...

    def logits(self, hidden: Row, depth: int) -> Row:
        """Logits [n_vocab] of head ``depth`` (from 1), valid until the next call."""
        ...

    @property
    def measured(self) -> Any:
        """What is known of the guesses' worth, see ``medusa_heads.Measured``."""
        ...


class MedusaPool:
    """See ``base.Passes``: a part is a state [1, width] and the head that reads it."""

    n_batch = max_rows = 64
    free_leaves = 0
    kernels = Kernels()

    def __init__(self, heads: MedusaHeads) -> None:
        self.heads = heads

    def open(self, target: Any = None) -> MedusaLane:
        return MedusaLane(self)

    def run(self, parts: Sequence[Part]) -> list[Out]:
        if len(parts) == 1:
            return [Out(self._row(parts[0]))]
        return [Out(self._row(part).copy()) for part in parts]

    def _row(self, part: Part) -> Rows:
        assert part.states is not None
        rows: Rows = self.heads.logits(part.states[0], part.head)[np.newaxis]
        return rows


class MedusaLane:
    """See ``effects.HeadPlace``."""

    n_batch = max_rows = 1
    first = end = 0
    width = 0
    layers: tuple[int, ...] = ()

    def __init__(self, pool: MedusaPool) -> None:
        self.pool = pool
        self.heads, self.measured = len(pool.heads), pool.heads.measured

    def evaluate(self, part: Part) -> Out:
        return self.pool.run((part,))[0]

    def close(self) -> None:
        pass
