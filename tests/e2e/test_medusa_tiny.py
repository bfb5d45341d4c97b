"""Medusa heads on the bundled target: same seed, same text; wrong files end with exit code 4."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from medusa_numpy import load_heads

from specllama.bench.prompts import load_prompts
from specllama.bench.proof import prove
from specllama.cli import invoke
from specllama.engine.engine import Engine
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.medusa_file import vocabulary_digest, write_heads
from specllama.models.refs import resolve
from specllama.settings.params import EngineOptions

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def target() -> GgufHeader:
    return read_header(resolve("tiny-target"))


def write(path: Path, target: GgufHeader, **changes: Any) -> Path:
    """Heads that repeat the target's own law: often wrong, sometimes right."""
    width = int(changes.get("width", target.embedding_length))
    options: dict[str, Any] = {
        "name": "echo",
        "heads": 3,
        "blocks": 0,
        "width": width,
        "vocab": target.vocab_size,
        "vocabulary": vocabulary_digest(target),
    }
    identity = np.eye(width, dtype=np.float32)
    arrays = {f"head.{h}.proj.weight": identity for h in range(3)}
    write_heads(path, arrays, **(options | changes))
    return path


@pytest.fixture(scope="module")
def echo(target: GgufHeader, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write(tmp_path_factory.mktemp("heads") / "echo.gguf", target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        with Engine.load("tiny", None, EngineOptions(threads=1, heads=(str(path),))) as engine:
            yield engine


def test_the_state_that_heads_read_is_what_the_output_matrix_reads(
    echo: Engine, target: GgufHeader, tmp_path: Path
) -> None:
    """Logits of the target, computed from its hidden states outside llama.cpp."""
    context: Any = echo.target
    heads = load_heads(write(tmp_path / "h.gguf", target), target)
    echo.reset()
    context.capture("final_hidden")
    ids = echo.encode(load_prompts()[0].content)[0][:24]
    context.forward(ids[:-8], outputs="none")
    rows = context.forward(ids[-8:], outputs="all")
    states = context.hidden.rows(len(ids) - 8, len(ids))
    assert states is not None
    for state, row in zip(states, rows, strict=True):
        # llama.cpp rounds the state to 8 bits before it multiplies: 0.054 at most here
        assert np.abs(heads.logits(state, 1) - row).max() < 0.08 * row.std()
    context.capture("nothing")
    echo.reset()


def test_the_text_with_medusa_is_that_of_plain_decoding(echo: Engine) -> None:
    cases = list(
        prove(
            echo,
            load_prompts()[:4],
            proposers=("medusa",),
            temperatures=(0.0, 0.7, 1.0),
            draft_max=(3, 8),
            max_tokens=40,
        )
    )
    assert [c for c in cases if not c.ok] == []
    assert all(c.identical for c in cases) or echo.info.exact_rows < 9
    assert sum(c.accepted for c in cases) < sum(c.drafted for c in cases)


def test_wrong_files_end_with_a_word_and_exit_code_4(
    target: GgufHeader, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = {
        "width": write(tmp_path / "width.gguf", target, width=128),
        "tokens": write(tmp_path / "vocab.gguf", target, vocab=target.vocab_size - 1),
        "different tokens": write(tmp_path / "other.gguf", target, vocabulary="0" * 64),
        "no drafting head": resolve("tiny-draft"),
    }
    for word, path in wrong.items():
        code = invoke(
            ["run", "-m", "tiny", "-t", "1", "--head", str(path), "--proposer", "medusa", "Hi"]
        )
        out, err = capfd.readouterr()
        assert code == 4, (word, err)
        assert word in err
        assert path.name in err
        assert out == ""
        assert "Traceback" not in err


def test_a_head_file_that_is_cut_short_cannot_be_loaded(
    target: GgufHeader, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "whole.gguf", target).read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: len(data) // 2])
    code = invoke(
        ["run", "-m", "tiny", "-t", "1", "--head", str(cut), "--proposer", "medusa", "Hi"]
    )
    assert code == 5
    assert "cut.gguf" in capfd.readouterr().err
