"""``specllama quantize`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import ggufs
import pytest
from ggufs_nextn import write_nextn

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
    assert f"specllama run -m {target}" in captured.err
    assert "more than" not in captured.err
    larger = tmp_path / "again.gguf"
    assert invoke(["quantize", str(target), str(larger), "--type", "q4_0"]) == 2
    assert "accept the loss with --requantize" in capsys.readouterr().err
    for kind in ("bf16", "f32", "f16"):  # nothing is lost: no flag has to agree to it
        larger.unlink(missing_ok=True)
        assert invoke(["quantize", str(target), str(larger), "--type", kind]) == 0
    assert f"more than {target.name}, and no better" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--type", "fp8"], 2, "use --type q8_0"),
        (["--type", "q4"], 2, "use --type q4_k_m"),
        ([], 2, "there is nothing to do"),
        (["--draft-tokens", "9000"], 2, "give --draft-tokens a number between"),
        (["--draft-tokens", "300", "--type", "q8_0"], 2, "copies weights as they are"),
        (["--likely-in", "."], 2, "--likely-in tells which tokens a draft keeps"),
        (["--likely-in", "/nope", "--type", "q8_0"], 2, "say how many: --draft-tokens"),
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


def test_a_draft_of_few_tokens(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "few.gguf"
    assert invoke(["quantize", str(source), str(copy), "--draft-tokens", "300", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["draft_tokens"] == 300
    assert f"-m TARGET -d {copy}" in said.err
    assert "a step of it reads 98% of what a step of m-F32.gguf does" in said.err
    assert invoke(["pair", str(source), str(copy)]) == 0
    assert "of which it guesses 300" in capsys.readouterr().out
    assert invoke(["run", "-m", str(copy), "Hello"]) == 5
    assert "knows only 300 of its tokens" in capsys.readouterr().err


def test_a_head_of_few_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, head = write_nextn(tmp_path / "model.gguf"), tmp_path / "mtp-model.gguf"
    page = tmp_path / "page.txt"
    page.write_text("the time and the time")
    argv = ["quantize", str(model), str(head), "--draft-tokens", "280"]
    assert invoke([*argv, "--likely-in", str(page), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["vocab_size"] == 280
    assert "of the tokens of these texts are among them" in said.err
    assert f"--head {head}" in said.err
    assert invoke(["pair", str(model), "--head", str(head), "--json"]) == 0
    ways = json.loads(capsys.readouterr().out)["methods"]
    assert next(way for way in ways if way["name"] == "mtp")["available"]
    assert invoke(argv) == 2
    assert "is never overwritten" in capsys.readouterr().err
