"""Files of states: whole or not there, private, bounded, deleted with their owner."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from specllama.errors import StoreError
from specllama.store import states
from specllama.store.states import Bytes, StateFile, States

PARTS: list[Bytes] = [b"cells" * 100, b"", bytearray(range(256))]
SIZES = [len(part) for part in PARTS]


def kept(tmp_path: Path, *, most: int = 1 << 20, key: str = "key") -> States:
    return States(key, most=most, folder=tmp_path / "states")


def only(there: States) -> StateFile:
    [one] = there.found()
    return one


def test_what_is_written_is_read_by_another_process(tmp_path: Path) -> None:
    assert kept(tmp_path).write("a1b2", "text", b"head", PARTS)
    there = kept(tmp_path)
    one = only(there)
    assert (one.owner, one.head) == ("a1b2", b"head")
    assert [bytes(part) for part in states.read(one, SIZES)] == [bytes(part) for part in PARTS]
    assert kept(tmp_path, key="another").found() == []


@pytest.mark.skipif(os.name != "posix", reason="modes")
def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    there = kept(tmp_path)
    there.write("a1b2", "text", b"head", PARTS)
    assert stat.S_IMODE(only(there).path.stat().st_mode) == 0o600
    assert stat.S_IMODE(there.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(there.root.stat().st_mode) == 0o700


@pytest.mark.parametrize("at", [0, 5, 30, 58, 80, 700, -40, -1])
def test_no_flipped_bit_is_taken(tmp_path: Path, at: int) -> None:
    there = kept(tmp_path)
    there.write("a1b2", "text", b"the head of a file", PARTS)
    one = only(there)
    data = bytearray(one.path.read_bytes())
    data[at] ^= 4
    one.path.write_bytes(data)
    with pytest.raises(StoreError):
        states.read(one, SIZES)


def test_no_torn_file_is_taken(tmp_path: Path) -> None:
    there = kept(tmp_path)
    there.write("a1b2", "text", b"head", PARTS)
    one = only(there)
    data = one.path.read_bytes()
    for n in range(0, len(data), 37):
        one.path.write_bytes(data[:n])
        with pytest.raises(StoreError):
            states.read(one, SIZES)
    one.path.write_bytes(data + b"!")
    with pytest.raises(StoreError):
        states.read(one, SIZES)


def test_a_file_that_is_gone_is_no_news(tmp_path: Path) -> None:
    there = kept(tmp_path)
    there.write("a1b2", "text", b"head", PARTS)
    one = only(there)
    kept(tmp_path).forget("a1b2")
    with pytest.raises(StoreError):
        states.read(one, SIZES)
    assert there.found() == []


def test_the_same_text_is_replaced_and_found_anew(tmp_path: Path) -> None:
    there = kept(tmp_path)
    there.write("a1b2", "text", b"one", [b"1"])
    assert only(there).head == b"one"
    kept(tmp_path).write("a1b2", "text", b"two", [b"22"])
    assert only(there).head == b"two"


def test_what_was_used_least_recently_goes_first(tmp_path: Path) -> None:
    there = kept(tmp_path, most=5000)
    for i, owner in enumerate(("a", "b", "c")):
        there.write(owner, "text", b"head", [bytes(1000)])
        os.utime(there.path / f"{owner}.text.state", (i, i))
    [first] = [one for one in there.found() if one.owner == "a"]
    states.read(first, [1000])
    kept(tmp_path, most=5000, key="other").write("d", "text", b"head", [bytes(2000)])
    assert {one.owner for one in there.found()} == {"a", "c"}
    assert states.size(there.root) <= 5000
    assert not there.write("e", "text", b"head", [bytes(6000)]), "larger than all may be"
    assert {one.owner for one in there.found()} == {"a", "c"}


def test_what_a_kill_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    there = kept(tmp_path)
    there.write("a", "text", b"head", PARTS)
    begun = there.path / ".begun"
    begun.write_bytes(b"half")
    states.trim(there.root, there.most)
    assert begun.exists(), "another process may be writing it"
    os.utime(begun, (0, 0))
    states.trim(there.root, there.most)
    assert not begun.exists()
    assert len(there.found()) == 1


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = kept(tmp_path)
    there.write("a", "text", b"head", PARTS)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        there.write("a", "text", b"other", PARTS)
    assert only(there).head == b"head"
    assert [path.name for path in there.path.iterdir()] == ["a.text.state"]


def test_by_default_they_take_a_tenth_of_what_is_free_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Disk:
        free = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk)
    assert States("key", folder=tmp_path / "none" / "yet").most == 100
    Disk.free = 1 << 50
    assert States("key", folder=tmp_path).most == states.MOST_BYTES


@pytest.mark.skipif(os.name != "posix", reason="fork")
def test_a_kill_loses_nothing_and_leaves_nothing_wrong() -> None:
    tool = Path(__file__).parents[2] / "lab" / "kill_writing.py"
    done = subprocess.run(
        [sys.executable, tool, "--kills", "25"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "25 kills" in done.stdout
    assert " 0 in the middle" not in done.stdout, "none of them came while it wrote"
