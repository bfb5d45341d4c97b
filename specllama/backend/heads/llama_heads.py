"""Heads that llama.cpp runs, each kind with what its graph wants: see ``head_pool``.

NextN          blocks of a target, in a second context on the same model. The context holds their
               keys and values only, and rolls back like any attention cache
EAGLE-3        an encoder, and one decoder layer that also reads states. The encoder fuses three
               hidden states of the target's pass over token p to the state g[p]. The decoder's pair
               at position p is token p with g[p - 1]; behind guessed tokens the head's own state
               stands in for g (what its training unrolled)
assistants     layers without keys and values of their own. Their context borrows the cells of the
               target's: it sees what the target's lane holds, and can change nothing there. So
               whatever shapes that cache is taken over from the target's context, above all how
               many sequences it has and whether they share cells: llama.cpp would lay the same
               cells out anew
DFlash         DFlash, DFlash2 and DSpark. A pass of states becomes keys and values of every layer,
               at the states' own positions; a pass of tokens, the last one and masks behind it,
               sees those and each other. It leaves keys and values, too, which go as drafted nodes
               do: a lane holds states of the target and nothing else
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llama_cpp as ll
import numpy as np

from specllama.arrays import IntArray, Row
from specllama.backend.heads.head_pool import (
    HeadGraph,
    HeadLane,
    HeadPart,
    HeadPool,
    head_params,
    load_head,
)
from specllama.backend.llama import LlamaModel
from specllama.backend.tree_layout import Layout
from specllama.errors import EngineError, UnsupportedModel
from specllama.models.layer_inputs import read_draft_ids
from specllama.models.nextn_blocks import GRAPHS, nextn_blocks
from specllama.models.tensors import TensorRows, read_tensor

if TYPE_CHECKING:
    from specllama.backend.base import Part
    from specllama.backend.lane import CellLane
    from specllama.backend.llama_pool import LlamaPool, LoadedModel
    from specllama.models.dflash_file import DflashFacts
    from specllama.models.gguf import GgufHeader
    from specllama.models.layer_inputs import HeadFacts
    from specllama.models.nextn_file import HeadWords


def open_nextn(header: GgufHeader, target: LoadedModel, words: HeadWords | None = None) -> HeadPool:
    """Open the NextN layers of a file: the target's own, or one that belongs to it.

    ``words``: its tokens, where it knows only some of the target's.

    ``nextn_blocks.why_not`` has nothing against the header, or llama.cpp ends the process.

    Raises:
        BadGguf, UnsupportedModel, CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free beside the target.
    """
    model, pool, lanes = target.model, target.pool, target.options.parallel
    if header is not target.header:
        model = load_head(header, target)
    params = pool.settings()
    params.ctx_type = ll.LLAMA_CONTEXT_TYPE_MTP
    params.n_ctx = pool.n_ctx
    heads, leaves = nextn_blocks(header), pool.max_leaves
    # llama.cpp makes room for one of each sequence; of several heads each reads all above
    params.n_outputs_max = max(lanes + leaves - 1, leaves * heads)
    params.swa_full = True  # so that any depth of rollback is possible
    width = int(ll.llama_model_n_embd_out(model.handle))
    masked = GRAPHS[header.architecture].outputs_only
    graph = HeadGraph(reads=width, gives=width, masked=masked, heads=heads)
    return HeadPool(model, params, graph, lanes=lanes, leaves=leaves, words=words)


def eagle_pool(
    model: LlamaModel, target: LlamaPool, facts: HeadFacts, *, threads: int, lanes: int = 1
) -> HeadPool:
    """Open the head's pool.

    Args:
        model: the head. target: whose matrices it may borrow.
    """
    graph = HeadGraph(
        reads=facts.width, gives=facts.width, masked=True, selects=False,
        features=len(facts.layers) * facts.target_width, layers=facts.layers,
    )  # fmt: skip
    params = head_params(target, threads)
    return HeadPool(model, params, graph, lanes=lanes, leaves=target.max_leaves)


def open_eagle3(header: GgufHeader, target: LoadedModel, facts: HeadFacts) -> HeadPool:
    """Open the head of a file.

    Raises:
        PairIncompatible: an architecture whose hidden states llama.cpp does not give away.
        CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free beside the target.
    """
    target.pool.require_layers(facts.layers)
    model = load_head(header, target)
    lanes = target.options.parallel
    return eagle_pool(model, target.pool, facts, threads=target.threads, lanes=lanes)


class AssistantPool(HeadPool):
    """The assistant's context.

    Args:
        model: the assistant.
        target: a pool that holds no cells: making the context empties it.

    Raises:
        CannotLoad: no memory, or functions that this libllama lacks.
    """

    def __init__(self, model: LlamaModel, target: LlamaPool) -> None:
        target.settle()
        if target.cells.held:
            raise EngineError("an assistant is opened before its target reads anything")
        params = target.settings()
        params.ctx_other = target.handle
        params.n_batch = params.n_ubatch = target.lanes + target.max_leaves - 1
        width = int(ll.llama_model_n_embd_out(model.handle))
        graph = HeadGraph(reads=width, gives=width, masked=False, borrows=True)
        super().__init__(model, params, graph, lanes=0, leaves=target.max_leaves)

    def open(self, target: Any = None) -> AssistantLane:
        """Open a view of a lane of the target."""
        return AssistantLane(self, target)


class AssistantLane(HeadLane):
    """A view of a target's lane: a pair at the position of its text's end, and nodes of any depth
    at that position, since the nodes above one are in its state alone."""

    def __init__(self, pool: AssistantPool, target: CellLane) -> None:
        super().__init__(pool, target.sequence)
        self._target = target

    @property
    def n_past(self) -> int:
        return self._target.n_past  # which carries out what the lane decided

    def piece(self, part: Part, *, encodes: bool) -> HeadPart:
        end = self.n_past
        self.sequence = self._target.sequence  # another one after a tree
        if part.parents is not None:
            return HeadPart(self, part, end, Layout(), [end] * part.size)
        if end != self.end:
            raise EngineError(f"the target's cache ends at {end}, not at {self.end}")
        return super().piece(part, encodes=encodes)

    def branches(self, parents: Sequence[int], reopen: int = 0) -> int:
        return 0

    def undo(self, piece: HeadPart) -> None:
        if piece.tree is None:
            self.end = piece.at

    def rollback(self, keep: int) -> None:
        self.first = self.end = keep


def open_assistant(header: GgufHeader, target: LoadedModel, facts: None = None) -> AssistantPool:
    """Open the assistant of a file.

    Raises:
        BadGguf, UnsupportedModel, CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free beside the target.
    """
    return AssistantPool(load_head(header, target), target.pool)


logger = logging.getLogger("specllama.backend.heads.llama_heads")


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
        model, target.pool, facts, threads=target.threads, lanes=target.options.parallel,
        markov=_markov(header, facts),
    )  # fmt: skip


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
