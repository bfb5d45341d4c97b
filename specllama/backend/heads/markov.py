"""The Markov head of a DSpark drafter: how much likelier a token is after another.

llama.cpp adds it along the likeliest guesses only. For any other token it is computed here, from
the few rows of the file that it takes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from specllama.arrays import IntArray, Row
from specllama.models.layer_inputs import read_draft_ids
from specllama.models.tensors import TensorRows, read_tensor

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader


class MarkovRows:
    """See ``blocks.Markov``.

    Raises:
        BadGguf, UnsupportedModel: cut short, or in types that are not decoded here.
    """

    def __init__(self, header: GgufHeader) -> None:
        self._before = TensorRows(header, "markov_w1.weight")
        self._after = TensorRows(header, "markov_w2.weight")
        self._row_of: IntArray | None = None  # of tokens, where not every one has a row
        if "d2t" in header.by_name:
            ids = read_draft_ids(header)
            self._row_of = np.zeros(header.vocab_size, np.int32)
            self._row_of[ids] = np.arange(len(ids), dtype=np.int32)
        self._weights: Row | None = None
        if "conf_proj.weight" in header.by_name:
            self._weights = read_tensor(header, "conf_proj.weight")[0, header.embedding_length :]

    def bias(self, ids: IntArray, behind: int) -> Row:
        rows = ids if self._row_of is None else self._row_of[ids]
        bias: Row = self._after[rows] @ self._state(behind)
        return bias

    def trust(self, behind: int) -> float:
        return 0.0 if self._weights is None else float(self._weights @ self._state(behind))

    def _state(self, token: int) -> Row:
        state: Row = self._before[np.array([token], np.int32)][0]
        return state
