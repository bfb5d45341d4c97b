"""The bundled pair as Hugging Face folders, which other engines are started over."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from engine_ways import WAYS, Place, Way
from export_hf import by_halves, export

from specllama.models.checkpoint import read_safetensors
from specllama.models.gguf import read_header
from specllama.models.refs import resolve_pair
from specllama.models.tensors import read_tensor

Floats = npt.NDArray[np.float64]


def turned(row: Floats, angles: Floats, first: list[int], second: list[int]) -> Floats:
    """A head's values, each pair (first[i], second[i]) turned by an angle."""
    a, b = row[first], row[second]
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles),
                           a * np.sin(angles) + b * np.cos(angles)])  # fmt: skip


def test_turning_halves_after_the_export_is_turning_neighbours_before_it() -> None:
    rng = np.random.default_rng(0)
    width = 8
    query, key = rng.normal(size=(2, 2 * width, 5)).astype(np.float32)  # [two heads, embedding]
    angles = rng.uniform(size=(2, width // 2))  # of two positions
    even, odd = list(range(0, width, 2)), list(range(1, width, 2))
    low, high = list(range(width // 2)), list(range(width // 2, width))
    x = rng.normal(size=5)
    for head in range(2):
        rows = slice(head * width, (head + 1) * width)
        before = turned(query[rows] @ x, angles[0], even, odd) @ turned(
            key[rows] @ x, angles[1], even, odd
        )
        q, k = by_halves(query, 2)[rows], by_halves(key, 2)[rows]
        after = turned(q @ x, angles[0], low, high) @ turned(k @ x, angles[1], low, high)
        assert after == pytest.approx(before)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The bundled draft model, and the folder it was written into."""
    source = resolve_pair("tiny")[1]
    assert source is not None
    return source, export(source, tmp_path_factory.mktemp("hf"))


def test_every_tensor_is_written_once(draft: tuple[Path, Path]) -> None:
    source, folder = draft
    written = read_safetensors(folder / "model.safetensors")
    model = read_header(source)
    config = json.loads((folder / "config.json").read_text())
    assert len(written) == model.n_tensors
    assert config["tie_word_embeddings"] is True  # it has no output matrix of its own
    assert written["model.embed_tokens.weight"].shape == (4096, config["hidden_size"])
    down = np.asarray(written["model.layers.1.mlp.down_proj.weight"])
    assert np.array_equal(down, read_tensor(model, "blk.1.ffn_down.weight"))


def test_the_vocabulary_keeps_its_ids(draft: tuple[Path, Path]) -> None:
    source, folder = draft
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    said = json.loads((folder / "tokenizer_config.json").read_text())
    tokens = [text.decode("utf-8", "replace") for text in read_header(source).token_bytes]
    assert [tokenizer["model"]["vocab"][token] for token in tokens] == list(range(len(tokens)))
    assert {t["content"] for t in tokenizer["added_tokens"]} >= {"<|im_start|>", "<|im_end|>"}
    assert said["eos_token"] == "<|im_end|>"
    assert said["chat_template"] == read_header(source).chat_template


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    from ggufs import write_mamba

    with pytest.raises(ValueError, match="mamba"):
        export(write_mamba(tmp_path / "mamba.gguf"), tmp_path / "out")


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def test_a_way_names_its_models_and_its_port(
    way: Way, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / (way.program or "llama-server")
    program.parent.mkdir(exist_ok=True)
    program.touch()
    monkeypatch.setenv(way.variable, str(tmp_path if way.program else program))
    place = Place(Path("/t.gguf"), Path("/d.gguf"), Path("/hf"))
    command = way.command(place, 9709)
    assert command[0] == str(program)
    assert "9709" in command
    assert ("/t.gguf" in command) == (way.program == "")
    assert not any("{hf}" in argument for argument in command)
    for flag, value in pairwise(command):
        if flag == "--speculative-config":
            assert json.loads(value)["num_speculative_tokens"] == 4
