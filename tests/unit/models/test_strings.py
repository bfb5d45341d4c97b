"""Lists of strings, looked through at a glance: what walking them one by one finds."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import ggufs
import pytest

from specllama.models import gguf, strings
from specllama.models.gguf import read_header
from specllama.models.gguf_format import raw_array
from specllama.models.strings import Texts, leap


def packed(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


def words(n: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.randrange(12)).replace(b"\0", b"z") + b"x%d" % i for i in range(n)]


ODD = {
    "plain": [],
    "an empty one": [b""],
    "two empty ones": [b"", b""],
    "NUL in front": [b"\0ab"],
    "NUL within": [b"a\0\0\0\0\0\0\0\0\0b"],
    "of 256 bytes": [b"y" * 256],
    "of 65,535 bytes": [b"y" * 65535],
    "of 70,000 bytes": [b"y" * 70000],
    "like a length": [b"\5\0\0\0\0\0\0\0hello"],
    "before a length of 256": [b"", b"y" * 256],
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("at", [0, 3000, 6000])
@pytest.mark.parametrize("window", [1 << 14, 8 << 20])
def test_it_never_skips_what_is_no_string(
    odd: str, at: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(strings, "MANY", 1)
    monkeypatch.setattr(strings, "WINDOW", window)
    texts = words(6000)
    texts[at:at] = ODD[odd]
    ends = [0]
    for text in texts:
        ends.append(ends[-1] + 8 + len(text))
    n, size = leap(bytearray(b"head" + packed(texts) + bytes(20)), 4, len(texts))
    assert size == ends[n]
    assert n == len(texts) if odd in ("plain", "of 256 bytes") else n >= min(at, 1)
    assert leap(packed(texts), 0, 100)[0] <= 100


@pytest.mark.parametrize("odd", ODD)
def test_a_table_is_whole_or_none(odd: str) -> None:
    texts = [*words(50), b"<0x41>", b"a", *ODD[odd], b"end"]
    found = Texts.of(packed(texts), len(texts))
    if found is None:
        assert odd not in ("plain", "of 256 bytes", "of 65,535 bytes")
        return
    assert [found[i] for i in range(len(texts))] == texts
    assert all(texts)
    assert not any(b"\0" in text for text in texts)
    names = {text for text in texts if len(text) == 1 or (len(text) == 6 and text[:1] == b"<")}
    assert found.of_bytes() == names
    assert Texts.of(packed(texts), len(texts) - 1) is None
    assert Texts.of(packed(texts)[:-1], len(texts)) is None


@pytest.mark.parametrize("size", [1, 7, 8, 9, 16, 300])
def test_texts_that_are_there_twice_are_seen(size: int) -> None:
    texts = [*words(500), b"a" * size, b"a" * (size - 1) + b"b", b"b" + b"a" * (size - 1)]
    texts = list(dict.fromkeys(texts))
    table = Texts.of(packed(texts), len(texts))
    assert table is not None
    assert table.differ()
    twice = Texts.of(packed([*texts, b"a" * size]), len(texts) + 1)
    assert twice is not None
    assert not twice.differ()


def test_a_header_says_the_same_of_its_tokens_either_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ggufs.write_spm(tmp_path / "m.gguf")
    glance, walked = read_header(path), read_header(path)
    monkeypatch.setattr(gguf.Texts, "of", lambda raw, count: None)
    assert walked.token_texts is None
    monkeypatch.undo()
    assert glance.token_texts is not None
    assert glance.token_bytes == walked.token_bytes
    assert glance.longest_token == walked.longest_token == max(map(len, walked.token_bytes))
    assert b"<0x41>" in glance.texts_of_bytes() <= walked.texts_of_bytes()
    assert glance.tokens_of_type(6) == [i for i, k in enumerate(walked.token_types()) if k == 6]
    assert [glance.token_text(i) for i in range(9)] == list(walked.token_bytes[:9])
    tokens = glance.arrays["tokenizer.ggml.tokens"]
    assert len(raw_array(path, tokens)) == sum(8 + len(text) for text in walked.token_bytes)
