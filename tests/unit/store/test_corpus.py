"""The store of past token sequences: bounded, torn-tail tolerant, listable, deletable."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from specllama.errors import StoreError
from specllama.paths import data_dir
from specllama.store.corpus import Corpus, tokenizer_key

KEY = "0123456789abcdef"


def text(start: int, n: int = 20) -> list[int]:
    return list(range(start, start + n))


def test_texts_come_back_in_order() -> None:
    corpus = Corpus()
    assert corpus.files() == []
    assert corpus.size() == corpus.delete() == 0
    for start in (0, 100, 150_000):
        assert corpus.add(KEY, text(start))
    assert Corpus().texts(KEY) == [text(0), text(100), text(150_000)]
    assert corpus.texts(KEY, most=45) == [text(100), text(150_000)]
    assert corpus.texts(KEY, most=10) == []
    assert corpus.texts("ffff") == []
    assert corpus.path == data_dir() / "corpus"


def test_short_and_repeated_texts_are_not_kept() -> None:
    corpus = Corpus()
    assert not corpus.add(KEY, [1, 2, 3])
    assert corpus.add(KEY, text(0))
    assert not corpus.add(KEY, text(0))
    assert len(corpus.texts(KEY)) == 1


def test_what_is_kept_can_be_listed_sized_and_deleted() -> None:
    corpus = Corpus()
    corpus.add(KEY, text(0))
    corpus.add("ffff", text(5, 30))
    corpus.add("ffff", text(9, 30))
    listed = {f.tokenizer: f for f in corpus.files()}
    assert (listed[KEY].texts, listed[KEY].tokens) == (1, 20)
    assert (listed["ffff"].texts, listed["ffff"].tokens) == (2, 60)
    assert corpus.size() == sum(f.file_bytes for f in listed.values()) == 88 + 2 * 128
    assert listed[KEY].to_dict()["file_bytes"] == 88
    assert corpus.delete("ffff") == 256
    assert [f.tokenizer for f in corpus.files()] == [KEY]
    assert corpus.delete() == 88
    assert corpus.delete("ffff") == 0


def test_a_file_keeps_its_newest_texts_within_its_bound() -> None:
    corpus = Corpus(max_bytes=1000)
    for i in range(40):
        corpus.add(KEY, text(100 * i))
        assert corpus.size() <= 1000
    kept = corpus.texts(KEY)
    assert len(kept) >= 8
    assert kept == [text(100 * i) for i in range(40 - len(kept), 40)]
    corpus.add(KEY, text(0, 2000))  # larger than the bound: kept alone
    assert corpus.texts(KEY) == [text(0, 2000)]
    corpus.add(KEY, text(7))
    assert corpus.texts(KEY) == [text(7)]


@pytest.mark.parametrize("damage", ["torn", "flipped", "foreign", "odd"])
def test_damaged_files_lose_what_is_damaged_and_go_on(damage: str) -> None:
    corpus = Corpus()
    corpus.add(KEY, text(0))
    corpus.add(KEY, text(100))
    path = corpus.path / f"{KEY}.tokens"
    data = path.read_bytes()
    path.write_bytes(
        {
            "torn": data[:-7],
            "flipped": data[:100] + bytes([data[100] ^ 1]) + data[101:],
            "foreign": b"not a corpus at all, but long enough to look",
            "odd": data + b"\x01",
        }[damage]
    )
    kept = {"torn": 1, "flipped": 1, "foreign": 0, "odd": 2}[damage]
    assert corpus.texts(KEY) == [text(0), text(100)][:kept]
    corpus.add(KEY, text(200))
    assert corpus.texts(KEY) == [*[text(0), text(100)][:kept], text(200)]


@pytest.mark.skipif(os.name != "posix", reason="permissions are POSIX")
def test_only_the_owner_may_read() -> None:
    corpus = Corpus(max_bytes=300)
    for i in range(6):
        corpus.add(KEY, text(i))
        mode = stat.S_IMODE((corpus.path / f"{KEY}.tokens").stat().st_mode)
        assert mode & 0o077 == 0


def test_names_that_could_leave_the_folder_are_refused() -> None:
    for name in ("", "../x", "a/b", "a.b"):
        with pytest.raises(StoreError, match="name"):
            Corpus().add(name, text(0))


def test_a_folder_that_cannot_be_written_is_one_readable_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError, match="cannot write"):
        Corpus(blocked / "corpus").add(KEY, text(0))


def test_equal_vocabularies_share_a_name() -> None:
    one, two = b"\1\0\0\0a", b"\1\0\0\0b"
    key = tokenizer_key(one + two)
    assert key != tokenizer_key(two + one)
    assert key.isalnum()
