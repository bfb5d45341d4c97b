"""Whether llama.cpp can run a file's NextN blocks, told from the header before it would abort."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ggufs_nextn import ARCHITECTURES, CHAINED, write_nextn

from specllama.errors import PairIncompatible
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.gguf_format import TensorInfo
from specllama.models.nextn_blocks import GRAPHS, nextn_blocks, trunk_blocks, why_not
from specllama.models.nextn_file import check_target


@pytest.fixture(scope="module", params=ARCHITECTURES)
def header(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> GgufHeader:
    path = tmp_path_factory.mktemp("nextn") / f"{request.param}.gguf"
    nextn = 2 if request.param in CHAINED else 1
    return read_header(write_nextn(path, request.param, nextn=nextn))


def changed(
    header: GgufHeader, keys: Mapping[str, Any] | None = None, **tensors: TensorInfo | None
) -> GgufHeader:
    """Other numbers in the metadata; tensors replaced, or without them (None)."""
    own = {header.own(key): value for key, value in (keys or {}).items()}
    kept = [tensors.get(t.name, t) for t in header.tensors]
    return replace(
        header,
        metadata={**header.metadata, **own},
        tensors=tuple(tensor for tensor in kept if tensor is not None),
    )


def test_a_whole_file_can_draft(header: GgufHeader) -> None:
    assert why_not(header) == ""
    assert nextn_blocks(header) == (2 if header.architecture in CHAINED else 1)


def test_nothing_may_be_missing(header: GgufHeader) -> None:
    """llama.cpp would not load the file, or end the process when it builds the graph."""
    graph = GRAPHS[header.architecture]
    optional = {"nextn.shared_head_norm", "attn_q_norm", "attn_k_norm", "attn_sinks", "exp_probs_b"}
    optional |= {"attn_gate", "indexer"} | {"ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp"}
    missed = set()
    for block in range(trunk_blocks(header), header.block_count):
        for tensor in header.tensors:
            prefix, name = f"blk.{block}.", tensor.name.removeprefix(f"blk.{block}.")
            if not tensor.name.startswith(prefix):
                continue
            reason = why_not(changed(header, **{tensor.name: None}))
            assert reason in ("", f"its NextN layer lacks the tensor {tensor.name}")
            if reason:
                missed.add(name)
            else:
                assert any(name.startswith(one) for one in optional), name
    needed = {*graph.attention, *graph.nets[0]} if len(graph.nets) == 1 else {*graph.attention}
    for name in needed:
        names = {one if one.endswith(".bias") else one + ".weight" for one in name.split("|")}
        assert names & missed, name


def test_one_block_or_a_chain(header: GgufHeader) -> None:
    stacked = why_not(changed(header, {"nextn_predict_layers": 2}))
    if header.architecture in CHAINED:
        assert stacked == ""
    else:
        assert "llama.cpp runs one NextN layer" in stacked


def test_a_joint_matrix_of_another_width(header: GgufHeader) -> None:
    name = f"blk.{trunk_blocks(header)}.nextn.eh_proj.weight"
    narrow = replace(header.by_name[name], shape=(64, 64))
    assert "joins a width of 32, the model's is 64" in why_not(changed(header, **{name: narrow}))


@pytest.mark.parametrize(
    ("arch", "keys", "why"),
    [
        ("qwen35", {"nextn_predict_layers": 0}, "no NextN layers"),
        ("qwen35", {"attention.value_length": 16}, "differ in width"),
        ("deepseek2", {"attention.temperature_scale": 0.1}, "has a temperature"),
        ("deepseek4", {"attention.compress_ratios": 4}, "compresses its cache"),
    ],
)
def test_what_a_graph_cannot_take(
    tmp_path: Path, arch: str, keys: Mapping[str, Any], why: str
) -> None:
    header = read_header(write_nextn(tmp_path / "model.gguf", arch))
    arrays = {name: a for name, a in header.arrays.items() if not name.endswith(tuple(keys))}
    assert why in why_not(changed(replace(header, arrays=arrays), keys))


def test_positions_with_sections(tmp_path: Path) -> None:
    header = read_header(write_nextn(tmp_path / "model.gguf", "glm4moe"))
    images = read_header(write_nextn(tmp_path / "images.gguf", "qwen35"))
    sections = images.arrays["qwen35.rope.dimension_sections"]
    arrays = {**header.arrays, "glm4moe.rope.dimension_sections": sections}
    assert "sections" in why_not(replace(header, path=images.path, arrays=arrays))
    assert why_not(images) == ""


def test_other_architectures(tmp_path: Path) -> None:
    header = read_header(write_nextn(tmp_path / "model.gguf", "glm4moe"))
    other = {key.replace("glm4moe", "glm4"): value for key, value in header.metadata.items()}
    renamed = replace(header, metadata={**other, "general.architecture": "glm4"})
    assert why_not(renamed) == "llama.cpp does not run the NextN layers of glm4 models"


@pytest.mark.parametrize(
    ("head", "why"),
    [
        ({}, ""),
        ({"arch": "qwen3next"}, "for qwen3next"),
        ({"width": 128}, "it is for 128"),
        ({"nextn": 2}, "cannot draft: llama.cpp runs one"),
    ],
)
def test_a_file_of_blocks_belongs_to_one_target(
    tmp_path: Path, head: Mapping[str, Any], why: str
) -> None:
    target = read_header(write_nextn(tmp_path / "target.gguf", nextn=0))
    blocks = read_header(write_nextn(tmp_path / "mtp.gguf", trunk=False, **head))
    if not why:
        check_target(blocks, target)
        return
    with pytest.raises(PairIncompatible, match=why):
        check_target(blocks, target)
