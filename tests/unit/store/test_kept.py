"""Whatever has become of a kept file, its readers go on: any byte may have changed."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from specllama import paths
from specllama.backend import verdicts
from specllama.backend.exactness import SCHEMA, Exactness, Group
from specllama.errors import SpecllamaError
from specllama.models.receipts import Receipt, read_receipt, receipt_path, write_receipt
from specllama.models.summaries import Summaries
from specllama.store import profile_file
from specllama.store.rounds import read_run
from specllama.tui.state import DraftFile, Preferences, PromptHistory

MODEL = paths.bundled_dir() / "tiny-target-q4_0.gguf"
FOUND = Exactness(rows=16, trees=True, widths=(2, 4), groups=(Group((4, 8), ms=(1.0, 2.0)),))


def bytes_of(text: str) -> bytes:
    return json.dumps({"schema": "x", "text": text, "n": [1, 2.5, None]}).encode() + b"\n"


def exactness(folder: Path) -> tuple[Path, Callable[[], object]]:
    def read() -> None:
        key = {"file": "ä model"}
        assert verdicts.kept(SCHEMA, key, Exactness, lambda: FOUND, folder) == FOUND

    read()
    (path,) = folder.iterdir()
    return path, read


def summaries(folder: Path) -> tuple[Path, Callable[[], object]]:
    def read() -> None:
        known = Summaries()
        found = dataclasses.asdict(known.get(MODEL))
        assert {name: type(value) for name, value in found.items()} == kinds

    known = Summaries()
    kinds = {name: type(value) for name, value in dataclasses.asdict(known.get(MODEL)).items()}
    known.save()
    return paths.cache_dir() / "headers.json", read


def receipt(folder: Path) -> tuple[Path, Callable[[], object]]:
    file = folder / "model.gguf"
    file.write_bytes(b"weights")
    made = Receipt("user/repo", "model.gguf", "c" * 40, 7, "sha256", "0" * 64)
    write_receipt(file, made)
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


KEPT = (
    *(exactness, summaries, receipt, profile, run),
    *(preferences, history, unsent),
)


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
