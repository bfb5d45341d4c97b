"""Scaling keeps the logits bit for bit where the width factor is a power of four."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

gguf = pytest.importorskip("gguf")
pytest.importorskip("llama_cpp")

from specllama.models.gguf import read_header  # noqa: E402
from specllama.models.recipe.runner import Runner  # noqa: E402
from specllama.models.recipe.scale import (  # noqa: E402
    DRAFT_PRESETS,
    PRESETS,
    LlamaShape,
    check_shapes,
    read_shape,
    scale_model,
    scale_pair,
)
from specllama.models.recipe.shape import DRAFT, TARGET  # noqa: E402

VOCAB = 64


def write_model(path: Path, s: LlamaShape, kind: str, seed: int = 0) -> None:
    """A random `llama` model without a vocabulary."""
    from gguf.quants import quantize

    q = gguf.GGMLQuantizationType
    rng = np.random.default_rng(seed)
    w = gguf.GGUFWriter(path, "llama")
    w.add_name("random")
    w.add_context_length(s.context)
    w.add_embedding_length(s.width)
    w.add_block_count(s.layers)
    w.add_feed_forward_length(s.hidden)
    w.add_head_count(s.heads)
    w.add_head_count_kv(s.kv_heads)
    w.add_key_length(s.head_size)
    w.add_value_length(s.head_size)
    w.add_rope_dimension_count(s.head_size)
    w.add_rope_freq_base(s.rope_base)
    w.add_layer_norm_rms_eps(s.eps)
    w.add_vocab_size(s.vocab)
    w.add_tokenizer_model("no_vocab")

    def matrix(name: str, rows: int, columns: int, to: Any) -> None:
        data = rng.normal(0, columns**-0.5, (rows, columns)).astype(np.float32)
        w.add_tensor(name, quantize(data, to), raw_dtype=to)

    def norm(name: str) -> None:
        w.add_tensor(name, rng.uniform(0.5, 1.5, s.width).astype(np.float32))

    inner = q.Q4_0 if kind == "q4_0" else q.Q8_0
    heads, groups = s.heads * s.head_size, s.kv_heads * s.head_size
    matrix("token_embd.weight", s.vocab, s.width, q.Q8_0)
    for i in range(s.layers):
        norm(f"blk.{i}.attn_norm.weight")
        norm(f"blk.{i}.ffn_norm.weight")
        matrix(f"blk.{i}.attn_q.weight", heads, s.width, inner)
        matrix(f"blk.{i}.attn_k.weight", groups, s.width, inner)
        matrix(f"blk.{i}.attn_v.weight", groups, s.width, inner)
        matrix(f"blk.{i}.attn_output.weight", s.width, heads, inner)
        matrix(f"blk.{i}.ffn_gate.weight", s.hidden, s.width, inner)
        matrix(f"blk.{i}.ffn_up.weight", s.hidden, s.width, inner)
        matrix(f"blk.{i}.ffn_down.weight", s.width, s.hidden, inner)
    norm("output_norm.weight")
    if not s.tied:
        matrix("output.weight", s.vocab, s.width, q.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def logits(path: Path) -> NDArray[np.float32]:
    """One prompt at once, then some tokens one by one."""
    with Runner(path, context=64) as r:
        rows = [r.forward([3, 1, 4, 1, 5, 9, 2, 6], every=True)]
        rows += [r.forward([t]) for t in (5, 3, 5)]
    return np.concatenate(rows)


@pytest.mark.parametrize(("kind", "tied", "factor"), [("q4_0", False, 16), ("q8_0", True, 4)])
def test_scaled_logits_are_identical(tmp_path: Path, kind: str, tied: bool, factor: int) -> None:
    small = LlamaShape(
        width=64, layers=2, hidden=96, heads=2, kv_heads=1, vocab=VOCAB, context=64, tied=tied
    )
    write_model(tmp_path / "a.gguf", small, kind)
    big = LlamaShape(width=64 * factor, layers=4, hidden=320, heads=8, kv_heads=4)
    scale_model(tmp_path / "a.gguf", tmp_path / "b.gguf", big)
    before, after = logits(tmp_path / "a.gguf"), logits(tmp_path / "b.gguf")
    assert before.std() > 0.1
    np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("to", ["BF16", "Q8_0"])
def test_with_other_types_it_is_nearly_the_same_model(tmp_path: Path, to: str) -> None:
    small = LlamaShape(width=64, layers=2, hidden=96, heads=2, kv_heads=1, vocab=VOCAB, context=64)
    write_model(tmp_path / "a.gguf", small, "q4_0")
    big = LlamaShape(width=256, layers=3, hidden=320, heads=8, kv_heads=4)
    scale_model(tmp_path / "a.gguf", tmp_path / "b.gguf", big, kind=to)
    header = read_header(tmp_path / "b.gguf")
    assert set(header.tensor_types) == {to, "F32"}
    assert header.quantization == to
    np.testing.assert_allclose(logits(tmp_path / "a.gguf"), logits(tmp_path / "b.gguf"), atol=0.1)


def test_other_widths_agree_closely(tmp_path: Path) -> None:
    small = LlamaShape(width=64, layers=2, hidden=96, heads=2, kv_heads=1, vocab=VOCAB, context=64)
    write_model(tmp_path / "a.gguf", small, "q8_0")
    scale_model(
        tmp_path / "a.gguf",
        tmp_path / "b.gguf",
        LlamaShape(width=512, layers=2, hidden=96, heads=2, kv_heads=1),
    )
    np.testing.assert_allclose(logits(tmp_path / "a.gguf"), logits(tmp_path / "b.gguf"), atol=0.1)


def test_scaled_file_says_so(tmp_path: Path) -> None:
    small = LlamaShape(width=64, layers=1, hidden=96, heads=2, kv_heads=1, vocab=VOCAB, context=64)
    write_model(tmp_path / "a.gguf", small, "q4_0")
    scale_model(
        tmp_path / "a.gguf",
        tmp_path / "b.gguf",
        LlamaShape(width=256, layers=3, hidden=128, heads=4, kv_heads=2),
        label="test",
    )
    reader = gguf.GGUFReader(tmp_path / "b.gguf")
    fields = {k: v.contents() for k, v in reader.fields.items()}
    assert fields["general.name"] == "random scaled to test"
    assert fields["specllama.scaled_from"] == "random"
    shape = read_shape(read_header(tmp_path / "b.gguf"))
    assert (shape.width, shape.layers, shape.hidden, shape.heads) == (256, 3, 128, 4)
    assert fields["specllama.scaled_parameters"] == shape.parameters
    assert shape.parameters == sum(int(np.prod(t.shape)) for t in reader.tensors)
    assert not list(tmp_path.glob("*.part"))


def test_presets_fit_the_family_exactly() -> None:
    for presets, base in ((PRESETS, TARGET), (DRAFT_PRESETS, DRAFT)):
        for label, shape in presets.items():
            check_shapes(base, shape)
            assert shape.width // base.width in (4, 16), "else norms are not bit-exact"
            number = float(label[:-1]) * (1e9 if label.endswith("b") else 1e6)
            assert shape.parameters == pytest.approx(number, rel=0.12)


def test_bad_requests(tmp_path: Path) -> None:
    small = LlamaShape(width=64, layers=2, hidden=96, heads=2, kv_heads=1)
    with pytest.raises(ValueError, match="width 32 is below 64"):
        check_shapes(small, LlamaShape(width=32, layers=2, hidden=96, heads=2, kv_heads=1))
    with pytest.raises(ValueError, match="heads per key/value head"):
        check_shapes(small, LlamaShape(width=64, layers=2, hidden=96, heads=4, kv_heads=1))
    with pytest.raises(ValueError, match="unknown size"):
        scale_pair(tmp_path / "x", tmp_path / "y", tmp_path, to="9b")
