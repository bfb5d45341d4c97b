"""The model of a command that names none: the one used last, a real one that is here, the toy."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import ggufs
import pytest

from specllama import paths
from specllama.cli import chat, invoke, loading, served_models
from specllama.models import catalog, library
from specllama.models.refs import bundled
from specllama.settings.config_file import load_settings

NOTE = "no model given: using "


def chosen(capsys: pytest.CaptureFixture[str], quiet: bool = False) -> tuple[str, str | None, str]:
    capsys.readouterr()
    target, draft = loading.pair_of(load_settings(), quiet=quiet)
    told = capsys.readouterr()
    assert told.out == "", "stdout is data"
    return target, draft, told.err


@pytest.fixture(autouse=True)
def _alone(nobody_else: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def pulled(repo: str, name: str, age_s: float = 0.0) -> Path:
    path = paths.models_dir() / repo / name
    path.parent.mkdir(parents=True, exist_ok=True)
    ggufs.write_llama(path)
    os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    return path


def test_the_pair_that_was_used_last_is_taken_and_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second, draft = (ggufs.write_llama(tmp_path / f"{n}.gguf") for n in ("a", "b", "d"))
    library.remember(first, None)
    library.remember(second, draft)
    library.remember(bundled("tiny"), bundled("tiny-draft"))  # the toy is no choice of a person's
    target, its, told = chosen(capsys)
    assert (target, its) == (str(second), str(draft))
    assert told.startswith(NOTE)
    assert "b.gguf, the model used last" in told
    assert "-m" in told
    assert told.count("\n") == 1
    assert chosen(capsys, quiet=True) == (str(second), str(draft), "")
    second.unlink()
    assert chosen(capsys)[:2] == (str(first), None)
    first.unlink()
    assert chosen(capsys)[0] == "tiny"


def test_what_a_person_names_comes_before_what_was_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library.remember(ggufs.write_llama(tmp_path / "a.gguf"), None)
    monkeypatch.setenv("SPECLLAMA_DRAFT_MODEL", "none")
    assert chosen(capsys)[:2] == (str(tmp_path / "a.gguf"), "none")
    monkeypatch.setenv("SPECLLAMA_MODEL", "tiny")
    assert chosen(capsys) == ("tiny", "none", "")


def test_a_model_that_is_here_comes_before_the_toy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert chosen(capsys)[::2] == ("tiny", f"{NOTE}the bundled tiny pair (choose one with -m)\n")
    (tmp_path / "mine").mkdir()
    other = ggufs.write_llama(tmp_path / "mine" / "other.gguf")
    monkeypatch.setenv("SPECLLAMA_MODEL_DIRS", str(other.parent))
    assert chosen(capsys)[0] == str(other)
    pulled("someone/Something-GGUF", "something-Q4_0.gguf")
    assert chosen(capsys)[0] == "someone/Something-GGUF:Q4_0"
    # of a pulled pair the target, whichever file came last
    pair = catalog.find("smollm2-1b7")
    assert pair is not None
    assert pair.draft is not None
    pulled(pair.target.repo, "x-Q4_K_M.gguf", age_s=60)
    pulled(pair.draft.repo, "y-Q8_0.gguf")
    target, _, told = chosen(capsys)
    assert target == f"{pair.target.repo}:Q4_K_M"
    assert f"{target}, a model that is here" in told


def test_heads_and_models_too_large_for_this_machine_are_not_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from specllama.models import memory

    pulled("someone/Something-GGUF", "eagle3-something-Q4_0.gguf")
    assert chosen(capsys)[0] == "tiny"
    path = pulled("someone/Something-GGUF", "something-Q4_0.gguf")
    monkeypatch.setattr(memory, "available_memory", lambda: path.stat().st_size // 2)
    assert chosen(capsys)[0] == "tiny"


def test_every_command_with_that_default_asks_in_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, draft = (ggufs.write_llama(tmp_path / f"{name}.gguf") for name in ("mine", "draft"))
    library.remember(mine, draft)
    loaded: list[tuple[str, str | None]] = []

    class Seen(Exception):
        pass

    def load(target: Any, its: Any, *args: Any, **more: Any) -> Any:
        loaded.append((str(target), its and str(its)))
        raise Seen

    monkeypatch.setattr(loading, "load", load)
    lines = (["run", "Hi"], ["chat", "--plain"], ["prove"], ["tune"], ["bench", "run"], ["demo"])
    for line in lines:
        invoke(line)
    assert loaded == [(str(mine), str(draft))] * len(lines)
    opened: list[Any] = []
    monkeypatch.setattr(chat, "_can_draw", lambda: True)

    def no_host(recipe: Any) -> Any:
        opened.append((recipe.target, recipe.draft))
        raise Seen

    monkeypatch.setattr("specllama.engine.host.EngineHost", no_host)
    invoke(["chat"])
    monkeypatch.setattr(served_models, "EngineHost", lambda recipe, **more: no_host(recipe))
    invoke(["serve", "--port", "0"])
    assert opened == [(str(mine), str(draft))] * 2


@pytest.mark.e2e
def test_run_uses_again_what_it_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = tmp_path / "mine.gguf"
    mine.write_bytes(bundled("tiny").read_bytes())
    assert invoke(["run", "-m", str(mine), "-n", "2", "--json", "Hi"]) == 0
    capsys.readouterr()
    assert invoke(["run", "-n", "2", "--json", "Hi"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["type"] == "finish"
    assert f"{mine}, the model used last" in told.err
    assert invoke(["run", "-n", "2", "-q", "Hi"]) == 0
    assert "no model given" not in capsys.readouterr().err
