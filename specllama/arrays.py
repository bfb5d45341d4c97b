"""Arrays that the backend fills and the algorithm reads: their types, in one place."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float64]
Row = npt.NDArray[np.float32]  # [n_vocab] logits, usually a view into llama.cpp's buffer
Rows = npt.NDArray[np.float32]  # [n_rows, n_vocab]

# hidden states of the target that a drafter reads; numbers are layers, whose inputs it reads, and
# FINAL among them is the state of "final_hidden"
HiddenNeed = Literal["nothing", "final_hidden", "nextn"] | tuple[int, ...]
FINAL = -1


def with_final(need: HiddenNeed) -> bool:
    """True if the final hidden state is among these states."""
    return need == "final_hidden" or (isinstance(need, tuple) and FINAL in need)
