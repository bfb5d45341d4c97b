"""Published checkpoints: their configuration and tensors, read without running what is in them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specllama.errors import CannotLoad, ModelUnavailable
from specllama.models.gguf_writer import Tensor
from specllama.models.safetensors import read_safetensors
from specllama.paths import pip_install

CONFIG = "config.json"
MAX_CONFIG_BYTES = 4 << 20


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a folder.

    Raises:
        ModelUnavailable: it has none.
        CannotLoad: not a JSON object.
    """
    path = folder / CONFIG
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise CannotLoad(f"{path} is too large for a configuration")
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelUnavailable(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CannotLoad(f"{path} is not JSON: {type(error).__name__}") from None
    if not isinstance(config, dict):
        raise CannotLoad(f"{path} is no configuration of a model")
    return config


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, by name; of all its parts.

    Raises:
        ModelUnavailable: there are none.
        CannotLoad: damaged, or a pickle that cannot be read safely here.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ModelUnavailable(f"{folder} contains no .safetensors file")
    return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


def read_tensors(path: Path) -> Mapping[str, Tensor]:
    """The tensors of one file, by name.

    Raises:
        ModelUnavailable: no such file.
        CannotLoad: damaged, or a pickle that cannot be read safely here.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    try:
        from specllama.models.pickled import read_pickled
    except ImportError:
        raise CannotLoad(
            f"{path.name} is a pickle, which can run code when it is opened; "
            "reading it safely needs PyTorch",
            f"{pip_install('torch')}, or take the .safetensors file of the same heads",
        ) from None
    return read_pickled(path)
