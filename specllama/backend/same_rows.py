"""The test that a draft model of fewer words (``trimmed``) computes what the whole one does.

It runs in a process of its own: llama.cpp's graph of some architecture may scale embeddings
otherwise than tokens, or end the process for want of tokens. Then there is no such copy of its
models. The steps of both are timed in turn.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from specllama.cancel import Cancel
from specllama.errors import Cancelled, UnsupportedModel

_TOKENS = 24
_TURNS = 8
_NEAR = 0.02  # logits; what other kernels for fewer rows may change
_POLL_S = 0.02


class Tried(msgspec.Struct, frozen=True):
    """The result of trying a copy.

    Attributes:
        words: that the copy knows.
        difference: the largest one of a logit that both compute, over a few rows.
        share: of the time of a step of the whole model, in the same seconds.
        why_not: it does not draft; "" where it does. looks: that ended so.
    """

    words: int
    difference: float = 0.0
    share: float = 1.0
    why_not: str = ""
    looks: int = 0


def compare(
    whole: Path, copy: Path, *, threads: int = 1, kernels: bool = False, stop: Cancel | None = None
) -> Tried:
    """Compare a copy with the whole model; delete one that computes something else.

    Raises:
        UnsupportedModel: it did.
        Cancelled: ``stop`` was set.
    """
    stop, how = stop or Cancel(), [str(threads), str(int(kernels))]
    command = [sys.executable, "-P", "-m", __name__, str(whole), str(copy), *how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        while child.poll() is None:
            if stop.wait(_POLL_S):
                child.kill()
                raise Cancelled("the comparison of draft models was stopped")
        assert child.stdout is not None
        said = child.stdout.read().splitlines()
    why = "llama.cpp does not compute it"
    if child.returncode == 0:
        found = msgspec.json.decode(said[-1], type=Tried)
        if found.difference <= _NEAR:
            return found
        why = f"its logits differ by {found.difference:.3g}"
    copy.unlink(missing_ok=True)
    raise UnsupportedModel(
        f"{whole.name} does not work with fewer tokens: {why}", "draft with the whole model"
    )


def compared(whole: Path, copy: Path, threads: int = 1, kernels: bool = False) -> Tried:
    """Compare them in this process."""
    import numpy as np

    from specllama.backend.embedding import Embedding
    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import open_pool
    from specllama.backend.turns import timed
    from specllama.models.gguf import read_header
    from specllama.settings.params import EngineOptions

    embedding, lanes, models = Embedding(read_header(copy)), [], []
    options = EngineOptions().resolved(on_gpu=False, one_kv_type=read_header(whole).one_kv_type)
    for path, read in ((copy, embedding), (whole, None)):
        models.append(LlamaModel(path, embedding=read, gpu_layers="0", kernels=kernels))
        pool = open_pool(
            models[-1], n_ctx=256, max_rows=1, threads=threads, options=options,
            any_width=False,
        )  # fmt: skip
        lanes.append(pool.open())
    says, n_vocab = embedding.says, embedding.n_vocab
    text = [n_vocab * i // _TOKENS for i in range(_TOKENS)]
    largest = 0.0
    for part in (text[:-2], text[-2:]):
        few, all_of_them = (lane.forward(part, outputs="last")[0, says] for lane in lanes)
        largest = max(largest, float(np.abs(few - all_of_them).max()))
    turns = timed(lanes, [1], _TURNS)
    for model in models:
        model.close()
    ms, whole_ms = (float(np.median([turn[i][1] for turn in turns])) for i in (0, 1))
    return Tried(len(says), largest, ms / whole_ms)


if __name__ == "__main__":
    first, second, n_threads, own = sys.argv[1:]
    found = compared(Path(first), Path(second), int(n_threads), own == "1")
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
