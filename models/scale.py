"""Make a small GGUF cost as much as a large one without changing what it computes.

Everything is done on the quantised blocks: original blocks are copied byte for byte, padding is
blocks of zeros, and weights whose result is never used are random, so that their cost is real.

- Width: zeros after the original columns. RMSNorm then averages over D instead of d numbers, so
  its epsilon shrinks by d/D and its weights by sqrt(d/D). When D/d is a power of four the factor
  is a power of two and every float stays bit-identical; the presets use only such widths.
- Heads, hidden units: random input weights, zero output weights. Head size and group ratio stay,
  so the original heads keep their key/value heads.
- Layers: extra ones whose two output matrices are zero pass their input on unchanged.

``specllama bench scale OUT`` is its command.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q
from numpy.typing import NDArray

from specllama.models.shape import LlamaShape

Bytes = NDArray[np.uint8]
Progress = Callable[[str, float], None]

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

# Bytes per block of 32 weights; a block begins with its float16 scale.
BLOCK = {Q.Q4_0: 18, Q.Q8_0: 34}


@dataclass(frozen=True)
class _Plan:
    """One tensor of the new file: its shape (rows, columns), type, and how to get its bytes."""

    name: str
    rows: int
    columns: int
    kind: Q
    make: Callable[[], NDArray[Any]]


def read_shape(reader: gguf.GGUFReader) -> LlamaShape:
    """The sizes a GGUF of the `llama` architecture declares."""

    def value(key: str) -> Any:
        field = reader.get_field(key)
        if field is None:
            raise ValueError(f"the file lacks {key}; only `llama` models can be scaled")
        return field.contents()

    if value("general.architecture") != "llama":
        raise ValueError(f"architecture {value('general.architecture')!r} cannot be scaled")
    tensors = {t.name: t for t in reader.tensors}
    return LlamaShape(
        width=value("llama.embedding_length"),
        layers=value("llama.block_count"),
        hidden=value("llama.feed_forward_length"),
        heads=value("llama.attention.head_count"),
        kv_heads=value("llama.attention.head_count_kv"),
        head_size=value("llama.rope.dimension_count"),
        vocab=int(tensors["token_embd.weight"].shape[1]),
        context=value("llama.context_length"),
        rope_base=value("llama.rope.freq_base"),
        eps=value("llama.attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in tensors,
    )


def check_shapes(old: LlamaShape, new: LlamaShape) -> None:
    """Raise ValueError if `new` cannot hold `old`."""
    problems = []
    for name in ("width", "layers", "hidden", "heads", "kv_heads"):
        if getattr(new, name) < getattr(old, name):
            problems.append(f"{name} {getattr(new, name)} is below {getattr(old, name)}")
    if new.heads * old.kv_heads != old.heads * new.kv_heads:
        problems.append("heads per key/value head must stay the same")
    for name in ("width", "hidden"):
        if getattr(new, name) % 32 or getattr(old, name) % 32:
            problems.append(f"{name} must be a multiple of 32")
    if problems:
        raise ValueError("cannot scale: " + "; ".join(problems))


def _noise(rows: int, columns: int, kind: Q, seed: int) -> Bytes:
    """Random blocks of small weights; a pattern is tiled because only the cost matters."""
    rng = np.random.default_rng(seed)
    pattern = rng.integers(0, 256, (997, BLOCK[kind]), np.uint8)
    scales = rng.uniform(0.0005, 0.002, 997) * (8 if kind == Q.Q4_0 else 0.5)
    pattern[:, :2] = scales.astype(np.float16).view(np.uint8).reshape(-1, 2)
    row = columns // 32 * BLOCK[kind]
    return np.resize(pattern.reshape(-1), (rows, row))


def _widen(old: Bytes, rows: int, columns: int, kind: Q, noise_rows: bool, seed: int) -> Bytes:
    """`old` in the top left corner; below it noise or zeros, to its right zeros."""
    row = columns // 32 * BLOCK[kind]
    out: Bytes = np.zeros((rows, row), np.uint8)
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
    """Rows and columns of a block's matrix in a model of shape `s`."""
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


