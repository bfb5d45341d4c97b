"""The whole of a second backend: a model that counts which letters followed which in a text.

``NAME.counts`` is that text. Its letters are the vocabulary, and a lane is the list of its tokens.
A target looks at the last three letters, its draft model at the last one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specllama.arrays import HiddenNeed, Rows
from specllama.backend.base import (
    Blob,
    Lane,
    Opened,
    OpenedPair,
    Outputs,
    Part,
    Pool,
    SpecialToken,
    Vocab,
)
from specllama.backend.exactness import Exactness
from specllama.backend.hidden import HiddenRows
from specllama.backend.kernels import Kernels
from specllama.backend.pass_plan import PassPlan
from specllama.cancel import Cancel
from specllama.errors import CannotLoad, ContextFull, EngineError
from specllama.events import Event
from specllama.interface import ModelInfo
from specllama.settings.params import EngineOptions

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


class Letters:
    """A vocabulary: token 0 ends a turn, the others are letters."""

    adds_bos, longest = False, 5
    specials: Sequence[SpecialToken] = ()

    def __init__(self, text: str) -> None:
        self._letters = sorted(set(text))

    @property
    def n_tokens(self) -> int:
        return 1 + len(self._letters)

    def special(self, token: int) -> SpecialToken | None:
        return None

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool, after_text: bool = False
    ) -> list[int]:
        return [1 + self._letters.index(c) for c in text if c in self._letters]

    def piece(self, token: int, *, special: bool = False) -> bytes:
        return self._letters[token - 1].encode() if token else b"<end>" if special else b""

    def is_eog(self, token: int) -> bool:
        return token == 0

    @property
    def gap(self) -> None:
        return None


class Counts:
    """The logits after some tokens: how often each letter followed the longest known ending."""

    def __init__(self, text: Sequence[int], n_vocab: int, order: int) -> None:
        self.n_vocab = n_vocab
        self._order = order
        self._seen: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for i, token in enumerate(text):
            for n in range(min(order, i) + 1):
                self._seen[tuple(text[i - n : i])][token] += 1

    def row(self, tokens: Sequence[int]) -> Rows:
        counts = np.full(self.n_vocab, 0.01, np.float32)
        for n in range(min(self._order, len(tokens)) + 1):
            for token, seen in self._seen.get(tuple(tokens[len(tokens) - n :]), {}).items():
                counts[token] += seen * 10.0**n
        return np.log(counts)


class CountLane:
    """See ``base.Lane``."""

    n_ctx, n_batch, max_rows, max_leaves, runs = 400, 32, 16, 1, 1

    def __init__(self, pool: CountPool) -> None:
        self.pool = pool
        self.n_vocab = pool._counts.n_vocab
        self.tokens: list[int] = []
        self.hidden = HiddenRows()
        self._closed = False

    @property
    def n_past(self) -> int:
        return len(self.tokens)

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        self.pool.run([part := Part(self, tokens, outputs, parents)])
        return part.rows

    def branches(self, parents: Sequence[int], reopen: int = 0) -> int:
        raise EngineError("this backend takes chains")

    def reopen(self, n: int) -> None:
        raise EngineError("this backend takes chains")

    def keep_path(self, path: Sequence[int]) -> None:
        raise EngineError("there was no tree")

    def rollback(self, keep_len: int) -> None:
        if not 0 <= keep_len <= len(self.tokens):
            raise ValueError("cannot roll back")
        del self.tokens[keep_len:]

    def reusable_prefix(self, keep_len: int) -> int:
        return keep_len

    def capture(self, need: HiddenNeed) -> None:
        if need != "nothing":
            raise EngineError("nothing is hidden here")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.pool._lanes.remove(self)


@dataclass(frozen=True)
class Kept:
    """See ``base.Blob``."""

    tokens: Sequence[int]
    n_bytes: int = 0


class CountPool:
    """See ``base.Pool``. Nothing is shared, so nothing has to be settled or compacted."""

    n_batch, max_rows = CountLane.n_batch, CountLane.max_rows
    ghosts = held = compactions = free_leaves = 0
    room = 10_000
    forgets = False
    alike = None

    def __init__(self, counts: Counts, lanes: int, stop: Cancel) -> None:
        self.kernels = Kernels(exact_rows=self.max_rows)
        self.n_ctx, self.lanes = CountLane.n_ctx, lanes
        self.plan = PassPlan(self)
        self._counts, self._stop = counts, stop
        self._lanes: list[CountLane] = []
        self._handed_out: list[Rows] = []
        self._shared = 0  # passes of several lanes, for the test

    def exact_prefix(self, held: Lane | Blob, keep: int, n: int, begin: int = 0) -> int:
        return keep

    def open(self) -> Lane:
        if len(self._lanes) == self.lanes:
            raise EngineError("every lane is taken")
        self._lanes.append(CountLane(self))
        return self._lanes[-1]

    def fork(self, lane: Lane, keep: int, into: Lane | None = None) -> Lane:
        return self.resume(Kept(lane.tokens[:keep]), into)

    def run(self, parts: Sequence[Part]) -> None:
        self._stop.check()
        if sum(len(part.tokens) for part in parts) > self.n_batch:
            raise ValueError("too many tokens")
        if any(len(part.lane.tokens) + len(part.tokens) > CountLane.n_ctx for part in parts):
            raise ContextFull("the context is full")
        for rows in self._handed_out:
            rows.fill(np.nan)
        self._handed_out = [self._rows(part) for part in parts]
        self._shared += len(parts) > 1
        for part, rows in zip(parts, self._handed_out, strict=True):
            part.rows = rows

    def _rows(self, part: Part) -> Rows:
        text, first = part.lane.tokens, len(part.lane.tokens)
        text += part.tokens
        wanted = {"all": first, "last": len(text) - 1, "none": len(text)}[part.outputs]
        rows = [self._counts.row(text[: i + 1]) for i in range(wanted, len(text))]
        return np.array(rows, np.float32).reshape(len(rows), self._counts.n_vocab)

    def settle(self) -> None:
        pass

    def copied(self, lane: Lane) -> Blob:
        return Kept(list(lane.tokens))

    def park(self, lane: Lane) -> Blob:
        kept = self.copied(lane)
        lane.rollback(0)
        return kept

    def resume(self, blob: Blob, into: Lane | None = None) -> Lane:
        lane = into or self.open()
        lane.tokens.extend(blob.tokens)
        return lane

    def compact(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_pair(
    target: Path,
    draft: Path | None,
    options: EngineOptions,
    on_progress: Callable[[Event], None] | None,
    stop: Cancel,
) -> OpenedPair:
    if not (text := target.read_text("utf-8")):
        raise CannotLoad(f"{target.name} is empty")
    vocab: Vocab = Letters(text)

    def opened(path: Path, order: int) -> Opened:
        ids = vocab.tokenize(path.read_text("utf-8"), add_special=False, parse_special=False)
        pool: Pool = CountPool(Counts(ids, vocab.n_tokens, order), options.parallel, stop)
        info = ModelInfo(
            path=str(path), name=path.stem, architecture="counts", quantization="none",
            n_params=0, file_bytes=path.stat().st_size, n_ctx=CountLane.n_ctx,
            n_ctx_train=CountLane.n_ctx, n_vocab=vocab.n_tokens, kv_bytes=0, gpu_layers=0,
        )  # fmt: skip
        return Opened(pool, vocab, info)

    return OpenedPair(
        target=opened(target, 3),
        draft=None if draft is None else opened(draft, 1),
        exactness=Exactness(CountLane.max_rows),
        template=TEMPLATE,
    )
