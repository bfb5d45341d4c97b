"""Published DFlash, DFlash2 and DSpark drafters: converted they are the files that llama.cpp runs.

What such a file computes is compared with NumPy elsewhere; here it is taken apart, published, and
must come back tensor by tensor and fact by fact.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dflash_files import MASK, write_dflash
from ggufs import bpe_tokens, write_llama
from ggufs_nextn import write_nextn
from published_heads import write_repository

from specllama.engine.engine import Engine
from specllama.errors import CannotLoad, PairIncompatible
from specllama.models.conversion import convert
from specllama.models.dflash_file import IN_LAYER, TOP, read_facts
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.layer_inputs import read_draft_ids
from specllama.models.tensors import read_bytes, read_tensor
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

VOCAB = len(bpe_tokens()[0])
IDS = sorted(range(3, VOCAB, 2))
KINDS: dict[str, dict[str, Any]] = {
    "borrows": {},
    "own matrices": {"own_embedding": True, "own_output": True},
    "draft vocabulary": {"draft_ids": IDS},
    "causal": {"keys": {"dflash.attention.causal": True}},
    "anchored with a Markov head": {"kind": "dspark"},
    "a Markov head behind the masks": {
        "kind": "dspark",
        "keys": {"dflash.sample_from_anchor": False},
    },
    "a Markov head over few tokens": {"kind": "dspark", "draft_ids": IDS},
    "a Markov head alone": {"kind": "dspark", "confidence": False},
    "a selector": {"kind": "dflash2"},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("target") / "target.gguf", blocks=4)


def values(header: GgufHeader, name: str) -> Any:
    if name == "d2t":
        ids = read_draft_ids(header)
        return ids - np.arange(len(ids))
    if name.endswith("conv_base"):  # three-dimensional
        info = header.by_name[name]
        data = np.fromfile(
            header.path, "<f4", info.n_elements, offset=header.data_offset + info.offset
        )
        return data.reshape(info.shape[::-1])
    return read_tensor(header, name)


def weights(header: GgufHeader) -> dict[str, Any]:
    """The tensors of a drafter under the names of its authors."""
    top = {ours: name for name, ours in TOP.items()}
    inside = {ours: name for name, ours in IN_LAYER.items()}
    found = {}
    for name in header.by_name:
        if name.startswith("blk."):
            _, block, rest = name.split(".", 2)
            found[f"layers.{block}.{inside[rest]}"] = values(header, name)
        else:
            found[top.get(name, name)] = values(header, name)
    return found


def config(header: GgufHeader, layout: str) -> dict[str, Any]:
    """The configuration of a drafter, as the ``speculators`` format or its authors write it."""
    facts = read_facts(header)
    layer = {
        "model_type": "qwen3",
        "hidden_size": header.embedding_length,
        "intermediate_size": header.feed_forward_length,
        "num_hidden_layers": header.block_count,
        "num_attention_heads": header.head_count,
        "num_key_value_heads": header.head_count_kv,
        "head_dim": header.key_length,
        "rms_norm_eps": 1e-5,
    }
    if layout == "speculators":
        return {
            "speculators_model_type": facts.kind,
            "transformer_layer_config": layer,
            "block_size": facts.block,
            "aux_hidden_state_layer_ids": list(facts.layers),
            "mask_token_id": facts.mask,
            "sample_from_anchor": facts.anchored,
            "causal": facts.causal,
        }
    inner: dict[str, Any] = {
        "mask_token_id": facts.mask,
        "target_layer_ids": [layer - 1 for layer in facts.layers],
        "causal": facts.causal,
    }
    for key in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        if number := header.integer(f"dflash.{key}"):
            inner[key] = number
    anchor = {"sample_from_anchor": facts.anchored} if facts.kind == "dspark" else {}
    kind = {"architectures": ["DSparkDraftModel" if facts.kind == "dspark" else "DFlashDraftModel"]}
    return {**kind, **layer, **anchor, "block_size": facts.block, "dflash_config": inner}


@pytest.mark.parametrize("layout", ["speculators", "authors"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back_as_it_was(kind: str, layout: str, target: Path, tmp_path: Path) -> None:
    arguments = {"layers": (1, 3), **KINDS[kind]}
    before = read_header(write_dflash(tmp_path / "before.gguf", target, **arguments))
    said = config(before, layout)
    if kind == "a selector" and layout == "speculators":
        said |= config(before, "authors")["dflash_config"] | {"target_layer_ids": None}
    folder = write_repository(tmp_path / "published", said, weights(before))
    convert(folder, tmp_path / "after.gguf", read_header(target), "f32")
    after = read_header(tmp_path / "after.gguf")
    assert read_facts(after) == read_facts(before)
    assert set(after.by_name) == set(before.by_name)
    for name in before.by_name:
        if not name.endswith("conv_base"):
            assert np.array_equal(read_bytes(after, name), read_bytes(before, name)), name
        assert np.array_equal(values(after, name), values(before, name)), name
    for key in ("rope.freq_base", "attention.layer_norm_rms_epsilon"):
        assert after.number(f"dflash.{key}") == pytest.approx(before.number(f"dflash.{key}"))
    assert after.token_bytes == before.token_bytes


def test_one_that_was_published_drafts(target: Path, tmp_path: Path) -> None:
    before = read_header(write_dflash(tmp_path / "before.gguf", target, kind="dspark"))
    folder = write_repository(
        tmp_path / "published", config(before, "speculators"), weights(before)
    )
    convert(folder, tmp_path / "after.gguf", read_header(target), "f32")
    replies = []
    for head in ("before", "after"):
        options = EngineOptions(
            threads=1, n_ctx=256, check_memory=False, heads=(str(tmp_path / f"{head}.gguf"),)
        )
        with Engine.load(target, None, options) as engine:
            for proposer in ("none", "dflash"):
                params = GenerateParams(
                    sampling=SamplingParams(temperature=0.8),
                    proposer=proposer,
                    window="fixed",
                    max_tokens=24,
                    seed=1,
                )
                *_, done = engine.generate([5, 6, 7, 8], params)
                replies.append((done.token_ids, done.draft_n_accepted))
    assert replies[:2] == replies[2:]
    assert replies[0][0] == replies[1][0]


def test_targets_with_positions_in_parts(tmp_path: Path) -> None:
    target = write_nextn(tmp_path / "target.gguf", nextn=0)
    before = read_header(write_dflash(tmp_path / "before.gguf", target))
    folder = write_repository(tmp_path / "p", config(before, "authors"), weights(before))
    convert(folder, tmp_path / "after.gguf", read_header(target), "q8_0")
    sections = read_header(tmp_path / "after.gguf").array("dflash.rope.dimension_sections")
    assert sections == [before.key_length // 2, 0, 0, 0]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "windows": ({"use_sliding_window": True, "sliding_window": 64}, "window"),
    "windows of some": ({"layer_types": ["full_attention", "sliding_attention"]}, "window"),
    "neighbours": ({"rope_is_neox_style": False}, "neighbouring"),
    "part of a head": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "part of each head"),
    "a Markov head of another kind": ({"markov_head_type": "gated"}, "'gated'"),
    "a scale": ({"dflash_config": {"output_multiplier": 0.5}}, "output_multiplier"),
    "no layers read": ({"dflash_config": {"mask_token_id": MASK}}, "reads the layers None"),
    "no mask": ({"dflash_config": {"target_layer_ids": [0]}}, "mask token is None"),
    "no block": ({"block_size": None}, "block_size is None"),
    "an anchor that guesses": ({"sample_from_anchor": True}, "DSpark only"),
    "far too many layers": ({"num_hidden_layers": 1 << 30}, "1,073,741,824 layers"),
    "no list of layers": ({"layer_types": 5, "hidden_size": []}, "hidden_size is []"),
    "layers of another model": ({"model_type": "gemma4"}, "that of gemma4 models"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_was_not_tried_is_named(case: str, target: Path, tmp_path: Path) -> None:
    changes, words = REFUSED[case]
    before = read_header(write_dflash(tmp_path / "before.gguf", target, layers=(1,)))
    folder = write_repository(
        tmp_path / "p", {**config(before, "authors"), **changes}, weights(before)
    )
    with pytest.raises(CannotLoad, match="cannot be converted") as refused:
        convert(folder, tmp_path / "after.gguf", read_header(target), "f16")
    assert words in refused.value.message
    assert not (tmp_path / "after.gguf").exists()


def test_a_drafter_of_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    before = read_header(write_dflash(tmp_path / "before.gguf", target))
    said, tensors = config(before, "authors"), weights(before)
    wide = read_header(write_llama(tmp_path / "wide.gguf", width=128, blocks=4))
    folder = write_repository(tmp_path / "p", said, tensors)
    with pytest.raises(PairIncompatible, match="are 128 wide"):
        convert(folder, tmp_path / "after.gguf", wide, "f16")
    flat = read_header(write_llama(tmp_path / "flat.gguf", blocks=1))
    with pytest.raises(PairIncompatible, match="layer 2"):
        convert(folder, tmp_path / "after.gguf", flat, "f16")
    assert not (tmp_path / "after.gguf").exists()
    flat_table = {**tensors, "markov_head.markov_w1.weight": np.zeros((), np.float32)}
    folder = write_repository(tmp_path / "p", said, flat_table)
    with pytest.raises(CannotLoad, match=r"markov_w1.weight has the shape \[\]"):
        convert(folder, tmp_path / "after.gguf", read_header(target), "f16")
    more = {**tensors, "layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    folder = write_repository(tmp_path / "p", said, more)
    with pytest.raises(CannotLoad, match=r"q_proj\.bias"):
        convert(folder, tmp_path / "after.gguf", read_header(target), "f16")
