"""The texts that a user names to draft from: which are read, and what is left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specllama.errors import UsageError
from specllama.store import texts
from specllama.store.texts import read_texts


def write(path: Path, data: bytes, age: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_a_folder_is_read_oldest_first(tmp_path: Path) -> None:
    write(tmp_path / "a.py", b"newest")
    write(tmp_path / "below" / "b.md", "älter".encode(), age=2)
    write(tmp_path / "below" / "c.txt", b"between", age=1)
    assert read_texts([str(tmp_path)]) == (["älter", "between", "newest"], "")
    assert read_texts([str(tmp_path / "a.py")]) == (["newest"], "")
    assert read_texts([str(tmp_path), str(tmp_path / "a.py")])[0].count("newest") == 1


def test_what_is_no_text_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "MOST_FILE", 100)
    monkeypatch.setattr(texts, "MOST_BYTES", 150)
    write(tmp_path / "image.png", b"\x89PNG\0\0")
    write(tmp_path / "latin", b"\xe4")
    write(tmp_path / "data.csv", b"1" * 101)
    write(tmp_path / "new", b"n" * 90)
    write(tmp_path / "old", b"o" * 90, age=9)
    write(tmp_path / "small", b"s" * 20, age=10)
    for hidden in (".git/config", ".env", "node_modules/x.js", "__pycache__/x.py"):
        write(tmp_path / hidden, b"secret")
    found, without = read_texts([str(tmp_path)])
    assert found == ["s" * 20, "n" * 90]
    assert sorted(without.split(", ")) == [
        "1 beyond 8 MiB of newer ones", "1 larger than 1 MiB", "2 no text",
    ]  # fmt: skip


def test_a_name_of_nothing_is_refused() -> None:
    for name in ("/there/is/none", "~nobodyx9/none"):
        with pytest.raises(UsageError, match="no such file or folder"):
            read_texts([name])
