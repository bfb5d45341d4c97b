"""The log of a server: each request on a line, in files of bounded size."""

import logging
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from servers import serving, table, until

from specllama.cli import invoke
from specllama.errors import ConfigError, UsageError
from specllama.server import server_log as server_log
from specllama.server.guard import is_told
from specllama.server.server_log import ServerLog
from specllama.settings.config_file import load_settings

LOGGER = logging.getLogger("specllama.server")
HELLO = {"messages": [{"role": "user", "content": "the rain"}], "max_tokens": 4}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    level, handlers = LOGGER.level, list(LOGGER.handlers)
    yield
    LOGGER.setLevel(level)
    assert LOGGER.handlers == handlers
    assert LOGGER.propagate


def test_lines_carry_ids_and_what_went_wrong(tmp_path: Path) -> None:
    file = tmp_path / "logs" / "serve.log"
    log = ServerLog(file)
    with serving(table(tmp_path), log=log.request) as server:
        server.models.hearers.add(log.model)
        server.post("/v1/chat/completions", HELLO, headers={"x-request-id": "r1"})
        server.post("/v1/chat/completions", {**HELLO, "keep_alive": 0})
        server.http.get("/nowhere", headers={"x-request-id": "r2"})
    try:
        raise ValueError("a bug")
    except ValueError:
        LOGGER.exception("/v1/models failed, r3")
    log.close()
    text = file.read_text("utf-8")
    when = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    assert re.search(
        rf"{when}POST /v1/chat/completions 200 \d+\.\d\d s, 127.0.0.1, r1(, nothing drafted: .+)?$",
        text,
        re.M,
    )
    assert re.search(rf"{when}GET /nowhere 404 .*, r2$", text, re.M)
    assert re.search(rf"{when}table is unloaded$", text, re.M)
    assert re.search(rf"{when}/v1/models failed, r3\nTraceback", text, re.M)
    assert "rain" not in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("template", [True, False])
def test_a_model_without_a_chat_template_is_told(tmp_path: Path, template: bool) -> None:
    log = ServerLog(tmp_path / "serve.log")
    info = SimpleNamespace(has_chat_template=template)
    log.model(cast(Any, SimpleNamespace(name="base", state="loaded", failed="", known_info=info)))
    log.close()
    text = (tmp_path / "serve.log").read_text()
    assert "base is loaded" in text
    assert ("base: this model has no chat template" in text) is not template


def test_files_are_bounded_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "_FILE_BYTES", 1000)
    log = ServerLog(tmp_path / "serve.log")
    for i in range(200):
        log.say(f"line {i:03} {'x' * 80}")
    log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["serve.log", *(f"serve.log.{i}" for i in (1, 2, 3, 4))]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert "line 199" in files[0].read_text("utf-8")


def test_what_is_told(tmp_path: Path) -> None:
    file = tmp_path / "serve.log"
    log = ServerLog(file, requests=False)
    log.request("a request")
    log.say("a word")
    log.close()
    quiet = ServerLog(file, quiet=True)
    quiet.say("nothing")
    LOGGER.warning("a warning")
    quiet.close()
    assert [line[20:] for line in file.read_text("utf-8").splitlines()] == ["a word", "a warning"]


def test_a_long_load_says_how_long_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_log, "time", clock := SimpleNamespace(now=0.0))
    clock.monotonic = lambda: clock.now
    log = ServerLog(tmp_path / "serve.log")
    model = SimpleNamespace(name="m", state="loading", failed="", progress=0.0, known_info=None)
    for now, share in ((0.0, 0.0), (2.0, 0.1), (6.0, 0.3), (8.0, 0.5), (12.0, 0.75)):
        clock.now, model.progress = now, share
        log.model(cast(Any, model))
    model.state = "loaded"
    log.model(cast(Any, model))
    log.close()
    assert [line[20:] for line in (tmp_path / "serve.log").read_text("utf-8").splitlines()] == [
        "m is loading",
        "m is 30% loaded, about 14 s left",
        "m is 75% loaded, about 4 s left",
        "m is loaded",
    ]


def test_polls_stand_in_the_log_where_they_fail() -> None:
    told = [("/v1/models", 200), ("/metrics", 503), ("/health", 500), ("/metrics", 401)]
    assert all(is_told(path, status) for path, status in told)
    assert not any(is_told(path, status) for path, status in [("/health", 503), ("/health", 200)])


def test_lines_that_nobody_takes_are_counted(tmp_path: Path) -> None:
    log = ServerLog(tmp_path / "serve.log")
    log.close()  # nothing is taken from here on
    entry = log._entry
    for i in range(server_log._MOST + 7):
        entry.handle(LOGGER.makeRecord("x", logging.INFO, "", 0, f"line {i}", (), None))
    while not entry.queue.empty():
        entry.queue.get()
    entry.handle(LOGGER.makeRecord("x", logging.INFO, "", 0, "next", (), None))
    last = entry.queue.get().getMessage()
    assert last == "(7 lines were dropped: they came faster than they were read)\nnext"


@pytest.mark.parametrize("away", ["renamed", "deleted"])
def test_lines_go_to_the_file_of_that_name(tmp_path: Path, away: str) -> None:
    """As logrotate leaves it: before the next line there may be a new file, or none."""
    file, old = tmp_path / "serve.log", tmp_path / "serve.log.old"
    log = ServerLog(file)
    for text in ("one", "two", "three"):
        log.say(text)
        until(lambda text=text: file.exists() and file.read_text("utf-8").endswith(f" {text}\n"))
        file.rename(old) if away == "renamed" else file.unlink()
        if text == "two":
            file.touch(0o600)
    log.hang_up()
    log.close()
    assert file.read_text("utf-8").endswith("SIGHUP, for the log: its file was opened again\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    if away == "renamed":
        assert old.read_text("utf-8").endswith(" three\n")


@pytest.mark.parametrize("name", ["uvicorn.error", "asyncio"])
def test_lines_of_what_we_run_on_have_a_time_too(tmp_path: Path, name: str) -> None:
    log = ServerLog(tmp_path / "serve.log")
    before = logging.getLogger(name).level
    logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger(name).error("a word")
    logging.getLogger(name).setLevel(before)
    log.close()
    assert re.fullmatch(r"[\d-]+ [\d:]+ a word\n", (tmp_path / "serve.log").read_text("utf-8"))


def test_a_full_disk_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    log = ServerLog(tmp_path / "serve.log")
    (tmp_path / "serve.log").unlink()
    (tmp_path / "serve.log").symlink_to("/dev/full")
    for _ in range(3):
        log.say("a line")
    log.close()
    said = capsys.readouterr().err
    assert said.count("No space left") == 1
    assert "Traceback" not in said


def test_where_no_log_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError, match="is no file"):
        ServerLog(tmp_path)
    (tmp_path / "file").touch()
    assert invoke(["serve", "--port", "0", "--log-file", str(tmp_path / "file" / "log")]) == 2
    assert "cannot write the log" in capsys.readouterr().err


def test_a_folders_file_does_not_say_where(tmp_path: Path) -> None:
    project = tmp_path / "specllama.toml"
    project.write_text('log-file = "/tmp/x"\n', "utf-8")
    with pytest.raises(ConfigError, match="log-file cannot come from the file of a folder"):
        load_settings(project=project)
