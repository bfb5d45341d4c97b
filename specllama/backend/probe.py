"""Which passes are computed like single steps here, bit for bit: measured on the loaded file.

A few tokens are decoded one by one, then again in passes of 2, 3, 4, 8 … rows; every row of every
matrix product and attention (see ``watch``), and the logits, must be the same bits. It is done in a
short cache and in one of more than 512 cells, where llama.cpp splits attention over threads; the
cells between are copies that no row sees, so that nothing has to be read for it. Half of the tokens
are one token again and again: such rows meet in the same expert of a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

import numpy as np

from specllama.arrays import Row
from specllama.backend.base import Context
from specllama.errors import EngineError
from specllama.exactness import Exactness

NARROW = (2, 3, 4, 8, 16)  # as far as a window goes by itself
WIDE = 32  # and further, up to what the context takes, where that takes a second or two
HEAD = 40  # tokens before the rows that are compared
COPIES = 14  # of the head: the cache is longer than 512 cells, two sequences stay for branches
LONG = HEAD * (COPIES + 1)
CELLS = 768  # that a probe needs
# a branch beside a chain: rows 3 and 4 follow row 0, past the cells of rows 1 and 2
_TREE = (-1, 0, 1, 0, 3)
_LINE = (0, 3, 4)


class Seen(Protocol):
    """What passes compute inside: by name, a hash of each token's row."""

    def expect(self, n: int) -> None: ...

    def take(self) -> Mapping[str, Sequence[int]]: ...


@dataclass(frozen=True, slots=True)
class _Computed:
    """One row of a pass: its logits and what led to them."""

    logits: Row
    inside: Mapping[str, int]

    def same(self, other: _Computed) -> bool:
        """Bit for bit, in all that both passes name alike."""
        mine, theirs = self.inside, other.inside
        return bool(
            np.array_equal(self.logits.view(np.uint32), other.logits.view(np.uint32))
        ) and all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys())


class _Probe:
    """Rows of one text behind one head, decoded in passes of any width."""

    def __init__(self, context: Context, seen: Seen | None, base: int) -> None:
        self._context = context
        self._seen = seen
        self._base = base
        n = context.max_rows
        self._text = [_token(i if i % 4 < 2 else 1, context.n_vocab) for i in range(n + 1)]
        self._alone: list[_Computed] = []
        self.worst = 0.0

    def run(self, start: int, n: int) -> list[_Computed]:
        """Rows ``start`` to ``start + n - 1`` of the text in one pass, on top of those before."""
        return self.evaluate(self._text[start : start + n], None)

    def evaluate(self, tokens: Sequence[int], parents: Sequence[int] | None) -> list[_Computed]:
        if self._seen is not None:
            self._seen.expect(len(tokens))
        rows = self._context.forward(tokens, outputs="all", parents=parents).copy()
        inside = {} if self._seen is None else self._seen.take()
        return [
            _Computed(row, {name: hashes[i] for name, hashes in inside.items()})
            for i, row in enumerate(rows)
        ]

    def steps(self, n: int) -> None:
        """Decode the first ``n`` tokens one by one."""
        self._context.rollback(self._base)
        self._alone = [self.run(i, 1)[0] for i in range(n)]

    def extend(self, n: int, size: int) -> None:
        """Decode on to ``n`` tokens in passes of ``size``, which were found to be like steps."""
        for start in range(len(self._alone), n, size):
            self._alone += self.run(start, min(size, n - start))

    def alike(self, n: int) -> bool:
        """Whether a pass of the first ``n`` tokens, and the step after it, are like steps."""
        self._context.rollback(self._base)
        rows = self.run(0, n)
        pairs = list(zip(self._alone, rows, strict=False))
        if n < len(self._alone):
            pairs.append((self._alone[n], self.run(n, 1)[0]))
        self.worst = max(float(np.abs(a.logits - b.logits).max()) for a, b in pairs)
        return all(a.same(b) for a, b in pairs)

    def branches_alike(self) -> bool:
        """Whether the rows of a branch are like steps along it. Leaves a pass to be settled."""
        text = self._text
        self._context.rollback(self._base)
        along = [self.evaluate([text[node]], None)[0] for node in _LINE]
        self._context.rollback(self._base)
        tree = self.evaluate(text[: len(_TREE)], _TREE)
        return all(a.same(tree[node]) for a, node in zip(along, _LINE, strict=True))


def _token(i: int, n_vocab: int) -> int:
    """Tokens spread over the vocabulary, the same for everyone."""
    return (7919 * i + 101) % n_vocab


def probe(
    context: Context,
    seen: Seen | None,
    fill: Callable[[int], None],
    *,
    trained: int,
    far: bool = True,
) -> Exactness:
    """How many rows of a pass are computed like single steps.

    Args:
        context: empty, of ``CELLS`` cells, for passes of 16 rows at least; cleared in the end.
        seen: looks into its passes; None compares logits only.
        fill: lengthens the cache by copies that no row sees; may raise EngineError.
        trained: positions that the model knows.
        far: go on to passes of more than 16 rows.

    Raises:
        EngineError: a pass failed.
    """
    begin = perf_counter()
    head = [_token(i, context.n_vocab) for i in range(LONG)]
    cells = [HEAD]
    trees = False
    try:
        context.forward(head[:HEAD], outputs="last")  # a running state is copied shortly before
        found = _widths(_Probe(context, seen, HEAD), (2, 4))
        if found.rows == 4:
            base = _lengthen(context, fill, head, trained)
            cells += [LONG] if base else []
            prober = _Probe(context, seen, base or HEAD)
            most = context.max_rows
            wide = [w for w in sorted({WIDE, most}) if far and NARROW[-1] < w <= most]
            found = _widths(prober, (*NARROW, *wide))
            if found.rows >= len(_TREE) and context.max_leaves > 1:
                trees = prober.branches_alike()
        return Exactness(
            rows=found.rows,
            trees=trees,
            widths=found.widths,
            cells=tuple(cells),
            differs=found.differs,
            by=found.by,
            inside=seen is not None,
            seconds=perf_counter() - begin,
        )
    finally:
        context.rollback(0)


def _lengthen(
    context: Context, fill: Callable[[int], None], head: Sequence[int], trained: int
) -> int:
    """Make the cache long; how many tokens of the text it then holds, 0 where it stayed short."""
    context.rollback(HEAD)
    try:
        fill(COPIES)
        return HEAD
    except EngineError:
        context.rollback(0)
    long = trained >= CELLS
    for i in range(0, LONG if long else HEAD, context.n_batch):
        context.forward(head[i : min(i + context.n_batch, LONG if long else HEAD)], outputs="last")
    return LONG if long else 0


@dataclass(frozen=True, slots=True)
class _Found:
    rows: int
    widths: tuple[int, ...]
    differs: int
    by: float


def _widths(prober: _Probe, widths: Sequence[int]) -> _Found:
    """The widest pass that is like single steps, looked for upwards and then in between."""
    tried: list[int] = []
    good, bad, by = 1, 0, 0.0
    prober.steps(5)
    for width in widths:
        if width > 4:
            # what comes after the steps so far, in passes that were found to be like steps
            most = NARROW[-1]
            prober.extend(max(width, most) + 1, 4 if width <= most else most)
        tried.append(width)
        if not prober.alike(width):
            bad, by = width, prober.worst
            break
        good = width
    while bad > good + 1 and bad <= NARROW[-1]:
        middle = (good + bad) // 2
        tried.append(middle)
        if prober.alike(middle):
            good = middle
        else:
            bad, by = middle, prober.worst
    return _Found(good, tuple(sorted(tried)), bad, by)
