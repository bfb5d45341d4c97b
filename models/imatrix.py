"""Importance matrices, as ``llama-imatrix`` writes them: which weights a quantizer keeps best."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specllama.errors import UsageError
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.heads import kind_of
from specllama.models.tensors import Floats, read_tensor

_SUMS, _COUNTS = ".in_sum2", ".counts"


def read_imatrix(path: Path, model: GgufHeader) -> dict[str, Floats]:
    """Return the mean square of each input of a model's matrices, [experts, inputs], by name.

    Raises:
        UsageError: the file is none, or one of another model.
        ModelUnavailable, CannotLoad: it cannot be read.
    """
    header = read_header(path)
    if kind_of(header) != "imatrix":
        raise UsageError(f"{path.name} is no importance matrix", "llama-imatrix writes one")
    found = {}
    for name in header.by_name:
        of = model.by_name.get(name.removesuffix(_SUMS))
        if of is None or not of.is_matrix or not name.endswith(_SUMS):
            continue
        sums, counts = (read_tensor(header, of.name + end).ravel() for end in (_SUMS, _COUNTS))
        experts = of.shape[2] if len(of.shape) > 2 else 1
        if sums.size != of.shape[0] * experts or counts.size != experts:
            raise UsageError(f"{path.name} is of another model: {of.name} has other inputs")
        seen = counts.reshape(experts, 1)
        means = sums.reshape(experts, -1) / np.maximum(seen, 1)
        found[of.name] = np.where(seen > 0, means, 1).astype(np.float32)
    if not found:
        raise UsageError(f"{path.name} names no matrix of {model.path.name}")
    return found
