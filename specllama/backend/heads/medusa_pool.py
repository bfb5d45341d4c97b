"""Medusa heads as a pool: nothing is kept between passes, so a lane is a name.

A head reads its matrices once for the states of all conversations that are at its depth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from specllama.arrays import Rows
from specllama.backend.base import Out, Part
from specllama.backend.kernels import Kernels
from specllama.models.medusa_file import STATES


class MedusaHeads(Protocol):
    """Heads that can be asked, however they are computed."""

    def __len__(self) -> int:
        """Count the heads: the deepest guess."""
        ...

    def logits(self, hidden: Rows, depth: int) -> Rows:
        """Compute the logits [n, n_vocab] of head ``depth`` (from 1) on states [n, width], valid
        until the next call; n is ``STATES`` at most."""
        ...

    def close(self) -> None:
        """Free their memory."""
        ...


class MedusaPool:
    """A pool of heads, see ``base.Passes``: a part is a state [1, width] and its head."""

    n_batch = max_rows = STATES
    free_leaves = 0
    kernels = Kernels()

    def __init__(self, heads: MedusaHeads) -> None:
        self.heads = heads

    def open(self, target: Any = None) -> MedusaLane:
        return MedusaLane(self)

    def close(self) -> None:
        self.heads.close()

    def run(self, parts: Sequence[Part]) -> list[Out]:
        depths: dict[int, list[Part]] = {}
        for part in parts:
            depths.setdefault(part.head, []).append(part)
        said: dict[int, Iterator[Rows]] = {}
        for head, together in depths.items():
            rows = self.heads.logits(np.concatenate([p.states for p in together]), head)
            said[head] = iter(np.split(rows if len(depths) == 1 else rows.copy(), len(together)))
        return [Out(next(said[part.head])) for part in parts]


class MedusaLane:
    """A lane of heads, see ``effects.HeadPlace``."""

    n_batch = max_rows = 1
    first = end = 0
    width = 0
    layers: tuple[int, ...] = ()

    def __init__(self, pool: MedusaPool) -> None:
        self.pool = pool
        self.heads = len(pool.heads)

    def evaluate(self, part: Part) -> Out:
        return self.pool.run((part,))[0]

    def copied(self) -> bytes:
        return b""

    def restore(self, state: memoryview, first: int, end: int) -> bool:
        return False

    def close(self) -> None:
        pass
