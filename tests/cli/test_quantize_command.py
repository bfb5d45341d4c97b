"""``specllama quantize`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import ggufs
import pytest

from specllama.cli import invoke


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return ggufs.write_llama(tmp_path / "m-F32.gguf")


@pytest.mark.e2e
def test_quantize(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "m-Q8_0.gguf"
    assert (
        invoke(["quantize", str(source), str(target), "--type", "q8_0", "-t", "1", "--json"]) == 0
    )
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["quantization"] == "Q8_0"
    assert result["exact_rows"] == 16
    assert f"specllama run -m {target}" in captured.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--type", "fp8"], 2, "use --type q8_0"),
        (["--type", "q4"], 2, "use --type q4_k_m"),
        ([], 2, "say what to make"),
        (["--prune-layers", "7"], 2, "it has layers 0 to 1"),
    ],
)
def test_refusals(
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    assert invoke(["quantize", str(source), str(tmp_path / "x.gguf"), *arguments]) == code
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert not (tmp_path / "x.gguf").exists()


def test_a_source_that_is_no_model(tmp_path: Path) -> None:
    page = tmp_path / "page.gguf"
    page.write_text("<html>")
    target = str(tmp_path / "x.gguf")
    assert invoke(["quantize", str(page), target, "--type", "q8_0"]) == 5
    assert invoke(["quantize", str(tmp_path / "none.gguf"), target, "--type", "q8_0"]) == 3
