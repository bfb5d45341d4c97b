"""The test that a draft model of fewer words (``trimmed``) computes what the whole one does.

It runs in a process of its own: ``python -m specllama.backend.same_rows WHOLE COPY``.

llama.cpp's graph of some architecture may scale embeddings otherwise than tokens, or end the
process for want of tokens. Then there is no such copy of its models.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from specllama.errors import UnsupportedModel

_TOKENS = 24
_NEAR = 0.02  # logits; what other kernels for fewer rows may change


def require(whole: Path, copy: Path) -> None:
    """Delete a copy that does not compute what the whole model does.

    Raises:
        UnsupportedModel: it did not.
    """
    command = [sys.executable, "-P", "-m", __spec__.name, str(whole), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == 0:
        return
    copy.unlink(missing_ok=True)
    last = (done.stdout.strip().splitlines() or ["llama.cpp ended the process"])[-1]
    raise UnsupportedModel(
        f"{whole.name} does not work with fewer tokens: {last}", "draft with the whole model"
    )


def largest_difference(whole: Path, copy: Path) -> float:
    """Return the largest difference of a logit that both compute, over a few rows."""
    import numpy as np

    from specllama.backend.llama import LlamaModel
    from specllama.backend.llama_pool import open_pool
    from specllama.models.gguf import read_header
    from specllama.settings.params import EngineOptions

    rows = []
    says, n_vocab = None, 0
    for path in (copy, whole):
        header = read_header(path)
        model = LlamaModel(
            path, trimmed=header if header.rows else None, gpu_layers="0", repack=False
        )
        options = EngineOptions().resolved(on_gpu=False, one_kv_type=header.one_kv_type)
        made = {"n_ctx": 256, "max_rows": 1, "threads": 1, "flash": options.flash_attn}
        pool = open_pool(model, options=options, any_width=False, **made)
        if model.embedding is not None:
            says, n_vocab = model.embedding.spread.says, model.n_vocab
        lane, text = pool.open(), [n_vocab * i // _TOKENS for i in range(_TOKENS)]
        found = [lane.forward(part, outputs="last")[0, says] for part in (text[:-2], text[-2:])]
        rows.append(np.stack(found))
        model.close()
    return float(np.abs(rows[0] - rows[1]).max())


if __name__ == "__main__":
    found = largest_difference(Path(sys.argv[1]), Path(sys.argv[2]))
    if not found <= _NEAR:
        print(f"its logits differ by {found:.3g}")
        sys.exit(1)
