"""Draft models that know fewer words: what such a file holds, and that it computes what the whole
one does, bit for bit, for the words that it has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggufs import bpe_tokens, write_llama, write_mamba, write_spm, write_windows
from ggufs_gemma4 import write_gemma4

from specllama.arrays import IntArray, Rows
from specllama.backend import embedding, same_rows
from specllama.backend.base import Part
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_pool import LlamaPool, open_pool
from specllama.engine.gguf_pair import read_pair
from specllama.errors import BadGguf, PairIncompatible, UnsupportedModel, UsageError
from specllama.models import trimmed
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.loadable import check_loadable
from specllama.models.pairing import require_pair
from specllama.models.tensors import read_bytes
from specllama.settings.params import EngineOptions

pytestmark = pytest.mark.usefixtures("tried_home")  # rows are compared in a process

N = 280
WORDS = [f"word{i}" for i in range(60)]


def tied(path: Path) -> Path:
    return write_llama(path, tied=True, quant="Q8_0")


def untied(path: Path) -> Path:
    return write_llama(path, quant="Q5_1")


MODELS: dict[str, Callable[[Path], Path]] = {
    "tied": tied,
    "untied": untied,
    "floats": write_llama,
    "windows": write_windows,
    "a running state": write_mamba,
    "scaled embeddings": write_gemma4,
}


def made(folder: Path, write: Callable[[Path], Path], n: int = N) -> tuple[GgufHeader, GgufHeader]:
    """A model, and its copy of few tokens."""
    whole = read_header(write(folder / "whole.gguf"))
    says = trimmed.choose(whole, n, {whole.vocab_size - 1: 1})
    return whole, trimmed.write(whole, folder / "few.gguf", says)


def says_of(copy: GgufHeader) -> IntArray:
    return np.array(copy.array("specllama.says"), np.int32)


def opened(header: GgufHeader) -> LlamaPool:
    read = embedding.Embedding(header) if header.rows else None
    model = LlamaModel(header.path, embedding=read, gpu_layers="0", repack=False)
    options = EngineOptions(parallel=2).resolved(on_gpu=False, one_kv_type=False)
    many = {"lanes": 2, "max_leaves": 4, "max_rows": 8, "threads": 1, "any_width": False}
    return open_pool(model, n_ctx=256, options=options, flash=options.flash_attn, **many)


def everything(pool: LlamaPool) -> list[Rows]:
    """Rows of prompts, steps, trees, cuts, shared passes and lanes that come back."""
    rows: list[Rows] = []
    last, text = pool.n_vocab - 1, [(7 * i) % pool.n_vocab for i in range(40)]
    lane = pool.open()

    def took(found: Rows) -> None:
        rows.append(found.copy())

    took(lane.forward(text, outputs="last"))
    took(lane.forward([last], outputs="last"))
    lane.rollback(41 if pool.forgets else 25)
    took(lane.forward([3, last, 5], outputs="last"))
    if lane.max_leaves > 1:
        took(lane.forward([5, 7, last, 11], outputs="all", parents=[-1, -1, 0, 1]))
        lane.keep_path([1, 3])
        took(lane.forward([55], outputs="last"))
    if pool.lanes > 1:
        other = pool.open()
        other.forward(text[:9], outputs="none")
        shared = (Part(lane, [9], "last"), Part(other, [last], "last"))
        pool.run(shared)
        for part in shared:
            assert part.rows is not None
            took(part.rows)
        blob = pool.park(other)
        took(pool.resume(blob, other).forward([2], outputs="last"))
    return rows


@pytest.mark.parametrize("kind", MODELS)
def test_it_computes_what_the_whole_model_does(kind: str, tmp_path: Path) -> None:
    whole, copy = made(tmp_path, MODELS[kind])
    says = says_of(copy)
    pools = [opened(header) for header in (whole, copy)]
    assert [pool.n_vocab for pool in pools] == [whole.vocab_size] * 2
    found = [everything(pool) for pool in pools]
    assert len(found[0]) >= 3
    for rows, few in zip(*found, strict=True):
        assert np.array_equal(rows[:, says], few[:, says])
        assert np.isneginf(np.delete(few, says, axis=1)).all()
    for pool in pools:
        pool.model.close()
    assert same_rows.compare(whole.path, copy.path).difference == 0.0
    assert copy.path.exists()


def test_a_copy_that_computes_something_else_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings that are not scaled as the graph scales tokens; another model's rows."""
    whole, copy = made(tmp_path, write_gemma4)
    assert same_rows.compared(whole.path, copy.path).difference == 0.0
    with monkeypatch.context() as patch:
        patch.setattr(embedding, "SCALED", frozenset())
        assert same_rows.compared(whole.path, copy.path).difference > 0.1
    other = write_gemma4(tmp_path / "other.gguf", seed=2)
    with pytest.raises(UnsupportedModel, match="its logits differ by"):
        same_rows.compare(other, copy.path)
    assert not copy.path.exists()
    with pytest.raises(UnsupportedModel, match="does not compute it"):  # no file
        same_rows.compare(other, copy.path)


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_what_the_file_holds(kind: str, tmp_path: Path) -> None:
    whole, copy = made(tmp_path, MODELS[kind])
    says = says_of(copy)
    assert len(says) == copy.rows == N < copy.vocab_size == whole.vocab_size
    assert whole.vocab_size - 1 in says  # it was counted
    assert copy.token_bytes == whole.token_bytes
    assert copy.chat_template == whole.chat_template
    for info in copy.tensors:
        part, all_of_it = read_bytes(copy, info.name), read_bytes(whole, info.name)
        if info.shape[1:] == (N,):
            all_of_it = all_of_it.reshape(whole.vocab_size, -1)[says].ravel()
        assert np.array_equal(part, all_of_it)
    table, kept = trimmed.read_embedding(copy)
    assert kept == whole.by_name[trimmed.TABLE].type
    assert np.array_equal(table.ravel(), read_bytes(whole, trimmed.TABLE))
    assert 0 < trimmed.work(whole, N) < 1
    assert require_pair(whole, copy).compatible
    check_loadable(copy, "draft")
    with pytest.raises(UnsupportedModel, match="knows only 280 of its tokens"):
        check_loadable(copy)


