"""An assistant through llama.cpp: layers without keys and values of their own.

Its context borrows the cells of the target's: it sees what the target's lane holds, and can change
nothing there. So whatever shapes that cache is taken over from the target's context, above all how
many sequences it has and whether they share cells: llama.cpp would lay the same cells out anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llama_cpp as ll

from specllama.backend.heads.head_pool import HeadGraph, HeadLane, HeadPart, HeadPool, load_head
from specllama.backend.llama import LlamaModel
from specllama.backend.tree_layout import Layout
from specllama.errors import EngineError

if TYPE_CHECKING:
    from specllama.backend.base import Part
    from specllama.backend.lane import CellLane
    from specllama.backend.llama_pool import LlamaPool, LoadedModel
    from specllama.models.gguf import GgufHeader


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
