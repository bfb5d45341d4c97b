"""The shape of a pool, and one pass before it runs: arrays that the library reads as they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specllama.arrays import IntArray


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a pool.

    Attributes:
        n_ctx: most tokens of a lane, and of all lanes together unless they are apart.
        lanes: most conversations at once.
        max_rows: most rows with logits in a pass.
        max_leaves: most branches of a token tree; 1 takes chains only.
        n_batch: most tokens in a pass.
        apart: every lane has ``n_ctx`` cells of its own.
    """

    n_ctx: int
    lanes: int = 4
    max_rows: int = 1
    max_leaves: int = 1
    n_batch: int = 512
    apart: bool = False

    @property
    def judged(self) -> bool:
        """True if a pass returns more than one row of each lane; not so for a draft model."""
        return self.max_rows > self.lanes

    @property
    def sequences(self) -> int:
        """Ids that lanes and leaves take, and the two that a pool of shared cells keeps to
        itself."""
        if self.apart:
            return self.lanes
        return (
            self.lanes + self.max_leaves - 1 + (2 if self.lanes > 1 or self.max_leaves > 1 else 0)
        )


class Batch:
    """A row for each of ``n`` tokens, each in up to ``width`` sequences."""

    def __init__(self, n: int, width: int) -> None:
        self.n = 0  # tokens that are in it now
        self.token: IntArray = np.zeros(n, np.int32)
        self.position: IntArray = np.zeros(n, np.int32)
        self.sequences: IntArray = np.zeros((n, width), np.int32)
        self.n_sequences: IntArray = np.ones(n, np.int32)
        self.output: npt.NDArray[np.int8] = np.zeros(n, np.int8)
