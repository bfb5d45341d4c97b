"""Which models ``serve`` answers with, what ``ps`` lists and ``stop`` unloads."""

import importlib.util
import json
import re
import shutil
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from servers import served, several

from specllama import paths
from specllama.cli import invoke
from specllama.events import Notice
from specllama.server.loaded_models import Models
from specllama.server.service import Service

pytestmark = pytest.mark.usefixtures("nobody_else")


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Two models, and a head whose name does not say so."""
    tiny = paths.bundled_dir()
    for name, file in (("large", "tiny-target-q4_0"), ("small", "tiny-draft-q8_0"),
                       ("other", "tiny-eagle3-q8_0")):  # fmt: skip
        shutil.copy(tiny / f"{file}.gguf", tmp_path / f"{name}.gguf")
    return tmp_path


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Models, bool]]:
    """What a server would have begun with, and whether it loads the first at once."""
    from specllama.server import server_process

    seen: list[tuple[Models, bool]] = []

    def run(service: Service, listening: socket.socket, *, load: bool, **more: Any) -> None:
        listening.close()
        seen.append((service.models, load))

    monkeypatch.setattr(server_process, "run", run)
    return seen


def test_models_with_their_drafts_and_names(shelf: Path, opened: Any) -> None:
    large, small = str(shelf / "large.gguf"), str(shelf / "small.gguf")
    flags = ["-m", large, "-m", small, "-d", "auto", "-d", "none", "--alias", "a", "--alias", "b"]
    assert invoke(["serve", "--port", "0", *flags, "--models-max", "1"]) == 0
    [(models, load)] = opened
    assert load
    assert models.most == 1
    found = [(m.name, m.recipe.target, m.recipe.draft, m.usual_s) for m in models.all.values()]
    assert found == [("a", large, None, 600.0), ("b", small, "none", 600.0)]
    assert models.all["b"].is_called("small")
    assert models.all["b"].is_called("small.gguf")


def test_a_folder_is_its_models(shelf: Path, opened: Any) -> None:
    assert invoke(["serve", "--port", "0", "-m", str(shelf), "--idle-unload", "never"]) == 0
    [(models, _)] = opened
    assert list(models.all) == ["large", "small"], "the head is none"
    assert not models.alone
    assert all(model.usual_s == float("inf") for model in models.all.values())


async def test_every_model_that_is_here(
    shelf: Path, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECLLAMA_MODEL_DIRS", str(shelf))
    assert invoke(["serve", "--port", "0", "--on-demand"]) == 0
    [(models, load)] = opened
    assert not load, "nothing is loaded before it is asked for"
    names = {model.name for model in await models.look()}
    assert {"tiny-target", "large", "small"} <= names
    assert "other" not in names
    model = await models.named("small")
    assert Path(model.recipe.target).name == "small.gguf"
    assert model.target.architecture == "llama"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-m", "LARGE", "-m", "SMALL", "-d", "a", "-d", "b", "-d", "c"], "given 3 times"),
        (["-m", "LARGE", "--alias", "a", "--alias", "b"], "given 2 times, for 1 models"),
        (["-m", "EMPTY"], "without a GGUF model"),
        (["--idle-unload", "soon"], "idle-unload: cannot read the duration"),
    ],
)
def test_what_is_refused(
    flags: list[str], said: str, shelf: Path, capsys: pytest.CaptureFixture[str], opened: Any
) -> None:
    (shelf / "empty").mkdir()
    named = {"LARGE": "large.gguf", "SMALL": "small.gguf", "EMPTY": "empty"}
    flags = [str(shelf / named[flag]) if flag in named else flag for flag in flags]
    assert invoke(["serve", "--port", "0", *flags]) == 2
    assert said in capsys.readouterr().err


def test_what_is_loaded_and_unloaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = several(tmp_path, "first", "second", usual_s=600.0)
    with served(Service(Models(models))) as server:
        assert invoke(["ps", server.url]) == 0
        titles, line = capsys.readouterr().out.splitlines()
        assert titles.split("  ")[0] == "model"
        assert line.split()[0] == "first"
        assert line.endswith("10 min")
        assert invoke(["ps", server.url, "--json"]) == 0
        [told] = json.loads(capsys.readouterr().out)["models"]
        page = (Path(__file__).parents[2] / ".github" / "json.md").read_text("utf-8")
        row = next(line for line in page.splitlines() if line.startswith("| `ps` |"))
        assert all(name in row for name in told)
        assert invoke(["stop", "second", "--server", server.url]) == 2
        assert "loaded: first" in capsys.readouterr().err
        assert invoke(["stop", "first", "--server", server.url]) == 0
        assert "first is unloaded" in capsys.readouterr().err
        end = time.monotonic() + 20
        while server.models.loaded:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert invoke(["ps", server.url]) == 0
        assert "no model is loaded" in capsys.readouterr().err
    assert invoke(["ps", "http://127.0.0.1:9"]) == 1


# -- ``specllama serve`` before it listens --


def test_what_is_missing_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec

    def found(name: str, *more: Any) -> Any:
        return None if name == "uvicorn" else real(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    assert invoke(["serve"]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert "uvicorn" in error
    assert re.search(r'pip install "starlette[^"]*" "uvicorn[^"]*"$', hint)


def test_what_a_load_measures_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specllama.server import server_process

    def run(service: Any, listening: socket.socket, **more: Any) -> None:
        listening.close()
        hear = service.models.first.queue.host.on_event
        if hear is not None:
            hear(Notice("measuring whether passes are exact", topic="exactness"))

    monkeypatch.setattr(server_process, "run", run)
    assert invoke(["serve", "--port", "0"]) == 0
    assert "measuring whether passes are exact" in capsys.readouterr().err
    assert invoke(["serve", "--port", "0", "-q"]) == 0
    assert "measuring" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--experiment", "auto=50"], "add up to 100"),
        (["--experiment", "often=100"], "cannot read the experiment"),
        (["--api-key-file", "KEYS"], "holds no key"),
    ],
)
def test_what_serve_refuses(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# none\n\n", "utf-8")
    flags = [str(keys) if flag == "KEYS" else flag for flag in flags]
    assert invoke(["serve", "--port", "0", *flags]) == 2
    assert said in capsys.readouterr().err


# -- ``--rpc`` and ``specllama rpc-worker``: what is warned of, and refused --


def test_a_worker_on_another_machine_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["run", "-m", "no-such-file.gguf", "Hi"]
    assert invoke([*command, "--rpc", "10.0.0.7:50052"]) == 3
    assert "without a password" in capsys.readouterr().err
    assert invoke([*command, "--rpc", "localhost:50052"]) == 3
    assert "without a password" not in capsys.readouterr().err


def test_a_worker_listens_to_this_machine_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["rpc-worker", "--host", "10.0.0.7"]) == 2
    assert "SSH tunnel" in capsys.readouterr().err


def test_doctor_says_which_worker_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert invoke(["doctor", "--rpc", f"127.0.0.1:{port}", "-m", "tiny", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [check["name"] for check in checks if check["status"] == "bad"] == ["workers"]
