"""Heads that know a table, for drafters: each kind checks what it is asked to read."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from engines import FakeContext
from head_lanes import FakeHeadLane
from medusa_numpy import Heads, MedusaHead, Vector
from oracle import Tokens
from table_model import FakeTable
from toys import LAYERS, WIDTH, V

from specllama.arrays import IntArray, Row, Rows
from specllama.backend.heads.medusa_head import MedusaPool
from specllama.errors import ContextFull
from specllama.speculative.drafting.dflash import DflashDrafter, Markov, Places
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.eagle3 import EagleDrafter
from specllama.speculative.drafting.medusa import Hidden, MedusaDrafter
from specllama.speculative.drafting.mtp import MtpDrafter

BLOCKS = ("dflash", "dflash2", "dspark", "unsure")


class FakeEagle(FakeHeadLane):
    """A head that knows the table. It checks what it is fed: encoded states of the target, one of
    each position, and its own behind guesses only."""

    def __init__(
        self, table: FakeTable, target: FakeContext, known: FakeTable, n_ctx: int = 512
    ) -> None:
        self.n_ctx, self.n_batch, self.width, self.heads = n_ctx, 16, WIDTH, 1
        self.max_rows = 16
        self.grown: list[int] = []  # nodes of each pass over guesses
        self._nodes: list[list[int]] = []  # guesses on the path to each
        self.first = 0
        self.layers = LAYERS
        self.pairs: list[tuple[int, bool]] = []  # token, with a state of the target
        self.reads: list[int] = []  # pairs of each pass with states of the target
        self.encoded: list[int] = []  # states of each pass of the encoder
        self._table = table
        self._of, self._known = target, known

    @property
    def end(self) -> int:
        return self.first + len(self.pairs)

    def encode(self, features: Rows) -> Rows:
        self.encoded.append(len(features))
        states = np.full((len(features), WIDTH), 2.0, np.float32)
        states[:, : features.shape[1]] = 2.0 * features
        return states

    def feed(self, tokens: Sequence[int], states: Rows) -> tuple[Row, Row]:
        assert 0 < len(tokens) <= self.n_batch
        self._nodes = []
        if len(self.pairs) + len(tokens) > self.n_ctx:
            raise ContextFull("full")
        for token, state in zip(tokens, states, strict=True):
            text = [*self._of.tokens, token]
            assert text[self.end] == token
            row = self._known.row(text[: self.end])[:WIDTH]
            assert np.array_equal(state[: len(row)], 2.0 * row)
            self.pairs.append((token, True))
        self.reads.append(len(tokens))
        return self._table.row(self._text), np.ones(WIDTH, np.float32)

    @property
    def _text(self) -> list[int]:
        return [*self._of.tokens[: self.first], *(token for token, _ in self.pairs)]

    def grow(
        self, tokens: Sequence[int], states: Rows, parents: Sequence[int], head: int = 0
    ) -> tuple[Rows, Rows]:
        assert (states == 1).all()
        self.grown.append(len(tokens))
        rows = []
        for token, parent in zip(tokens, parents, strict=True):
            assert parent < len(self._nodes)
            self._nodes.append([*(self._nodes[parent] if parent >= 0 else ()), token])
            rows.append(self._table.row([*self._text, *self._nodes[-1]]))
        if len(self.pairs) + len(self._nodes) > self.n_ctx:
            raise ContextFull("full")
        return np.stack(rows), np.ones((len(tokens), WIDTH), np.float32)

    def drop(self) -> None:
        self._nodes = []

    def rollback_to(self, end: int) -> None:
        assert self.first <= end <= self.end
        del self.pairs[end - self.first :]
        self._nodes = []

    def begin_at(self, position: int) -> None:
        self.first = position
        self.pairs.clear()
        self._nodes = []

    def close(self) -> None:
        self.begin_at(0)


class FakeNextn(FakeHeadLane):
    """A NextN block that knows the table, and remembers every pair that it holds or was fed.

    Its own state behind a pair is all ones: a state of the target's is never that. Of several
    heads, each must be given what was drafted, with the states of those before it: 2 of head 1 ...
    """

    def __init__(
        self, table: FakeTable, n_ctx: int = 512, n_batch: int = 16, heads: int = 1
    ) -> None:
        self._table = table
        self.heads = heads
        self.used: list[int] = []  # heads, in order
        self.n_ctx, self.n_batch, self.max_rows = n_ctx, n_batch, 16
        self.width = min(WIDTH, table.n_vocab)
        self._nodes: list[tuple[int, int]] = []  # token and parent of drafted tokens
        self.first = 0
        self.pairs: list[tuple[int, tuple[float, ...]]] = []
        self.fed: list[tuple[int, bool]] = []  # (position, with a state of the target)
        self.restarts: list[int] = []
        self.closed = False

    @property
    def end(self) -> int:
        return self.first + len(self.pairs)

    def feed(self, tokens: Sequence[int], states: Rows) -> tuple[Row, Row]:
        assert 0 < len(tokens) <= self.n_batch
        assert states.shape == (len(tokens), self.width)
        self.used.append(0)
        self._nodes = []
        if len(self.pairs) + len(tokens) > self.n_ctx:
            raise ContextFull("full")
        for token, state in zip(tokens, states, strict=True):
            self.fed.append((self.end, not (state == 1).all()))
            self.pairs.append((token, tuple(state.tolist())))
        return self._table.row([token for token, _ in self.pairs]), np.ones(self.width, np.float32)

    def grow(
        self, tokens: Sequence[int], states: Rows, parents: Sequence[int], head: int = 0
    ) -> tuple[Rows, Rows]:
        assert 0 <= head < self.heads
        self.used.append(head)
        self._nodes = [] if head else self._nodes
        text, paths = [token for token, _ in self.pairs], list[list[int]]()
        for token, state, parent in zip(tokens, states, parents, strict=True):
            assert parent < len(self._nodes)
            self._nodes.append((token, parent))
            path = [token]
            while parent >= 0:
                token, parent = self._nodes[parent]
                path.insert(0, token)
            paths.append(path)
            self.fed.append((self.end + len(path) - 1, False))
            assert set(state.tolist()) == {float(len(path)) if head else 1.0}
        assert not head or max(map(len, paths)) == head
        if len(self.pairs) + len(self._nodes) > self.n_ctx:
            raise ContextFull("full")
        rows = np.stack([self._table.row([*text, *path]) for path in paths])
        return rows, np.full((len(tokens), self.width), 1.0 + head, np.float32)

    def drop(self) -> None:
        self._nodes = []

    def rollback_to(self, end: int) -> None:
        self._nodes = []
        assert self.first <= end <= self.end
        del self.pairs[end - self.first :]

    def begin_at(self, position: int) -> None:
        self._nodes = []
        self.first = position
        self.pairs.clear()
        self.restarts.append(position)

    def close(self) -> None:
        self.closed = True


class Pairs:
    """A Markov head of random numbers."""

    def __init__(self, n_vocab: int) -> None:
        rng = np.random.default_rng(4)
        self.added = rng.normal(size=(n_vocab, n_vocab)).astype(np.float32)
        self.trusted = rng.normal(size=n_vocab)

    def bias(self, ids: IntArray, behind: int) -> Row:
        row: Row = self.added[behind, ids]
        return row

    def trust(self, behind: int) -> float:
        return float(self.trusted[behind])


class FakeBlocks(FakeHeadLane):
    """A drafter that knows the table. It checks what it reads: a state of the target for every
    position, of committed tokens only."""

    def __init__(
        self,
        table: FakeTable,
        target: FakeContext,
        known: FakeTable,
        kind: str = "dflash",
        n_ctx: int = 4096,
        guesses: int = 6,
    ) -> None:
        self.layers, self.n_ctx, self.n_batch = LAYERS, n_ctx, 16
        self.places = Places(guesses, 0, candidates=2 if kind == "dflash2" else 0,
                             confident=kind in ("dspark", "unsure"))  # fmt: skip
        self.first = self.end = 0
        self.reads: list[int] = []  # states of each pass
        self.blocks: list[int] = []  # places of each block
        self.markov: Markov | None = Pairs(table.n_vocab) if kind == "dspark" else None
        self._table, self._of, self._known, self._kind = table, target, known, kind

    def read(self, states: Rows) -> None:
        assert 0 < len(states) <= self.n_batch
        if self.end + len(states) - self.first > self.n_ctx:
            raise ContextFull("full")
        for i, state in enumerate(states):
            row = self._known.row(self._of.tokens[: self.end + i + 1])[:WIDTH]
            assert np.array_equal(state[: len(row)], row)
        self.end += len(states)
        self.reads.append(len(states))

    def grow(self, tokens: Tokens, states: None, parents: range, head: int) -> tuple[Rows, Rows]:
        token, n = tokens[0], len(tokens)
        assert 0 < n <= self.places.guesses
        assert [*parents] == [*range(-1, n - 1)]
        assert self.end == len(self._of.tokens), "every committed token was read"
        self.blocks.append(n)
        text, rows = [*self._of.tokens, token], list[Row]()
        for _ in range(n):
            row = self._table.row(text)
            if self.markov is not None:
                row = row + self.markov.bias(np.arange(len(row), dtype=np.int32), text[-1])
            rows.append(row)
            text.append(int(np.argmax(row)))
        if self._kind != "dflash2":
            return np.array(rows, np.float32), np.linspace(0.9, 0.2, n, dtype=np.float32)[:, None]
        best = np.argsort(np.array(rows), axis=1)[:, ::-1][:, :2].astype(np.int32)
        pairs, cut = Pairs(self._table.n_vocab), np.array(rows, np.float32)
        scores = np.zeros((n, 2, 2), np.float32)
        for place in range(n):
            for i in range(2):
                behind = int(best[place - 1, i]) if place else token
                scores[place, i] = cut[place, best[place]] + pairs.bias(best[place], behind)
        return cut[:0], np.concatenate((best, scores.reshape(n, 4)), 1, dtype=np.float32)

    def rollback_to(self, end: int) -> None:
        assert self.first <= end <= self.end
        self.end = end

    def begin_at(self, position: int) -> None:
        self.first = self.end = position

    def close(self) -> None:
        self.begin_at(0)


def state_of(tokens: Sequence[int], n_vocab: int = V) -> Vector:
    """A hidden state that knows the last two tokens, as the table's laws do."""
    hidden = np.zeros(n_vocab**2, np.float32)
    hidden[tokens[-2] * n_vocab + tokens[-1]] = 1.0
    return hidden


