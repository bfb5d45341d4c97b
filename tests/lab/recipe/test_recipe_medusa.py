"""Medusa heads scaled with their target guess the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from ggufs import write_llama
from medusa_numpy import load_heads

from specllama.models.gguf import read_header
from specllama.models.medusa_file import vocabulary_digest, write_heads
from specllama.models.recipe.scale_heads import scale_heads


@pytest.mark.parametrize("own", [False, True])
def test_scaled_heads_guess_the_same(tmp_path: Path, own: bool) -> None:
    rng = np.random.default_rng(0)
    write_llama(tmp_path / "small.gguf", width=64, quant="Q8_0", seed=1)
    small = read_header(tmp_path / "small.gguf")
    shapes: dict[str, tuple[int, ...]] = {
        "block.0.weight": (64, 64),
        "block.0.bias": (64,),
        "proj.weight": (64, 64),
    }
    if own:
        shapes["output.weight"] = (small.vocab_size, 64)
    write_heads(
        tmp_path / "heads.gguf",
        {
            f"head.{h}.{name}": rng.standard_normal(shape).astype(np.float32)
            for h in range(2)
            for name, shape in shapes.items()
        },
        name="heads",
        heads=2,
        blocks=1,
        width=64,
        vocab=small.vocab_size,
        vocabulary=vocabulary_digest(small),
    )
    write_llama(tmp_path / "wide.gguf", width=256, quant="Q8_0", seed=1)
    wide = read_header(tmp_path / "wide.gguf")
    scale_heads(tmp_path / "heads.gguf", wide, tmp_path / "scaled.gguf")
    before = load_heads(tmp_path / "heads.gguf", small)
    after = load_heads(tmp_path / "scaled.gguf", wide)
    hidden = rng.standard_normal(64).astype(np.float32)
    state = np.concatenate((hidden, np.zeros(192, np.float32)))
    for depth in (1, 2):
        narrow = before.heads[depth - 1].state(hidden)
        broad = after.heads[depth - 1].state(state)
        assert broad[:64] == pytest.approx(narrow, rel=1e-5, abs=1e-5)
        assert not broad[64:].any()
        if own:
            assert after.logits(state, depth) == pytest.approx(
                before.logits(hidden, depth), rel=1e-4, abs=1e-4
            )


def test_heads_are_not_scaled_for_another_target(tmp_path: Path) -> None:
    write_llama(tmp_path / "small.gguf", width=64)
    small = read_header(tmp_path / "small.gguf")
    eye = np.eye(128, dtype=np.float32)
    write_heads(
        tmp_path / "heads.gguf",
        {"head.0.proj.weight": eye},
        name="heads",
        heads=1,
        blocks=0,
        width=128,
        vocab=small.vocab_size,
    )
    with pytest.raises(ValueError, match="not a scaled version"):
        scale_heads(tmp_path / "heads.gguf", small, tmp_path / "out.gguf")
