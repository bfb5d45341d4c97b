"""NextN layers of few tokens: which are kept, what the file holds, and whose it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ggufs_nextn import ARCHITECTURES, CHAINED, write_nextn

from specllama.arrays import IntArray
from specllama.errors import BadGguf, PairIncompatible, UnsupportedModel, UsageError
from specllama.models.companions import kind_of
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.nextn_file import READS, check_target, places, read_words, write_head
from specllama.models.tensors import read_bytes
from specllama.models.words import SAYS, Spread, likeliest

N = 300


def made(folder: Path, arch: str = "qwen35") -> tuple[GgufHeader, GgufHeader, IntArray]:
    """A target, a head of some of its tokens, and these."""
    source = write_nextn(folder / "model.gguf", arch, nextn=2 if arch in CHAINED else 1)
    target = read_header(source)
    says = likeliest(target, N, Counter({target.vocab_size - 1: 3}), places(target))
    write_head(target, folder / "head.gguf", says)
    return target, read_header(folder / "head.gguf"), says


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_rows_of_the_tokens_and_the_layers_are_those_of_the_target(
    arch: str, tmp_path: Path
) -> None:
    target, head, says = made(tmp_path, arch)
    assert kind_of(head) == "mtp"
    words = check_target(head, target)
    assert words is not None
    assert np.array_equal(words.says, says)
    assert head.vocab_size == N < target.vocab_size
    cut = 0
    for info in head.tensors:
        if len(info.shape) > 2:
            continue
        whole, part = read_bytes(target, info.name), read_bytes(head, info.name)
        if info.shape[1:] == (N,):
            whole, cut = whole.reshape(target.vocab_size, -1)[says].ravel(), cut + 1
        assert np.array_equal(whole, part)
    assert cut >= 2
    assert not [t for t in head.tensors if t.name.startswith("blk.0.")]


def test_what_is_no_word_places_then_the_most_frequent_then_the_first(tmp_path: Path) -> None:
    target = read_header(write_nextn(tmp_path / "model.gguf"))
    size, alone = target.vocab_size, 3 + 256
    last = size - 1
    assert [*likeliest(target, alone + 2, {}, places(target))] == [*range(alone + 2)]
    assert [*likeliest(target, alone + 2, {last: 1}, places(target))] == [*range(alone + 1), last]
    for n in (alone, size):
        with pytest.raises(UsageError, match=f"{size} tokens, of which {alone} have to stay"):
            likeliest(target, n, {}, places(target))


def test_other_tokens_are_read_as_how_they_begin(tmp_path: Path) -> None:
    target, head, says = made(tmp_path)
    words, texts = read_words(head), target.token_bytes
    assert words is not None
    kept = {texts[token] for token in says}
    for token, row in enumerate(words.reads):
        text, read = texts[token], texts[says[row]]
        assert text.startswith(read)
        assert read == text or not any(text[:n] in kept for n in range(len(read) + 1, len(text)))


def test_a_row_over_the_targets_tokens(tmp_path: Path) -> None:
    _, head, says = made(tmp_path)
    words = read_words(head)
    assert words is not None
    rows = np.arange(2 * N, dtype=np.float32).reshape(2, N)
    wide = Spread(words.says, len(words.reads))(rows)
    assert np.array_equal(wide[:, says], rows)
    assert np.isneginf(np.delete(wide, says, axis=1)).all()


def test_arrays_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    target, head, _ = made(tmp_path)
    for key in (SAYS, READS):
        alone = {name: array for name, array in head.arrays.items() if name != key}
        with pytest.raises(BadGguf, match="is not a list of"):
            read_words(replace(head, arrays=alone))
        with pytest.raises(BadGguf, match="do not belong together"):  # both are the other one
            read_words(
                replace(head, arrays={**alone, key: head.arrays[SAYS if key == READS else READS]})
            )
    kinds = {name: kind for name, kind in head.kinds.items() if name not in (SAYS, READS)}
    bare = replace(head, kinds=kinds)
    assert read_words(bare) is None
    with pytest.raises(PairIncompatible, match="300 tokens"):
        check_target(bare, target)


def test_it_is_of_its_target_only(tmp_path: Path) -> None:
    target, head, _ = made(tmp_path)
    tokens = target.arrays["tokenizer.ggml.tokens"]
    other = {**target.arrays, "tokenizer.ggml.tokens": replace(tokens, count=tokens.count - 1)}
    with pytest.raises(PairIncompatible, match="another target") as caught:
        check_target(head, replace(target, arrays=other))
    assert f"reads {tokens.count} tokens" in caught.value.message


def test_a_target_without_such_layers_is_refused(tmp_path: Path) -> None:
    target = read_header(write_nextn(tmp_path / "model.gguf", nextn=0))
    with pytest.raises(UnsupportedModel, match="no NextN layers"):
        write_head(target, tmp_path / "head.gguf", np.arange(N, dtype=np.int32))
    assert not (tmp_path / "head.gguf").exists()
