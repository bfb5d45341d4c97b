"""Every command finds the models of the setting ``model-dirs``, wherever that is set."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specllama import paths
from specllama.cli import invoke
from specllama.errors import ModelUnavailable

TARGET, DRAFT, HEAD = "maker/some-GGUF:Q4_0", "little.gguf", "head.gguf"
PAIR = ["-m", TARGET, "-d", DRAFT]
ENGINES = (["run", "Hi"], ["chat", "--plain"], ["serve", "--port", "0"], ["prove"], ["tune"],
           ["bench", "run"])  # fmt: skip

pytestmark = pytest.mark.usefixtures("nobody_else")


@pytest.fixture
def shelf(tmp_path: Path, nobody_else: Path) -> Path:
    """A folder of models: a target in a repository's folder, a draft and a head beside it."""
    shelf = nobody_else / "my models"
    repo = shelf / "maker" / "some-GGUF"
    repo.mkdir(parents=True)
    tiny = paths.bundled_dir()
    shutil.copy(tiny / "tiny-target-q4_0.gguf", repo / "some-Q4_0.gguf")
    shutil.copy(tiny / "tiny-draft-q8_0.gguf", shelf / DRAFT)
    shutil.copy(tiny / "tiny-eagle3-q8_0.gguf", shelf / HEAD)
    return shelf


@pytest.fixture(params=["the user's file", "the project's file", "the variable"])
def told(
    request: pytest.FixtureRequest, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is set."""
    monkeypatch.chdir(tmp_path)
    line = 'model-dirs = ["~/elsewhere", "~/my models"]\n'
    if request.param == "the user's file":
        paths.config_file().parent.mkdir(parents=True)
        paths.config_file().write_text(line)
    elif request.param == "the project's file":
        (tmp_path / "specllama.toml").write_text(line)
    else:
        monkeypatch.setenv("SPECLLAMA_MODEL_DIRS", f"~/elsewhere{os.pathsep}{shelf}")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a call that ends its command was given; see ``stop``."""
    return []


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch, asked: list[Any]) -> Callable[[str], None]:
    """Replace a function by one that keeps its arguments and ends the command."""

    def stop(name: str) -> None:
        def end(*given: Any, **more: Any) -> Any:
            asked.extend(given)
            raise ModelUnavailable("far enough")

        monkeypatch.setattr(name, end)

    return stop


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize("command", ENGINES, ids=lambda words: words[0])
def test_what_loads_a_pair(
    command: list[str], shelf: Path, asked: list[Any], stop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def serve(service: Any, listening: Any, **more: Any) -> None:
        listening.close()
        service.models.first.queue.host.factory(lambda event: None)

    def open_pair(target: Path, draft: Path, *more: Any) -> None:
        asked.extend([target, draft])
        raise ModelUnavailable("far enough")

    monkeypatch.setattr("specllama.server.server_process.run", serve)
    monkeypatch.setattr("specllama.engine.opening.open_gguf", open_pair)
    assert invoke([*command, *PAIR]) == 3
    assert asked == [shelf / "maker/some-GGUF/some-Q4_0.gguf", shelf / DRAFT]


@pytest.mark.usefixtures("told")
def test_doctor_reads_a_pair(shelf: Path, asked: list[Any], stop: Any) -> None:
    stop("specllama.engine.gguf_pair.read_pair")
    invoke(["doctor", *PAIR])
    assert asked[:2] == [shelf / "maker/some-GGUF/some-Q4_0.gguf", shelf / DRAFT]


@pytest.mark.usefixtures("told")
def test_convert(shelf: Path, asked: list[Any], stop: Any) -> None:
    stop("specllama.models.conversion.convert")
    assert invoke(["convert", "checkpoint", "out.gguf", "--target", TARGET]) == 3
    assert asked[2].path == shelf / "maker/some-GGUF/some-Q4_0.gguf"


@pytest.mark.usefixtures("told")
def test_pair(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["pair", TARGET, DRAFT, "--head", HEAD]) == 0
    said = capsys.readouterr().out
    assert DRAFT in said
    assert "eagle3" in next(line for line in said.splitlines() if "eagle3" in line)
    assert invoke(["pair", TARGET]) == 0  # without a draft, those of the folder are shown
    assert str(shelf / DRAFT) in capsys.readouterr().out.replace("\n", "")


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    ("ref", "file"),
    [
        (TARGET, "maker/some-GGUF/some-Q4_0.gguf"),
        ("maker/some-GGUF", "maker/some-GGUF/some-Q4_0.gguf"),
        ("maker/some-GGUF/some-Q4_0.gguf", "maker/some-GGUF/some-Q4_0.gguf"),
        (DRAFT, DRAFT),
    ],
)
def test_hub_path_and_verify(
    ref: str, file: str, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["hub", "path", ref]) == 0
    assert capsys.readouterr().out.strip() == str(shelf / file)
    assert invoke(["hub", "verify", ref, "--json"]) == 0
    assert str(shelf / file) in capsys.readouterr().out


@pytest.mark.usefixtures("told")
def test_what_only_shows_models(shelf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from specllama.cli.completion import _model_names

    assert invoke(["hub", "info", DRAFT, "--json"]) == 0
    assert str(shelf / DRAFT) in capsys.readouterr().out
    assert invoke(["hub", "ls", "--json"]) == 0
    assert str(shelf / DRAFT) in capsys.readouterr().out
    assert str(shelf / DRAFT) in _model_names()
    assert invoke(["doctor", "--json"]) == 0
    assert "folder models" in capsys.readouterr().out


@pytest.mark.usefixtures("told")
def test_the_choices_of_the_app(shelf: Path) -> None:
    from specllama.models import library
    from specllama.settings.params import EngineOptions
    from specllama.tui import choices

    rows = choices.local_rows(library.scan())
    target = next(row for row in rows if row.path and row.path.name == "some-Q4_0.gguf")
    drafts = choices.draft_rows(target, EngineOptions())
    assert str(shelf / DRAFT) in [row.ref for row in drafts]


@pytest.mark.e2e
@pytest.mark.usefixtures("told")
def test_a_reply_of_models_in_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--head", HEAD, "--proposer", "eagle3", "--max-tokens", "12", "-c", "256", "-t", "1"]
    assert invoke(["run", "Hi", *PAIR, *flags, "--exact=2", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "eagle3" in {line.get("source") for line in lines}


@pytest.mark.usefixtures("told")
@pytest.mark.parametrize(
    "ref", ["./little.gguf", "../little.gguf", "some-Q4_0.gguf", "maker/other"]
)
def test_what_is_not_in_the_folder(ref: str) -> None:
    assert invoke(["hub", "path", ref]) == 3
