"""Training Medusa heads: what they learn from, and that they compute the same outside PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ggufs import write_llama

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("llama_cpp")

from medusa_numpy import load_heads as load_numpy  # noqa: E402

from specllama.models.gguf import read_header  # noqa: E402
from specllama.models.recipe import train_medusa as medusa  # noqa: E402
from specllama.models.recipe.model import Tiny  # noqa: E402
from specllama.models.recipe.scale import LlamaShape  # noqa: E402

SMALL = LlamaShape(width=64, layers=1, hidden=64, heads=1, kv_heads=1, vocab=96, context=64)


def random_heads(width: int, blocks: int = 2) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    heads = torch.nn.ModuleList(medusa.Head(width, blocks) for _ in range(medusa.DEPTHS))
    for p in heads.parameters():
        torch.nn.init.normal_(p, std=0.1)
    return heads


def test_new_heads_repeat_the_target() -> None:
    x = torch.randn(5, 16)
    assert torch.equal(medusa.Head(16, 2)(x), x)


def test_exported_heads_compute_the_same_in_numpy(tmp_path: Path) -> None:
    write_llama(tmp_path / "target.gguf", width=64)
    header = read_header(tmp_path / "target.gguf")
    heads = random_heads(64)
    medusa.export(heads, tmp_path / "heads.gguf", header, "test")
    loaded = load_numpy(tmp_path / "heads.gguf", header)
    again = medusa.load_heads(tmp_path / "heads.gguf")
    x = torch.randn(64)
    for head, twin, numpy_head in zip(heads, again, loaded.heads, strict=True):
        with torch.no_grad():
            exact, rounded = head(x).numpy(), twin(x).numpy()
        assert numpy_head.state(x.numpy()) == pytest.approx(rounded, rel=1e-4, abs=1e-4)
        assert rounded == pytest.approx(exact, rel=0.05, abs=0.05)


def test_a_head_learns_the_targets_law_at_its_own_distance_within_an_answer() -> None:
    model = Tiny(SMALL)
    torch.nn.init.normal_(model.output.weight, std=0.2)
    heads = random_heads(64, blocks=1)
    n = medusa.SEGMENT + medusa.DEPTHS + 40
    run = torch.cat((torch.zeros(50), torch.ones(n - 50))).long()  # two answers
    states = medusa.States(torch.randn(n, 64).half(), run)
    found = medusa.losses(model, heads, states, torch.tensor([3]))
    for d, loss in enumerate(found, start=1):
        expected = []
        for i in range(3, 3 + medusa.SEGMENT):
            if run[i] != run[i + d]:
                continue
            with torch.no_grad():
                law = model.head(states.hidden[i + d].float()).softmax(-1)
                said = model.head(heads[d - 1](states.hidden[i].float())).log_softmax(-1)
            expected.append(-float((law * said).sum()))
        assert len(expected) == medusa.SEGMENT - d
        assert loss.item() == pytest.approx(np.mean(expected), rel=0.02)  # bfloat16 products
