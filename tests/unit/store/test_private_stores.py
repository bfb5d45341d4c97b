"""What people wrote is theirs alone, whatever the umask, also where others could read it before."""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import engine_info

from specllama import paths
from specllama.events import Started
from specllama.settings.params import GenerateParams
from specllama.store.message_tree import StoredMessage
from specllama.store.rounds import RoundLog
from specllama.store.sessions import SessionStore
from specllama.tui.state import write_atomically

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such modes")


@pytest.fixture(params=[0o022, 0o000], ids=["umask 022", "umask 000"])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def write_everything() -> None:
    with SessionStore.open() as store:
        store.put(store.create(), 0, StoredMessage("user", "a secret"))
        open_to_others()  # while SQLite's own files lie beside the database
    log = RoundLog(engine_info(), GenerateParams())
    assert log.write(Started(1, 0, 8, 1, "none", "match", 0, "exact")) is None
    log.close()
    assert write_atomically(paths.data_dir() / "tui" / "unsent.json", b"{}")


def open_to_others() -> None:
    found = [paths.data_dir(), *paths.data_dir().rglob("*")]
    wrong = [
        f"{path.name}: {mode:o}"
        for path in found
        if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077
    ]
    assert len(found) > 3
    assert wrong == []


def test_new_stores_are_closed_to_others(umask: int) -> None:
    write_everything()
    open_to_others()


def test_stores_that_were_open_are_closed(umask: int) -> None:
    with SessionStore.open() as store:  # keeps the -wal and -shm files alive
        store.put(store.create(), 0, StoredMessage("user", "a secret"))
        for path in [paths.data_dir(), *paths.data_dir().rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        write_everything()
        open_to_others()


def test_a_folder_of_someone_else_is_left_alone(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    with SessionStore.open(shared / "sessions.db") as store:
        store.create()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o755
    assert stat.S_IMODE((shared / "sessions.db").stat().st_mode) == 0o600