def knowing(table: FakeTable, depths: int = 3, noise: float = 0.0) -> Heads:
    """Heads that know the greedy future of every pair of tokens, plus noise; no blocks."""
    n, rng = table.n_vocab, np.random.default_rng(7)
    outputs = [np.zeros((n, n * n), np.float32) for _ in range(depths)]
    for a, b in itertools.product(range(n), repeat=2):
        text = [a, b]
        text.append(int(np.argmax(table.row(text))))  # what the pending token will be
        for output in outputs:
            row = table.row(text)
            output[:, a * n + b] = row + noise * rng.standard_normal(n)
            text.append(int(np.argmax(row)))
    return Heads(tuple(MedusaHead((), None, o) for o in outputs), None, None, n)


def medusa_of(heads: Heads, hidden: Hidden, ranks: int = 4) -> MedusaDrafter:
    return MedusaDrafter(MedusaPool(heads).open(), hidden, ranks=ranks)


# what drafts as a table says, for a target of another one, with room for so many tokens
Maker = Callable[[FakeTable, FakeContext, FakeTable, int], Drafter]


def _eagle(table: FakeTable, target: FakeContext, known: FakeTable, n_ctx: int) -> Drafter:
    return EagleDrafter(FakeEagle(table, target, known, n_ctx), target, n_vocab=table.n_vocab)


def _nextn(table: FakeTable, target: FakeContext, known: FakeTable, n_ctx: int) -> Drafter:
    return MtpDrafter(FakeNextn(table, n_ctx), target, n_vocab=table.n_vocab)


def _medusa(table: FakeTable, target: FakeContext, known: FakeTable, n_ctx: int) -> Drafter:
    return medusa_of(knowing(table, noise=1.0), lambda tokens: state_of(tokens, table.n_vocab))


def _blocks(kind: str) -> Maker:
    def make(table: FakeTable, target: FakeContext, known: FakeTable, n_ctx: int) -> Drafter:
        lane = FakeBlocks(table, target, known, kind, n_ctx)
        return DflashDrafter(lane, target, lane.places, lane.markov, n_vocab=table.n_vocab)

    return make


HEAD_DRAFTERS: dict[str, Maker] = {
    "eagle3": _eagle,
    "nextn": _nextn,
    "medusa": _medusa,
    **{kind: _blocks(kind) for kind in BLOCKS},
}
