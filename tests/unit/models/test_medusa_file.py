"""Medusa head files: what is written, read, refused, and converted from published layouts."""

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from ggufs import write_llama
from medusa_numpy import load_heads
from published_heads import save_safetensors

from specllama.errors import (
    BadGguf,
    CannotLoad,
    ModelUnavailable,
    PairIncompatible,
    SpecllamaError,
    UnsupportedModel,
    UsageError,
)
from specllama.models.checkpoint import read_safetensors
from specllama.models.conversion import convert
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.gguf_writer import write_gguf
from specllama.models.medusa_file import read_checkpoint, read_facts, vocabulary_digest, write_heads
from specllama.models.tensors import pack_q8_0, read_tensor

WIDTH = 64
Floats = np.ndarray[Any, np.dtype[np.float32]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> GgufHeader:
    path = tmp_path_factory.mktemp("target") / "target.gguf"
    write_llama(path, width=WIDTH)
    return read_header(path)


def random(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def write(path: Path, target: GgufHeader, **changes: Any) -> Path:
    """Two heads of one block that share the target's output matrix."""
    width = changes.pop("width", WIDTH)
    arrays: dict[str, Any] = {}
    for h in range(2):
        arrays[f"head.{h}.block.0.weight"] = random(width, width, seed=h)
        arrays[f"head.{h}.block.0.bias"] = random(width, seed=h)
        arrays[f"head.{h}.proj.weight"] = random(width, width, seed=h + 5)
    arrays |= changes.pop("arrays", {})
    options: dict[str, Any] = {
        "name": "heads",
        "heads": 2,
        "blocks": 1,
        "width": width,
        "vocab": target.vocab_size,
        "vocabulary": vocabulary_digest(target),
    }
    write_heads(path, {k: v for k, v in arrays.items() if v is not None}, **(options | changes))
    return path


# -- tensors ------------------------------------------------------------------------------------


def test_tensors_read_as_the_reference_decodes_them(tmp_path: Path) -> None:
    matrix = random(7, 512)
    for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0"):
        path = tmp_path / f"{kind}.gguf"
        quant = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(matrix, quant)
        w = gguf.GGUFWriter(path, "medusa")
        w.add_tensor("m", data, raw_dtype=quant)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        header = read_header(path)
        expected = gguf.quants.dequantize(data, quant)
        assert np.array_equal(read_tensor(header, "m"), expected), kind
        rows = np.array([5, 0], np.int32)
        assert np.array_equal(read_tensor(header, "m")[rows], expected[rows]), kind


def test_six_bit_blocks_read_as_the_reference_decodes_them(tmp_path: Path) -> None:
    """The package cannot write Q6_K; random blocks with small scales serve."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (4, 2 * 210), np.uint8)
    blocks.reshape(4, 2, 210)[..., 208:] = (
        rng.uniform(0.001, 0.1, (4, 2, 1)).astype(np.float16).view(np.uint8)
    )
    path = tmp_path / "q6.gguf"
    w = gguf.GGUFWriter(path, "medusa")
    w.add_tensor("m", blocks, raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q6_K)
    assert read_tensor(read_header(path), "m") == pytest.approx(expected, rel=1e-6)


def test_eight_bit_packing_is_the_reference_packing() -> None:
    matrix = np.concatenate((random(5, 96), np.zeros((1, 96), np.float32), 1e-6 * random(2, 96)))
    assert np.array_equal(
        pack_q8_0(matrix), gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    )


def test_what_is_written_the_gguf_package_reads(tmp_path: Path, target: GgufHeader) -> None:
    path = write(tmp_path / "h.gguf", target)
    for tensor in gguf.GGUFReader(path).tensors:
        kind = tensor.tensor_type
        assert kind.name == ("F32" if "bias" in tensor.name else "Q8_0")
        values = gguf.quants.dequantize(tensor.data, kind)
        assert np.array_equal(values, read_tensor(read_header(path), tensor.name))
    facts = read_facts(read_header(path))
    assert (facts.heads, facts.blocks, facts.rows) == (2, 1, target.vocab_size)
    assert facts.needs_target_output


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(SpecllamaError, match="cannot write"):
        write_gguf(tmp_path / "no" / "x.gguf", {}, {})
    with pytest.raises(ValueError, match="cannot be written"):
        write_gguf(tmp_path / "x.gguf", {}, {"m": (random(2, 30), "Q8_0")})
    assert list(tmp_path.iterdir()) == []


# -- heads of a target --------------------------------------------------------------------------


def test_heads_load_with_the_targets_output_matrix(tmp_path: Path, target: GgufHeader) -> None:
    heads = load_heads(write(tmp_path / "h.gguf", target, kind="F32"), target)
    assert len(heads) == 2
    assert heads.output is not None
    assert np.array_equal(heads.output, read_tensor(target, "output.weight"))
    hidden = random(WIDTH, seed=3)
    x = hidden.astype(np.float64)
    z = random(WIDTH, WIDTH, seed=1) @ x + random(WIDTH, seed=1)
    x = random(WIDTH, WIDTH, seed=6) @ (x + z / (1 + np.exp(-z)))
    assert heads.logits(hidden, 2) == pytest.approx(heads.output @ x, rel=1e-3, abs=1e-3)


def test_heads_may_say_some_tokens_only(tmp_path: Path, target: GgufHeader) -> None:
    ids = np.array([9, 4, 30], np.int32)
    heads = load_heads(write(tmp_path / "h.gguf", target, arrays={"ids": ids}), target)
    row = heads.logits(random(WIDTH), 1)
    assert len(row) == target.vocab_size
    assert sorted(np.flatnonzero(np.isfinite(row))) == sorted(ids)


def test_heads_of_another_target_are_refused(tmp_path: Path, target: GgufHeader) -> None:
    with pytest.raises(PairIncompatible, match="width 32") as error:
        load_heads(write(tmp_path / "narrow.gguf", target, width=32), target)
    assert error.value.exit_code == 4
    with pytest.raises(
        PairIncompatible, match=f"{target.vocab_size} tokens|has {target.vocab_size}"
    ):
        load_heads(write(tmp_path / "more.gguf", target, vocab=target.vocab_size + 1), target)
    with pytest.raises(PairIncompatible, match="different tokens"):
        load_heads(write(tmp_path / "other.gguf", target, vocabulary="0" * 64), target)
    with pytest.raises(PairIncompatible, match="not Medusa heads"):
        load_heads(target.path, target)


def test_damaged_heads_are_refused(tmp_path: Path, target: GgufHeader) -> None:
    whole = write(tmp_path / "h.gguf", target).read_bytes()
    for share in (0.02, 0.3, 0.9, 0.999):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[: int(share * len(whole))])
        with pytest.raises(BadGguf):
            load_heads(cut, target)
    bad: dict[str, dict[str, Any]] = {
        "missing": {"arrays": {"head.1.block.0.bias": None}},
        "of shape": {"arrays": {"head.0.proj.weight": random(WIDTH, 32)}},
        "head_count": {"heads": 0},
        "block_count": {"blocks": 99},
        "token ids": {"arrays": {"ids": np.array([1, 1], np.int32)}},
        "not finite": {"arrays": {"head.0.block.0.bias": np.full(WIDTH, np.nan, np.float32)}},
    }
    for message, changes in bad.items():
        with pytest.raises(BadGguf, match=message):
            load_heads(write(tmp_path / "bad.gguf", target, **changes), target)


def test_types_that_are_not_decoded_are_named(tmp_path: Path) -> None:
    path = tmp_path / "q5.gguf"
    write_llama(path, width=WIDTH, quant="Q5_0")
    target = read_header(path)
    assert target.by_name["output.weight"].type == "Q5_0"
    with pytest.raises(UnsupportedModel, match="Q5_0"):
        read_tensor(target, "output.weight")


# -- published layouts --------------------------------------------------------------------------


def medusa_1(rows: int, prefix: str = "", heads: int = 3, blocks: int = 1) -> dict[str, Floats]:
    found = {}
    for h in range(heads):
        for b in range(blocks):
            found[f"{prefix}{h}.{b}.linear.weight"] = 0.1 * random(WIDTH, WIDTH, seed=h)
            found[f"{prefix}{h}.{b}.linear.bias"] = 0.1 * random(WIDTH, seed=h)
        found[f"{prefix}{h}.{blocks}.weight"] = 0.1 * random(rows, WIDTH, seed=h)
    return found


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("prefix", ["", "medusa_head.", "heads."])
def test_a_published_checkpoint_becomes_a_head_file(
    tmp_path: Path, target: GgufHeader, dtype: str, prefix: str
) -> None:
    tensors = medusa_1(target.vocab_size, prefix, blocks=2)
    save_safetensors(tmp_path / "medusa_lm_head.safetensors", tensors, dtype)
    out = tmp_path / "heads.gguf"
    convert(tmp_path, out, target, "f32")
    heads = load_heads(out, target)
    assert len(heads) == 3
    assert heads.output is None
    hidden = random(WIDTH, seed=9)
    x = hidden
    for _ in range(2):
        z = tensors[f"{prefix}1.0.linear.weight"] @ x + tensors[f"{prefix}1.0.linear.bias"]
        x = x + z / (1 + np.exp(-z))
    expected = tensors[f"{prefix}1.2.weight"] @ x
    assert heads.logits(hidden, 2) == pytest.approx(expected, rel=0.05, abs=0.05)
    convert(tmp_path, tmp_path / "small.gguf", target, "q8_0")
    assert (tmp_path / "small.gguf").stat().st_size < 0.35 * out.stat().st_size
    near = load_heads(tmp_path / "small.gguf", target).logits(hidden, 2)
    assert near == pytest.approx(expected, rel=0.1, abs=0.1)


@pytest.mark.parametrize("extra", [-20, 64])
def test_padded_and_shorter_matrices_fit_the_vocabulary(
    tmp_path: Path, target: GgufHeader, extra: int
) -> None:
    rows = target.vocab_size + extra
    save_safetensors(tmp_path / "medusa_lm_head.safetensors", medusa_1(rows))
    convert(tmp_path, tmp_path / "h.gguf", target, "f16")
    row = load_heads(tmp_path / "h.gguf", target).logits(random(WIDTH), 1)
    assert len(row) == target.vocab_size
    assert np.isfinite(row).sum() == min(rows, target.vocab_size)


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path, target: GgufHeader) -> None:
    file = tmp_path / "medusa_lm_head.safetensors"
    out = tmp_path / "h.gguf"
    save_safetensors(file, medusa_1(target.vocab_size + 500))
    with pytest.raises(PairIncompatible, match="guess among"):
        convert(file, out, target, "f16")
    wide = {k: random(*(2 * n for n in v.shape)) for k, v in medusa_1(40).items()}
    save_safetensors(file, wide)
    with pytest.raises(PairIncompatible, match="width 128"):
        convert(file, out, target, "f16")
    whole = medusa_1(target.vocab_size)
    for name in ("1.0.linear.bias", "2.1.weight", "0.1.weight"):
        save_safetensors(file, {k: v for k, v in whole.items() if k != name})
        with pytest.raises(CannotLoad):
            read_checkpoint(file)
    save_safetensors(file, {**whole, "1.0.linear.weight": random(WIDTH, 32)})
    with pytest.raises(CannotLoad, match="shape"):
        read_checkpoint(file)
    save_safetensors(file, {"model.embed_tokens.weight": random(4, 4)})
    with pytest.raises(CannotLoad, match="Medusa-1"):
        read_checkpoint(file)
    with pytest.raises(ModelUnavailable):
        convert(tmp_path / "nothing", out, target, "f16")
    out.write_bytes(b"mine")
    with pytest.raises(UsageError, match="never overwritten"):
        convert(file, out, target, "f16")
    assert out.read_bytes() == b"mine"


def test_damaged_safetensors_are_refused(tmp_path: Path) -> None:
    good = save_safetensors(tmp_path / "a.safetensors", medusa_1(40)).read_bytes()
    length = int.from_bytes(good[:8], "little")
    broken = {
        "empty": b"",
        "short": good[:6],
        "cut": good[:-1],
        "no header": good[: length // 2],
        "lying length": struct.pack("<Q", 1 << 62) + good[8:],
        "not JSON": good[:8] + b"x" * length + good[8 + length :],
        "a list": struct.pack("<Q", 2) + b"[]",
        "odd offsets": good.replace(b'"data_offsets": [0,', b'"data_offsets": [1,', 1),
        "negative": good.replace(b'"shape": [64, 64]', b'"shape": [-4, -1]', 1),
    }
    for name, data in broken.items():
        path = tmp_path / "b.safetensors"
        path.write_bytes(data)
        with pytest.raises(CannotLoad):
            read_safetensors(path)
        assert path.exists(), name


def test_a_pickle_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle
    import sys

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    path = tmp_path / "medusa_lm_head.pt"
    path.write_bytes(pickle.dumps({"0.0.linear.weight": Trap()}, protocol=2))
    with pytest.raises(CannotLoad, match=r"pickle|tensors only"):
        read_checkpoint(path)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CannotLoad, match="pickle") as error:
        read_checkpoint(path)
    assert error.value.hint
    assert not (tmp_path / "ran").exists()
