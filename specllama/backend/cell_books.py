"""The books of a pool; they apply the lanes' pending cuts and keeps before the next pass.

settle   dead cells behind the last living one are freed, those before it become ghosts
         (``cells``); only then comes the next pass
compact  drop the ghosts, write the state out and read it back: the order of cells stays
"""

from __future__ import annotations

import threading

import numpy as np

from specllama.arrays import HiddenNeed
from specllama.backend.cache import Cache, Shape
from specllama.backend.cells import Cells, Places
from specllama.backend.lane import CellLane
from specllama.errors import EngineError, PoolFull
from specllama.history import common_prefix

_GHOST_LIMIT = 256  # ghosts that are always worth their keep


class CellBooks:
    """The books of a pool: its cells, its lanes, their sequences.

    Args:
        cache: empty, with ``shape.sequences`` sequences.
        in_order: keep the order of every lane's cells (see ``cells``).
    """

    def __init__(self, cache: Cache, shape: Shape, *, in_order: bool) -> None:
        self.cache = cache
        self.shape = shape
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
    def lanes(self) -> int:
        return self.shape.lanes

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
        if lane is self._only and not lane.closed:
            self._settle_only(lane)
        else:
            self.settle()
        return self.cache.end(lane.sequence)

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
        if lane not in self._decided:
            self._decided.append(lane)

    def choose_states(self) -> None:
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
        if (
            tree is not None
            and tree.path is not None
            and self.cells.gaps(tree.places[tree.rest])[1]
        ):
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
            raise PoolFull(
                f"no room left in the KV cache of {cells.n} tokens",
                "start a new chat, raise --ctx-size, or use --on-full shift",
            )
