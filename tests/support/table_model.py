"""A deterministic table model: no weights, exact arithmetic, the same protocol as llama.cpp.

Logits are a hash of the last few tokens, so every context row is reproducible and independent of
how the pass was cut. A draft is the same table plus noise: ``agreement`` 1 copies the target, 0 is
unrelated. Rows handed out are poisoned by the next pass, as llama.cpp reuses its buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from specllama.arrays import HiddenNeed, IntArray, Row, Rows
from specllama.backend.base import Gap, Opened, OpenedPair, SpecialToken
from specllama.backend.batch import Batch, Shape
from specllama.backend.exactness import Exactness
from specllama.backend.kernels import TILE, Kernels
from specllama.backend.pool import CellPool
from specllama.cancel import Cancel
from specllama.engine.host import LoadEngine
from specllama.engine.opening import BACKENDS
from specllama.errors import CannotLoad, ContextFull, EngineError
from specllama.events import Event
from specllama.files import DAMAGE
from specllama.interface import ModelInfo
from specllama.settings.params import EngineOptions

_EOG = 0
_WIDTH = 8  # of a hidden state


class FakeVocab:
    """Token 0 ends a turn; token t > 0 is one character from a fixed alphabet."""

    def __init__(self, n_tokens: int = 64, alphabet: str | None = None) -> None:
        self._n = n_tokens
        letters = (
            alphabet or "etaoin shrdlucmfwypvbgkqjxz.,;:!?'-ETAOINSHRDLUCMFWYPVBGKQJXZ0123456789"
        )
        self._letters = (letters * (n_tokens // len(letters) + 1))[: n_tokens - 1]

    @property
    def n_tokens(self) -> int:
        return self._n

    @property
    def longest(self) -> int:
        return 4  # a character that the alphabet lacks

    @property
    def adds_bos(self) -> bool:
        return False

    @property
    def specials(self) -> Sequence[SpecialToken]:
        return ()

    def special(self, token: int) -> SpecialToken | None:
        return None

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool, after_text: bool = False
    ) -> list[int]:
        return [1 + max(self._letters.find(c), 0) for c in text]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if not 0 <= token < self._n:
            raise EngineError(f"token {token} is outside the vocabulary of {self._n}")
        if token == _EOG:
            return b"<end>" if special else b""
        return self._letters[token - 1].encode()

    def is_eog(self, token: int) -> bool:
        return token == _EOG

    @property
    def gap(self) -> Gap | None:
        return None


class GappedVocab(FakeVocab):
    """A vocabulary with line breaks that marks gaps; marks end a text."""

    gap = Gap(60, 61, 62, 63)  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(64, "\netaoin shrdlu():=+,cmfwypvbgkqjxz.0123456789_ETAOINSHRDLUCMF")

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return b"" if token in range(60, 64) and not special else super().piece(token)

    def is_eog(self, token: int) -> bool:
        return token == _EOG or token in range(60, 64)


class FakeTable:
    """Logits as a pure function of the last ``order`` tokens.

    Args:
        sharpness: scale of the logits; larger is more predictable.
        agreement: for drafts, weight of the table ``of`` in the mixture.
    """

    def __init__(
        self,
        n_vocab: int = 64,
        *,
        seed: int = 0,
        order: int = 2,
        sharpness: float = 3.0,
        eog_bias: float = 0.0,
        of: FakeTable | None = None,
        agreement: float = 1.0,
    ) -> None:
        self.n_vocab = n_vocab
        self._seed = seed
        self._order = order
        self._sharpness = sharpness
        self._eog_bias = eog_bias
        self._of = of
        self._agreement = agreement
        self._cache: dict[tuple[int, ...], Row] = {}

    def row(self, tokens: Sequence[int]) -> Row:
        key = tuple(tokens[-self._order :])
        found = self._cache.get(key)
        if found is None:
            rng = np.random.default_rng((self._seed, *key))
            found = (rng.standard_normal(self.n_vocab) * self._sharpness).astype(np.float32)
            if self._of is not None:
                a = np.float32(self._agreement)
                found = a * self._of.row(tokens)[: self.n_vocab] + (1 - a) * found
            else:
                found[_EOG] += self._eog_bias
            self._cache[key] = found
        return found


IN_A_TILE = 1 << 16  # of a cell: what a tile makes of a token differs from what a step does


class FakeCache:
    """A KV cache of llama.cpp in miniature, over a table instead of a model.

    Cells are taken, shared, freed and filled again as ``llama_kv_cache`` does. A row is a function
    of the cells that its token sees, in the order in which they lie.

    Args:
        by_order: False takes them in the order of their positions, as in exact arithmetic.
        by_four: rows of a pass are computed four at a time and what is left over one by one, which
            rounds otherwise; so are those that come out.
    """

    def __init__(
        self,
        table: FakeTable,
        shape: Shape,
        stop: Cancel,
        *,
        by_order: bool = True,
        by_four: bool = False,
    ) -> None:
        self.batch = Batch(shape.n_batch, shape.max_leaves)
        self.passes: list[int] = []  # tokens of each
        self.closed = False
        self._table = table
        self._shape = shape
        self.stop = stop
        self._by_order, self._by_four = by_order, by_four
        n = shape.n_ctx
        self._token: IntArray = np.zeros(n, np.int32)
        self._position: IntArray = np.full(n, -1, np.int32)
        self._owners: npt.NDArray[np.uint64] = np.zeros(n, np.uint64)  # a bit a sequence
        # how a tile found the cell, and whether it was computed among four
        self._displaced: IntArray = np.zeros(n, np.int32)
        self._head = 0
        self._needs: set[HiddenNeed] = set()
        self._states: Rows = np.empty((0, _WIDTH), np.float32)
        self._handed_out: Rows = np.empty((0, table.n_vocab), np.float32)

    @property
    def n_cells(self) -> int:
        return len(self._token)

    def require_open(self) -> None:
        if self.closed:
            raise EngineError("the context is closed")

    # -- passes --

    def decode(self, *, tiled: bool) -> None:
        batch = self.batch
        n = batch.n
        several = batch.n_sequences[:n].max() > 1
        self._require_valid()
        self._handed_out.fill(np.nan)
        cells = self._slot(n)
        self._token[cells] = batch.token[:n]
        self._position[cells] = batch.position[:n]
        self._owners[cells] = np.uint64(1) << batch.sequences[:n, 0].astype(np.uint64)
        for i in range(n) if several else ():
            for s in batch.sequences[i, 1 : batch.n_sequences[i]]:
                self._owners[cells[i]] |= np.uint64(1 << int(s))
        self._displaced[cells] = 0
        if tiled:
            tiles = cells - batch.position[:n] + IN_A_TILE
            self._displaced[cells] = tiles if n >= TILE else IN_A_TILE // 2
        if self._by_four:
            self._displaced[cells[: n // 4 * 4]] += 1
        self.passes.append(n)
        seen = {int(s): self._text(int(s)) for s in set(batch.sequences[:n, 0].tolist())}
        states, rows = [], []
        for i in range(n) if self._needs else np.flatnonzero(batch.output[:n]).tolist():
            row = self._row(seen[int(batch.sequences[i, 0])], int(batch.position[i]))
            states.append(row[:_WIDTH])
            if batch.output[i]:
                rows.append(row)
        if self._needs:
            self._states = np.array(states, np.float32)
        self._handed_out = np.array(rows, np.float32).reshape(len(rows), self._table.n_vocab)
        if self._by_four:
            self._handed_out[: len(rows) // 4 * 4] += np.float32(1e-3)

    def _text(self, sequence: int) -> tuple[list[int], IntArray, IntArray]:
        """Tokens, positions and displacements of a sequence, in the order in which they lie."""
        cells = self._cells(sequence, 0, -1)
        if not self._by_order:
            cells = cells[np.argsort(self._position[cells], kind="stable")]
        return self._token[cells].tolist(), self._position[cells], self._displaced[cells]

    def _row(self, text: tuple[list[int], IntArray, IntArray], position: int) -> Row:
        tokens, positions, displaced = text
        end = position - int(positions[0]) + 1
        if end > len(tokens) or positions[end - 1] != position or positions[:end].max() > position:
            visible = np.flatnonzero(positions <= position)  # they lie in another order
            tokens, displaced, end = (
                [tokens[i] for i in visible],
                displaced[visible],
                int(visible.size),
            )
        row = self._table.row(tokens[:end])
        moved = int(displaced[:end].sum())
        return row + np.float32(1e-3 * moved) if moved else row

    def _require_valid(self) -> None:
        """What ends the process, or fails, in llama.cpp."""
        batch = self.batch
        n = batch.n
        assert 0 < n <= self._shape.n_batch
        assert int(np.count_nonzero(batch.output[:n])) <= self._shape.max_rows
        last: dict[int, int] = {}
        for i, (many, position) in enumerate(
            zip(batch.n_sequences[:n].tolist(), batch.position[:n].tolist(), strict=True)
        ):
            for s in batch.sequences[i, :many].tolist():
                assert 0 <= s < self._shape.sequences
                before = last[s] if s in last else self.end(s) - 1
                assert position == before + 1, "positions of a sequence must go on"
                last[s] = position

    def _slot(self, n: int) -> IntArray:
        """The free cells that ``n`` tokens go to."""
        free = self._owners == 0
        used = len(free) - int(free.sum())
        if self._head > used + 2 * n:
            self._head = 0
        found = np.flatnonzero(free)
        found = np.concatenate((found[found >= self._head], found[found < self._head]))[:n]
        if len(found) < n:
            raise ContextFull(f"no room left in the KV cache of {len(free)} tokens")
        self._head = int(found[-1]) + 1
        return found.astype(np.int32)

    def rows(self, n: int) -> Rows:
        return self._handed_out[:n]

    def want(self, needs: set[HiddenNeed]) -> None:
        self._needs = set(needs)

    def prepare(self, *, every_row: bool) -> None:
        pass

    def states(self, need: HiddenNeed, n: int) -> Rows:
        """A state is the first logits of its row, so that tests can check its readers."""
        return self._states[:n]

    # -- sequences --

    def copy(self, sequence: int, to: int, begin: int, end: int) -> None:
        self._owners[self._cells(sequence, begin, end)] |= np.uint64(1 << to)

    def remove(self, sequence: int, begin: int) -> bool:
        cells = self._cells(sequence, begin, -1)
        self._owners[cells] &= ~np.uint64(1 << sequence)
        freed = cells[self._owners[cells] == 0]
        self._position[freed] = -1
        if len(freed):
            self._head = min(self._head, int(freed[0]))
        return True

    def _cells(self, sequence: int, begin: int, end: int) -> npt.NDArray[np.int64]:
        assert 0 <= sequence < self._shape.sequences
        here = (self._owners & np.uint64(1 << sequence) != 0) & (self._position >= begin)
        return np.flatnonzero(here if end < 0 else here & (self._position < end))

    def keep(self, sequence: int) -> None:
        self._owners &= np.uint64(1 << sequence)
        free = self._owners == 0
        self._position[free] = -1
        self._head = min(self._head, int(free.argmax()) if free.any() else len(free))

    def clear(self) -> None:
        self._owners[:] = 0
        self._position[:] = -1
        self._head = 0

    def end(self, sequence: int) -> int:
        cells = self._cells(sequence, 0, -1)
        return int(self._position[cells].max()) + 1 if len(cells) else 0

    def state(self, sequence: int) -> bytes:
        return self._written(self._cells(sequence, 0, -1)).tobytes()

    def _written(self, cells: npt.NDArray[np.int64]) -> IntArray:
        return np.stack((self._token[cells], self._position[cells], self._displaced[cells]))

    def restore(self, sequence: int, state: bytes) -> bool:
        token, position, displaced = np.frombuffer(state, np.int32).reshape(3, -1)
        cells = self._slot(len(token))
        self._token[cells], self._position[cells] = token, position
        self._owners[cells], self._displaced[cells] = 1 << sequence, displaced
        return True

    def rewrite(self) -> bool:
        kept = np.flatnonzero(self._owners)
        state, owners = self._written(kept), self._owners[kept]
        self.clear()
        n = len(kept)
        self._token[:n], self._position[:n], self._displaced[:n] = state
        self._owners[:n] = owners
        return True

    def beside(self, shape: Shape) -> FakeCache:
        return FakeCache(
            self._table, shape, self.stop, by_order=self._by_order, by_four=self._by_four
        )

    def close(self) -> None:
        self.closed = True


class FakePool(CellPool):
    """A pool over a table; refuses everything that llama.cpp would refuse or abort on.

    Args:
        in_order: False frees cells instead of leaving ghosts.
        by_order, by_four: see ``FakeCache``.
        tiles: long reads are computed in tiles, which see where cells lie.
        wide: see ``Kernels``.
        widths: see ``keep_to``.
    """

    def __init__(
        self,
        table: FakeTable,
        *,
        n_ctx: int = 512,
        lanes: int = 4,
        max_rows: int = 65,
        n_batch: int = 512,
        max_leaves: int = 16,
        stop: Cancel | None = None,
        in_order: bool = True,
        by_order: bool = True,
        by_four: bool = False,
        tiles: bool = False,
        wide: int = TILE,
        widths: Sequence[int] = (),
    ) -> None:
        shape = Shape(n_ctx, lanes, max_rows, max_leaves, n_batch)
        self.fake = FakeCache(table, shape, stop or Cancel(), by_order=by_order, by_four=by_four)
        exact = 1 if by_four else max_rows
        kernels = Kernels(tiles=tiles, wide=wide, exact_rows=exact, exact_trees=exact > 1)
        super().__init__(self.fake, shape, table.n_vocab, kernels, in_order=in_order)  # type: ignore[arg-type]
        if widths:
            self.keep_to(widths, trees=True)


def fake_model(n_ctx: int = 512, n_vocab: int = 64, path: str = "fake") -> ModelInfo:
    """What a table says of itself."""
    return ModelInfo(
        path=path,
        name="fake table",
        architecture="table",
        quantization="exact",
        n_params=0,
        file_bytes=0,
        n_ctx=n_ctx,
        n_ctx_train=n_ctx,
        n_vocab=n_vocab,
        kv_bytes=0,
        gpu_layers=0,
    )


class TableFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file ``NAME.table``: the arguments of a ``FakeTable``, as JSON.

    A draft model whose file says how far it agrees is a mixture with its target. One with ``gap``
    fills gaps in texts.
    """

    n_vocab: int = 64
    seed: int = 0
    order: int = 2
    sharpness: float = 3.0
    eog_bias: float = 0.0
    agreement: float = 1.0
    gap: bool = False

    def table(self, of: FakeTable | None = None) -> FakeTable:
        return FakeTable(
            self.n_vocab, seed=self.seed, order=self.order, sharpness=self.sharpness,
            eog_bias=self.eog_bias, of=of, agreement=self.agreement,
        )  # fmt: skip


