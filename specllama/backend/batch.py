"""One pass before it runs: a row for each token, in arrays that the library reads as they are."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from specllama.arrays import IntArray


class Batch:
    """Room for ``n`` tokens, each in up to ``width`` sequences."""

    def __init__(self, n: int, width: int) -> None:
        self.n = 0  # tokens that are in it now
        self.token: IntArray = np.zeros(n, np.int32)
        self.position: IntArray = np.zeros(n, np.int32)
        self.sequences: IntArray = np.zeros((n, width), np.int32)
        self.n_sequences: IntArray = np.ones(n, np.int32)
        self.output: npt.NDArray[np.int8] = np.zeros(n, np.int8)
