"""The passes computed like single steps here, bit for bit: measured on the loaded file.

A few tokens are decoded one by one, then again in passes of 2, 3, 4, 8 … rows; every row of every
matrix product and attention (see ``watch``), and the logits, must be the same bits. It is done in a
short cache and in one of more than 512 cells, where llama.cpp splits attention over threads; the
cells between are copies that no row sees, so that nothing has to be read for it. Half of the tokens
are one token again and again: such rows meet in the same expert of a mixture.

Kernels are chosen by how many rows a pass has: CPUs compute four rows of a K-quant together and
what is left over one by one, GPUs take another kernel from some width on, or give each thread more
columns. Widths fall into groups: in passes of one group a row has the same bits, in those of
another it has others. Widths whose rows depend on their place belong to none.

A pass that is too narrow for its group is filled up with guesses that no drafter offered. So the
rows that all others are compared with are those of single steps, filled up to the narrowest width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from specllama.arrays import Row
from specllama.backend.base import Context
from specllama.backend.exactness import Exactness, Group
from specllama.errors import EngineError

if TYPE_CHECKING:
    from specllama.backend.watch import Watch

NARROW = (2, 3, 4, 8, 16)  # as far as a window goes by itself
WIDE = 32  # and further, up to what the context takes, where that takes a second or two
HEAD = 40  # tokens before the rows that are compared
COPIES = 14  # of the head: the cache is longer than 512 cells, two sequences stay for branches
LONG = HEAD * (COPIES + 1)
STEPS = 4  # a short cache, a long one, branches, all threads
EFFORT = {True: 112.0, False: 56.0}  # of a probe, by ``far``, in single steps
CELLS = 768  # that a probe needs
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # as far as a window goes by itself
# a branch alongside a chain: rows 3 and 4 follow row 0, past the cells of rows 1 and 2
TREE = (-1, 0, 1, 0, 3)
LINE = (0, 3, 4)


@dataclass(frozen=True, slots=True)
class Computed:
    """One row of a pass: its logits and the sums before them."""

    logits: Row
    inside: Mapping[str, int]

    def same(self, other: Computed) -> bool:
        """True if both are equal bit for bit, in all sums that both passes name alike."""
        mine, theirs = self.inside, other.inside
        return bool(
            np.array_equal(self.logits.view(np.uint32), other.logits.view(np.uint32))
        ) and all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys())


class Probe:
    """Rows of one text after a common beginning, decoded in passes of any width."""

    def __init__(
        self,
        context: Context,
        seen: Watch | None,
        base: int,
        tick: Callable[[int], object] = lambda rows: None,
    ) -> None:
        self.context = context
        self._tick = tick  # called before every pass, with its rows
        self._seen = seen
        self._base = base
        n = context.max_rows
        self._text = [spread(i if i % 4 < 2 else 1, context.n_vocab) for i in range(n + 1)]
        self.alone: list[Computed] = []
        self.worst = 0.0

    def run(self, start: int, n: int) -> list[Computed]:
        """Compute rows ``start`` to ``start + n - 1`` in one pass after those before."""
        return self.evaluate(self._text[start : start + n], None)

    def evaluate(self, tokens: Sequence[int], parents: Sequence[int] | None) -> list[Computed]:
        self._tick(len(tokens))
        if self._seen is not None:
            self._seen.expect(len(tokens))
        rows = self.context.forward(tokens, outputs="all", parents=parents).copy()
        inside = {} if self._seen is None else self._seen.take()
        return [
            Computed(row, {name: hashes[i] for name, hashes in inside.items()})
            for i, row in enumerate(rows)
        ]

    def restart(self) -> None:
        """Go back to the head."""
        self.context.rollback(self._base)

    def padded(
        self, text: Sequence[int], width: int, parents: Sequence[int] | None = None
    ) -> list[Computed]:
        """Run these tokens of the text in one pass of ``width`` rows, and keep only theirs."""
        n = len(text)
        past = len(self.context.tokens)
        tokens = [self._text[i] for i in text]
        if parents is not None:
            parents = [*parents, *range(n - 1, width - 1)]
        rows = self.evaluate(tokens + tokens[-1:] * (width - n), parents)[:n]
        if parents is None:
            self.context.rollback(past + n)
        return rows

    def padded_steps(self, text: Sequence[int], width: int) -> list[Computed]:
        """Compute these tokens after the common beginning, each in a pass of ``width`` rows."""
        self.restart()
        return [self.padded([i], width)[0] for i in text]

    def steps(self, n: int) -> None:
        """Decode the first ``n`` tokens one by one."""
        self.restart()
        self.alone = [self.run(i, 1)[0] for i in range(n)]

    def extend(self, n: int, size: int) -> None:
        """Decode on to ``n`` tokens in passes of ``size``, which were found to be like steps."""
        for start in range(len(self.alone), n, size):
            self.alone += self.run(start, min(size, n - start))

    def matches(self, n: int) -> bool:
        """True if a pass of the first ``n`` tokens, and the step after it, are like steps."""
        self.restart()
        rows = self.run(0, n)
        pairs = list(zip(self.alone, rows, strict=False))
        if n < len(self.alone):
            pairs.append((self.alone[n], self.run(n, 1)[0]))
        self.worst = max(float(np.abs(a.logits - b.logits).max()) for a, b in pairs)
        return all(a.same(b) for a, b in pairs)


def spread(i: int, n_vocab: int) -> int:
    """Return a token of a sequence that spreads over the vocabulary, the same on every machine."""
    return (7919 * i + 101) % n_vocab


class _Steps:
    """The rows of a text, each in a pass of its own of ``width`` rows."""

    def __init__(self, probe: Probe, width: int, n: int) -> None:
        self.width = width
        self.members = [width]
        self.rows = probe.padded_steps(range(n), width)

    def takes(self, probe: Probe, width: int) -> bool:
        """True if passes of this width compute these rows, wherever they stand, and leave the cells
        that these leave."""
        for n in {1, width // 2 + 1, width}:
            probe.restart()
            found = probe.padded(range(n), width)
            found += probe.padded([n], width)
            if not all(a.same(b) for a, b in zip(self.rows, found, strict=False)):
                return False
        return True


def groups(probe: Probe, widths: Sequence[int]) -> list[list[int]]:
    """Divide the widths after one text into groups, each ascending."""
    n = max(widths) + 1
    found: list[_Steps] = []
    for width in widths:
        mine = next((one for one in found if one.takes(probe, width)), None)
        if mine is not None:
            mine.members.append(width)
            continue
        probe.restart()
        first = probe.padded([0], width)[0]
        if any(first.same(one.rows[0]) for one in found):
            continue  # only where it stands in front
        steps = _Steps(probe, width, n)
        if steps.takes(probe, width):
            found.append(steps)
    return [one.members for one in found]


def common(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the groups that two divisions of widths have in common."""
    shared = (tuple(w for w in a if w in b) for a in one for b in other)
    return sorted(group for group in shared if group)