def _plans(reader: gguf.GGUFReader, old: LlamaShape, new: LlamaShape) -> list[_Plan]:
    tensors = {t.name: t for t in reader.tensors}
    plans: list[_Plan] = []

    def source(name: str) -> tuple[NDArray[Any], Q]:
        t = tensors[name]
        kind = Q(t.tensor_type)
        if t.data.ndim > 1 and kind not in BLOCK:
            raise ValueError(f"{name} is {kind.name}; only Q4_0 and Q8_0 can be scaled")
        return t.data, kind

    def matrix(name: str, part: str | None, from_name: str | None, seed: int) -> None:
        rows, columns = _dimensions(part, new) if part else (new.vocab, new.width)
        data, kind = source(from_name or f"blk.0.{part}.weight")
        noisy = part is not None and part not in OUTPUTS
        old_part = data if from_name else data[:0]
        plans.append(
            _Plan(
                name,
                rows,
                columns,
                kind,
                lambda: _widen(old_part, rows, columns, kind, noisy, seed),
            )
        )

    def norm(name: str, exists: bool) -> None:
        data = source(name)[0] if exists else np.ones(0, np.float32)
        plans.append(_Plan(name, 1, new.width, Q.F32, lambda: _norm(data, new.width)))

    matrix("token_embd.weight", None, "token_embd.weight", 0)
    for i in range(new.layers):
        exists = i < old.layers
        norm(f"blk.{i}.attn_norm.weight", exists)
        norm(f"blk.{i}.ffn_norm.weight", exists)
        for j, part in enumerate(MATRICES):
            name = f"blk.{i}.{part}.weight"
            matrix(name, part, name if exists else None, 1 + i * len(MATRICES) + j)
    norm("output_norm.weight", True)
    if not old.tied:
        matrix("output.weight", None, "output.weight", 0)
    return plans


def _copy_metadata(reader: gguf.GGUFReader, w: gguf.GGUFWriter, replaced: dict[str, Any]) -> None:
    """All keys of the source, with some values replaced."""
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        sub = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = replaced.get(field.name, field.contents())
        w.add_key_value(field.name, value, kind, sub_type=sub)


def scale_model(
    src: Path, dst: Path, shape: LlamaShape, *, label: str = "", progress: Progress | None = None
) -> None:
    """Write `dst`, which computes what `src` computes at the cost of `shape`.

    Only the sizes of `shape` matter; vocabulary, context, head size, RoPE and tying are kept.
    """
    reader = gguf.GGUFReader(src)
    old = read_shape(reader)
    new = replace(
        old,
        width=shape.width,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
    )
    check_shapes(old, new)
    field = reader.get_field("general.name")
    name = str(field.contents()) if field else src.stem
    label = label or f"{new.parameters / 1e6:.0f}m"
    plans = _plans(reader, old, new)

    dst.parent.mkdir(parents=True, exist_ok=True)
    part = dst.with_name(dst.name + ".part")
    w = gguf.GGUFWriter(part, "llama")
    _copy_metadata(
        reader,
        w,
        {
            "general.name": f"{name} scaled to {label}",
            "llama.embedding_length": new.width,
            "llama.block_count": new.layers,
            "llama.feed_forward_length": new.hidden,
            "llama.attention.head_count": new.heads,
            "llama.attention.head_count_kv": new.kv_heads,
            "llama.attention.layer_norm_rms_epsilon": old.eps * old.width / new.width,
        },
    )
    w.add_string("specllama.scaled_from", name)
    w.add_uint64("specllama.scaled_parameters", new.parameters)
    for p in plans:
        if p.kind == Q.F32:
            w.add_tensor_info(p.name, (p.columns,), np.dtype(np.float32), 4 * p.columns)
        else:
            row = p.columns // 32 * BLOCK[p.kind]
            w.add_tensor_info(
                p.name, (p.rows, row), np.dtype(np.uint8), p.rows * row, raw_dtype=p.kind
            )
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    try:
        for i, p in enumerate(plans):
            w.write_tensor_data(p.make())
            if progress:
                progress(dst.name, (i + 1) / len(plans))
    except BaseException:
        w.close()
        part.unlink(missing_ok=True)
        raise
    w.close()
    part.replace(dst)


def scale_pair(
    target_path: Path,
    draft_path: Path,
    out_dir: Path,
    *,
    to: str,
    draft_to: str | None = None,
    progress: Progress | None = None,
) -> tuple[Path, Path]:
    """Scale target and draft to presets; the draft's default is about 1/16 of the target."""
    if to not in PRESETS:
        raise ValueError(f"unknown size {to!r}; known: {', '.join(PRESETS)}")
    small = draft_to or DRAFT_FOR[to]
    if small not in DRAFT_PRESETS:
        raise ValueError(f"unknown draft size {small!r}; known: {', '.join(DRAFT_PRESETS)}")
    target = out_dir / f"{target_path.stem}-scaled-{to}.gguf"
    draft = out_dir / f"{draft_path.stem}-scaled-{small}.gguf"
    scale_model(target_path, target, PRESETS[to], label=to, progress=progress)
    scale_model(draft_path, draft, DRAFT_PRESETS[small], label=small, progress=progress)
    return target, draft
