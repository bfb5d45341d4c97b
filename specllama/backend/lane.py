"""A conversation's place in a pool: its text, its cells, and its pending changes.

Decisions (``rollback``, ``keep_path``, ``close``) change the lane's text at once and the cache when
the pool settles, before its next pass: then it is known of every lane which cells die.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from specllama.arrays import HiddenNeed, Rows
from specllama.backend.base import Out, Outputs, Part, Pool
from specllama.backend.cells import Places
from specllama.backend.hidden import HiddenRows
from specllama.backend.kernels import Read
from specllama.backend.layout import Layout
from specllama.errors import EngineError
from specllama.history import History


class Home(Pool, Protocol):
    """A lane's interface to its pool."""

    @property
    def n_ctx(self) -> int: ...

    @property
    def longest(self) -> int:
        """Most cells of a lane, pads among them."""
        ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def max_leaves(self) -> int: ...

    def decided(self, lane: CellLane) -> None:
        """Note that the lane's text no longer equals the cache."""
        ...

    def end_of(self, lane: CellLane) -> int:
        """Return the position after the last one of the lane, as the library reports it."""
        ...

    def reusable_prefix(self, lane: CellLane, keep: int) -> int:
        """See ``Lane.reusable_prefix``."""
        ...

    def choose_states(self) -> None:
        """Change the hidden states that a lane wants."""
        ...

    def rows_at(self, past: int) -> int:
        """See ``Lane.rows_at``."""
        ...

    def require_open(self) -> None: ...


@dataclass(slots=True)
class CachedTree:
    """A tree in the cache. ``path``: the nodes that stay; None until that is decided."""

    tokens: list[int]
    layout: Layout
    sequences: list[int]  # of the leaves; the first is the lane's own
    places: Places  # of the nodes
    path: list[int] | None = None

    @property
    def rest(self) -> Places:
        """The nodes that do not stay."""
        stays = np.zeros(len(self.tokens), np.bool_)
        stays[self.path] = True
        return np.flatnonzero(~stays)


@dataclass(frozen=True, slots=True)
class Parked:
    """A lane outside its pool; see ``base.Blob``."""

    tokens: Sequence[int]
    state: bytes
    hidden: HiddenRows = field(default_factory=HiddenRows)
    need: HiddenNeed = "nothing"
    read: Sequence[Read] = ()

    @property
    def n_bytes(self) -> int:
        return len(self.state)


class CellLane:
    """A lane of a pool, which makes it; see ``base.Lane``."""

    def __init__(self, pool: Home, sequence: int) -> None:
        self.pool = pool
        self.sequence = sequence
        self.n_ctx, self.n_vocab, self.n_batch = pool.n_ctx, pool.n_vocab, pool.n_batch
        self.max_rows, self.max_leaves = pool.max_rows, pool.max_leaves
        self.tokens = History()
        self.places: Places = np.empty(pool.longest, np.int64)  # of the cells, by position
        self.n_cells = 0  # of them that the cache holds, a tree apart
        self.read: list[Read] = []
        self.tree: CachedTree | None = None
        self.hidden = HiddenRows()
        self.need: HiddenNeed = "nothing"
        self.closed = False

    # -- facts --

    @property
    def growing(self) -> CachedTree | None:
        """The tree whose surviving nodes are not yet decided."""
        tree = self.tree
        return tree if tree is not None and tree.path is None else None

    @property
    def n_past(self) -> int:
        self._require_open()
        return self.pool.end_of(self)

    def _require_open(self) -> None:
        self.pool.require_open()
        if self.closed:
            raise EngineError("the lane is closed")

    def rows_at(self, past: int) -> int:
        return self.pool.rows_at(past)

    # -- passes and what stays of them --

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        return self.pool.run((Part(self, tokens, outputs, parents),))[0].rows

    def evaluate(self, part: Part) -> Out:
        return Out(self.forward(part.tokens, outputs=part.outputs, parents=part.parents))

    def grown(self, parents: Sequence[int]) -> Layout:
        """Return the lane's tree with the nodes of a further pass.

        Raises:
            ValueError: a parent does not precede its child.
        """
        tree = self.growing
        return (Layout() if tree is None else tree.layout).grown(parents)

    def reopen(self, n: int) -> None:
        if self.growing is not None or not n:
            return
        self._require_open()
        self.pool.settle()
        keep = len(self.tokens) - n
        line = Layout().grown(range(-1, n - 1))
        places = self.places[keep : keep + n].copy()
        self.tree = CachedTree(self.tokens[keep:], line, [self.sequence], places)
        self.tokens.cut(keep)
        self.n_cells = keep

    def branches(self, parents: Sequence[int], reopen: int = 0) -> int:
        line = range(-1, reopen - 1) if self.growing is None else ()
        return len(self.grown((*line, *parents)).copies)

    def keep_path(self, path: Sequence[int]) -> None:
        self._require_open()
        tree = self.growing
        if tree is None:
            raise EngineError("there is no tree to settle")
        end = path[-1] if path else -1
        if end >= len(tree.tokens) or list(path) != tree.layout.above(end):
            raise ValueError("not a path from the root of the tree")
        tree.path = list(path)
        self.hidden.keep_path(len(self.tokens), path)
        self.tokens.extend([tree.tokens[node] for node in path])
        self.pool.decided(self)

    def rollback(self, keep_len: int) -> None:
        self._require_open()
        if not 0 <= keep_len <= len(self.tokens):
            raise ValueError(f"cannot roll back to {keep_len} of {len(self.tokens)} tokens")
        if self.growing is not None:
            self.keep_path(())
        if keep_len < len(self.tokens):
            self.tokens.cut(keep_len)
            self.hidden.cut(keep_len)
            self.pool.decided(self)

    def reusable_prefix(self, keep_len: int) -> int:
        return self.pool.reusable_prefix(self, keep_len)

    def capture(self, need: HiddenNeed) -> None:
        self._require_open()
        if need != self.need:
            before, self.need = self.need, need
            try:
                self.pool.choose_states()
            except BaseException:
                self.need = before
                raise
            self.hidden.clear()

    def close(self) -> None:
        """Give the place back; do nothing if that was done before."""
        if self.closed:
            return
        if (tree := self.growing) is not None:
            tree.path = []
        self.tokens.clear()
        self.hidden.clear()
        self.closed = True
        self.pool.decided(self)
