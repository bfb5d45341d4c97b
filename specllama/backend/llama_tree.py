"""Tree passes through llama.cpp: one sequence id per leaf over one shared pool of KV cells.

    before    the cached prefix is shared with every leaf (``seq_cp``: metadata only)
    pass      a node carries the ids of the leaves below it, at position prefix + depth; llama.cpp
              lets a query see the cells that carry its first id, which are its ancestors
    after     the winning leaf becomes sequence 0, everything else is dropped

Attention adds cells up in the order in which they lie. Cells of a dropped branch before kept ones
are filled by later tokens, which would change that order, and with it now and then a last bit.
Where bits count, on a CPU, such kept tokens are dropped as well and read again behind the others.

Chain passes are those of ``LlamaContext``, unchanged. What llama.cpp would abort on (a leaf number
beyond ``n_seq_max``, diverged sequences, a second tree on top of an unsettled one) is refused here
before the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llama_cpp as ll
import numpy as np

from specllama.backend.base import Outputs
from specllama.backend.llama_context import SEQ, LlamaContext, decode_error
from specllama.errors import EngineError
from specllama.speculative.tree import Layout, layout
from specllama.speculative.types import IntArray, Rows


@dataclass(frozen=True, slots=True)
class _Pass:
    """A tree pass that waits for ``keep_path``."""

    tokens: list[int]
    parents: tuple[int, ...]
    layout: Layout


class LlamaTreeContext(LlamaContext):
    """A KV cache that takes trees of up to ``max_leaves`` leaves besides chains."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._tree: _Pass | None = None
        self._b_n_seq: IntArray = np.ctypeslib.as_array(self._batch.n_seq_id, (self._n_batch,))

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        if self._tree is not None:
            raise EngineError("a tree pass must be settled with keep_path")
        if parents is None:
            return super().forward(tokens, outputs=outputs)
        if len(parents) != len(tokens):
            raise ValueError(f"{len(tokens)} tokens with {len(parents)} parents")
        placed = layout(parents)
        if placed.n_leaves > self._max_leaves:
            raise ValueError(f"a tree has at most {self._max_leaves} leaves, not {placed.n_leaves}")
        n_rows = self._load(tokens, outputs)
        n, past = len(tokens), len(self._tokens)
        with self._lock:
            for leaf in range(1, placed.n_leaves):
                ll.llama_memory_seq_cp(self._memory, SEQ, leaf, -1, -1)
            self._b_pos[:n] = placed.depth + past
            for i, leaves in enumerate(placed.leaves):
                self._b_n_seq[i] = len(leaves)
                for k, leaf in enumerate(leaves):
                    self._batch.seq_id[i][k] = leaf
            self._tree = _Pass(self._b_token[:n].tolist(), tuple(parents), placed)
            self._capture.prepare(n_rows == n)
            try:
                status = self._decode(reading=False)
            finally:
                self._b_n_seq[:n] = 1
                for i in range(n):
                    self._batch.seq_id[i][0] = SEQ
            if status != 0:
                self._cut(past)
                raise decode_error(status, self._n_ctx)
            self._capture.take(past, n, n_rows == n)
            return self._rows(n_rows)

    def keep_path(self, path: Sequence[int]) -> None:
        tree = self._tree
        if tree is None:
            raise EngineError("there is no tree pass to settle")
        above = -1
        for node in path:
            if not 0 <= node < len(tree.parents) or tree.parents[node] != above:
                raise ValueError("not a path from the root of the tree")
            above = node
        stay = len(path)
        if self.model.gpu_layers == 0:
            stay = next((i for i, node in enumerate(path) if node != i), stay)
        with self._lock:
            winner = tree.layout.leaves[above][0] if path else SEQ
            self._only(winner, len(self._tokens) + stay)
            self._capture.hidden.keep_path(len(self._tokens), path[:stay])
            self._tokens += [tree.tokens[node] for node in path[:stay]]
        if stay < len(path):
            super().forward([tree.tokens[node] for node in path[stay:]], outputs="all")

    def rollback(self, keep_len: int) -> None:
        if self._tree is not None and 0 <= keep_len <= len(self._tokens):
            self.keep_path(())
        super().rollback(keep_len)

    def _cut(self, keep_len: int, *, replay: bool = True) -> None:
        if self._tree is not None:
            self._only(SEQ, min(keep_len, len(self._tokens)))
        super()._cut(keep_len, replay=replay)

    def _only(self, leaf: int, keep: int) -> None:
        """Keep the first ``keep`` tokens of one leaf's branch, as sequence 0, and nothing else."""
        memory = self._memory
        self._tree = None
        if not ll.llama_memory_seq_rm(memory, leaf, keep, -1):
            self._clear()
            raise EngineError("llama.cpp refused to roll the KV cache back; it was cleared")
        ll.llama_memory_seq_keep(memory, leaf)
        if leaf != SEQ:
            ll.llama_memory_seq_cp(memory, leaf, SEQ, -1, -1)
            ll.llama_memory_seq_keep(memory, SEQ)
