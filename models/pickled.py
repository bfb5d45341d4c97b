"""Checkpoints of PyTorch (pickles), read without running what they may contain."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray

from specllama.errors import CannotLoad


def read_pickled(path: Path) -> dict[str, NDArray[Any]]:
    """The tensors of a state dictionary as float32.

    Raises:
        CannotLoad: not a checkpoint, or it holds more than tensors, which is refused.
    """
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
        return {str(key): value.float().numpy() for key, value in data.items()}
    except (pickle.UnpicklingError, AttributeError, EOFError, OSError, RuntimeError) as error:
        raise CannotLoad(f"{path.name} is not a checkpoint of tensors only: {error}") from None