def open_pair(
    target: Path,
    draft: Path | None,
    options: EngineOptions,
    on_progress: Callable[[Event], None] | None,
    stop: Cancel,
) -> OpenedPair:
    """See ``opening.open_gguf``."""
    n_ctx, rows = options.n_ctx or 512, options.max_rows

    def opened(path: Path, of: FakeTable | None) -> tuple[FakeTable, Opened]:
        try:
            file = msgspec.json.decode(path.read_bytes(), type=TableFile)
            table = file.table(of)
        except (OSError, *DAMAGE) as error:
            raise CannotLoad(f"{path.name} is no table: {error}") from None
        pool = FakePool(
            table, n_ctx=n_ctx, max_rows=rows, max_leaves=options.max_leaves, stop=stop,
            lanes=max(options.parallel, 4), in_order=of is None, by_order=of is None,
        )  # fmt: skip
        info = fake_model(n_ctx, table.n_vocab, str(path))
        # kept on disk where a test says so: others share a folder
        key = "" if options.kv_disk in ("auto", "off") else path.stem
        vocab = GappedVocab() if file.gap else FakeVocab(table.n_vocab)
        return table, Opened(pool, vocab, info, key)

    table, first = opened(target, None)
    return OpenedPair(
        first, None if draft is None else opened(draft, table)[1], exactness=Exactness(rows, True)
    )


class LoadTable(LoadEngine):
    """``LoadEngine`` for tables: a child process that gets it imports this file."""


BACKENDS[".table"] = "table_model:open_pair"
