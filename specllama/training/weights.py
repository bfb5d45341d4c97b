"""The weights that write replies: the target's, as a pass for many replies costs least here.

A file is laid out for single tokens; a pass for sixteen replies takes two to three times what it
could where llama.cpp has no kernel of many rows for the type. Then another layout, or a copy of the
file as F16, writes and reads. Its numbers are the target's, but for the rounding of a pass; what a
head learns of them holds for both.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import perf_counter

from specllama.errors import SpecllamaError
from specllama.models import memory, quantization
from specllama.models.gguf import GgufHeader, read_header
from specllama.settings.params import Repacking
from specllama.training.features import Teacher

logger = logging.getLogger("specllama.training.weights")

COPY = ".copy.gguf"  # hidden: nobody chats with it
_TYPE = "f16"
_FASTER = 0.85  # of the time of a pass, at most, or the target writes as it is
_PASSES = 4  # of which the fastest counts
_SHARE = 1 / 4  # of the free memory that a copy may take

Weights = tuple[GgufHeader, Repacking]


def choose_weights(target: GgufHeader, folder: Path, threads: int | None, disk: int) -> Weights:
    """Return the first other way whose passes of many rows are much faster, else the target as it
    is; a copy that is not used is deleted.

    Args:
        folder: for the copy. disk: bytes in it, of which a copy takes a half at most.
    """
    usual: Weights = (target, "auto")
    usual_s = _pass_s(usual, threads)
    for weights in _others(target, folder, threads, disk // 2):
        with suppress(SpecllamaError):  # no memory for it
            share = _pass_s(weights, threads) / usual_s
            logger.info("%s, --repack %s: %.2f of a pass", weights[0].path.name, weights[1], share)
            if share < _FASTER:
                return weights
    (folder / COPY).unlink(missing_ok=True)
    return usual


def _others(target: GgufHeader, folder: Path, threads: int | None, most: int) -> Iterator[Weights]:
    """Yield other ways to compute the target; a copy has ``most`` bytes at most."""
    if memory.repacked_bytes(target):
        yield target, "on"
    if set(target.tensor_types) <= quantization.FLOATS:
        return
    try:
        if not (path := folder / COPY).exists():
            n = threads or 0
            job = quantization.prepare(target.path, path, _TYPE, threads=n, requantize=True)
            free = memory.available_memory()
            if job.expected > min(most, _SHARE * free if free else most):
                return
            quantization.run(job)
        yield read_header(path), "auto"
    except SpecllamaError as error:
        logger.info("no copy as %s: %s", _TYPE, error)


def _pass_s(weights: Weights, threads: int | None) -> float:
    """Return the seconds of a pass with a row for each reply."""
    target, repack = weights
    with Teacher.open(target, threads=threads, repack=repack) as teacher:
        lane, found = teacher.pool.open(), []
        for _ in range(_PASSES):
            begin = perf_counter()
            lane.forward([0] * teacher.lanes, outputs="all")
            found.append(perf_counter() - begin)
            lane.rollback(0)
    return min(found)
