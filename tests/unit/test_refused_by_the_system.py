"""Packages that cannot be imported, memory that is refused, disks that are full: one sentence."""

from __future__ import annotations

import errno
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import ScriptedEngine

from specllama import paths
from specllama.backend import cores
from specllama.cli import invoke
from specllama.cli.diagnostics import explain
from specllama.cli.repl import Repl
from specllama.engine.profiles import Profile
from specllama.errors import CannotLoad, DoesNotFit, EngineError, UsageError, as_ours
from specllama.events import Notice, TextDelta
from specllama.server.request_queue import RequestQueue
from specllama.session import Session
from specllama.store.sessions import SessionStore

MAPPED = "llguidance.abi3.so: failed to map segment from shared object"
LIBRARY = "libgomp.so.1: cannot open shared object file: No such file or directory"


def _caused(by: str) -> ImportError:
    """An error as numpy raises it: pages of advice, and the reason behind them."""
    error = ImportError("\n\nIMPORTANT: PLEASE READ THIS FOR ADVICE")
    error.__cause__ = ImportError(by)
    return error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (ModuleNotFoundError("no", name="llguidance"), UsageError, "which is not installed"),
        (ModuleNotFoundError("no module 'x'", name="x"), CannotLoad, "no module 'x'"),
        (ImportError(MAPPED), DoesNotFit, "there is no memory left for it"),
        (_caused(MAPPED), DoesNotFit, "there is no memory left for it"),
        (MemoryError(), DoesNotFit, "there is no memory left for it"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), DoesNotFit, "Cannot allocate memory"),
        (ImportError(LIBRARY), CannotLoad, LIBRARY),
        (_caused(LIBRARY), CannotLoad, LIBRARY),
    ],
)
def test_an_import_says_why_it_failed(error: Exception, kind: type[Exception], words: str) -> None:
    found = paths.cannot_import(error, "schemas need llguidance", "llguidance")
    assert type(found) is kind
    assert found.message.startswith("schemas need llguidance")
    assert words in found.message
    assert ("not installed" in found.message) == (kind is UsageError)
    assert "ADVICE" not in found.message


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("can't start new thread"), 5),
        (MemoryError("Unable to allocate 3 GiB"), 5),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 5),
        (_caused(MAPPED), 5),
        (_caused(LIBRARY), 5),
        (ModuleNotFoundError("no", name="uvicorn"), 1),
        (RuntimeError("another reason"), 1),
    ],
)
def test_the_command_line_ends_with_the_code_of_the_reason(error: Exception, code: int) -> None:
    found, message, hint = explain(error)
    assert found == code
    assert ("bug" in (hint or "")) == ("another reason" in message)


def test_an_error_of_the_engine_keeps_its_kind() -> None:
    ours = UsageError("no", "do")
    assert as_ours(ours, "the engine failed") is ours
    assert isinstance(as_ours(RuntimeError("std::bad_alloc"), "it failed"), DoesNotFit)
    other = as_ours(KeyError("x"), "it failed")
    assert type(other) is EngineError
    assert other.message == "it failed: KeyError: 'x'"


@pytest.mark.skipif(sys.platform != "linux", reason="limits on the address space are Linux's")
def test_a_library_that_the_address_space_has_no_room_for() -> None:
    """As with ``ulimit -v``: what is loaded already stays, the next library does not come."""
    code = (
        "import resource\n"
        "from specllama.errors import SpecllamaError\n"
        "from specllama.grammar import guide\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))\n"
        "try:\n"
        "    guide._library()\n"
        "except SpecllamaError as error:\n"
        "    print(error.exit_code, error.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("5 grammars and JSON schemas need llguidance: there is no memory")
    assert "installed" not in done.stdout


def _full(path: object) -> Any:
    return SimpleNamespace(total=10**9, used=10**9, free=4096)


def test_a_full_disk_bars_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.barred(tmp_path / "new") == ""
    monkeypatch.setattr(shutil, "disk_usage", _full)
    said = paths.barred(tmp_path / "new")
    assert said == f"the disk of {tmp_path} is full: 4,096 bytes are free"


def test_a_profile_that_cannot_be_written_says_so_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    profile = Profile(tmp_path / "file" / "p.json", {"target": "t"})
    profile.trouble = ""
    profile.costs.target.set(1, 10.0)
    assert not profile.save()
    assert "cannot be written" in profile.trouble
    profile.trouble = ""
    assert not profile.save()
    assert profile.trouble == ""


def test_a_server_logs_what_its_stores_lack_once_each(caplog: pytest.LogCaptureFixture) -> None:
    queue = RequestQueue(SimpleNamespace(), "m", lanes=1)  # type: ignore[arg-type]
    full = [Notice("cannot keep a state", "warning", "state"), TextDelta("x")]
    queue._warn(full)
    queue._warn([*full, Notice("cannot keep a profile", "warning", "profile")])
    queue._warn([Notice("the context is full", "warning", "context")])
    assert [one.getMessage() for one in caplog.records] == [
        "m: cannot keep a state",
        "m: cannot keep a profile",
    ]


@pytest.mark.parametrize(
    ("share", "count"), [(None, 8), (0.25, 1), (1.0, 1), (1.5, 2), (4.0, 4), (64.0, 8)]
)
def test_a_share_of_processor_time_bounds_the_threads(
    monkeypatch: pytest.MonkeyPatch, share: float | None, count: int
) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(cores, "processors", lambda: share)
    assert cores.usable_cores() == (list(range(8)), count)
    assert cores.physical_cores() <= count


def test_a_store_in_memory_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with SessionStore.open(tmp_path / "file" / "sessions.db") as store:
        store.create(title="gone")
        assert not store.keeps
        assert store.lacks
    with SessionStore.unstored() as wished:
        assert not wished.keeps
        assert not wished.lacks
    with SessionStore.open(tmp_path / "sessions.db") as sound:
        assert sound.keeps
        assert not sound.lacks


def test_a_full_disk_is_one_warning_of_a_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["log", "path"]) == 0
    assert "nothing can be kept" not in capsys.readouterr().err
    paths.private_folder(paths.profiles_dir())
    monkeypatch.setattr(shutil, "disk_usage", _full)
    assert invoke(["log", "path"]) == 0
    said = capsys.readouterr().err
    assert said.count("nothing can be kept") == 1
    assert all(word in said for word in ("is full", "conversations", "logs", "measurements"))


def test_a_plain_chat_offers_a_file_until_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    answers = iter([str(tmp_path / "file"), str(tmp_path / "chat.md")])
    monkeypatch.setattr("click.prompt", lambda *words, **how: next(answers))
    lines = SimpleNamespace(interactive=True, message=lambda: None)
    with SessionStore.open(tmp_path / "file" / "sessions.db") as store:
        session = Session(ScriptedEngine(["A reply."]), store)
        list(session.send("A question."))
        assert Repl(session, store, lines=lines, quiet=True).run() == 0  # type: ignore[arg-type]
    assert "A reply." in (tmp_path / "chat.md").read_text()
    assert (tmp_path / "file").read_text() == "mine"
    assert next(answers, None) is None
