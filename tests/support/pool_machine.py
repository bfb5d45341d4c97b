"""A state machine over any pool: whatever happens in it, every lane's rows are those of the same
tokens alone.

``Alone`` knows the right rows: a fresh pool of one lane reads the same tokens in the same reads
(long reads are computed in tiles, so they count), and every other row is a pass of one row.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specllama.arrays import Row, Rows
from specllama.backend.base import Part
from specllama.backend.kernels import TILE
from specllama.backend.lane import CellLane, Parked
from specllama.backend.pool import CellPool
from specllama.errors import ContextFull

ROW = 0


@dataclass
class Talk:
    """A conversation: its lane, and how its text came about."""

    lane: CellLane
    text: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)  # lengths; ROW is a token whose row was judged


class Alone:
    """Rows of a text in a pool of its own: cut back to what it shares with the last one."""

    def __init__(self, pool: CellPool) -> None:
        self._lane = pool.open()
        self._reads: list[int] = []

    def row(self, text: Sequence[int], reads: Sequence[int]) -> Row:
        """Behind ``text``, whose last token is a pass of one row."""
        lane, at, same = self._lane, 0, 0
        for old, n in zip(self._reads, reads[:-1], strict=False):
            if old != n or lane.tokens[at : at + (n or 1)] != list(text[at : at + (n or 1)]):
                break
            at, same = at + (n or 1), same + 1
        lane.rollback(at)
        for n in reads[same:-1]:
            lane.forward(text[at : at + (n or 1)], outputs="none" if n else "all")
            at += n or 1
        assert len(text) - at == 1
        self._reads = list(reads)
        row: Row = lane.forward(text[at:], outputs="all")[0]
        return row


class Machine:
    """Random decisions over a pool, checked after each.

    Args:
        pool: the pool under test.
        alone: pools of one lane, computed alike.
        tokens: that texts are made of.
        long: reads of ``TILE`` tokens and more happen, too.
    """

    def __init__(
        self, pool: CellPool, alone: Alone, tokens: Sequence[int], *, long: bool = False
    ) -> None:
        self.pool = pool
        self.alone = alone
        self.tokens = tokens
        self.long = long
        self.talks: list[Talk] = []
        self.parked: list[tuple[Parked, Talk]] = []
        self.rows = self.wrong = 0

    # -- what happens --

    def play(self, seed: int, steps: int) -> None:
        """So many steps at random, and the end of all talks."""
        rng = random.Random(seed)
        for _ in range(steps):
            self.step(rng)
        self.finish()

    def step(self, rng: random.Random) -> None:
        doing = rng.choices(
            (self.open, self.fork, self.run, self.close, self.park, self.resume, self.compact,
             self.rollback, self.read),
            (2, 1, 10, 1, 1, 2, 1, 2, 2),
        )[0]  # fmt: skip
        doing(rng)
        self.check()

    def some(self, rng: random.Random, n: int) -> list[int]:
        return [rng.choice(self.tokens) for _ in range(n)]

    def open(self, rng: random.Random) -> None:
        if len(self.talks) < self.pool.lanes:
            self.talks.append(Talk(self.pool.open()))

    def fork(self, rng: random.Random) -> None:
        if self.talks and len(self.talks) < self.pool.lanes:
            of = rng.choice(self.talks)
            keep, reads = _whole(of, rng.randint(0, len(of.text)))
            self.talks.append(Talk(self.pool.fork(of.lane, keep), of.text[:keep], reads))

    def close(self, rng: random.Random) -> None:
        if self.talks:
            self.talks.pop(rng.randrange(len(self.talks))).lane.close()

    def park(self, rng: random.Random) -> None:
        if self.talks and len(self.parked) < 3:
            talk = self.talks.pop(rng.randrange(len(self.talks)))
            self.parked.append((self.pool.park(talk.lane), talk))
            assert not talk.lane.tokens
            talk.lane.close()

    def resume(self, rng: random.Random) -> None:
        if self.parked and len(self.talks) < self.pool.lanes:
            i = rng.randrange(len(self.parked))
            blob, talk = self.parked[i]
            try:
                lane = self.pool.resume(blob)
            except ContextFull:
                return
            self.talks.append(Talk(lane, list(talk.text), list(talk.reads)))
            if rng.random() < 0.7:  # a blob can be resumed again
                del self.parked[i]

    def compact(self, rng: random.Random) -> None:
        self.pool.compact()
        assert self.pool.ghosts == 0

    def rollback(self, rng: random.Random) -> None:
        if self.talks:
            talk = rng.choice(self.talks)
            keep, reads = _whole(talk, rng.randint(0, len(talk.text)))
            talk.lane.rollback(keep)
            talk.text, talk.reads = talk.text[:keep], reads

    def read(self, rng: random.Random) -> None:
        """A prompt: no rows, and now and then long enough for tiles."""
        if self.talks:
            talk = rng.choice(self.talks)
            n = (
                rng.randint(TILE, TILE + 40)
                if self.long and rng.random() < 0.5
                else rng.randint(1, 9)
            )
            tokens = self.some(rng, n)
            try:
                talk.lane.forward(tokens, outputs="none")
            except ContextFull:
                return
            talk.text += tokens
            talk.reads.append(n)

    def run(self, rng: random.Random) -> None:
        """One ragged pass of chains and trees; some of each stays."""
        parts: list[Part] = []
        leaves, left = self.pool.free_leaves, self.pool.max_rows
        for talk in self.talks:
            if rng.random() < 0.8 and left:
                n = rng.randint(1, min(left, 6))
                parents: list[int] | None = None
                if leaves >= 3 and rng.random() < 0.4:
                    parents = [-1, *(rng.randrange(max(0, i - 2), i) for i in range(1, min(n, 4)))]
                    n = len(parents)
                    leaves -= 3
                left -= n
                parts.append(Part(talk.lane, self.some(rng, n), "all", parents))
        if not parts:
            return
        try:
            self.pool.run(parts)
        except ContextFull:
            return
        found = [part.rows.copy() for part in parts]
        talks = [next(t for t in self.talks if t.lane is part.lane) for part in parts]
        order = list(zip(parts, talks, found, strict=True))
        for part, talk, rows in order:
            self._judge(talk, part, rows)
        for part, talk, _ in rng.sample(order, len(order)):  # settled in any order
            path = [*range(rng.randint(0, len(part.tokens)))]
            if part.parents is None:
                talk.lane.rollback(len(talk.text) + len(path))
            else:
                path = _path(rng, part.parents)
                talk.lane.keep_path(path)
            talk.text += [part.tokens[i] for i in path]
            talk.reads += [ROW] * len(path)

    def _judge(self, talk: Talk, part: Part, rows: Rows) -> None:
        paths: list[list[int]] = []
        for i, row in enumerate(rows):
            above = i - 1 if part.parents is None else part.parents[i]
            paths.append([*(paths[above] if above >= 0 else []), part.tokens[i]])
            right = self.alone.row([*talk.text, *paths[-1]], [*talk.reads, *[ROW] * len(paths[-1])])
            self.rows += 1
            self.wrong += not np.array_equal(row.view(np.uint32), right.view(np.uint32))

    # -- what always holds --

    def check(self) -> None:
        pool, cells = self.pool, self.pool.cells
        pool.settle()
        assert len(pool._lanes) == len(self.talks)
        held: set[int] = set()
        for talk in self.talks:
            lane = talk.lane
            assert lane.tokens == talk.text
            assert lane.n_past == len(talk.text)
            places = lane.places[: lane.n_cells].tolist()
            assert len(places) == len(talk.text)
            if cells.in_order:
                assert places == sorted(places), "the order of a lane's cells ascends"
            assert len(set(places)) == len(places)
            held |= set(places)
        assert cells.held == len(held), "no cell is leaked"
        assert cells.room + pool.ghosts + len(held) == cells.n
        free = pool._free
        assert len(free) == len(set(free)) == pool.shape.sequences - 2 - len(self.talks)

    def finish(self) -> None:
        for talk in self.talks:
            talk.lane.close()
        self.talks = []
        self.check()
        assert self.pool.cells.room == self.pool.cells.n, "nothing stays when all have gone"


def _whole(talk: Talk, keep: int) -> tuple[int, list[int]]:
    """The longest beginning of up to ``keep`` tokens that ends between two reads."""
    at, reads = 0, []
    for n in talk.reads:
        if at + (n or 1) > keep:
            break
        at += n or 1
        reads.append(n)
    return at, reads


def _path(rng: random.Random, parents: Sequence[int]) -> list[int]:
    node, path = rng.randrange(-1, len(parents)), []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]
