"""One pool for all heads that llama.cpp runs: their lanes share passes as a model's do.

Positions are those of the text. NextN blocks and EAGLE-3 heads read pairs:

    pair at position p    token p of the text, and a state that stands for the text before it
    what comes out        logits of token p + 1, and a state that stands in for the target's own

A pass is over text, which stays, or over drafted nodes after it (``Part.parents``), which go with
the next decision. Nodes of a tree have a sequence for each leaf (``tree_layout``). What differs
between llama.cpp's graphs is data: ``HeadGraph``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llama_cpp as ll
import numpy as np

from specllama.arrays import Rows
from specllama.backend.base import Part
from specllama.backend.kernels import Kernels
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_cache import StateBatch, decode_error, set_state, state_of, stop_on
from specllama.backend.llama_log import last_words, recent
from specllama.backend.symbols import function
from specllama.backend.symbols import rows as view
from specllama.backend.threads import Threads
from specllama.backend.tree_layout import Layout
from specllama.errors import CannotLoad, ContextFull, EngineError
from specllama.models.memory import HEAD_BATCH, estimate_head, require_fit
from specllama.models.words import Spread

if TYPE_CHECKING:
    from specllama.backend.llama_pool import LlamaPool, LoadedModel
    from specllama.models.gguf import GgufHeader
    from specllama.models.nextn_file import HeadWords

_FLAGGED = 16  # tokens of a text that may all have logits, where only all or none can have them


@dataclass(frozen=True, slots=True)
class HeadGraph:
    """The differences between the heads' graphs.

    Attributes:
        reads: width of the states that are read.
        gives: width of the states that come out; 0 for none.
        masked: llama.cpp gives states of rows with logits away, else of every row.
        selects: the graph computes logits of chosen rows; else llama.cpp copies the first ones
            whatever their flags say: all rows of a pass have logits, or none.
        logits: there are some.
        heads: NextN blocks that draft in turn, one token each; they read text alike.
        features: width of the target's states that an encoder makes states of; 0 without one.
        layers: of the target, whose inputs are read; () for other states.
        borrows: its cells are those of the target's cache.
        alike: lanes that draft in one pass have the same number of tokens in it: the graph asserts
            it (dflash.cpp, of DSpark).
    """

    reads: int
    gives: int
    masked: bool
    selects: bool = True
    logits: bool = True
    heads: int = 1
    features: int = 0
    layers: tuple[int, ...] = ()
    borrows: bool = False
    alike: bool = False


@dataclass(slots=True)
class HeadPart:
    """A part of a pass, checked. ``at``: the position of its first row."""

    lane: HeadLane
    part: Part
    at: int
    tree: Layout | None = None  # the lane's with these nodes
    positions: Sequence[int] = ()
    sequences: Sequence[Sequence[int]] = ()  # of each node; those of a text are the lane's
    before: tuple[Layout, list[int]] | None = None  # what the lane had of a tree, and its leaves

    @property
    def way(self) -> tuple[Any, ...]:
        """The traits that parts must share for one pass of the library."""
        part = self.part
        head = part.head if self.tree is not None else 0
        n = len(part.tokens)
        size = n if self.lane.pool.graph.alike else 0
        return part.outputs == "states", n > 0, part.states is not None, size, head


class HeadPool:
    """A context on drafting layers, see ``base.Passes``. Not for two threads at once.

    Args:
        model: the drafting layers'.
        params: llama.cpp's, for one lane; ``n_batch`` bounds a pass, ``n_outputs_max`` its rows.
        lanes: most at once; each has the ``n_ctx`` of ``params``. 0 where ``params`` are those of
            a cache that is another context's.
        leaves: most of a tree; all lanes together have so many branches.
        words: its tokens, where it knows only some of the target's.

    Raises:
        CannotLoad: no memory, or functions that this libllama lacks.
    """

    def __init__(
        self,
        model: LlamaModel,
        params: Any,
        graph: HeadGraph,
        *,
        lanes: int,
        leaves: int = 1,
        words: HeadWords | None = None,
    ) -> None:
        self._nextn = function("llama_get_embeddings_nextn")
        choose = function("llama_set_embeddings_nextn")
        several = graph.heads > 1
        self._choose_head = function("llama_set_nextn_layer_offset") if several else None
        self.graph, self.leaves, self.kernels = graph, leaves, Kernels()
        self.stop = model.stop
        self._words, self._said = words, model.vocab.n_tokens
        self.n_vocab = self._said if words is None else len(words.reads)
        self._spread = None if words is None else Spread(words.says, self.n_vocab)
        self._lanes, self._open = lanes, 0
        n_ctx, rows = int(params.n_ctx), int(params.n_outputs_max)
        if lanes:
            params.n_ctx = -(-n_ctx // 256) * 256 * lanes
            params.n_seq_max = lanes + leaves - 1
            params.kv_unified = params.n_seq_max > 1  # the rows of a pass keep their order
        self._branches = list(range(lanes, lanes + leaves - 1))
        recent.clear()
        self.handle: Any = ll.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise CannotLoad(
                f"cannot create a context for the drafting layer of {model.path.name}: "
                + (last_words() or "llama.cpp gave no reason"),
                "try a smaller --ctx-size",
            )
        model.loras.apply_to(self.handle)
        # must be what the graph does: llama.cpp copies so many rows, from the first on
        choose(self.handle, True, graph.masked)
        self.memory = ll.llama_get_memory(self.handle)
        self.n_ctx = min(int(ll.llama_n_ctx_seq(self.handle)), n_ctx)
        self.n_batch = int(ll.llama_n_batch(self.handle))
        self.max_rows = min(rows or self.n_batch, self.n_batch)
        most = int(params.n_threads)
        self.threads = Threads(lambda n: ll.llama_set_n_threads(self.handle, n, n), most)
        self._batch = StateBatch(self.n_batch, graph.reads, max(leaves, 1))
        self._features = StateBatch(self.n_batch if graph.features else 1, graph.features)

    @property
    def free_leaves(self) -> int:
        return len(self._branches)

    def open(self, target: Any = None) -> HeadLane:
        """Open an empty lane, for a lane of the target.

        Raises:
            EngineError: every lane is taken.
        """
        if self._open == self._lanes:
            raise EngineError(f"all {self._lanes} lanes of the drafting layer are taken")
        self._open += 1
        return HeadLane(self, self._open - 1)

    # -- passes --

    def run(self, parts: Sequence[Part]) -> None:
        rows = sum(p.size if p.outputs == "all" else p.outputs == "last" for p in parts)
        if sum(part.size for part in parts) > self.n_batch or rows > self.max_rows:
            raise ValueError(f"a pass of {self.n_batch} tokens and {self.max_rows} rows at most")
        pieces = [self._check(part) for part in parts]
        ways: dict[tuple[Any, ...], list[HeadPart]] = {}
        for piece in pieces:
            ways.setdefault(piece.way, []).append(piece)
        done: list[HeadPart] = []
        try:
            for (encodes, *_, head), together in ways.items():
                for piece in done:  # the next pass takes its rows' place
                    piece.part.rows = piece.part.rows.copy()
                done = together
                if encodes:
                    self._encode(together)
                else:
                    self._decode(together, head)
        except BaseException:
            for piece in pieces:
                piece.lane.undo(piece)
            raise

    def _check(self, part: Part) -> HeadPart:
        """Refuse a pass that the library would not take."""
        lane, states, tokens, n = part.lane, part.states, part.tokens, part.size
        if self.handle is None:
            raise EngineError("the context is closed")
        encodes = part.outputs == "states"
        width = self.graph.features if encodes else self.graph.reads
        if not 0 < n <= self.n_batch or (states is not None and states.shape != (n, width)):
            raise ValueError(f"states of shape {(n,) if states is None else states.shape}")
        parents = part.parents
        if len(tokens) not in (0, n) or (parents is not None and len(parents) != n):
            raise ValueError(
                f"{len(tokens)} tokens with {n} states, or parents that are not theirs"
            )
        if len(tokens) and (min(tokens) < 0 or max(tokens) >= self.n_vocab):
            raise EngineError(f"a token is outside the vocabulary of {self.n_vocab}")
        return lane.piece(part, encodes=encodes)  # type: ignore[no-any-return]

    def _encode(self, pieces: Sequence[HeadPart]) -> None:
        self._fill(self._features, [(piece, 0, piece.part.size) for piece in pieces], [1])
        self.stop.check()
        batch = self._features.ready(tokens=False, states=True)
        if status := ll.llama_encode(self.handle, batch):
            raise decode_error(status, self.n_ctx)
        fused = view(self._nextn(self.handle), self._features.n, self.graph.gives)
        at = 0
        for piece in pieces:
            n = piece.part.size
            piece.part.left = fused[at : at + n].copy()
            at += n

    def _decode(self, pieces: Sequence[HeadPart], head: int) -> None:
        """Decode texts and nodes, all with tokens, with states or with both."""
        graph = self.graph
        texts = [piece for piece in pieces if piece.tree is None]
        for piece in pieces:
            piece.lane.begin(piece)
        if self._choose_head is not None:
            whole = [(piece, 0, piece.part.size) for piece in texts]
            for other in range(1, graph.heads) if texts else ():
                self._choose_head(self.handle, other)
                self._run(whole, [0])
                for piece in texts:  # each head has keys and values of its own, in the same cells
                    ll.llama_memory_seq_rm(self.memory, piece.lane.sequence, piece.at, -1)
            self._choose_head(self.handle, head)
        asked = graph.logits and any(piece.part.outputs != "none" for piece in pieces)
        begin = dict.fromkeys(map(id, pieces), 0)
        if asked and not graph.selects:
            begin |= {id(p): p.part.size - 1 for p in texts if p.part.size > _FLAGGED}
            if before := [(piece, 0, n) for piece in texts if (n := begin[id(piece)])]:
                self._run(before, [0])
        slices = [(piece, begin[id(piece)], piece.part.size) for piece in pieces]
        flags: list[int] = []
        for piece, first, end in slices:
            outputs = piece.part.outputs
            every = asked and (outputs == "all" or not graph.selects)
            flags += [every] * (end - first - 1) + [every or (asked and outputs == "last")]
        self._run(slices, flags)
        self._answer(slices, flags)
        for piece in pieces:
            piece.lane.took(piece)

    def _answer(self, slices: Sequence[tuple[HeadPart, int, int]], flags: Sequence[int]) -> None:
        """Store llama.cpp's results of each piece; rows and states lie in the pieces' order."""
        graph, n = self.graph, len(flags)
        total = sum(flags)
        rows = view(ll.llama_get_logits(self.handle), total, self._said) if total else None
        if rows is not None and self._spread is not None:
            rows = self._spread(rows)
        beside, states = total if graph.masked else n, None
        if graph.gives and beside and any(piece.part.outputs != "none" for piece, *_ in slices):
            states = view(self._nextn(self.handle), beside, graph.gives)
        at = row = 0
        empty: Rows = np.empty((0, self.n_vocab), np.float32)
        for piece, first, end in slices:
            size, said = end - first, sum(flags[at : at + end - first])
            wanted = {"all": size, "last": 1}.get(piece.part.outputs, 0)
            given = empty if rows is None else rows[row + said - min(wanted, said) : row + said]
            last = row + said if graph.masked else at + size
            own = empty[:, :0] if states is None else states[last - wanted : last].copy()
            piece.part.rows, piece.part.left = given, own
            at, row = at + size, row + said

    def _fill(
        self, batch: StateBatch, slices: Iterable[tuple[HeadPart, int, int]], flags: Sequence[int]
    ) -> None:
        """Lay rows into a batch; a single flag applies to all of them."""
        n = 0
        for piece, first, end in slices:
            rows, part = slice(n, n + end - first), piece.part
            if part.states is not None:
                batch.states[rows] = part.states[first:end]
            if len(part.tokens):
                tokens = part.tokens[first:end]
                batch.token[rows] = tokens if self._words is None else self._words.reads[[*tokens]]
            batch.position[rows] = piece.positions[first:end]
            batch.n_sequences[rows] = 1
            batch.sequences[rows, 0] = piece.lane.sequence
            for i, ids in enumerate(piece.sequences[first:end], n):
                batch.n_sequences[i] = len(ids)
                batch.sequences[i, : len(ids)] = ids
            n = rows.stop
        batch.n = n
        batch.output[:n] = flags

    def _run(self, slices: Sequence[tuple[HeadPart, int, int]], flags: Sequence[int]) -> None:
        """Run one pass of the library."""
        self._fill(self._batch, slices, flags)
        part = slices[0][0].part
        self.stop.check()
        batch = self._batch.ready(tokens=len(part.tokens) > 0, states=part.states is not None)
        if status := self.threads.run(self._batch.n, lambda: ll.llama_decode(self.handle, batch)):
            raise decode_error(status, self.n_ctx)

    # -- sequences --

    def branch(self, n: int) -> list[int]:
        """Take ``n`` sequences for leaves.

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

    def close(self) -> None:
        if self.handle:
            ll.llama_free(self.handle)
            self.handle = None


