"""How exact a loaded target is: measured once for a file, a build, a machine and its settings."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from specllama.errors import SpecllamaError
from specllama.exactness import Exactness, measured

if TYPE_CHECKING:
    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import LlamaPool
    from specllama.models.gguf import GgufHeader
    from specllama.params import EngineOptions

logger = logging.getLogger("specllama.engine.probing")

FAR_BYTES = 1 << 30  # weights of models for which passes of up to 65 rows are compared, too


def exactness_of(
    header: GgufHeader, model: LlamaModel, target: LlamaPool, options: EngineOptions
) -> Exactness:
    """How far the target's passes equal single steps; kept in the profiles once it is known.

    Args:
        options: resolved, as ``target`` was made with them.
    """
    if model.has_windows and not options.swa_full:
        return Exactness(why_not="cells that have left a window are taken again, in another order")
    try:
        return measured(
            _key(header, model, target, options), lambda: _measure(model, target, options)
        )
    except (SpecllamaError, OSError) as error:
        logger.warning("cannot measure how exact wide passes are: %s", error)
        return Exactness(why_not=str(error))


def _key(
    header: GgufHeader, model: LlamaModel, target: LlamaPool, options: EngineOptions
) -> dict[str, Any]:
    """Everything that chooses kernels."""
    from specllama.backend import devices
    from specllama.models.pruned import fingerprint

    build = devices.build_info()
    return {
        "file": fingerprint(header),
        "build": [build.binding, *build.backends, *build.features, *devices.library_files()],
        "machine": [
            devices.cpu_name(),
            devices.cpu_features(),
            *(d.description for d in devices.gpus(devices.devices())),
        ],
        "gpu_layers": model.gpu_layers,
        "threads": target.kernels.threads,
        "flash_attn": target.kernels.flash,
        "alike": target.kernels.alike,
        "kv": [options.kv_type_k, options.kv_type_v],
        "mmap": options.use_mmap,
        "rows": target.max_rows,
        "leaves": target.max_leaves,
        "placement": [str(part) for part in (options.place, options.cpu, options.n_ubatch)],
        "text": [str(part) for part in (options.loras, options.rope)],
    }


def _measure(model: LlamaModel, target: LlamaPool, options: EngineOptions) -> Exactness:
    """Measure in a separate context, made like the target's, whose passes can be watched."""
    from specllama.backend.llama_pool import open_pool
    from specllama.backend.probe import CELLS, COPIES, NARROW, probe
    from specllama.backend.watch import Watch

    # a GPU runs different kernels if it is stopped and watched
    watch = Watch() if model.gpu_layers == 0 else None
    pool = open_pool(
        model,
        n_ctx=CELLS,
        lanes=COPIES + 2,
        max_rows=max(target.max_rows, NARROW[-1]),
        threads=target.kernels.threads,
        options=options,
        flash=target.kernels.flash,
        max_leaves=2,
        watch=watch,
    )
    lane = pool.open()

    def fill(copies: int) -> None:
        twin = pool.fork(lane, lane.n_past)
        copy = pool.park(twin)
        twin.close()
        for _ in range(copies):
            pool.resume(copy)

    try:
        return probe(lane, watch, fill, trained=model.n_ctx_train, far=model.n_bytes <= FAR_BYTES)
    finally:
        model.drop(pool)
