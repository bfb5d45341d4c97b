"""Inputs without an end, pipes for models, closed streams, links that lead to themselves, stores
that cannot be read or written: one clear line each, before anything is loaded."""

import io
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import click
import pytest

from specllama import paths
from specllama.cli import invoke, loading, output
from specllama.engine.profiles import Profile
from specllama.errors import CannotLoad, StoreError
from specllama.models import library, refs
from specllama.models.gguf import read_header
from specllama.models.receipts import read_receipt
from specllama.store import database
from specllama.store.message_tree import StoredMessage
from specllama.store.rounds import read_run
from specllama.store.sessions import SessionStore

POSIX = pytest.mark.skipif(sys.platform == "win32", reason="POSIX devices and links")


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded before the check")

    monkeypatch.setattr(loading, "load", refuse)
    monkeypatch.setattr(loading, "open_engine", refuse)


def said(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    capsys.readouterr()
    return invoke(args), capsys.readouterr().err


@POSIX
@pytest.mark.parametrize(
    "args",
    [
        ("run", "--json-schema", "@/dev/zero", "hi"),
        ("run", "--grammar-file", "/dev/zero", "hi"),
        ("prove", "--prompts", "/dev/zero"),
        ("bench", "run", "--prompts", "/dev/zero"),
    ],
)
def test_files_without_an_end(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, err = said(capsys, *args)
    assert code == 2
    assert "longer than 16 MiB" in err


@POSIX
def test_a_settings_file_without_an_end(capsys: pytest.CaptureFixture[str]) -> None:
    paths.config_file().parent.mkdir(parents=True, exist_ok=True)
    paths.config_file().symlink_to("/dev/zero")
    code, err = said(capsys, "config", "show")
    assert code == 2
    assert "longer than 16 MiB" in err


def piped(*args: str, script: str = "", feed: str = "yes") -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, through a shell that closes or fills streams."""
    command = f"{sys.executable} -m specllama {' '.join(args)}"
    line = f"{feed} | {command}" if feed else f"{command} {script}"
    return subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)


@POSIX
@pytest.mark.parametrize("args", [("run", "-"), ("run",)])
def test_a_prompt_without_an_end(args: tuple[str, ...]) -> None:
    done = piped(*args)
    assert done.returncode == 2
    assert "the prompt is longer than 16 MiB" in done.stderr


@POSIX
def test_closed_streams() -> None:
    done = piped("config", "path", script="<&-", feed="")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip().endswith("config.toml")
    done = piped("run", script="<&-", feed="")
    assert done.returncode == 2
    assert "the prompt is empty" in done.stderr
    done = piped("config", "path", script=">&-", feed="")
    assert done.returncode == 1
    assert done.stderr == "error: standard output is closed\n"
    done = piped("config", "path", script="2>&-", feed="")
    assert done.returncode == 0
    done = piped("config", "get", "nosuch", script="2>&-", feed="")
    assert (done.returncode, done.stdout) == (2, "")


@POSIX
def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    pipe = tmp_path / "model.gguf"
    os.mkfifo(pipe)
    with pytest.raises(CannotLoad, match="is a pipe or a device"):
        read_header(pipe)


@POSIX
def test_links_that_lead_to_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = paths.models_dir() / "user" / "repo"
    repo.mkdir(parents=True)
    cache = tmp_path / "hub"
    snapshot = cache / "models--user--other" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for folder in (repo, snapshot, tmp_path):
        (folder / "loop.gguf").symlink_to("loop.gguf")
    (tmp_path / "round").symlink_to("round")
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("SPECLLAMA_MODEL_DIRS", f"{tmp_path}{os.pathsep}{tmp_path / 'round'}")
    assert {model.source for model in library.scan()} == {"bundled"}
    assert invoke(["hub", "ls"]) == 0
    assert "unexpected" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "args",
    [
        ("bench", "run", "--temperature", "nan"),
        ("prove", "--temperature", "inf"),
        ("tune", "--temperature", "nan"),
    ],
)
def test_not_a_number(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, err = said(capsys, *args)
    assert code == 2
    assert "not a finite number" in err


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("bench", "run", "--length", "900"), "--length"),
        (("bench", "run", "--seed", "-4"), "--seed"),
        (("prove", "--max-tokens", "0"), "--max-tokens"),
        (("tune",), "the profile cannot be written"),
    ],
)
def test_checks_come_before_the_work(
    args: tuple[str, ...], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    paths.profiles_dir().parent.mkdir(parents=True, exist_ok=True)
    paths.profiles_dir().write_text("in the way")
    code, err = said(capsys, *(arg.format(file=file) for arg in args))
    assert code == 2
    assert word in err


def test_deeply_nested_files_are_damaged_files(tmp_path: Path) -> None:
    deep = "[" * 200_000
    profile = tmp_path / "profile.json"
    profile.write_text(deep)
    assert not Profile(profile).warm
    log = tmp_path / "log.jsonl"
    log.write_text(f'{deep}\n{{"type": "run"}}\n')
    assert read_run(log).skipped == 1
    model = tmp_path / "model.gguf"
    model.with_name(f"{model.name}.json").write_text(deep)
    assert read_receipt(model) is None
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(deep)
    assert invoke(["prove", "--prompts", str(prompts)]) == 2
    assert invoke(["bench", "table", str(profile)]) in (1, 2)


@POSIX
def test_a_setting_is_written_through_a_link(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles" / "specllama.toml"
    real.parent.mkdir()
    real.write_text("# mine\n")
    paths.config_file().parent.mkdir(parents=True, exist_ok=True)
    paths.config_file().symlink_to(real)
    assert invoke(["config", "set", "seed", "7"]) == 0
    assert paths.config_file().is_symlink()
    assert real.read_text() == "# mine\nseed = 7\n"


# -- the store of conversations --------------------------------------------------------------------


def test_a_damaged_store_is_not_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.write_bytes(b"not a database at all" * 400)
    with SessionStore.open(path) as store:
        for selector in ("last", "abcd"):
            with pytest.raises(StoreError, match="was damaged"):
                store.find(selector)


def test_a_store_of_a_newer_version_is_not_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    SessionStore.open(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("PRAGMA user_version = 99")
    raw.close()
    with SessionStore.open(path) as store, pytest.raises(StoreError, match="newer"):
        store.find("last")


def test_a_store_that_cannot_be_written_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.db"
    with SessionStore.open(path) as store:
        kept = store.create(title="kept")
        store.put(kept, 0, StoredMessage("user", "hello"))

    def refuse(path: Path) -> sqlite3.Connection:
        raise sqlite3.OperationalError("attempt to write a readonly database")

    monkeypatch.setattr(database, "_connect", refuse)
    with SessionStore.open(path) as store:
        assert "readonly" in store.notices[0]
        assert store.find("last") == kept
        assert [m.content for m in store.get(kept).messages] == ["hello"]
        store.put(kept, 1, StoredMessage("assistant", "lost"))
        assert len(store.get(kept).messages) == 1
        assert len(store.notices) == 1


def test_an_empty_store_is_an_empty_one(tmp_path: Path) -> None:
    with (
        SessionStore.open(tmp_path / "s.db") as store,
        pytest.raises(StoreError, match="no stored session yet"),
    ):
        store.find("last")


@POSIX
def test_what_lies_beside_a_target_does_not_matter(
    tmp_path: Path, nobody_else: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "t.gguf").symlink_to(paths.bundled_dir() / "tiny-target-q4_0.gguf")
    (folder / "dangling.gguf").symlink_to("/gone/x.gguf")
    (folder / "loop.gguf").symlink_to("loop.gguf")
    (folder / "folder.gguf").mkdir()
    os.mkfifo(folder / "pipe.gguf")
    code, err = said(capsys, "pair", str(folder / "t.gguf"))
    assert (code, "error" in err) == (0, False), err
    assert refs.resolve(str(folder)).name == "t.gguf"


LEGACY = ("latin-1", "cp437", "ascii")


@pytest.mark.parametrize("encoding", LEGACY)
def test_output_in_an_encoding_that_lacks_signs(encoding: str) -> None:
    """Both ways there are to a stream: our own, and click's for help."""
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
    for args in (
        ("pair", "tiny"),
        ("hub", "pairs"),
        ("run", "--help"),
        ("config", "show", "--all"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "specllama", *args], capture_output=True, env=environment
        )
        assert (done.returncode, b"bug" in done.stderr) == (0, False), (args, done.stderr)
        assert done.stdout.decode("utf-8"), "a pipe gets UTF-8, whatever the locale"


def test_a_terminal_that_lacks_signs_gets_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    for encoding, shown in (("latin-1", "+ x... é\n"), ("cp437", "+ x... é\n")):
        terminal = Terminal(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", terminal)
        output.prepare()
        output.line("✓ ✗… é")
        click.echo("✓ ✗… é")
        terminal.flush()
        assert terminal.buffer.getvalue().decode(encoding) == shown * 2
