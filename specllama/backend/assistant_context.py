"""An assistant through llama.cpp: layers without keys and values of their own.

Its context borrows the cells of the target's: it sees what the target's lane holds, and can change
nothing there. So whatever shapes that cache is taken over from the target's context, above all how
many sequences it has and whether they share cells: llama.cpp would lay the same cells out anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import llama_cpp as ll

from specllama.arrays import Row, Rows
from specllama.backend.head_model import load_head
from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.backend.state_lanes import LlamaStates, StateContext
from specllama.errors import EngineError
from specllama.models.assistant_file import check_target

if TYPE_CHECKING:
    from specllama.backend.llama_pool import LlamaPool
    from specllama.backend.loaded_target import LoadedTarget
    from specllama.models.gguf import GgufHeader


class AssistantContext(StateContext):
    """The assistant's context.

    Args:
        model: the assistant.
        pool: the target's, which holds no cells: making the context empties it.

    Raises:
        CannotLoad: no memory, or functions that this libllama lacks.
    """

    own_cache = False

    def __init__(self, model: LlamaModel, pool: LlamaPool) -> None:
        pool.settle()
        if pool.cells.held:
            raise EngineError("an assistant is opened before its target reads anything")
        params = pool.settings()
        params.ctx_other = pool.handle
        params.n_batch = params.n_ubatch = pool.max_leaves
        width = int(ll.llama_model_n_embd_out(model.handle))
        super().__init__(
            model,
            params,
            width=width,
            lanes=0,
            outputs_only=False,
            flags="last",
            leaves=pool.max_leaves,
        )

    def look(self, target: CellLane) -> AssistantLook:
        """For the drafter of a lane of the target."""
        return AssistantLook(self, target)


class AssistantLook(LlamaStates):
    """A look into a lane of the target: one pair at a time, at the position where its text ends."""

    def __init__(self, context: AssistantContext, target: CellLane) -> None:
        super().__init__(context, target.sequence)
        self._target = target

    @property
    def n_past(self) -> int:
        return self._target.n_past  # which carries out what the lane decided

    def feed(self, tokens: Sequence[int], states: Rows) -> tuple[Row, Row]:
        if self.n_past != self.end:
            raise EngineError(f"the target's cache ends at {self.n_past}, not at {self.end}")
        self._sequence = self._target.sequence  # another one after a tree
        return super().feed(tokens, states)

    def grow(
        self, tokens: Sequence[int], states: Rows, parents: Sequence[int], head: int = 0
    ) -> tuple[Rows, Rows]:
        """Nodes of any depth: what is above one is in its state alone."""
        n = len(tokens)
        self._take(states)
        self._know(tokens)
        rows, own = self._pairs.nodes([self.n_past] * n, [[self._sequence]] * n, tokens, states, 0)
        return rows, own.copy()

    def begin_at(self, position: int) -> None:
        self.first = self.end = position

    def _cut(self, end: int) -> None:
        self.end = end


def open_assistant(header: GgufHeader, target: LoadedTarget) -> AssistantContext:
    """The assistant of a file.

    Raises:
        PairIncompatible: one of another target.
        BadGguf, UnsupportedModel, CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free beside the target.
    """
    check_target(header, target.header)
    model = load_head(header, target)
    context = AssistantContext(model, target.pool)
    target.on_close.callback(context.close)
    return context
