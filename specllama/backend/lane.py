"""The lanes of a pool: the text and the cells of each, and the rollback of its KV cache.

Decisions (``rollback``, ``keep_path``, ``close``) change the lane's text at once, and the cache
when the pool settles, before its next pass: then it is known of every lane which cells die.

settle   dead cells behind the last living one are freed, those before it become ghosts
         (``cells``); only then comes the next pass
compact  drop the ghosts, write the state out and read it back: the order of cells stays
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, cast

import numpy as np

from specllama.arrays import HiddenNeed, Rows
from specllama.backend.base import MAKE_ROOM, Outputs, Part, Pool
from specllama.backend.batch import Shape
from specllama.backend.cells import Cells, Places
from specllama.backend.hidden import HiddenRows
from specllama.backend.kernels import Kernels, Read
from specllama.backend.pass_plan import PassPlan
from specllama.backend.tree_layout import Layout
from specllama.errors import EngineError, PoolFull
from specllama.settings.params import DRAFT_MAX
from specllama.text_history import History, common_prefix

if TYPE_CHECKING:
    from specllama.backend.llama_cache import LlamaCache

_GHOST_LIMIT = 256  # ghosts that are always worth their keep


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

    def __init__(self, books: LaneBooks, sequence: int) -> None:
        self.pool = cast(Pool, books)
        self._books = books
        self.sequence = sequence
        self.n_ctx, self.n_vocab, self.n_batch = books.n_ctx, books.n_vocab, books.n_batch
        self.max_rows, self.max_leaves = books.max_rows, books.max_leaves
        self.tokens = History()
        self.places: Places = np.empty(books.longest, np.int64)  # of the cells, by position
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
        return self._books.end_of(self)

    @property
    def runs(self) -> int:
        self._books.settle()
        return 1 + int(np.count_nonzero(np.diff(self.places[: self.n_cells]) != 1))

    def _require_open(self) -> None:
        self._books.require_open()
        if self.closed:
            raise EngineError("the lane is closed")

    # -- passes and what stays of them --

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        part = Part(self, tokens, outputs, parents)
        self.pool.run((part,))
        return part.rows

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
        self._books.decided(self)

    def rollback(self, keep_len: int) -> None:
        self._require_open()
        if not 0 <= keep_len <= len(self.tokens):
            raise ValueError(f"cannot roll back to {keep_len} of {len(self.tokens)} tokens")
        if self.growing is not None:
            self.keep_path(())
        if keep_len < len(self.tokens):
            self.tokens.cut(keep_len)
            self.hidden.cut(keep_len)
            self._books.decided(self)

    def reusable_prefix(self, keep_len: int) -> int:
        return self._books.reusable_prefix(self, keep_len)

    def capture(self, need: HiddenNeed) -> None:
        self._require_open()
        if need != self.need:
            before, self.need = self.need, need
            try:
                self._books.choose_states()
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
        self._books.decided(self)


class LaneBooks:
    """The books of a pool: its cells, its lanes, their sequences. They carry out the lanes' cuts.

    Args:
        cache: empty, with ``shape.sequences`` sequences.
        in_order: keep the order of every lane's cells (see ``cells``).
    """

    forgets: ClassVar[bool] = False

    def __init__(
        self, cache: LlamaCache, shape: Shape, n_vocab: int, kernels: Kernels, *, in_order: bool
    ) -> None:
        self.cache = cache
        self.shape = shape
        self.kernels = kernels
        self.n_vocab = n_vocab
        self.n_ctx = self.longest = shape.n_ctx  # ``longest``: of a lane, pads among them
        self.lanes, self.n_batch = shape.lanes, shape.n_batch
        self.max_rows = shape.max_rows
        self.max_leaves = shape.max_leaves
        self.plan = PassPlan(self)
        self.cells = Cells(cache.n_cells, in_order=in_order)
        n = shape.sequences
        self._free = list(range(n - 1, -1, -1))  # sequence ids, the lowest last
        if n > 1 and not shape.apart:
            self._ghost, self._spare = self._free.pop(0), self._free.pop(0)
        self._lanes: list[CellLane] = []
        self._decided: list[CellLane] = []
        # the only lane, while its cells are the first ones and the books need not name them
        self._only: CellLane | None = None
        self._needs: set[HiddenNeed] = set()
        self.compactions = 0
        self._lock = threading.RLock()  # two passes at once abort the process

    # -- facts --

    @property
    def ghosts(self) -> int:
        self.settle()
        return self.cells.ghosts

    @property
    def held(self) -> int:
        self.settle()
        return self.cells.held

    @property
    def room(self) -> int:
        return self.cells.n - self.held

    def require_open(self) -> None:
        self.cache.require_open()

    def end_of(self, lane: CellLane) -> int:
        """Return the position after the last one of the lane, as the library reports it."""
        if lane is self._only and not lane.closed:
            self._settle_only(lane)
        else:
            self.settle()
        return self.cache.end(lane.sequence)

    def reusable_prefix(self, lane: CellLane, keep: int) -> int:
        """Count the first tokens of a lane that stay after a cut, see ``Lane.reusable_prefix``."""
        return keep

    def keep_to(self, widths: Sequence[int], *, trees: bool) -> None:
        """Keep each later pass that returns rows to one of ``widths``, ascending. No lane is open.

        Args:
            trees: rows of branches are computed as those of chains.
        """
        most = widths[-1]
        any_width = tuple(widths) == tuple(range(1, most + 1)) and most > DRAFT_MAX
        kept = () if any_width else tuple(widths)
        self.kernels = replace(self.kernels, exact_rows=most, exact_trees=trees, widths=kept)
        self.max_rows = most
        self.max_leaves = self.shape.max_leaves if trees else 1
        # pads take places behind the last token that a text may have
        self.n_ctx = self.shape.n_ctx - max(b - a for a, b in pairwise((0, *widths))) + 1

    # -- lanes --

    def take_sequence(self) -> int:
        """Settle the pool and return a sequence id for a new lane."""
        self.require_open()
        self.settle()
        if len(self._lanes) >= self.lanes:
            raise EngineError(
                f"all {self.lanes} lanes are taken"
                if self.lanes > 1
                else "this model takes one conversation at a time"
            )
        if not self._free:
            raise EngineError("trees hold all sequences: settle them first")
        return self._free.pop()

    def seat(self, lane: CellLane) -> None:
        self._lanes.append(lane)

    # -- decisions --

    def decided(self, lane: CellLane) -> None:
        """Note that the lane's text no longer equals the cache."""
        if lane not in self._decided:
            self._decided.append(lane)

    def choose_states(self) -> None:
        """Change the hidden states that a lane wants."""
        needs: set[HiddenNeed] = {lane.need for lane in self._lanes}
        needs.discard("nothing")
        if needs != self._needs:
            with self._lock:
                self.cache.want(needs)
            self._needs = needs

    def _seek_only(self) -> None:
        """Remember the lane that is alone in the pool, if there is one."""
        if len(self._lanes) == 1 and not self.cells.has_ghosts:
            lane = self._lanes[0]
            settled = all(one is lane for one in self._decided)  # of it, pads may be left
            if settled and lane.tree is None and self.cells.held == lane.n_cells:
                self._only = lane

    def _settle_only(self, lane: CellLane) -> None:
        """Settle a lane that is alone."""
        if self._decided:
            self._decided.clear()
            if (keep := len(lane.tokens)) < lane.n_cells:
                self._cut(lane, keep)

    def settle(self) -> None:
        if (lane := self._only) is not None:
            self._only = None
            lane.places[: lane.n_cells] = np.arange(lane.n_cells)
            self.cells.fill(lane.n_cells)
        if not self._decided:
            return
        self.cache.require_open()
        lanes, self._decided = self._decided, []
        with self._lock:
            for lane in lanes:
                self._give_up(lane)
            if self.cells.settle():
                self.cache.remove(self._ghost, 0)
            for lane in lanes:
                self._keep_as_ghosts(lane)
                self._carry_out(lane)

    def _give_up(self, lane: CellLane) -> None:
        """Remove from the books the cells that the lane gives up."""
        tree, keep = lane.tree, len(lane.tokens)
        if tree is not None and tree.path is not None:
            tree.path = tree.path[: max(0, keep - lane.n_cells)]
            self.cells.drop(tree.places[tree.rest])
        if keep < lane.n_cells:
            self.cells.drop(lane.places[keep : lane.n_cells])

    def _keep_as_ghosts(self, lane: CellLane) -> None:
        """Turn cells that the lane gave up, and that living cells follow, into ghosts."""
        tree, keep = lane.tree, len(lane.tokens)
        if tree and tree.path is not None and self.cells.gaps(tree.places[tree.rest])[1]:
            for end, sequence in zip(tree.layout.ends, tree.sequences, strict=True):
                along = tree.layout.above(end)
                same = common_prefix(along, tree.path)
                self._leave(sequence, lane.n_cells + same, tree.places[along[same:]])
        if keep < lane.n_cells:
            self._leave(lane.sequence, keep, lane.places[keep : lane.n_cells])

    def _leave(self, sequence: int, position: int, places: Places) -> None:
        """Turn the dead cells of a sequence into ghosts if living cells follow them."""
        begin, end = self.cells.gaps(places)
        if end:
            self.cache.copy(sequence, self._ghost, position + begin, position + end)
            self.cells.make_ghosts(places[begin:end])

    def _carry_out(self, lane: CellLane) -> None:
        """Make the cache agree with the lane's text."""
        tree, keep = lane.tree, len(lane.tokens)
        if tree is not None and tree.path is not None:
            path = tree.path
            winner = tree.layout.leaf_at(path[-1]) if path else 0
            end = lane.n_cells + len(path)
            lane.sequence = tree.sequences.pop(winner)
            if tree.sequences and len(self._lanes) == 1 and not self.cells.has_ghosts:
                self.cache.keep(lane.sequence)  # sequence by sequence takes longer
            else:
                for sequence in tree.sequences:
                    self.cache.remove(sequence, 0)
            self._free += tree.sequences
            self.cache.remove(lane.sequence, end)
            lane.places[lane.n_cells : end] = tree.places[path]
            lane.n_cells, lane.tree = end, None
        if keep < lane.n_cells:
            self._cut(lane, keep)
        if lane.closed and lane in self._lanes:
            self._lanes.remove(lane)
            self._free.append(lane.sequence)
            self.choose_states()

    def _cut(self, lane: CellLane, keep: int) -> None:
        """Cut the cache of a lane to its first ``keep`` tokens."""
        lane.n_cells = keep
        lane.read = [(begin, min(end, keep), way) for begin, end, way in lane.read if begin < keep]
        if not self.cache.remove(lane.sequence, keep):
            self._lose()
            raise EngineError("llama.cpp refused to roll the KV cache back; it was cleared")

    def _lose(self) -> None:
        """Empty the cache and every lane."""
        self.cache.clear()
        self.cells.clear()
        self._only = None
        for lane in self._lanes:
            if lane.tree is not None:
                self._free += lane.tree.sequences[1:]
            lane.tokens.clear()
            lane.hidden.clear()
            lane.read = []
            lane.n_cells, lane.tree = 0, None

    # -- room --

    def compact(self) -> None:
        self.settle()
        if not self.cells.ghosts:
            return
        self.compactions += 1
        with self._lock:
            self.cache.remove(self._ghost, 0)
            if not self.cache.rewrite():
                self._lose()
                raise EngineError("llama.cpp refused to compact the KV cache; it was cleared")
            moved = self.cells.compact()
            for lane in self._lanes:
                lane.places[: lane.n_cells] = moved[lane.places[: lane.n_cells]]
                if lane.tree is not None:
                    lane.tree.places = moved[lane.tree.places]

    def _fit(self, n: int) -> None:
        """Make sure that ``n`` cells are free."""
        cells = self.cells
        if cells.has_ghosts and (cells.room < n or cells.ghosts > max(_GHOST_LIMIT, cells.held)):
            self.compact()
        if cells.room < n:
            raise PoolFull(f"no room left in the KV cache of {cells.n} tokens", MAKE_ROOM)
