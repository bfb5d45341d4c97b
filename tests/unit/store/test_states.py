"""Files of states: whole or not there, private, bounded, deleted with their owner."""

import dataclasses
import json
import os
import random
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama import paths
from specllama.backend import verdicts
from specllama.backend.exactness import SCHEMA, Exactness, Group
from specllama.errors import SpecllamaError, StoreError
from specllama.models.receipts import Receipt, read_receipt, receipt_path, write_receipt
from specllama.models.summaries import Summaries
from specllama.store import profile_file, states
from specllama.store.rounds import read_run
from specllama.store.states import Bytes, StateFile, States
from specllama.tui.state import DraftFile, Preferences, PromptHistory

PARTS: list[Bytes] = [b"cells" * 100, b"", bytearray(range(256))]
SIZES = [len(part) for part in PARTS]


def kept(tmp_path: Path, *, most: int = 1 << 20, key: str = "key") -> States:
    return States(key, most=most, folder=tmp_path / "states")


def only(there: States) -> StateFile:
    [one] = there.found()
    return one


def test_what_is_written_is_read_by_another_process(tmp_path: Path) -> None:
    assert kept(tmp_path).write("a1b2", "text", b"head", PARTS)
    one = only(kept(tmp_path))
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


# -- kept files of which any byte may have changed --


MODEL = paths.bundled_dir() / "tiny-target-q4_0.gguf"
FOUND = Exactness(rows=16, trees=True, widths=(2, 4), groups=(Group((4, 8), ms=(1.0, 2.0)),))


def bytes_of(text: str) -> bytes:
    return json.dumps({"schema": "x", "text": text, "n": [1, 2.5, None]}).encode() + b"\n"


def exactness(folder: Path) -> tuple[Path, Callable[[], object]]:
    def read() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(paths, "profiles_dir", lambda: folder)
            found = verdicts.kept(SCHEMA, {"file": "ä model"}, Exactness, lambda: FOUND)
        assert found == FOUND

    read()
    (path,) = folder.rglob("*.json")
    return path, read


def summaries(folder: Path) -> tuple[Path, Callable[[], object]]:
    def read() -> None:
        found = dataclasses.asdict(Summaries().get(MODEL))
        assert {name: type(value) for name, value in found.items()} == kinds

    known = Summaries()
    kinds = {name: type(value) for name, value in dataclasses.asdict(known.get(MODEL)).items()}
    known.save()
    return paths.cache_dir() / "headers.json", read


def receipt(folder: Path) -> tuple[Path, Callable[[], object]]:
    file = folder / "model.gguf"
    file.write_bytes(b"weights")
    write_receipt(file, Receipt("user/repo", "model.gguf", "c" * 40, 7, "sha256", "0" * 64))
    return receipt_path(file), lambda: read_receipt(file)


def in_file(
    path: Path, text: bytes, read: Callable[[Path], object]
) -> tuple[Path, Callable[[], object]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text)
    return path, lambda: read(path)


def profile(folder: Path) -> tuple[Path, Callable[[], object]]:
    def read(path: Path) -> None:
        try:
            profile_file.read(path)
        except profile_file.DAMAGE:
            pass

    return in_file(folder / "p.json", bytes_of("ä pair"), read)


def run(folder: Path) -> tuple[Path, Callable[[], object]]:
    lines = bytes_of("ä run") + b'{"type": "notice", "message": "\xc3\xa4"}\n'
    return in_file(folder / "1.jsonl", lines, read_run)


def preferences(folder: Path) -> tuple[Path, Callable[[], object]]:
    text = json.dumps({"theme": "ä", "keys": {"a": "b"}, "view": "text"}, ensure_ascii=False)
    return in_file(Preferences.path(), text.encode(), lambda path: Preferences.load())


def history(folder: Path) -> tuple[Path, Callable[[], object]]:
    return in_file(folder / "h.jsonl", '"ä line"\n"b"\n'.encode(), PromptHistory)


def unsent(folder: Path) -> tuple[Path, Callable[[], object]]:
    text = '{"text": "ä", "pastes": {"a": "b"}}'.encode()
    return in_file(folder / "u.json", text, lambda path: DraftFile(path).load())


KEPT = (*(exactness, summaries, receipt, profile, run), *(preferences, history, unsent))


@pytest.mark.parametrize("keep", KEPT, ids=lambda keep: keep.__name__)
def test_any_byte_may_have_changed(
    keep: Callable[[Path], tuple[Path, Callable[[], object]]], tmp_path: Path
) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    path, read = keep(folder)
    sound = path.read_bytes()
    chance = random.Random(7)
    deep = b"[" * 200_000
    for data in (b"", b"\0" * 64, b"\xff\xfe{", deep, b'{"a":' * 50_000, sound[: len(sound) // 2]):
        path.write_bytes(data)
        check_read(read)
    for _ in range(300):
        data = bytearray(sound)
        for at in chance.choices(range(len(data)), k=chance.choice((1, 1, 3, 20))):
            data[at] = chance.choice((0xE5, 0x80, ord('"'), ord("9"), data[at] ^ 1 << (at % 8)))
        path.write_bytes(data)
        check_read(read)


def check_read(read: Callable[[], object]) -> None:
    try:
        read()
    except SpecllamaError:
        pass


def test_a_verdict_that_a_flipped_bit_changed_is_not_believed(tmp_path: Path) -> None:
    path, read = exactness(tmp_path / "kept")
    assert b'"rows":16' in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(b'"rows":16', b'"rows":46'))
    read()