def test_special_tokens_stay_then_the_most_frequent_then_the_first(tmp_path: Path) -> None:
    whole = read_header(write_llama(tmp_path / "m.gguf"))
    last = whole.vocab_size - 1
    assert [*trimmed.choose(whole, 10, {})] == [*range(10)]
    assert [*trimmed.choose(whole, 10, {last: 2, 20: 1, 0: 5})] == [*range(8), 20, last]
    for n in (3, whole.vocab_size):
        with pytest.raises(UsageError, match="3 have to stay"):
            trimmed.choose(whole, n, {})


def test_characters_behind_all_words_take_their_turns(tmp_path: Path) -> None:
    specials = {"<mine>": 4, "<unused7>": 3}
    spm = read_header(write_spm(tmp_path / "m.gguf", specials=specials))
    kept = {spm.token_text(token) for token in trimmed.choose(spm, 12, {})}
    assert {b"<s>", b"</s>", b"<mine>"} < kept
    assert "▁".encode() in kept
    assert kept & {b"a", b"b"} == {b"a", b"b"}
    assert b"<unused7>" not in kept
    assert not any(text.startswith(b"<0x") for text in kept)


def _split(path: Path) -> Path:
    from ggufs import write_split

    return write_split(path)[0]


def _per_layer(path: Path) -> Path:
    """A model whose layers look tokens up themselves."""
    size = len(bpe_tokens()[0])

    def named(name: str, values: Any) -> Any:
        return np.zeros((size, 64), np.float32) if name == "output_norm.weight" else values

    return write_llama(path, weights=named)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (_split, "only one file"),
        (_per_layer, "depends on them in every layer"),
    ],
)
def test_a_model_that_cannot_do_without_tokens(
    write: Callable[[Path], Path], words: str, tmp_path: Path
) -> None:
    header = read_header(write(tmp_path / "m.gguf"))
    with pytest.raises(UnsupportedModel, match=words):
        trimmed.write(header, tmp_path / "few.gguf", np.arange(9, dtype=np.int32))
    assert not (tmp_path / "few.gguf").exists()


def test_a_copy_is_not_cut_again_nor_translated(tmp_path: Path) -> None:
    whole, copy = made(tmp_path, untied)
    with pytest.raises(UnsupportedModel, match="knows only 280 tokens already"):
        trimmed.write(copy, tmp_path / "fewer.gguf", np.arange(9, dtype=np.int32))
    other = write_spm(tmp_path / "other.gguf")
    options = EngineOptions(allow_other_vocab=True)
    with pytest.raises(PairIncompatible, match="too few to be translated"):
        read_pair(other, copy.path, options)
    assert not read_pair(whole.path, copy.path, options).translated


def test_damage_is_seen(tmp_path: Path) -> None:
    _, copy = made(tmp_path, untied)
    short = replace(copy, file_bytes=copy.file_bytes - 1)
    with pytest.raises(BadGguf, match="cut short"):
        embedding.Embedding(short)
    with pytest.raises(BadGguf, match="not a type"):
        embedding.Embedding(replace(copy, metadata={**copy.metadata, trimmed.EMBEDDING: "Q9"}))
    merges = copy.arrays["tokenizer.ggml.merges"]
    for array in (merges, copy.arrays["tokenizer.ggml.token_type"]):
        arrays = {**copy.arrays, "specllama.says": array}
        with pytest.raises(BadGguf, match="says"):
            embedding.Embedding(replace(copy, arrays=arrays))
