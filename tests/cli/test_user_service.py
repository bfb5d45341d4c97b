"""``serve --install-service``: shown, confirmed, written, started, reloaded, removed."""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from specllama.cli import invoke, user_service
from specllama.cli.serve import command
from specllama.paths import config_file, server_log

INSTALL = ["serve", "-m", "tiny", "--install-service"]
UNIT = ".config/systemd/user/specllama.service"
LIMIT_S = 240.0  # a busy machine loads slowly


@pytest.fixture(autouse=True)
def person(monkeypatch: pytest.MonkeyPatch, nobody_else: Path) -> Path:
    """Not root, with an empty home; returns it."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return nobody_else


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """What systemctl and launchctl were called with, which do nothing here."""
    folder, record = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    for name in ("systemctl", "launchctl"):
        (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {record}\n', "utf-8")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return lambda: record.read_text("utf-8").splitlines() if record.exists() else []


def words(unit: str) -> list[str]:
    """The command of a unit, as systemd reads it."""
    [line] = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    return [
        word.replace("%%", "%").replace("$$", "$")
        for word in shlex.split(line.partition("=")[2].replace("\\\\", "\\\\"))
    ]


def test_it_is_shown_and_asked_about_first(
    person: Path, calls: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(INSTALL) == 2
    shown = capsys.readouterr()
    assert "ExecStart=" in shown.out
    assert "add -y to agree" in shown.err
    assert not (person / UNIT).exists()
    assert calls() == []


def test_installed_and_removed(
    person: Path, home: Path, calls: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([*INSTALL, "--idle-unload", "5s", "--drain", "7", "--yes"]) == 0
    shown = capsys.readouterr()
    unit = (person / UNIT).read_text("utf-8")
    assert unit.strip() == shown.out.strip(), "what was shown was written"
    log = f"--log-file={home}/log/serve.log"
    flags = ["--idle-unload=5s", "--drain=7.0"]
    start = [sys.executable, "-P", "-m", "specllama", "serve", "--model=tiny"]
    assert words(unit)[: len(start)] == start
    assert sorted(words(unit)[len(start) :]) == sorted([*flags, log])
    assert f"Environment=SPECLLAMA_HOME={home}" in unit
    assert "TimeoutStopSec=22" in unit
    control = "systemctl --user"
    enabled = [f"{control} daemon-reload", f"{control} enable --now specllama.service"]
    assert calls() == enabled
    for line in ("status specllama", "restart specllama", "reload specllama", "serve --uninstall"):
        assert line in shown.err
    ended = f"{control} disable --now specllama.service"
    assert invoke([*INSTALL, "--yes"]) == 0
    assert calls() == [*enabled, ended, *enabled], "another takes its place"
    assert "--idle-unload" not in (person / UNIT).read_text("utf-8")
    assert invoke(["serve", "--uninstall-service", "-y"]) == 0
    assert not (person / UNIT).exists()
    assert calls()[-2:] == [ended, f"{control} daemon-reload"]
    assert invoke(["serve", "--uninstall-service", "-y"]) == 2
    assert "no service is installed" in capsys.readouterr().err


def test_without_systemctl_the_lines_are_said(
    person: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert invoke([*INSTALL, "-y"]) == 0
    said = capsys.readouterr().err
    line = "systemctl --user daemon-reload && systemctl --user enable --now specllama.service"
    assert f"there is no systemctl here; next: {line}" in said
    assert (person / UNIT).exists()


def test_what_systemctl_says_is_said(
    calls: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub = tmp_path / "bin" / "systemctl"
    stub.write_text("#!/bin/sh\necho 'Failed to connect to bus' >&2\nexit 1\n", "utf-8")
    assert invoke([*INSTALL, "-y"]) == 1
    error, hint = capsys.readouterr().err.splitlines()[-2:]
    assert error == "error: systemctl --user daemon-reload: Failed to connect to bus"
    assert hint.endswith("daemon-reload && systemctl --user enable --now specllama.service")


@pytest.mark.parametrize(
    ("case", "code", "said"),
    [
        ("root", 2, "does not run as root"),
        ("windows", 2, "systemd (Linux) or launchd (macOS)"),
        ("key", 2, "would stand in the file"),
        ("line", 2, "cannot be written into the file"),
        ("model", 3, "no such file"),
    ],
)
def test_what_is_refused(
    case: str, code: int, said: str, person: Path, calls: Any,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    more: list[str] = []
    if case == "root":
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    elif case == "windows":
        monkeypatch.setattr(sys, "platform", "win32")
    elif case == "key":
        monkeypatch.setenv("SPECLLAMA_API_KEY", "secret")
    elif case == "line":
        more = ["--alias", "two\nlines"]
    else:
        more = ["-m", "./nowhere.gguf"]
    assert invoke([*INSTALL, "-y", *more]) == code
    assert said in capsys.readouterr().err
    assert not (person / UNIT).exists()
    assert calls() == []


def test_what_the_service_would_not_see_is_named(
    calls: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECLLAMA_CTX_SIZE", "512")
    config_file().parent.mkdir(parents=True)
    config_file().write_text("top-k = 7\n", "utf-8")
    assert invoke([*INSTALL, "-y"]) == 0
    said = capsys.readouterr().err
    assert "ctx-size is set by SPECLLAMA_CTX_SIZE, which the service does not see" in said
    assert "top-k" not in said


def test_flags_mean_the_same_in_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a unit says is parsed to what was typed, with whole paths."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(user_service.refs.bundled("tiny-draft"), tmp_path / "a b.gguf")
    (tmp_path / "notes").mkdir()
    typed = ["-m", "a b.gguf", "-m", "tiny", "-d", "none", "-d", "auto", "--alias", "50% of $HOME",
             "--alias", 'a "name" \\ here', "--draft-from", "notes", "--no-slots", "--think", "low",
             "--exact", "--stop", "# end;", "--temp", "0.5", "-c", "512", "--slot-save-path", "s",
             "--no-mmap", "--insecure", "--no-access-log", "-q", "--seed", "5"]  # fmt: skip
    with command.make_context("serve", list(typed)) as ctx:
        wanted = dict(ctx.params)
        unit = user_service.service_file(
            [*user_service.PROGRAM, *user_service._flags(ctx)], "/log", 1.0
        ).text
    monkeypatch.chdir("/")
    with command.make_context("serve", words(unit)[5:]) as ctx:
        found = dict(ctx.params)
    whole = {"model": (str(tmp_path / "a b.gguf"), "tiny"), "slot_save_path": tmp_path / "s",
             "draft_from": (str(tmp_path / "notes"),)}  # fmt: skip
    assert found == {**wanted, **whole}


def test_systemd_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    file = tmp_path / "specllama.service"
    odd = [*user_service.PROGRAM, "--alias=50% of $HOME", '--alias=a "b" \\ c', "--stop=#;"]
    file.write_text(user_service.service_file(odd, "/log", 1.0).text, "utf-8")
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(file)],
        capture_output=True, text=True, env=environment, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


def test_an_agent_for_launchd(
    person: Path, home: Path, calls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert invoke([*INSTALL, "--alias", "a & b", "-y"]) == 0
    path = person / "Library" / "LaunchAgents" / "specllama.serve.plist"
    told = plistlib.loads(path.read_bytes())
    assert told["ProgramArguments"] == [
        sys.executable, "-P", "-m", "specllama", "serve", "--model=tiny", "--alias=a & b",
        f"--log-file={home}/log/serve.log",
    ]  # fmt: skip
    assert told["EnvironmentVariables"] == {"SPECLLAMA_HOME": str(home)}
    assert told["RunAtLoad"] is True
    domain = f"gui/{person.stat().st_uid}"
    assert calls() == [f"launchctl bootstrap {domain} {path}"]
    assert invoke(["serve", "--uninstall-service", "-y"]) == 0
    assert calls()[-1] == f"launchctl bootout {domain}/specllama.serve"
    assert not path.exists()


@pytest.mark.e2e
def test_its_command_serves_reloads_sleeps_and_ends(person: Path, calls: Any) -> None:
    """What systemd would do with the unit, by hand: start, reload, restart, stop."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    keys = person / "keys"
    keys.write_text("first\n", "utf-8")
    config_file().parent.mkdir(parents=True)
    flags = ["--port", str(port), "--api-key-file", str(keys), "-c", "512", "-t", "1"]
    assert invoke([*INSTALL, "-y", *flags]) == 0
    unit = (person / UNIT).read_text("utf-8")

    def logged(said: str) -> bool:
        return server_log().exists() and said in server_log().read_text("utf-8")

    def until(true: Callable[[], bool]) -> None:
        end = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < end, server_log().read_text("utf-8")
            assert process.poll() is None
            time.sleep(0.1)

    url = f"http://127.0.0.1:{port}"
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "seed": 1}
    texts = []
    for turn in range(2):
        server_log().unlink(missing_ok=True)
        process = subprocess.Popen(words(unit), cwd=person, stderr=subprocess.DEVNULL)
        try:
            with httpx2.Client(base_url=url, timeout=LIMIT_S) as http:
                until(lambda: logged("tiny is loaded"))
                until(lambda: answers(http))
                key = {"Authorization": "Bearer second"}
                if not turn:
                    assert http.post("/v1/chat/completions", json=asked, headers=key).is_error
                    keys.write_text("second\n", "utf-8")
                    config_file().write_text('idle-unload = "200ms"\n', "utf-8")
                    process.send_signal(signal.SIGHUP)
                    until(lambda: logged("changed: idle-unload, 1 key"))
                reply = http.post("/v1/chat/completions", json=asked, headers=key)
                texts.append(reply.json()["choices"][0]["message"]["content"])
                until(lambda: logged("tiny is unloaded"))
                assert children(process.pid) <= 1, "its engine ended with its memory"
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        assert code == 0, "a stop is no failure: nothing is started again"
    assert texts[0] == texts[1] != ""


def answers(http: httpx2.Client) -> bool:
    try:
        return http.get("/health").status_code == 200
    except httpx2.TransportError:
        return False


def children(pid: int) -> int:
    """Processes of a process; one of Python's own follows its shared memory."""
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.exists():
        pytest.skip("counts processes on Linux")
    return sum(len((task / "children").read_text("ascii").split()) for task in tasks.iterdir())