class HeadLane:
    """A lane, see ``effects.HeadPlace``."""

    def __init__(self, pool: HeadPool, sequence: int) -> None:
        self.pool = pool
        self.sequence = sequence
        self.n_ctx, self.n_batch, self.max_rows = pool.n_ctx, pool.n_batch, pool.leaves
        graph = pool.graph
        self.width, self.heads, self.layers = graph.reads, graph.heads, graph.layers
        self.first = self.end = 0
        self.tree, self.opened = Layout(), list[int]()  # and the sequences of its branches

    @property
    def n_past(self) -> int:
        """One past the last position, as the cache itself reports it; 0 when it is empty."""
        return int(ll.llama_memory_seq_pos_max(self.pool.memory, self.sequence)) + 1

    # -- a pass of it --

    def piece(self, part: Part, *, encodes: bool) -> HeadPart:
        """Return a part of a pass with its positions.

        Raises:
            ContextFull: there is no room for it.
            ValueError: a parent does not precede its child.
        """
        n, at, parents = part.size, self.n_past if encodes else self.end, part.parents
        tree = None if parents is None else self._before.grown(parents)
        held = 0 if tree is None else len(self._before.parents)
        if not encodes and self.end - self.first + held + n > self.n_ctx:
            raise ContextFull("the cache of the drafting layer is full")
        depth = range(n) if tree is None else tree.new_depth
        return HeadPart(self, part, at, tree, [at + d for d in depth])

    @property
    def _before(self) -> Layout:
        """The tree that a pass of nodes grows; of several heads each is given all of its own."""
        return self.tree if self.heads == 1 else Layout()

    def branches(self, parents: Sequence[int], reopen: int = 0) -> int:
        """Count the leaves that a pass of nodes adds to the tree."""
        return len(self._before.grown(parents).copies)

    def begin(self, piece: HeadPart) -> None:
        """Prepare for a pass: text drops the tree, nodes that branch off get sequences."""
        if piece.tree is None or self.heads > 1:
            self.drop()
        if piece.tree is None:
            return
        piece.before = self.tree, [*self.opened]
        opened = self.pool.branch(len(piece.tree.copies))
        self.opened += opened
        held = [self.sequence, *self.opened]
        for sequence, (leaf, n_above) in zip(opened, piece.tree.copies, strict=True):
            ll.llama_memory_seq_cp(self.pool.memory, held[leaf], sequence, 0, self.end + n_above)
        piece.sequences = [[held[leaf] for leaf in below] for below in piece.tree.leaves]

    def took(self, piece: HeadPart) -> None:
        if piece.tree is None:
            self.end += piece.part.size
        else:
            self.tree = piece.tree

    def undo(self, piece: HeadPart) -> None:
        """Restore the lane as it was before a failed pass, or drop its tree."""
        if piece.tree is None:
            if piece.part.outputs != "states":
                self.cut(piece.at)
        elif piece.before is not None:
            pool, (self.tree, held) = self.pool, piece.before
            pool.give_back([sequence for sequence in self.opened if sequence not in held])
            self.opened = held
            for sequence, last in zip((self.sequence, *held), self.tree.ends, strict=True):
                at = self.end + len(self.tree.above(last))
                ll.llama_memory_seq_rm(pool.memory, sequence, at, -1)

    # -- what stays --

    def keep_path(self, path: Sequence[int]) -> None:
        """Drop the tree; the accepted tokens are read again, with the target's states."""
        self.drop()

    def rollback(self, keep: int) -> None:
        """Cut the lane from position ``keep`` on; if that was all, the next token lies there.

        Raises:
            ValueError: it lies beyond the end.
            EngineError: llama.cpp refused; nothing is held and the next position is 0.
        """
        self.drop()
        if keep > self.end > self.first or keep < 0:
            raise ValueError(f"cannot roll back to {keep} of {self.first} to {self.end}")
        if keep <= self.first or self.first == self.end:
            self._clear(keep)
        elif keep < self.end:
            self.cut(keep)

    def cut(self, end: int) -> None:
        if end == self.first:
            self._clear(end)
        elif ll.llama_memory_seq_rm(self.pool.memory, self.sequence, end, -1):
            self.end = end
        else:
            self._clear(0)
            raise EngineError("llama.cpp refused to cut the drafting layer's cache; it was cleared")

    def _clear(self, position: int) -> None:
        if self.pool.handle is not None:
            ll.llama_memory_seq_rm(self.pool.memory, self.sequence, -1, -1)
        self.first = self.end = position

    def drop(self) -> None:
        if self.tree.parents and self.pool.handle is not None:
            self.pool.give_back(self.opened)
            ll.llama_memory_seq_rm(self.pool.memory, self.sequence, self.end, -1)
        self.tree, self.opened = Layout(), []

    # -- out of the cache, and in again --

    def copied(self) -> bytes:
        self.drop()
        if self.end == self.first or self.pool.graph.borrows:
            return b""
        return bytes(state_of(self.pool.handle, self.sequence))

    def restore(self, state: memoryview, first: int, end: int) -> bool:
        self.drop()
        self._clear(0)
        if not set_state(self.pool.handle, self.sequence, state) or self.n_past != end:
            self._clear(0)
            return False
        self.first, self.end = first, end
        return True

    def close(self) -> None:
        self.rollback(0)


def load_head(header: GgufHeader, target: LoadedModel) -> LlamaModel:
    """Load the model of a head that belongs to the target.

    Raises:
        BadGguf, UnsupportedModel, CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free alongside the target.
    """
    if target.options.check_memory and target.model.gpu_layers == 0:
        n_ctx = target.pool.n_ctx * target.options.parallel
        require_fit(estimate_head(header, target.header, n_ctx=n_ctx))
    return target.load(header, load_mtp=True, head=True)


def head_params(pool: LlamaPool, threads: int) -> Any:
    """Return llama.cpp's parameters for a head, which may borrow the target's matrices."""
    params = ll.llama_context_default_params()
    params.n_ctx = pool.n_ctx
    params.n_batch = params.n_ubatch = HEAD_BATCH
    params.n_threads = params.n_threads_batch = threads
    params.no_perf = True
    stop_on(pool.model.stop, params)
    params.ctx_other = pool.handle
    return params
