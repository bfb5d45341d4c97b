"""How exact a loaded target is: measured once for a file, a build, a machine and its settings."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from specllama.backend import verdicts
from specllama.backend.exactness import SCHEMA, Exactness, Group
from specllama.errors import EngineError, SpecllamaError, UsageError
from specllama.events import Event, Notice
from specllama.settings.hardware import Adapter

if TYPE_CHECKING:
    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import LlamaPool
    from specllama.models.gguf import GgufHeader
    from specllama.settings.params import EngineOptions

logger = logging.getLogger("specllama.engine.probing")

WAITING = (
    "measuring whether drafted passes compute the same bits as plain ones here; once for this model"
)
_TIMED = 5  # passes of each width
_STATES = 2  # of what is written, and of how llama.cpp's own bytes are taken over
FAR_BYTES = 1 << 30  # weights of models for which passes of up to 65 rows are compared, too


def exactness_of(
    header: GgufHeader,
    model: LlamaModel,
    target: LlamaPool,
    options: EngineOptions,
    report: Callable[[Event], None] | None = None,
) -> Exactness:
    """How far the target's passes equal single steps; kept in the profiles once it is known. The
    target's passes are kept to what ``options.exact`` asks for.

    Args:
        options: resolved, as ``target`` was made with them.
        report: hears that it is being measured, where that takes a while.

    Raises:
        UsageError: what it asks for cannot be had here.
    """
    found = _found(header, model, target, options, report).keeping(options.exact)
    pool = target.kernels
    if found.kept is None:
        target.kernels = replace(pool, exact_rows=found.rows, exact_trees=found.trees)
        return found
    if found.kept.widths[0] > 1 and options.parallel > 1 and not pool.any_width:
        raise UsageError(
            "--exact: on this device the rows of a conversation depend on where others lie in the "
            "cache",
            "add --parallel 1",
        )
    target.keep_to(found.kept.widths, trees=found.kept.trees)
    return found


def _found(
    header: GgufHeader,
    model: LlamaModel,
    target: LlamaPool,
    options: EngineOptions,
    report: Callable[[Event], None] | None,
) -> Exactness:
    if model.has_windows and not options.swa_full:
        return Exactness(why_not="cells that have left a window are taken again, in another order")
    try:
        return verdicts.kept(
            SCHEMA,
            kernel_key(header, model, target, options),
            Exactness,
            lambda: _measure(model, target, options, report),
        )
    except (SpecllamaError, OSError) as error:
        logger.warning("cannot measure how exact wide passes are: %s", error)
        return Exactness(why_not=str(error))


def kernel_key(
    header: GgufHeader, model: LlamaModel, target: LlamaPool, options: EngineOptions
) -> dict[str, Any]:
    """Everything that chooses kernels."""
    return {
        **verdicts.circumstances(header),
        "repack": model.repacks,
        "gpu_layers": model.gpu_layers,
        "threads": target.kernels.threads,
        "flash_attn": target.kernels.flash,
        "alike": target.kernels.any_width,
        "kv": [options.kv_type_k, options.kv_type_v],
        "mmap": options.use_mmap,
        "rows": target.max_rows,
        "leaves": target.max_leaves,
        "placement": [str(part) for part in (options.place, options.cpu, options.n_ubatch)],
        "text": [str(part) for part in (options.loras, options.rope)],
        "groups": options.exact != "off",
    }


def _measure(
    model: LlamaModel,
    target: LlamaPool,
    options: EngineOptions,
    report: Callable[[Event], None] | None,
) -> Exactness:
    """Measure in a separate context, made like the target's, whose passes can be watched."""
    from specllama.backend.llama_pool import open_pool
    from specllama.backend.probe import CELLS, COPIES, NARROW, probe
    from specllama.backend.watch import Watch
    from specllama.backend.widths import WIDTHS

    most = min(target.max_rows, target.pads + 1)
    widths = [w for w in WIDTHS if w <= most] if options.exact != "off" else []

    # a GPU runs different kernels if it is stopped and watched
    watch = Watch() if model.gpu_layers == 0 else None
    pool = open_pool(
        model,
        n_ctx=CELLS,
        lanes=1 if target.forgets else COPIES + 2,
        max_rows=max(target.max_rows, NARROW[-1]),
        threads=target.kernels.threads,
        options=options,
        flash=target.kernels.flash,
        # elsewhere a row's bits depend on where the cells of a branch that was kept lie
        max_leaves=2 if target.kernels.any_width else 1,
        watch=watch,
    )
    if watch is not None:
        watch.expect(1)  # a pass that is watched takes other times
        pool.try_one_thread()
        watch.take()
    lane = pool.open()

    def waiting() -> None:
        if report is not None:
            report(Notice(WAITING, topic="exactness"))

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
        found = probe(
            lane,
            watch,
            fill,
            trained=model.n_ctx_train,
            far=far,
            widths=widths,
            all_threads=pool.take_all_threads,
            waiting=waiting,
        )
    finally:
        model.drop(pool)
    return msgspec.structs.replace(found, groups=_timed(found.groups, target))


def _timed(groups: Sequence[Group], target: LlamaPool) -> tuple[Group, ...]:
    """The groups with what passes of their widths take: of a few in turn, the shortest."""
    ms = {w: math.inf for group in groups for w in group.widths}
    lane = target.open()
    for _ in range(_TIMED):
        for w in ms:
            begin = perf_counter()
            lane.forward([0] * w, outputs="all")
            ms[w] = min(ms[w], (perf_counter() - begin) * 1e3)
            lane.rollback(0)
    lane.close()
    return tuple(
        msgspec.structs.replace(group, ms=tuple(ms[w] for w in group.widths)) for group in groups
    )


def state_key(
    header: GgufHeader, model: LlamaModel, pool: LlamaPool, options: EngineOptions
) -> str:
    """The name of everything that decides what a pool's cells hold, and how they are written."""
    n_ctx = header.metadata.get(header.own("rope.scaling.original_context_length"))
    key = {
        **kernel_key(header, model, pool, options),
        "version": _STATES,
        "swa": options.swa_full,
        "forgets": pool.forgets,
        "adapters": [_changed(text) for text in options.loras],
        # some models turn positions otherwise in a context that is longer
        "long": isinstance(n_ctx, int) and pool.n_ctx > n_ctx,
    }
    return hashlib.sha256(msgspec.json.encode(key, order="sorted")).hexdigest()[:16]


def _changed(adapter: str) -> list[int]:
    """Size and time of an adapter's file."""
    stat = Path(Adapter.read(adapter).path).expanduser().stat()
    return [stat.st_size, stat.st_mtime_ns]
