"""The times of passes in both layouts of a target's weights, taken by turns while it is at rest.

The file is loaded a second time, in the layout that was not chosen. No text depends on what is
found: it is what a reply's verdict names as a remedy, see ``remedies``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter

from specllama.backend import llama, trial
from specllama.backend.llama_pool import LlamaPool, LoadedModel, open_pool
from specllama.engine.gguf_pair import Pair
from specllama.errors import DoesNotFit
from specllama.events import Measuring, Report
from specllama.models import memory
from specllama.text import size

WHAT = "timing the other layout of the weights"
SHARE = 0.5  # of the free memory that a second copy of the weights may take
_TURNS = 4
_CELLS = 256


def has_another(pair: Pair) -> bool:
    """True if the target's weights have another layout here."""
    return not pair.on_gpu and trial.repacks() and memory.repacked_bytes(pair.target) > 0


def time_layouts(
    target: LoadedModel, report: Report, rows: Sequence[int]
) -> dict[bool, dict[int, float]]:
    """Time passes in both layouts by turns; return the shortest milliseconds by rows, by whether
    the weights were repacked.

    Raises:
        Cancelled: it was stopped.
        DoesNotFit: there is no memory for it.
        CannotLoad: llama.cpp refuses it.
    """
    extra, free = memory.repacked_bytes(target.header), memory.available_memory()
    if extra > SHARE * free:
        raise DoesNotFit(f"a second copy takes {size(extra)}, {size(free)} are free", needed=extra)
    begin, turns = perf_counter(), [n for _ in range(_TURNS) for n in rows]

    def told(share: float) -> None:
        if report is not None:
            left_s = (perf_counter() - begin) * (1 - share) / share if share > 0.2 else None
            report(Measuring(WHAT, 1, 1, share, left_s))

    told(0.0)
    other = target.load(
        target.header,
        repack=not target.model.repacks,
        progress=lambda fraction: told(0.2 * fraction),
    )
    pools: list[LlamaPool] = []
    try:
        pools = [_pool(model, target, max(rows)) for model in (target.model, other)]
        times: dict[bool, dict[int, float]] = {False: {}, True: {}}
        for done, n in enumerate(turns):
            for pool in pools:
                found = times[pool.model.repacks]
                found[n] = min(_time(pool, n), found.get(n, math.inf))
            told(0.2 + 0.8 * (done + 1) / len(turns))
        return times
    finally:
        if pools:
            target.model.drop(pools[0])
        other.close()


def _pool(model: llama.LlamaModel, target: LoadedModel, rows: int) -> LlamaPool:
    kernels, choice = target.pool.kernels, target.pool.cache.choice
    threads = kernels.threads if choice is None else choice.count
    options, flash = target.options, kernels.flash
    return open_pool(
        model, n_ctx=_CELLS, max_rows=rows, threads=threads, options=options, flash=flash
    )


def _time(pool: LlamaPool, rows: int) -> float:
    """Return the milliseconds of the second of two passes: it reuses the graph of the first."""
    lane, ms = pool.open(), 0.0
    for _ in range(2):
        begin = perf_counter()
        lane.forward([0] * rows, outputs="all" if rows <= 16 else "last")
        ms = (perf_counter() - begin) * 1e3
        lane.rollback(0)
    lane.close()
    return ms
