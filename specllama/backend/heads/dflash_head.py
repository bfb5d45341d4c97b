"""DFlash, DFlash2 and DSpark drafters through llama.cpp.

    a pass of states     becomes keys and values of every layer, at the states' own positions
    a pass of tokens     the last token and masks behind it, which see those and each other

The second leaves keys and values, too, which go as drafted nodes do: a lane holds states of the
target and nothing else.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import llama_cpp as ll
import numpy as np

from specllama.arrays import IntArray, Row
from specllama.backend.heads.head_pool import HeadGraph, HeadPool, head_params, load_head
from specllama.errors import UnsupportedModel
from specllama.models.layer_inputs import read_draft_ids
from specllama.models.tensors import TensorRows, read_tensor

if TYPE_CHECKING:
    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import LlamaPool, LoadedModel
    from specllama.models.dflash_file import DflashFacts
    from specllama.models.gguf import GgufHeader

logger = logging.getLogger("specllama.backend.heads.dflash_head")


class DflashPool(HeadPool):
    """The drafter's pool.

    Attributes:
        facts: how a block is asked for, among others.
        markov: of a DSpark, where its types are read here.

    Args:
        model: the drafter. target: whose matrices it may borrow.
    """

    def __init__(
        self,
        model: LlamaModel,
        target: LlamaPool,
        facts: DflashFacts,
        *,
        threads: int,
        lanes: int = 1,
        markov: MarkovRows | None = None,
    ) -> None:
        self.facts, self.markov = facts, markov
        params = head_params(target, threads)
        params.n_ctx += facts.block
        graph = HeadGraph(
            reads=len(facts.layers) * facts.target_width,
            gives=facts.width if facts.candidates or facts.confident else 0,
            masked=facts.kind != "dflash2",
            logits=facts.kind != "dflash2",
            layers=facts.layers,
            alike=facts.kind == "dspark",
        )
        super().__init__(model, params, graph, lanes=lanes)
        ll.llama_set_causal_attn(self.handle, facts.causal)


def _markov(header: GgufHeader, facts: DflashFacts) -> MarkovRows | None:
    try:
        return MarkovRows(header) if facts.kind == "dspark" else None
    except UnsupportedModel as error:  # its guesses do without
        logger.info("%s", error)
        return None


def open_dflash(header: GgufHeader, target: LoadedModel, facts: DflashFacts) -> DflashPool:
    """Open the drafter of a file.

    Raises:
        PairIncompatible: an architecture whose hidden states llama.cpp does not give away.
        BadGguf, UnsupportedModel, CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free beside the target.
    """
    target.pool.require_layers(facts.layers)
    model = load_head(header, target)
    return DflashPool(
        model,
        target.pool,
        facts,
        threads=target.threads,
        lanes=target.options.parallel,
        markov=_markov(header, facts),
    )


class MarkovRows:
    """The Markov head of a DSpark drafter, see ``blocks.Markov``.

    llama.cpp adds it along the likeliest guesses only. For any other token it is computed here,
    from the few rows of the file that it takes.

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
