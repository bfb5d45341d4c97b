"""Habits of other tools get an answer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specllama.cli import ELSEWHERE, SHORT, invoke
from specllama.models.gguf import read_header
from specllama.models.memory import context_length
from specllama.models.refs import bundled, parse_hub, plain, resolve


def test_numbers_that_mean_none(cli, monkeypatch) -> None:
    monkeypatch.setenv("SPECLLAMA_MAX_TOKENS", "9")
    cli("run", "Hi", "-n", "-1", "-c", "0", "--seed", "-1")
    settings = cli.opened[-1]
    assert settings["max-tokens"] is None
    assert settings["seed"] is None
    assert settings.engine_options().n_ctx == 0
    assert cli("run", "Hi", "-n", "-2").code == 2
    assert cli("run", "Hi", "-c", "-1").code == 2


def test_a_context_of_nought_is_the_trained_one(tmp_path: Path) -> None:
    import ggufs

    header = read_header(ggufs.write_llama(tmp_path / "m.gguf", context=32768))
    assert [context_length(header, asked) for asked in (None, 0, 512)] == [8192, 32768, 512]


def test_prompts_as_options(cli, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("from a file\n")
    prompts = []
    for words in (["-p", "typed"], ["--prompt", "typed"], ["-f", str(file)]):
        assert cli("run", *words).code == 0
        prompts.append(cli.engine.requests[-1].prompt[-1].content)
    assert prompts == ["typed", "typed", "from a file"]
    assert cli("run", "-p", "a", "b").code == 2
    assert cli("run", "-f", str(tmp_path / "none.txt")).code == 2


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("hf.co/user/repo", "user/repo"),
        ("hf.co/user/repo:Q4_K_M", "user/repo:Q4_K_M"),
        ("huggingface.co/user/repo/", "user/repo"),
        ("https://huggingface.co/user/repo", "user/repo"),
        ("https://hf.co/user/repo/tree/main", "user/repo"),
        ("https://huggingface.co/user/repo/blob/main/sub/m-Q4_0.gguf", "user/repo/sub/m-Q4_0.gguf"),
        (
            "https://huggingface.co/user/repo/resolve/main/m.gguf?download=true",
            "user/repo/m.gguf",
        ),
        ("hf:user/repo", "user/repo"),
        ("hf://user/repo", "user/repo"),
        ("user/repo", "user/repo"),
        ("./hf.co/user/repo", "./hf.co/user/repo"),
    ],
)
def test_references_of_other_tools(typed: str, meant: str) -> None:
    assert plain(typed) == meant
    if not typed.startswith("."):
        assert parse_hub(typed) == parse_hub(meant)


def test_a_pulled_model_goes_by_its_long_name() -> None:
    from specllama import paths

    path = paths.models_dir() / "user" / "repo" / "m-Q4_0.gguf"
    path.parent.mkdir(parents=True)
    shutil.copy(bundled("tiny-draft"), path)
    assert resolve("hf.co/user/repo:Q4_0") == path
    assert resolve("https://huggingface.co/user/repo/resolve/main/m-Q4_0.gguf") == path


def test_words_of_other_tools(capsys: pytest.CaptureFixture[str]) -> None:
    for word, (group, verb) in SHORT.items():
        assert invoke([word, "--help"]) == 0
        assert f"Usage: specllama {group} {verb}" in capsys.readouterr().out.replace(word, verb)
    for word, answer in ELSEWHERE.items():
        assert invoke([word]) == 2
        assert answer in capsys.readouterr().err
    assert invoke(["list"]) == 0
    assert "tiny-target" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (("--rope-scaling", "yarn"), "--rope-scaling is gone: the model's file says it"),
        (("--numa", "isolate"), "taskset"),
        (("--no-swa-full",), "--no-swa-full is gone"),
        (("--dry-base", "1.8"), "a setting without a flag here: --set dry-base=X"),
        (("--mlock",), "--set mlock=on|off"),
        (("--set", "main_gpu=1"), "the setting main-gpu is gone; take it out"),
        (("--set", "top-q=1"), "did you mean top-p?"),
        (("--set", "top-k"), "write --set NAME=VALUE"),
        (("--no-such-thing",), "No such option"),
    ],
)
def test_flags_that_are_none_here(cli, typed: tuple[str, ...], answer: str) -> None:
    for command in ("run", "chat", "serve"):
        result = cli(command, *typed)
        assert result.code == 2
        assert answer in result.err


def test_info_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.gguf"
    shutil.copy(bundled("tiny-target"), path)
    for ref in (str(path), str(tmp_path), "tiny"):
        assert invoke(["show", ref]) == 0
        shown = capsys.readouterr()
        assert "llama, " in shown.out
        assert "Q4_0" in shown.out
        assert "specllama pair" in shown.err
    assert invoke(["hub", "info", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["file"]["architecture"] == "llama"
    assert invoke(["hub", "info", str(tmp_path / "none.gguf")]) == 3
