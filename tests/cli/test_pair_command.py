"""``specllama pair``: the table, one draft in detail, and exit codes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ggufs
import pytest

from specllama.cli import invoke
from specllama.models.refs import bundled

pytestmark = pytest.mark.usefixtures("nobody_else")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A draft that fits, and one of every kind that does not."""
    mix = tmp_path / "mix"
    mix.mkdir()
    shutil.copy(bundled("tiny-draft"), mix / "fits.gguf")
    ggufs.write_llama(mix / "other-words.gguf")
    ggufs.write_spm(mix / "other-tokenizer.gguf")
    ggufs.write_bert(mix / "encoder.gguf")
    ggufs.write_vocab_only(mix / "words-only.gguf", ["a", "b"])
    (mix / "broken.gguf").write_bytes(bundled("tiny-draft").read_bytes()[:3000])
    return mix


@pytest.mark.parametrize(
    "given",
    [
        ["-m", "tiny-target", "-d", "tiny-draft"],
        ["tiny-target", "-d", "tiny-draft"],
        ["-m", "tiny-target", "tiny-draft"],
        ["--draft-model", "tiny-draft", "--model", "tiny-target"],
    ],
)
def test_target_and_draft_are_named_as_elsewhere(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["pair", "tiny-target", "tiny-draft", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert invoke(["pair", *given, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["drafts"] == told["drafts"]
    assert invoke(["pair", "-d", "tiny-draft"]) == 2
    assert "which target is meant" in capsys.readouterr().err


def test_a_folder_of_drafts(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["pair", "tiny-target", str(folder)]) == 0
    captured = capsys.readouterr()
    rows = {line.split()[1]: line for line in captured.out.splitlines()[1:]}
    assert rows["fits.gguf"].startswith("✓")
    for name, words in {
        "other-words.gguf": "332 tokens, not 4,096; token 5: ",
        "other-tokenizer.gguf": "llama tokenizer, not gpt2; token 5: ",
        "encoder.gguf": "is an encoder",
        "words-only.gguf": "2 tokens, not 4,096",
        "broken.gguf": "strings in a file of 3,000 bytes",
    }.items():
        assert rows[name].startswith("✗"), name
        assert words in rows[name], name
    assert next(iter(rows)) == "fits.gguf"  # what fits comes first
    assert f"-d {folder}/fits.gguf" in captured.err


def test_where_no_draft_fits_a_head_may(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "fits.gguf").unlink()
    target = folder.parent / "alone.gguf"
    shutil.copy(bundled("tiny-target"), target)
    for named, words in (("tiny-target", "drafts with its head"), (str(target), "none fits")):
        assert invoke(["pair", named, str(folder)]) == 4
        assert words in capsys.readouterr().err


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["pair", "tiny", str(folder), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["target"]["architecture"] == "llama"
    by_ref = {entry["ref"]: entry for entry in data["drafts"]}
    fits = by_ref["fits.gguf"]
    assert fits["fits"] is True
    assert fits["report"]["shared"] == 1.0
    assert fits["memory"]["total"] > fits["memory"]["required"] > 0
    assert 0 < fits["required_acceptance"] < 1
    assert by_ref["other-words.gguf"]["report"]["differences"][0]["id"] == 5
    assert by_ref["encoder.gguf"]["report"] is None


def test_heads_beside_the_target_are_in_the_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def needs(*arguments: str) -> dict[str, Any]:
        assert invoke(["pair", *arguments, "--json"]) == 0
        memory: dict[str, Any] = json.loads(capsys.readouterr().out)["drafts"][0]["memory"]
        return memory

    beside = needs("tiny", "tiny-draft")
    assert len(beside["heads"]) == 2
    copy = tmp_path / "target.gguf"  # no heads beside it
    shutil.copy(bundled("tiny-target"), copy)
    alone = needs(str(copy), "tiny-draft")
    assert alone["heads"] == []
    heads = sum(head["required"] for head in beside["heads"])
    assert heads > 0
    assert beside["required"] == alone["required"] + heads
    medusa = next(bundled("tiny-target").parent.glob("tiny-medusa*.gguf"))
    named = needs(str(copy), "tiny-draft", "--head", str(medusa))
    assert len(named["heads"]) == 1
    again = needs("tiny", "tiny-draft", "--head", str(medusa))
    assert again["heads"] == beside["heads"], "the named one takes the place of its kind"


def test_one_draft_in_detail(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["pair", "tiny", "tiny-draft"]) == 0
    out = capsys.readouterr().out
    words_of_all = (
        "token texts     the same",
        "EOS of prompts",
        "rollback",
        "chat template",
        "memory",
    )
    for words in (*words_of_all, "heads"):
        assert words in out


def test_a_draft_that_does_not_fit_is_exit_code_4(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["pair", "tiny", str(folder / "other-words.gguf")]) == 4
    captured = capsys.readouterr()
    assert "✗  token texts" in captured.out
    assert "cannot draft for tiny" in captured.err


def test_all_that_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["pair", "tiny"]) == 0
    assert "tiny-draft" in capsys.readouterr().out


def test_the_catalogue_s_draft_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specllama import paths

    here = paths.models_dir() / "Qwen" / "Qwen3-8B-GGUF"
    here.mkdir(parents=True)
    ggufs.write_llama(here / "Qwen3-8B-Q4_K_M.gguf")
    assert invoke(["pair", "qwen3-8b"]) == 0
    assert "specllama hub pull Qwen/Qwen3-0.6B-GGUF:Q8_0" in capsys.readouterr().out


def test_a_target_that_is_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["pair", str(folder / "encoder.gguf")]) == 5
    assert invoke(["pair", str(folder / "missing.gguf")]) == 3
    assert "Traceback" not in capsys.readouterr().err


def test_the_memory_is_that_of_the_context_that_a_load_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specllama.engine.gguf_pair import read_pair
    from specllama.models import memory
    from specllama.settings.params import EngineOptions

    monkeypatch.setattr(memory, "available_memory", lambda: 400 << 20)
    target = ggufs.write_llama(tmp_path / "target.gguf", width=256, context=131_072)
    draft = ggufs.write_llama(tmp_path / "draft.gguf", context=131_072)
    assert invoke(["pair", str(target), str(draft), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["drafts"]
    loaded = read_pair(target, draft, EngineOptions())
    assert 8192 < loaded.n_ctx < 131_072
    assert found["memory"] == loaded.need(loaded.n_ctx).to_dict()


def test_a_large_draft_is_said_to_gain_hardly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ggufs.write_llama(tmp_path / "target.gguf", width=256, blocks=4)
    ggufs.write_llama(tmp_path / "half.gguf", width=256, blocks=2)
    assert invoke(["pair", str(target), str(tmp_path)]) == 0
    assert "will hardly gain: 1/" in capsys.readouterr().out
