"""The network: its parts agree with what llama.cpp will compute. Needs the `train` extra."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

from specllama.models.recipe.induction import seed_induction  # noqa: E402
from specllama.models.recipe.model import Tiny, fake_q4_0, rotate  # noqa: E402
from specllama.models.recipe.scale import LlamaShape  # noqa: E402
from specllama.models.recipe.shape import DRAFT, TARGET  # noqa: E402
from specllama.models.recipe.tokenizer import SPECIAL, load_tokenizer, train_tokenizer  # noqa: E402
from specllama.models.recipe.train import Packer, encode  # noqa: E402

SMALL = LlamaShape(width=128, layers=2, hidden=64, heads=2, kv_heads=1, vocab=512, context=256)


def test_parameter_counts_match_the_shapes() -> None:
    for shape in (TARGET, DRAFT, SMALL):
        assert Tiny(shape).parameter_count() == shape.parameters


def test_fake_quantisation_is_q4_0() -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    w = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    packed = quantize(w.numpy(), GGMLQuantizationType.Q4_0)
    expected = dequantize(packed, GGMLQuantizationType.Q4_0)
    np.testing.assert_allclose(fake_q4_0(w).numpy(), expected, atol=1e-6)


def test_rotation_depends_on_distance_only() -> None:
    model = Tiny(SMALL)
    cos, sin = model.cos, model.sin
    q, k = torch.randn(2, 64, generator=torch.Generator().manual_seed(2))
    scores = [
        float(
            rotate(q[None], cos[i : i + 1], sin[i : i + 1])[0]
            @ rotate(k[None], cos[i - 5 : i - 4], sin[i - 5 : i - 4])[0]
        )
        for i in (5, 50, 200)
    ]
    assert scores == pytest.approx([scores[0]] * 3, abs=1e-3)


@pytest.mark.parametrize("tied", [False, True])
def test_seeded_heads_copy_from_the_start(tied: bool) -> None:
    torch.manual_seed(3)
    shape = LlamaShape(
        width=128, layers=2, hidden=64, heads=2, kv_heads=1, vocab=512, context=256, tied=tied
    )
    model = Tiny(shape)
    seed_induction(model)
    part = torch.randperm(512, generator=torch.Generator().manual_seed(4))[:40]
    ids = torch.cat((part, part))[None]
    with torch.no_grad():
        logits = model(ids)[0]
    losses = torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:], reduction="none")
    assert float(losses[41:].mean()) < float(losses[:39].mean()) - 1.0


def test_tokenizer_reads_any_text(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(samples=300)
    tokenizer.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    vocab = tokenizer.get_vocab()
    assert [vocab[t] for t in SPECIAL] == [0, 1, 2]
    assert len(set(vocab.values())) == len(vocab)
    for text in ("naïve — 日本語 🙂\n\n  x\t", 'it\'s {"a": 1}'):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_answers_are_marked_and_rows_begin_with_a_sample() -> None:
    tokenizer = train_tokenizer(samples=300)
    header = tokenizer.encode("assistant\n").ids
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    ids, answer = encode(tokenizer, text, header)
    marked = tokenizer.decode(
        [t for t, a in zip(ids, answer, strict=True) if a], skip_special_tokens=False
    )
    assert marked == "yes<|im_end|>"
    rows, mask = Packer(tokenizer, "t").rows(3, 256)
    assert rows.shape == mask.shape == (3, 257)
    assert (rows[:, 0] == 1).all()
    assert 0.1 < (mask > 0).mean() < 0.9
