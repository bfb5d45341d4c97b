"""The exactness of a loaded target, measured once for a file, a build, a machine and its settings.

What its passes cost is measured with it. That is done at rest, or when somebody asks for it, never
before a first answer: no text depends on what is found, see ``Kernels.exact_rows``. ``--exact``
alone asks for it when a model is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from specllama.backend import probe, verdicts
from specllama.backend.exactness import SCHEMA, Exactness
from specllama.backend.llama_pool import LlamaPool, LoadedModel, open_pool
from specllama.backend.turns import Turn, timed
from specllama.errors import Cancelled, EngineError, SpecllamaError, UsageError
from specllama.events import Measuring, Report

if TYPE_CHECKING:
    from specllama.backend.llama import LlamaModel

logger = logging.getLogger("specllama.engine.probing")

WHAT = "checking that drafting gives the same text here"
LATER = "that is done while the model is at rest, or now by: specllama tune -m FILE"
_TURNS = 3  # in which passes are timed
_STEADY = 1.25  # times the least, of what is believed
_SURE = 0.04  # share of a measurement after which its length is estimated
_STATES = 2  # of what is written, and of how llama.cpp's own bytes are taken over
FAR_BYTES = 1 << 30  # weights of models for which passes of up to 65 rows are compared, too


def exactness_of(target: LoadedModel, report: Report = None, *, now: bool) -> Exactness:
    """Return how far the target's passes equal single steps; kept in the profiles once it is known.
    The target's passes are kept to the wish of ``options.exact``.

    Args:
        report: receives the progress of the measurement.
        now: measure it if it is not known.

    Raises:
        UsageError: what it asks for cannot be had here.
        Cancelled: the measurement was stopped.
    """
    options, pool = target.options, target.pool
    found = _found(target, report, now).keeping(options.exact)
    pool.plan.measured = dict(found.costs)
    if found.kept is None:
        pool.kernels = replace(pool.kernels, exact_rows=found.rows, exact_trees=found.trees)
        return found
    if found.kept.widths[0] > 1 and options.parallel > 1 and not pool.kernels.any_width:
        raise UsageError(
            "--exact: on this device the rows of a conversation depend on where others lie in the "
            "cache",
            "add --parallel 1",
        )
    pool.keep_to(found.kept.widths, trees=found.kept.trees)
    return found


def _found(target: LoadedModel, report: Report, now: bool) -> Exactness:
    if target.model.has_windows and not target.options.swa_full:
        return Exactness(why_not="cells that have left a window are taken again, in another order")
    try:
        if now:
            target.header.read_contents(target.model.stop.check)
        key = kernel_key(target)
        if not now and verdicts.known(SCHEMA, key, Exactness) is None:
            return Exactness(rows=0, why_not=LATER)
        return verdicts.kept(SCHEMA, key, Exactness, lambda: _measure(target, report))
    except Cancelled:
        raise
    except (SpecllamaError, OSError) as error:
        logger.warning("cannot measure how exact wide passes are: %s", error)
        return Exactness(why_not=str(error))


def kernel_key(one: LoadedModel) -> dict[str, Any]:
    """Return everything that chooses kernels."""
    model, target, options = one.model, one.pool, one.options
    return {
        **verdicts.circumstances(one.header), "repack": model.repacks, "kernels": model.kernels,
        "gpu_layers": model.gpu_layers, "threads": target.kernels.threads,
        "flash_attn": target.kernels.flash, "alike": target.kernels.any_width,
        "kv": [options.kv_type_k, options.kv_type_v], "mmap": options.use_mmap,
        "rows": target.max_rows, "leaves": target.max_leaves, "placement": str(options.place),
        "text": [str(part) for part in (options.loras, options.rope_scale)],
        "groups": options.exact != "off",
    }  # fmt: skip


def _measure(one: LoadedModel, report: Report) -> Exactness:
    """Measure in a separate context, made like the target's, whose passes can be watched."""
    from specllama.backend.watch import Watch

    model, target, options = one.model, one.pool, one.options
    pads = target.max_rows - 1 if target.alike is None else target.alike  # that can be given up
    most = min(target.max_rows, pads + 1)
    widths = [w for w in probe.WIDTHS if w <= most] if options.exact != "off" else []

    # a GPU runs different kernels if it is stopped and watched
    watch = Watch() if model.gpu_layers == 0 else None
    pool = open_pool(
        model,
        n_ctx=probe.CELLS,
        lanes=1 if target.forgets else probe.COPIES + 2,
        max_rows=max(target.max_rows, probe.NARROW[-1]),
        threads=target.kernels.threads,
        options=options,
        # elsewhere a row's bits depend on where the cells of a branch that was kept lie
        max_leaves=2 if target.kernels.any_width else 1,
        watch=watch,
    )
    if watch is not None:
        watch.expect(1)  # a pass that is watched takes other times
        pool.try_one_thread()
        watch.take()
    lane = pool.open()

    begin = perf_counter()

    def told(step: int, share: float) -> None:
        if report is not None:
            left_s = (perf_counter() - begin) * (1 - share) / share if share > _SURE else None
            report(Measuring(WHAT, step, probe.STEPS, share, left_s))

    def fill(copies: int) -> None:
        if pool.forgets or not pool.kernels.any_width:
            raise EngineError("cells that no row sees tell nothing of this attention")
        twin = pool.fork(lane, lane.n_past)
        copy = pool.park(twin)
        twin.close()
        for _ in range(copies):
            pool.resume(copy)

    far = model.n_bytes <= FAR_BYTES
    try:
        found = probe.probe(
            lane, watch, fill, trained=model.n_ctx_train, far=far, widths=widths,
            all_threads=pool.take_all_threads, told=told,
        )  # fmt: skip
    finally:
        model.drop(pool)
    # a pass that is watched takes other times, and conversations have the target's lanes
    pool = _beside(model, one, target.max_rows)
    try:
        each = [w for w in probe.WIDTHS if w <= most]
        turns = timed([pool.open()], each, _TURNS, done=lambda: told(probe.STEPS, 0.99))
    finally:
        model.drop(pool)
    put = msgspec.structs.replace
    groups = tuple(
        put(one, ms=tuple(min(ms[w] for (ms,) in turns) for w in one.widths))
        for one in found.groups
    )
    return put(found, groups=groups, costs=tuple(steady(turns).items()))