def with_branches(probe: Probe, widths: tuple[int, ...]) -> Group:
    """Return a group of widths that knows if rows of branches are computed as steps are."""
    wide = next((w for w in widths if w >= len(TREE)), 0)
    if not wide or probe.context.max_leaves < 2:
        return Group(widths)
    along = probe.padded_steps([*LINE, 1], widths[0])
    probe.restart()
    tree = probe.padded(range(len(TREE)), wide, TREE)
    probe.context.keep_path(LINE)
    after: list[Computed] = [*(tree[node] for node in LINE), *probe.padded([1], widths[0])]
    return Group(widths, trees=all(a.same(b) for a, b in zip(along, after, strict=True)))


def probe(
    context: Context,
    seen: Watch | None,
    fill: Callable[[int], None],
    *,
    trained: int,
    far: bool = True,
    widths: Sequence[int] = (),
    all_threads: Callable[[], object] = lambda: None,
    told: Callable[[int, float], object] = lambda step, share: None,
) -> Exactness:
    """Measure which rows of a pass are computed like single steps.

    Args:
        context: empty, of ``CELLS`` cells, for passes of 16 rows at least; cleared in the end.
        seen: looks into its passes; None compares logits only.
        fill: lengthens the cache by copies that no row sees; may raise EngineError.
        trained: positions that the model knows.
        far: go on to passes of more than 16 rows.
        widths: find the groups of these, unless all are like single steps.
        all_threads: lets the passes that follow take every thread, if those before did not.
        told: called before every pass: which of ``STEPS`` it is in, and which share is done.

    Raises:
        EngineError: a pass failed.
    """
    begin = perf_counter()
    head = [spread(i, context.n_vocab) for i in range(LONG)]
    cells = [HEAD]
    trees = False
    divided: list[Group] = []
    try:
        context.forward(head[:HEAD], outputs="last")  # a running state is copied shortly before
        step, done = 1, 0.0

        def tick(rows: int) -> None:
            nonlocal done
            told(step, min(done / EFFORT[far], 0.99))
            done += (2 + rows) / 3  # single steps, as measured on two cores

        prober = Probe(context, seen, HEAD, tick)
        found = _widths(prober, (2, 4))
        if found.rows == 4 or widths:
            step = 2
            short = groups(prober, widths) if widths else []
            base = _lengthen(context, fill, head, trained)
            cells += [LONG] if base else []
            prober = Probe(context, seen, base or HEAD, tick)
            most = context.max_rows
            wide = [w for w in sorted({WIDE, most}) if far and NARROW[-1] < w <= most]
            if found.rows == 4:
                found = _widths(prober, (*NARROW, *wide))
            step = 3
            trees = with_branches(prober, tuple(range(1, found.rows + 1))).trees
            if found.rows < max(widths, default=0):
                shared = common(short, groups(prober, widths))
                divided = [with_branches(prober, group) for group in shared]
            step = 4
            if found.rows > 1:
                if not prober.alone:
                    prober.steps(found.rows)
                all_threads()
                if not prober.matches(min(found.rows, NARROW[-1])):
                    found = _Found(1, found.widths, min(found.rows, NARROW[-1]), prober.worst)
                    trees = False
        return Exactness(
            rows=found.rows, trees=trees, groups=tuple(divided), widths=found.widths,
            cells=tuple(cells), differs=found.differs, by=found.by, inside=seen is not None,
            seconds=perf_counter() - begin,
        )  # fmt: skip
    finally:
        context.rollback(0)


def _lengthen(
    context: Context, fill: Callable[[int], None], head: Sequence[int], trained: int
) -> int:
    """Lengthen the cache; return the tokens of the text in it, 0 if it stayed short."""
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


def _widths(prober: Probe, widths: Sequence[int]) -> _Found:
    """Search for the widest pass that is like single steps, upwards and then in between."""
    tried: list[int] = []
    good, bad, by = 1, 0, 0.0
    prober.steps(5)
    for width in widths:
        if width > 4:
            # what comes after the steps so far, in passes that were found to be like steps
            most = NARROW[-1]
            prober.extend(max(width, most) + 1, 4 if width <= most else most)
        tried.append(width)
        if not prober.matches(width):
            bad, by = width, prober.worst
            break
        good = width
    while bad > good + 1 and bad <= NARROW[-1]:
        middle = (good + bad) // 2
        tried.append(middle)
        if prober.matches(middle):
            good = middle
        else:
            bad, by = middle, prober.worst
    return _Found(good, tuple(sorted(tried)), bad, by)
