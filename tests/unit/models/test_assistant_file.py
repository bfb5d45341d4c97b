"""Gemma 4 assistants: what the proposer asks of one, and which files are refused."""

from pathlib import Path
from typing import Any

import pytest
from ggufs import write_llama
from ggufs_gemma4 import write_assistant, write_gemma4

from specllama.engine.target_heads import fitting, survey
from specllama.errors import BadGguf, PairIncompatible
from specllama.models.assistant_file import check_target
from specllama.models.gguf import read_header
from specllama.models.library import single
from specllama.models.memory import estimate_head, kv_bytes


def test_an_assistant_is_found_beside_its_target(tmp_path: Path) -> None:
    target = read_header(write_gemma4(tmp_path / "target.gguf"))
    head = write_assistant(tmp_path / "head.gguf")
    assert {way.name: way.available for way in survey(target, [str(head)])}["mtp"]
    assert list(fitting(target, [single(target.path), single(head)])) == ["mtp"]
    assert estimate_head(read_header(head), target, n_ctx=4096).kv == 0 < kv_bytes(target, 4096)


OWN = "gemma4-assistant."


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({OWN + "embedding_length_out": 96}, "hidden states of width 96"),
        (
            {OWN + "attention.key_length": 64, OWN + "rope.dimension_count": 64},
            "1 keys of width 64",
        ),
        ({OWN + "attention.value_length_swa": 32}, "layer 0 reads"),
        ({OWN + "attention.head_count_kv": [4, 2, 1]}, "layer 0 reads 4 keys"),
        ({OWN + "attention.head_count_kv": [2, 2, 2]}, "layer 2 reads 2 keys"),
        ({"tokenizer.ggml.tokens": [f"<{i}>" for i in range(332)]}, "have another text"),
    ],
)
def test_one_of_another_target_is_refused(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    target = read_header(write_gemma4(tmp_path / "target.gguf"))
    head = read_header(write_assistant(tmp_path / "head.gguf", keys=keys))
    with pytest.raises(PairIncompatible, match="another target") as refused:
        check_target(head, target)
    assert words in refused.value.message


def test_a_target_must_have_what_it_looks_into(tmp_path: Path) -> None:
    head = read_header(write_assistant(tmp_path / "head.gguf"))
    check_target(head, read_header(write_gemma4(tmp_path / "own.gguf")))
    kept = (True, False, True, False, True, False)
    check_target(head, read_header(write_gemma4(tmp_path / "kept.gguf", pattern=kept, shared=2)))
    for target, words in (
        (write_gemma4(tmp_path / "last.gguf", pattern=(True, False, False)), "one with a window"),
        (write_llama(tmp_path / "l.gguf"), "llama"),
    ):
        with pytest.raises(PairIncompatible, match=words):
            check_target(head, read_header(target))


@pytest.mark.parametrize(
    "keys",
    [
        {OWN + "nextn_predict_layers": 1},
        {OWN + "attention.sliding_window_pattern": [False] * 3},
        {OWN + "block_count": 0},
        {OWN + "rope.dimension_count": 256},
        {OWN + "rope.dimension_count_swa": 7},
        {OWN + "rope.dimension_count_swa": 96},
        {OWN + "rope.dimension_count_swa": None},
    ],
)
def test_one_on_which_llama_cpp_would_abort_is_refused(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    target = read_header(write_gemma4(tmp_path / "target.gguf"))
    head = read_header(write_assistant(tmp_path / "head.gguf", keys=keys))
    with pytest.raises(BadGguf):
        check_target(head, target)
