"""The passes computed like single steps here, bit for bit: measured on the loaded file.

A few tokens are decoded one by one, then again in passes of 2, 3, 4, 8 … rows; every row of every
matrix product and attention (see ``watch``), and the logits, must be the same bits. It is done in a
short cache and in one of more than 512 cells, where llama.cpp splits attention over threads; the
cells between are copies that no row sees, so that nothing has to be read for it. Half of the tokens
are one token again and again: such rows meet in the same expert of a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from specllama.backend.base import Context
from specllama.backend.exactness import Exactness, Group
from specllama.backend.probed import Probe, Seen, spread
from specllama.backend.widths import common, groups, with_branches
from specllama.errors import EngineError

NARROW = (2, 3, 4, 8, 16)  # as far as a window goes by itself
WIDE = 32  # and further, up to what the context takes, where that takes a second or two
HEAD = 40  # tokens before the rows that are compared
COPIES = 14  # of the head: the cache is longer than 512 cells, two sequences stay for branches
LONG = HEAD * (COPIES + 1)
STEPS = 4  # a short cache, a long one, branches, all threads
EFFORT = {True: 112.0, False: 56.0}  # of a probe, by ``far``, see ``_effort``
CELLS = 768  # that a probe needs


def probe(
    context: Context,
    seen: Seen | None,
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
            done += _effort(rows)

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
                if not prober.has_steps:
                    prober.steps(found.rows)
                all_threads()
                if not prober.matches(min(found.rows, NARROW[-1])):
                    found = _Found(1, found.widths, min(found.rows, NARROW[-1]), prober.worst)
                    trees = False
        return Exactness(
            rows=found.rows,
            trees=trees,
            groups=tuple(divided),
            widths=found.widths,
            cells=tuple(cells),
            differs=found.differs,
            by=found.by,
            inside=seen is not None,
            seconds=perf_counter() - begin,
        )
    finally:
        context.rollback(0)


def _effort(rows: int) -> float:
    """Estimate how many single steps a pass takes, from measurements on two cores."""
    return (2 + rows) / 3


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
