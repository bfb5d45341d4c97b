"""Scaling: a small GGUF made as costly as a large one, which computes the same.

Quantised blocks are copied byte for byte, padding is zeros, and weights whose result is never used
are random, so that their cost is real.

- Width: zeros after the original columns. RMSNorm then averages over D instead of d numbers, so
  its epsilon shrinks by d/D and its weights by sqrt(d/D). When D/d is a power of four the factor
  is a power of two and every float stays bit-identical; the presets use only such widths.
- Heads, hidden units: random input weights, zero output weights. Head size and group ratio stay,
  so the original heads keep their key/value heads.
- Layers: extra ones whose two output matrices are zero pass their input on unchanged.

With other types, the matrices are rounded: it is hardly another model, but its text may differ.

``python -m specllama.models.recipe.scale OUT [--to 1b] [--draft-to 20m] [-m TARGET -d DRAFT]``
"""

from __future__ import annotations

import argparse
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specllama.models.ggml_types import tensor_bytes
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.gguf_writer import TYPE_IDS, Blocks, Tensor, Value, stored, write_gguf
from specllama.models.tensors import pack_q8_0, read_bytes, read_tensor

Bytes = NDArray[np.uint8]
Progress = Callable[[float], object]


def pack_bf16(matrix: NDArray[np.float32]) -> Bytes:
    """Pack rows as BF16, rounded to the nearest, to the even one of two."""
    bits = np.ascontiguousarray(matrix, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").view(np.uint8).reshape(len(matrix), -1)


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a `llama` model."""

    width: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int = 64
    vocab: int = 4096
    context: int = 2048
    rope_base: float = 10_000.0
    eps: float = 1e-5
    tied: bool = False

    @property
    def parameters(self) -> int:
        """The number of weights."""
        attention = 2 * self.width * self.head_size * (self.heads + self.kv_heads)
        layer = attention + 3 * self.width * self.hidden + 2 * self.width
        return self.layers * layer + self.width + self.vocab * self.width * (1 if self.tied else 2)


# Widths are 4 or 16 times 256 (target) and 128 (draft).
PRESETS: dict[str, LlamaShape] = {
    "300m": LlamaShape(width=1024, layers=18, hidden=4096, heads=16, kv_heads=8),
    "1b": LlamaShape(width=4096, layers=8, hidden=7680, heads=32, kv_heads=16),
    "3b": LlamaShape(width=4096, layers=24, hidden=8192, heads=32, kv_heads=16),
    "7b": LlamaShape(width=4096, layers=36, hidden=11008, heads=64, kv_heads=32),
}
DRAFT_PRESETS: dict[str, LlamaShape] = {
    "20m": LlamaShape(width=512, layers=5, hidden=2048, heads=8, kv_heads=4, tied=True),
    "60m": LlamaShape(width=512, layers=8, hidden=4096, heads=8, kv_heads=4, tied=True),
    "180m": LlamaShape(width=2048, layers=5, hidden=4096, heads=16, kv_heads=8, tied=True),
    "400m": LlamaShape(width=2048, layers=7, hidden=8192, heads=16, kv_heads=8, tied=True),
}
DRAFT_FOR = {"300m": "20m", "1b": "60m", "3b": "180m", "7b": "400m"}

BLOCKS = ("Q4_0", "Q8_0")  # types that can be scaled: zeros are blocks of zeros
SIZES = ("width", "layers", "hidden", "heads", "kv_heads")
U64 = 10  # as GGUF numbers the types of values
PACKED: dict[str, tuple[Callable[[NDArray[np.float32]], Bytes], int]] = {
    "BF16": (pack_bf16, 32),
    "Q8_0": (pack_q8_0, 7),
}
"""Types that matrices can be given instead of their own: how, and their number as a file's type."""


def read_shape(header: GgufHeader) -> LlamaShape:
    """Read the sizes a GGUF of the `llama` architecture declares."""
    if header.architecture != "llama":
        raise ValueError(f"architecture {header.architecture!r} cannot be scaled")

    def value(key: str) -> Any:
        found = header.metadata.get(header.own(key))
        if found is None:
            raise ValueError(f"the file lacks {header.own(key)}; only `llama` models can be scaled")
        return found

    return LlamaShape(
        width=value("embedding_length"),
        layers=value("block_count"),
        hidden=value("feed_forward_length"),
        heads=value("attention.head_count"),
        kv_heads=value("attention.head_count_kv"),
        head_size=value("rope.dimension_count"),
        vocab=header.by_name["token_embd.weight"].shape[1],
        context=value("context_length"),
        rope_base=value("rope.freq_base"),
        eps=value("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in header.by_name,
    )


def check_shapes(old: LlamaShape, new: LlamaShape) -> None:
    """Raise ValueError if `new` cannot hold `old`."""
    problems = []
    for name in SIZES:
        if getattr(new, name) < getattr(old, name):
            problems.append(f"{name} {getattr(new, name)} is below {getattr(old, name)}")
    if new.heads * old.kv_heads != old.heads * new.kv_heads:
        problems.append("heads per key/value head must stay the same")
    for name in ("width", "hidden"):
        if getattr(new, name) % 32 or getattr(old, name) % 32:
            problems.append(f"{name} must be a multiple of 32")
    if problems:
        raise ValueError("cannot scale: " + "; ".join(problems))


def _noise(rows: int, columns: int, kind: str, seed: int) -> Bytes:
    """Make random small weights; a pattern is tiled because only the cost matters."""
    rng = np.random.default_rng(seed)
    if kind == "BF16":
        values = rng.normal(0, 0.01, (997, 32)).astype(np.float32)
        pattern = pack_bf16(values)
    else:
        pattern = rng.integers(0, 256, (997, tensor_bytes(TYPE_IDS[kind], 32)), np.uint8)
        scales = rng.uniform(0.0005, 0.002, 997) * (8 if kind == "Q4_0" else 0.5)
        pattern[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return np.resize(pattern.reshape(-1), (rows, tensor_bytes(TYPE_IDS[kind], columns)))


def _widen(old: Bytes, rows: int, columns: int, kind: str, noise_rows: bool, seed: int) -> Bytes:
    """Put `old` in the top left corner; noise or zeros below it, zeros to its right."""
    out: Bytes = np.zeros((rows, tensor_bytes(TYPE_IDS[kind], columns)), np.uint8)
    if noise_rows and rows > len(old):
        out[len(old) :] = _noise(rows - len(old), columns, kind, seed)
    out[: old.shape[0], : old.shape[1]] = old
    return out


def _norm(old: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    factor = math.sqrt(len(old) / width)
    out = np.ones(width, np.float32)
    out[: len(old)] = old * np.float32(factor)
    return out


def _dimensions(name: str, s: LlamaShape) -> tuple[int, int]:
    """Return rows and columns of a block's matrix in a model of shape `s`."""
    q, kv = s.heads * s.head_size, s.kv_heads * s.head_size
    return {
        "attn_q": (q, s.width),
        "attn_k": (kv, s.width),
        "attn_v": (kv, s.width),
        "attn_output": (s.width, q),
        "ffn_gate": (s.hidden, s.width),
        "ffn_up": (s.hidden, s.width),
        "ffn_down": (s.width, s.hidden),
    }[name]


MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
# Their extra rows feed the residual stream and must stay zero.
OUTPUTS = {"attn_output", "ffn_down"}


def _tensors(
    header: GgufHeader, old: LlamaShape, new: LlamaShape, to: str | None
) -> dict[str, tuple[Tensor | Blocks, str]]:
    """Return the tensors of the new file and their types, made when they are written."""
    found: dict[str, tuple[Tensor | Blocks, str]] = {}

    def source(name: str, kind: str) -> Bytes:
        if kind != header.by_name[name].type:
            return PACKED[kind][0](read_tensor(header, name))
        return read_bytes(header, name).reshape(header.by_name[name].shape[1], -1)

    def matrix(name: str, part: str | None, exists: bool, seed: int) -> None:
        rows, columns = _dimensions(part, new) if part else (new.vocab, new.width)
        like = name if exists else f"blk.0.{part}.weight"
        kind = header.by_name[like].type
        if kind not in BLOCKS:
            raise ValueError(f"{like} is {kind}; only {' and '.join(BLOCKS)} can be scaled")
        kind = to or kind
        noisy = part is not None and part not in OUTPUTS

        def make() -> Bytes:
            own = source(name, kind) if exists else np.zeros((0, 0), np.uint8)
            return _widen(own, rows, columns, kind, noisy, seed)

        found[name] = Blocks((rows, columns), make), kind

    def norm(name: str, exists: bool) -> None:
        data = read_tensor(header, name) if exists else np.ones(0, np.float32)
        found[name] = _norm(data, new.width), "F32"

    matrix("token_embd.weight", None, True, 0)
    for i in range(new.layers):
        exists = i < old.layers
        norm(f"blk.{i}.attn_norm.weight", exists)
        norm(f"blk.{i}.ffn_norm.weight", exists)
        for j, part in enumerate(MATRICES):
            matrix(f"blk.{i}.{part}.weight", part, exists, 1 + i * len(MATRICES) + j)
    norm("output_norm.weight", True)
    if not old.tied:
        matrix("output.weight", None, True, 0)
    return found


def scale_model(
    src: Path,
    dst: Path,
    shape: LlamaShape,
    *,
    label: str = "",
    kind: str | None = None,
    progress: Progress | None = None,
) -> None:
    """Write `dst`, which computes what `src` computes at the cost of `shape`.

    Only the sizes of `shape` matter; vocabulary, context, head size, RoPE and tying are kept.

    Args:
        kind: a type of PACKED, for all matrices; None keeps theirs.

    Raises:
        ValueError: the model cannot be scaled so.
        SpecllamaError: the file cannot be read, or written.
    """
    header = read_header(src)
    old = read_shape(header)
    sizes = {name: getattr(shape, name) for name in SIZES}
    new = replace(old, **sizes)
    check_shapes(old, new)
    name = header.text("general.name") or src.stem
    label = label or f"{new.parameters / 1e6:.0f}m"
    metadata: dict[str, Value] = dict(stored(header, ""))
    metadata |= {
        "general.name": f"{name} scaled to {label}",
        "llama.embedding_length": new.width,
        "llama.block_count": new.layers,
        "llama.feed_forward_length": new.hidden,
        "llama.attention.head_count": new.heads,
        "llama.attention.head_count_kv": new.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": old.eps * old.width / new.width,
        "specllama.scaled_from": name,
        "specllama.scaled_parameters": struct.pack("<IQ", U64, new.parameters),
    }
    if kind is not None:
        metadata["general.file_type"] = PACKED[kind][1]
    tensors = _tensors(header, old, new, kind)
    dst.parent.mkdir(parents=True, exist_ok=True)
    write_gguf(dst, metadata, tensors, progress)


def scale_pair(
    target_path: Path,
    draft_path: Path,
    out_dir: Path,
    *,
    to: str,
    draft_to: str | None = None,
    kind: str | None = None,
    progress: Progress | None = None,
) -> tuple[Path, Path]:
    """Scale target and draft to presets; the draft's default is about 1/16 of the target.

    Args:
        kind: of the target, as of ``scale_model``.
    """
    if to not in PRESETS:
        raise ValueError(f"unknown size {to!r}; known: {', '.join(PRESETS)}")
    small = draft_to or DRAFT_FOR[to]
    if small not in DRAFT_PRESETS:
        raise ValueError(f"unknown draft size {small!r}; known: {', '.join(DRAFT_PRESETS)}")
    stem = target_path.stem if kind is None else f"{target_path.stem}-{kind.lower()}"
    target = out_dir / f"{stem}-scaled-{to}.gguf"
    draft = out_dir / f"{draft_path.stem}-scaled-{small}.gguf"
    scale_model(target_path, target, PRESETS[to], label=to, kind=kind, progress=progress)
    scale_model(draft_path, draft, DRAFT_PRESETS[small], label=small, progress=progress)
    return target, draft


def main() -> None:
    """Run the command line."""
    from specllama.models.refs import resolve_pair

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("-m", "--model", default="tiny")
    parser.add_argument("-d", "--draft-model")
    parser.add_argument("--to", default="1b", choices=PRESETS, help="cost of the target")
    parser.add_argument("--draft-to", choices=DRAFT_PRESETS, help="cost of the draft model")
    a = parser.parse_args()
    target, draft = resolve_pair(a.model, a.draft_model)
    assert draft is not None, "scaling takes a pair: give a draft model with -d"
    for path in scale_pair(Path(target), Path(draft), a.out, to=a.to, draft_to=a.draft_to):
        print(path)


if __name__ == "__main__":
    main()
