"""A bundled model with its tokens renumbered and some renamed; the weights stay its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from ggufs import _Writer

_IDS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "eot", "padding"))
_ROWS = ("token_embd.weight", "output.weight")


def with_tokens(
    source: Path,
    out: Path,
    order: Sequence[int],
    renamed: Sequence[int] = (),
    names_of: str = "unheard{}",
) -> Path:
    """Write ``source`` with token ``order[i]`` as number i.

    Args:
        renamed: old numbers of tokens that get a text that no tokenizer here has: ``names_of``.
    """
    reader = gguf.GGUFReader(source)
    names = {key: field.contents() for key, field in reader.fields.items()}
    tokens = list(names["tokenizer.ggml.tokens"])
    for old in renamed:
        tokens[old] = names_of.format(old)
    place = {old: new for new, old in enumerate(order)}
    w = _Writer(out, names["general.architecture"])
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind, value = field.types[0], names[key]
        if key == "tokenizer.ggml.tokens":
            w.add_token_list([tokens[old] for old in order])
        elif key == "tokenizer.ggml.token_type":
            w.add_token_types([value[old] for old in order])
        elif kind == gguf.GGUFValueType.ARRAY:
            w.add_array(key, value)
        else:
            w.add_key_value(key, place[value] if key in _IDS else value, kind)
    for tensor in reader.tensors:
        data = np.array(tensor.data)
        if tensor.name in _ROWS:
            data = data[np.array(order)]
        w.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    w.finish()
    return out


def with_tensor(source: Path, out: Path, name: str, kind: str = "F32") -> Path:
    """Write ``source`` with one more tensor, four rows of 64 ones as ``kind``."""
    w = _copy(source, out)
    packed = gguf.GGMLQuantizationType[kind]
    values = gguf.quantize(np.ones((4, 64), np.float32), packed)
    w.add_tensor(name, values, raw_dtype=packed)
    w.finish()
    return out


def with_template(source: Path, out: Path, template: str) -> Path:
    """Write ``source`` with another chat template."""
    _copy(source, out, {"tokenizer.chat_template": template}).finish()
    return out


def _copy(source: Path, out: Path, changed: Mapping[str, Any] = MappingProxyType({})) -> _Writer:
    """``source`` with values of its header changed, not finished yet."""
    reader = gguf.GGUFReader(source)
    w = _Writer(out, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        w.add_key_value(key, changed.get(key, field.contents()), field.types[0], sub)
    for tensor in reader.tensors:
        w.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    return w
