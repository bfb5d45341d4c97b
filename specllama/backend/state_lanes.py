"""Drafting layers that read the target's hidden states, run by llama.cpp.

One context holds a lane for every conversation; where they grow trees, all share its cells, and a
tree has a sequence for each leaf (``layout``). Positions are those of the text. NextN blocks and
EAGLE-3 heads read pairs:

    pair at position p    token p of the text, and a state that stands for the text before it
    what comes out        logits of token p + 1, and a state that stands in for the target's own
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal

import llama_cpp as ll
import numpy as np
import numpy.typing as npt

from specllama.arrays import IntArray, Row, Rows
from specllama.backend.base import Outputs
from specllama.backend.layout import Layout
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_cache import decode_error, require_running
from specllama.backend.llama_log import last_words, recent
from specllama.backend.symbols import function
from specllama.backend.symbols import rows as view
from specllama.errors import CannotLoad, ContextFull, EngineError

_INTS = ctypes.POINTER(ctypes.c_int32)
_FLAGGED = 16  # rows of a pass that may all have logits, where only all or none can have them


class StateBatch:
    """A batch of vectors, with tokens beside them if wanted; llama.cpp allocates for either.

    Args:
        size: most rows. width: of a vector; 0 for a batch of tokens alone.
        leaves: most sequences of a row.
    """

    def __init__(self, size: int, width: int, leaves: int = 1) -> None:
        self.batch = ll.llama_batch_init(size, width, leaves)
        as_array = np.ctypeslib.as_array
        self._states: Rows | None = as_array(self.batch.embd, (size, width)) if width else None
        # llama.cpp's own, to be freed by it; a field read as it is would follow its changes
        self._given = ctypes.cast(self.batch.token, _INTS), ctypes.cast(self.batch.pos, _INTS)
        self._tokens: IntArray = np.zeros(size, np.int32)
        # four times over: rotations of several dimensions read a position for each
        self._pos: IntArray = np.zeros(4 * size, np.int32)
        self.batch.pos = self._pos.ctypes.data_as(_INTS)
        self._output: npt.NDArray[np.int8] = as_array(self.batch.logits, (size,))
        self._n_sequences: IntArray = as_array(self.batch.n_seq_id, (size,))
        self._n_sequences[:] = 1

    def fill(
        self,
        sequence: int,
        past: int,
        states: Rows | None,
        outputs: Outputs,
        tokens: Sequence[int] = (),
    ) -> Any:
        """``states`` [n, width], ``tokens`` or both from position ``past`` on."""
        n = len(tokens) if states is None else len(states)
        if states is not None:
            assert self._states is not None
            self._states[:n] = states
        self._pos[: 4 * n] = np.tile(np.arange(past, past + n, dtype=np.int32), 4)
        self._output[:n] = outputs == "all"
        self._output[n - 1] = outputs != "none"
        self._n_sequences[:n] = 1
        for i in range(n):
            self.batch.seq_id[i][0] = sequence
        if len(tokens):
            self._tokens[:n] = tokens
            self.batch.token = self._tokens.ctypes.data_as(_INTS)
        self.batch.n_tokens = n
        return self.batch

    def place(self, positions: Sequence[int], sequences: Sequence[Sequence[int]]) -> None:
        """Put the rows of the batch there instead."""
        self._pos[: 4 * len(positions)] = np.tile(np.array(positions, np.int32), 4)
        for i, ids in enumerate(sequences):
            self._n_sequences[i] = len(ids)
            for j, sequence in enumerate(ids):
                self.batch.seq_id[i][j] = sequence

    def close(self) -> None:
        self.batch.token, self.batch.pos = self._given
        ll.llama_batch_free(self.batch)


class HeadContext:
    """One context on the drafting layers' model, shared by its lanes. Not for two threads at once.

    Attributes:
        own_cache: its lanes hold what they read, rather than look into the target's.
        states: the batch that it reads states with.

    Args:
        model: the drafting layers'.
        params: llama.cpp's, for one lane; ``n_batch`` bounds a pass.
        width: of a state.
        lanes: most at once; each has the ``n_ctx`` of ``params``. 0 where ``params`` are those of
            a cache that is another context's.
        leaves: most of a tree; all lanes together have so many branches.
        outputs_only: the graph gives states of rows with logits away, else of every row.

    Raises:
        CannotLoad: no memory, or functions that this libllama lacks.
    """

    own_cache = True

    def __init__(
        self,
        model: LlamaModel,
        params: Any,
        *,
        width: int,
        lanes: int,
        outputs_only: bool,
        leaves: int = 1,
    ) -> None:
        self._nextn = function("llama_get_embeddings_nextn")
        choose = function("llama_set_embeddings_nextn")
        self.stop = model.stop
        self.width = width
        self.n_vocab = model.vocab.n_tokens
        self._lanes, self._open = lanes, 0
        self._outputs_only = outputs_only
        n_ctx = int(params.n_ctx)
        if lanes:
            params.n_ctx = -(-n_ctx // 256) * 256 * lanes
            params.n_seq_max = lanes + leaves - 1
            params.kv_unified = leaves > 1  # else each lane has cells of its own
        self._branches = list(range(lanes, lanes + leaves - 1))
        self.leaves = leaves
        recent.clear()
        self.handle: Any = ll.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise CannotLoad(
                f"cannot create a context for the drafting layer of {model.path.name}: "
                + (last_words() or "llama.cpp gave no reason"),
                "try a smaller --ctx-size",
            )
        model.loras.wear(self.handle)
        # must be what the graph does: llama.cpp copies so many rows, from the first on
        choose(self.handle, True, outputs_only)
        self.memory = ll.llama_get_memory(self.handle)
        self.n_ctx = min(int(ll.llama_n_ctx_seq(self.handle)), n_ctx)
        self.n_batch = int(ll.llama_n_batch(self.handle))
        self.states = StateBatch(self.n_batch, width, leaves)

    def take(self) -> int:
        """The sequence of a further lane."""
        if self._open == self._lanes:
            raise EngineError(f"all {self._lanes} lanes of the drafting layer are taken")
        self._open += 1
        return self._open - 1

    def branch(self, n: int) -> list[int]:
        """So many sequences for leaves.

        Raises:
            EngineError: others have them.
        """
        if n > len(self._branches):
            raise EngineError(f"trees have at most {len(self._branches)} branches more")
        return [self._branches.pop() for _ in range(n)]

    def give_back(self, sequences: Sequence[int]) -> None:
        for sequence in sequences:
            ll.llama_memory_seq_rm(self.memory, sequence, -1, -1)
        self._branches += sequences

    def run(self, batch: Any) -> None:
        """Evaluate a batch."""
        require_running(self.stop)
        status = ll.llama_decode(self.handle, batch)
        if status != 0:
            raise decode_error(status, self.n_ctx)

    def close(self) -> None:
        if self.handle:
            self.states.close()
            ll.llama_free(self.handle)
            self.handle = None


class StateContext(HeadContext):
    """The context of a block that reads pairs, or of several that read alike and draft in turn.

    Args:
        flags: which rows may have logits: the "last", or "all or none" where the graph selects no
            rows and llama.cpp copies the first ones whatever their flags say.
        heads: NextN blocks; each drafts one token.
    """

    def __init__(
        self,
        model: LlamaModel,
        params: Any,
        *,
        width: int,
        lanes: int,
        outputs_only: bool,
        flags: Literal["last", "all or none"],
        heads: int = 1,
        leaves: int = 1,
    ) -> None:
        self._all = flags != "last"
        self.heads = heads
        self._choose_head = function("llama_set_nextn_layer_offset") if heads > 1 else None
        super().__init__(
            model, params, width=width, lanes=lanes, outputs_only=outputs_only, leaves=leaves
        )

    def open(self) -> LlamaStates:
        """An empty lane.

        Raises:
            EngineError: every lane is taken.
        """
        return LlamaStates(self, self.take())

    def decode(
        self, sequence: int, at: int, tokens: Sequence[int], states: Rows
    ) -> tuple[Row, Row]:
        """Read pairs from position ``at`` on: logits and state behind the last (views)."""
        if not self._all:
            if self._choose_head is not None:
                for other in range(1, self.heads):
                    self._choose_head(self.handle, other)
                    self._pass(sequence, at, tokens, states, "none")
                    # each head has keys and values of its own, in the same cells
                    ll.llama_memory_seq_rm(self.memory, sequence, at, -1)
                self._choose_head(self.handle, 0)
            return self._pass(sequence, at, tokens, states, "last")
        begin = 0 if len(tokens) <= _FLAGGED else len(tokens) - 1
        if begin:
            self._pass(sequence, at, tokens[:begin], states[:begin], "none")
        return self._pass(sequence, at + begin, tokens[begin:], states[begin:], "all")

    def nodes(
        self,
        positions: Sequence[int],
        sequences: Sequence[Sequence[int]],
        tokens: Sequence[int],
        states: Rows,
        head: int,
    ) -> tuple[Rows, Rows]:
        """Read pairs wherever they are: logits and states behind each (views)."""
        if self._choose_head is not None:
            self._choose_head(self.handle, head)
        n = len(tokens)
        batch = self.states.fill(0, 0, states, "all", tokens)
        self.states.place(positions, sequences)
        self.run(batch)
        return (
            view(ll.llama_get_logits(self.handle), n, self.n_vocab),
            view(self._nextn(self.handle), n, self.width),
        )

    def _pass(
        self, sequence: int, at: int, tokens: Sequence[int], states: Rows, outputs: Outputs
    ) -> tuple[Row, Row]:
        n = len(tokens)
        self.run(self.states.fill(sequence, at, states, outputs, tokens))
        if outputs == "none":
            return states[0], states[0]
        rows = n if outputs == "all" else 1
        logits = view(ll.llama_get_logits(self.handle), rows, self.n_vocab)[-1]
        rows = rows if self._outputs_only else n
        return logits, view(self._nextn(self.handle), rows, self.width)[-1]


class LlamaHead:
    """A lane, see ``asking.HeadLane``."""

    def __init__(self, context: HeadContext, sequence: int) -> None:
        self._of = context
        self._sequence = sequence
        self.n_ctx, self.n_batch, self.width = context.n_ctx, context.n_batch, context.width
        self.first = self.end = 0

    @property
    def n_past(self) -> int:
        """One past the last position, as the cache itself reports it; 0 when it is empty."""
        return int(ll.llama_memory_seq_pos_max(self._of.memory, self._sequence)) + 1

    def _take(self, states: Rows, held: int = 0) -> None:
        """Make sure that these states may be read now, behind ``held`` nodes of a tree."""
        n, of = len(states), self._of
        if of.handle is None:
            raise EngineError("the context is closed")
        if not 0 < n <= of.n_batch or states.shape != (n, of.width):
            raise ValueError(f"states of shape {states.shape}")
        if self.end - self.first + held + n > of.n_ctx:
            raise ContextFull("the cache of the drafting layer is full")

    def _know(self, tokens: Sequence[int]) -> None:
        if min(tokens) < 0 or max(tokens) >= self._of.n_vocab:
            raise EngineError(f"a token is outside the vocabulary of {self._of.n_vocab}")

    def rollback_to(self, end: int) -> None:
        if not self.first <= end <= self.end:
            raise ValueError(f"cannot roll back to {end} of {self.first} to {self.end}")
        if end < self.end:
            self._cut(end)

    def begin_at(self, position: int) -> None:
        if self._of.handle is not None:
            ll.llama_memory_seq_rm(self._of.memory, self._sequence, -1, -1)
        self.first = self.end = position

    def _cut(self, end: int) -> None:
        if end == self.first:
            self.begin_at(end)
        elif ll.llama_memory_seq_rm(self._of.memory, self._sequence, end, -1):
            self.end = end
        else:
            self.begin_at(0)
            raise EngineError("llama.cpp refused to cut the drafting layer's cache; it was cleared")

    def close(self) -> None:
        self.begin_at(0)


class LlamaStates(LlamaHead):
    """A lane of a block that reads pairs, see ``asking.StateLane``."""

    def __init__(self, context: StateContext, sequence: int) -> None:
        super().__init__(context, sequence)
        self._pairs = context
        self.heads = context.heads
        self.max_rows = context.leaves
        self._tree, self._opened = Layout(), list[int]()  # and the sequences of its branches

    def feed(self, tokens: Sequence[int], states: Rows) -> tuple[Row, Row]:
        self.drop()
        self._take(states)
        self._know(tokens)
        if len(tokens) != len(states):
            raise ValueError(f"{len(tokens)} tokens with {len(states)} states")
        try:
            row, state = self._pairs.decode(self._sequence, self.end, tokens, states)
        except BaseException:
            self._cut(self.end)  # what was read of it
            raise
        self.end += len(tokens)
        return row, state.copy()

    def grow(
        self, tokens: Sequence[int], states: Rows, parents: Sequence[int], head: int = 0
    ) -> tuple[Rows, Rows]:
        if self.heads > 1:
            self.drop()
        of, before, end = self._pairs, self._tree, self.end
        tree = before.grown(parents)
        self._take(states, held=len(before.parents))
        self._know(tokens)
        if not len(tokens) == len(states) == len(parents):
            raise ValueError(f"{len(tokens)} tokens, {len(states)} states, {len(parents)} parents")
        opened = of.branch(len(tree.copies))
        held = [self._sequence, *self._opened, *opened]
        for sequence, (leaf, n_above) in zip(opened, tree.copies, strict=True):
            ll.llama_memory_seq_cp(of.memory, held[leaf], sequence, 0, end + n_above)
        ids = [[held[leaf] for leaf in below] for below in tree.leaves]
        try:
            rows, own = of.nodes([end + d for d in tree.new_depth], ids, tokens, states, head)
        except BaseException:
            of.give_back(opened)
            for sequence, last in zip(held, before.ends, strict=False):
                at = end + len(before.above(last))
                ll.llama_memory_seq_rm(of.memory, sequence, at, -1)
            raise
        self._tree = tree
        self._opened += opened
        return rows, own.copy()

    def drop(self) -> None:
        if self._tree.parents and self._of.handle is not None:
            self._pairs.give_back(self._opened)
            ll.llama_memory_seq_rm(self._of.memory, self._sequence, self.end, -1)
        self._tree, self._opened = Layout(), []

    def rollback_to(self, end: int) -> None:
        self.drop()
        super().rollback_to(end)

    def begin_at(self, position: int) -> None:
        self.drop()
        super().begin_at(position)