def _beside(model: LlamaModel, target: LoadedModel, max_rows: int) -> LlamaPool:
    """Open a context of a model, whose passes take what the target's take."""
    kernels, choice = target.pool.kernels, target.pool.cache.threads.choice
    return open_pool(
        model,
        n_ctx=probe.CELLS,
        max_rows=max_rows,
        threads=kernels.threads if choice is None else choice.count,
        options=target.options,
    )


def steady(turns: Sequence[Turn], lane: int = 0) -> dict[int, float]:
    """Return the costs of a lane's passes in single ones of the first, where all turns agree: a
    busy machine tells nothing."""
    found = {w: [turn[lane][w] / max(turn[0][1], 1e-9) for turn in turns] for w in turns[0][lane]}
    return {w: median(r) for w, r in found.items() if max(r) < _STEADY * min(r)}


def state_key(one: LoadedModel) -> str:
    """Name everything that decides the content and the format of a pool's cells, but for the
    contents of files."""
    header, pool, options = one.header, one.pool, one.options
    n_ctx = header.metadata.get(header.own("rope.scaling.original_context_length"))
    key = {
        **kernel_key(one),
        "file": "",
        "version": _STATES,
        "swa": options.swa_full,
        "forgets": pool.forgets,
        # some models turn positions otherwise in a context that is longer
        "long": isinstance(n_ctx, int) and pool.n_ctx > n_ctx,
    }
    return verdicts.name_of(key)
