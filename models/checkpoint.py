"""Published checkpoints: their configuration and tensors, read without running their code."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specllama.errors import CannotLoad, ModelUnavailable
from specllama.models.gguf_writer import Tensor
from specllama.paths import cannot_import

CONFIG = "config.json"
MAX_CONFIG_BYTES = 4 << 20
MAX_HEADER_BYTES = 64 << 20
# dtype -> numpy's; bfloat16 is widened from its bits
_TYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4"}
_BYTES = {dtype: np.dtype(of).itemsize for dtype, of in _TYPES.items()}


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration of a folder.

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
    """Read every tensor in all parts of a folder, by name.

    Raises:
        ModelUnavailable: there are none.
        CannotLoad: damaged, or a pickle that cannot be read safely here.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))
    if not files:
        raise ModelUnavailable(f"{folder} contains no .safetensors file")
    return {name: tensor for file in files for name, tensor in read_tensors(file).items()}


def read_tensors(path: Path) -> Mapping[str, Tensor]:
    """Read the tensors of one file, by name.

    Raises:
        ModelUnavailable: no such file.
        CannotLoad: damaged, or a pickle that cannot be read safely here.
    """
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    try:
        import torch
    except (ImportError, MemoryError) as error:
        said = (
            f"{path.name} is a pickle, which can run code when it is opened (.safetensors files of "
            "the same heads do not); reading it safely needs PyTorch"
        )
        raise cannot_import(error, said, "torch", CannotLoad) from None
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
        return {str(key): value.float().numpy() for key, value in data.items()}
    except (pickle.UnpicklingError, AttributeError, EOFError, OSError, RuntimeError) as error:
        raise CannotLoad(f"{path.name} is not a checkpoint of tensors only: {error}") from None


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file; it is read when an array is asked for, floats as float32."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int  # byte in the file

    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> npt.NDArray[Any]:
        count = math.prod(self.shape)
        with self.path.open("rb") as file:
            file.seek(self.start)
            data = file.read(count * _BYTES[self.dtype])
        values: npt.NDArray[Any] = np.frombuffer(data, _TYPES[self.dtype])
        if self.dtype == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        whole = self.dtype.startswith("I")
        return values.reshape(self.shape).astype(dtype or (np.int64 if whole else np.float32))


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a file that have a known type, by name.

    Raises:
        ModelUnavailable: no such file.
        CannotLoad: not a safetensors file, damaged, or cut short.
    """

    def bad(why: str) -> CannotLoad:
        return CannotLoad(f"{path.name} is not a valid safetensors file: {why}")

    try:
        total = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(MAX_HEADER_BYTES, total - 8):
                raise bad(f"a header of {length} bytes in a file of {total}")
            text = file.read(length)
    except OSError as error:
        raise ModelUnavailable(f"cannot read {path}: {error.strerror or error}") from None
    try:
        header = json.loads(text)
        found = {}
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] not in _BYTES:
                continue
            shape = tuple(int(n) for n in entry["shape"])
            first, last = (int(n) for n in entry["data_offsets"])
            size = math.prod(shape) * _BYTES[entry["dtype"]]
            if min(shape, default=1) < 1 or first < 0 or last - first != size:
                raise bad(f"{name} has odd offsets")
            if 8 + length + last > total:
                raise bad(f"{name} lies beyond the end; the file is cut short")
            found[str(name)] = StoredTensor(path, name, entry["dtype"], shape, 8 + length + first)
        return found
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise bad(f"its header cannot be read ({type(error).__name__})") from None
