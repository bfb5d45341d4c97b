"""The test that a draft model of fewer words (``trimmed``) computes what the whole one does.

It runs in a process of its own: llama.cpp's graph of some architecture may scale embeddings
otherwise than tokens, or end the process for want of tokens. Then there is no such copy of its
models. The steps of both are timed in turn.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from time import perf_counter

import msgspec

from specllama.cancel import Cancel
from specllama.errors import Cancelled, UnsupportedModel

_TOKENS = 24
_STEPS = 8  # of each that are timed, and as many before
_NEAR = 0.02  # logits; what other kernels for fewer rows may change
_POLL_S = 0.02


class Tried(msgspec.Struct, frozen=True):
    """The result of trying a copy.

    Attributes:
        difference: the largest one of a logit that both compute, over a few rows.
        ms, whole_ms: a step of the copy, and of the whole model in the same seconds.
    """

    difference: float
    ms: float
    whole_ms: float


def compare(
    whole: Path, copy: Path, *, threads: int = 1, repack: bool = False, stop: Cancel | None = None
) -> Tried:
    """Compare a copy with the whole model; delete one that computes something else.

    Raises:
        UnsupportedModel: it did.
        Cancelled: ``stop`` was set.
    """
    stop = stop or Cancel()
    command = [sys.executable, "-P", "-m", __name__, str(whole), str(copy), str(threads)]
    with subprocess.Popen(
        [*command, str(int(repack))], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as child:
        while child.poll() is None and not stop.wait(_POLL_S):
            pass
        if child.poll() is None:
            child.kill()
            raise Cancelled("the comparison of draft models was stopped")
        assert child.stdout is not None
        said = child.stdout.read().splitlines()
    if child.returncode == 0:
        found = msgspec.json.decode(said[-1], type=Tried)
        if found.difference <= _NEAR:
            return found
        why = f"its logits differ by {found.difference:.3g}"
    else:
        why = "llama.cpp does not compute it"
    copy.unlink(missing_ok=True)
    raise UnsupportedModel(
        f"{whole.name} does not work with fewer tokens: {why}", "draft with the whole model"
    )


def compared(whole: Path, copy: Path, threads: int = 1, repack: bool = False) -> Tried:
    """Compare them in this process."""
    import numpy as np

    from specllama.backend.embedding import Embedding
    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import open_pool
    from specllama.models.gguf import read_header
    from specllama.settings.params import EngineOptions

    headers, lanes, models = [read_header(path) for path in (copy, whole)], [], []
    embedding = Embedding(headers[0], headers[1])
    for header, read in zip(headers, (embedding, None), strict=True):
        model = LlamaModel(header.path, embedding=read, gpu_layers="0", repack=repack)
        models.append(model)
        options = EngineOptions().resolved(on_gpu=False, one_kv_type=header.one_kv_type)
        pool = open_pool(
            model,
            n_ctx=256,
            max_rows=1,
            threads=threads,
            options=options,
            flash=options.flash_attn,
            any_width=False,
        )
        lanes.append(pool.open())
    says, n_vocab = embedding.says, embedding.n_vocab
    text = [n_vocab * i // _TOKENS for i in range(_TOKENS)]
    largest = 0.0
    for part in (text[:-2], text[-2:]):
        few, all_of_them = (lane.forward(part, outputs="last")[0, says] for lane in lanes)
        largest = max(largest, float(np.abs(few - all_of_them).max()))
    took: list[list[float]] = [[], []]
    for i in range(2 * _STEPS):
        for lane, times in zip(lanes, took, strict=True):
            begin = perf_counter()
            lane.forward([text[i]], outputs="last")
            times.append((perf_counter() - begin) * 1e3)
    for model in models:
        model.close()
    ms, whole_ms = (float(np.median(times[_STEPS:])) for times in took)
    return Tried(largest, ms, whole_ms)


if __name__ == "__main__":
    first, second, n_threads, repacked = sys.argv[1:]
    found = compared(Path(first), Path(second), int(n_threads), repacked == "1")
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
