"""Published EAGLE-3 heads: what is converted computes what the original weights compute."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggufs import bpe_tokens, write_llama
from head_lanes import begin_at, encode, feed
from published_heads import (
    LLAMA3,
    YARN,
    PublishedHead,
    eagle3_config,
    eagle3_weights,
    save_safetensors,
    write_repository,
)

from specllama.backend.heads.llama_heads import eagle_pool
from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_pool import open_pool
from specllama.errors import CannotLoad, ModelUnavailable, PairIncompatible
from specllama.models.conversion import convert, published_kind
from specllama.models.eagle3_file import read_facts
from specllama.models.gguf import read_header
from specllama.models.layer_inputs import read_draft_ids
from specllama.models.tensors import read_tensor
from specllama.settings.params import EngineOptions

OPTIONS = EngineOptions(threads=1, check_memory=False).resolved(on_gpu=False)
VOCAB = len(bpe_tokens()[0])
IDS = sorted(range(3, VOCAB, 3))
LAYERS = [0, 1, 3]

# name -> layout, changes of the configuration, arguments of the weights
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "speculators": ("speculators", {}, {"draft_ids": IDS}),
    "plain": ("plain", {"norm_before_residual": False}, {"draft_ids": IDS, "own_embedding": False}),
    "all tokens": ("plain", {}, {}),
    "padded": ("speculators", {}, {"padding": 4}),
    "norm before the fusion": ("speculators", {"norm_before_fc": True}, {"draft_ids": IDS}),
    "wide heads": ("speculators", {"head_dim": 32}, {"draft_ids": IDS}),
    "longer positions": ("speculators", {"rope_scaling": LLAMA3}, {"draft_ids": IDS}),
    "positions in between": ("speculators", {"rope_scaling": YARN}, {"draft_ids": IDS}),
    "half precision": ("plain", {}, {"draft_ids": IDS, "seed": 9}),
}


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("target") / "target.gguf", blocks=4)


@pytest.fixture
def target(target_file: Path) -> Iterator[CellLane]:
    model = LlamaModel(target_file)
    yield open_pool(
        model, n_ctx=256, max_rows=8, threads=1, options=OPTIONS, flash=OPTIONS.flash_attn
    ).open()
    model.close()


def repository(
    folder: Path, layout: str = "speculators", dtype: str = "F32", **changes: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    arguments = changes.pop("arguments", {"draft_ids": IDS})
    config = eagle3_config(layout, **{"eagle_aux_hidden_state_layer_ids": LAYERS, **changes})
    weights = eagle3_weights(config, vocab=VOCAB, **arguments)
    write_repository(folder, config, weights, dtype=dtype)
    return config, weights


@pytest.mark.parametrize("kind", HEADS)
def test_logits_are_those_of_the_original(
    kind: str, target: CellLane, target_file: Path, tmp_path: Path
) -> None:
    layout, changes, arguments = HEADS[kind]
    half = kind == "half precision"
    config, weights = repository(
        tmp_path / "head", layout, "BF16" if half else "F32", arguments=arguments, **changes
    )
    path, header = tmp_path / "head.gguf", read_header(target_file)
    convert(tmp_path / "head", path, header, "f32")
    facts = read_facts(read_header(path))
    assert facts.layers == tuple(LAYERS)
    target.capture(facts.layers)
    model = LlamaModel(path, head=True)
    context = eagle_pool(model, target.pool, facts, threads=1)  # type: ignore[arg-type]
    reference = PublishedHead(config, weights, read_tensor(header, "token_embd.weight"), VOCAB)
    text = [int(t) for t in np.random.default_rng(1).integers(3, VOCAB, 120)]
    target.forward(text[:-1], outputs="none")
    features = target.hidden.rows(0, len(text) - 1)
    assert features is not None
    states, fused = reference.fuse(features), context.open()
    near = 0.05 if half else 1e-2
    assert np.abs(encode(fused, features) - states).max() < near
    begin_at(fused, 1)  # rotations know differences only
    row, own = feed(fused, text[1:], encode(fused, features))
    for token in (7, 9, 200):
        logits, after = reference.run(text[1:], states)
        said = np.isfinite(logits[-1])
        assert (np.isfinite(row) == said).all()
        assert np.abs(row[said] - logits[-1][said]).max() < near * np.abs(logits[-1][said]).max()
        text, states = [*text, token], np.concatenate((states, after[-1:]))
        row, own = feed(fused, [token], own[None])
    context.close()
    model.close()


def test_what_is_written(target_file: Path, tmp_path: Path) -> None:
    header = read_header(target_file)
    repository(tmp_path / "head", "plain", eagle_aux_hidden_state_layer_ids=None)
    sizes = {}
    for kind in ("f32", "f16", "q8_0"):
        path = tmp_path / f"{kind}.gguf"
        convert(tmp_path / "head", path, header, kind)
        head = read_header(path)
        sizes[kind] = head.tensor_bytes
        assert head.token_bytes == header.token_bytes
        assert {k for k in header.kinds if k.startswith("tokenizer.")} <= set(head.kinds)
        assert head.chat_template == header.chat_template
        assert read_draft_ids(head).tolist() == IDS
        assert read_facts(head).layers == (2, 2, 1)  # of four layers
        assert {head.by_name[f"blk.0.{n}.weight"].type for n in ("attn_norm", "ffn_norm")} == {
            "F32"
        }
        assert head.by_name["fc.weight"].type == kind.upper()
    assert sizes["q8_0"] < 0.6 * sizes["f16"] < 0.4 * sizes["f32"]


def test_layers_in_the_words_of_other_trainers(target_file: Path, tmp_path: Path) -> None:
    config, weights = repository(tmp_path / "a", "plain")
    config["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": config.pop("eagle_aux_hidden_state_layer_ids")
    }
    write_repository(tmp_path / "a", config, weights)
    convert(tmp_path / "a", tmp_path / "a.gguf", read_header(target_file), "f16")
    assert read_facts(read_header(tmp_path / "a.gguf")).layers == tuple(LAYERS)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "layers": ({"num_hidden_layers": 2}, "2 layers"),
    "read layers": ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2, 3]}, "takes 3"),
    "words for layers": ({"eagle_aux_hidden_state_layer_ids": "all"}, "takes 3"),
    "type": ({"model_type": "qwen3"}, "that of qwen3 models"),
    "activation": ({"hidden_act": "gelu"}, "'gelu'"),
    "positions": ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "'longrope'"),
    "attention": ({"rope_scaling": {**YARN, "attention_factor": 2.0}}, "attention_factor is 2.0"),
    "rounding": ({"rope_scaling": {**YARN, "truncate": False}}, "does not round"),
    "a number": ({"intermediate_size": "many"}, "intermediate_size is 'many'"),
    "odd heads": ({"num_key_value_heads": 3}, "3 of keys"),
    "a shape": ({"intermediate_size": 80}, "has the shape [96, 64]"),
    "a norm without its tensor": ({"norm_before_fc": True}, "disagree"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_could_not_run_is_named(
    case: str, target_file: Path, tmp_path: Path
) -> None:
    changes, words = REFUSED[case]
    _, weights = repository(tmp_path / "head")
    write_repository(tmp_path / "head", eagle3_config("speculators", **changes), weights)
    with pytest.raises(CannotLoad, match="cannot be converted") as refused:
        convert(tmp_path / "head", tmp_path / "out.gguf", read_header(target_file), "f16")
    assert words in refused.value.message
    assert not (tmp_path / "out.gguf").exists()


def test_tensors_without_a_place_are_named(target_file: Path, tmp_path: Path) -> None:
    header = read_header(target_file)
    config, weights = repository(tmp_path / "head")
    for name in (
        "layers.0.self_attn.q_norm.weight",
        "layers.0.self_attn.q_proj.bias",
        "layers.1.mlp.up_proj.weight",
        "fc_norm.0.weight",
        "mask_hidden",
    ):
        write_repository(tmp_path / "head", config, {**weights, name: np.zeros(64, np.float32)})
        with pytest.raises(CannotLoad, match="no place for its tensor") as refused:
            convert(tmp_path / "head", tmp_path / "out.gguf", header, "f16")
        assert name in refused.value.message
    for name in ("fc.weight", "norm.weight", "layers.0.mlp.up_proj.weight", "lm_head.weight"):
        fewer = {k: v for k, v in weights.items() if k != name}
        write_repository(tmp_path / "head", config, fewer)
        with pytest.raises(CannotLoad, match=r"no tensor for|no output matrix"):
            convert(tmp_path / "head", tmp_path / "out.gguf", header, "f16")
    # of training, or kept for other programs
    unused = {"verifier_norm.weight": np.ones(64, np.float32)}
    write_repository(tmp_path / "head", config, {**weights, **unused})
    convert(tmp_path / "head", tmp_path / "out.gguf", header, "f16")


def test_a_head_of_another_target_is_refused(target_file: Path, tmp_path: Path) -> None:
    header = read_header(target_file)
    deep = {"eagle_aux_hidden_state_layer_ids": [2, 9, 15]}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"target_width": 128}, "of width 128"),
        ({}, {"draft_ids": [*IDS, VOCAB]}, "does not name"),
        ({}, {"draft_ids": [*IDS, 3]}, "does not name"),
        (deep, {"draft_ids": IDS}, "layer 9"),
        ({}, {"padding": -40}, "its target"),
        ({"hidden_size": 32}, {"draft_ids": IDS, "own_embedding": False}, "borrows"),
    ]
    for i, (changes, arguments, words) in enumerate(cases):
        repository(tmp_path / f"h{i}", arguments=arguments, **changes)
        with pytest.raises(PairIncompatible, match=words):
            convert(tmp_path / f"h{i}", tmp_path / "out.gguf", header, "q8_0")
        assert not (tmp_path / "out.gguf").exists()


def test_what_is_no_eagle3_repository(target_file: Path, tmp_path: Path) -> None:
    header, out = read_header(target_file), tmp_path / "out.gguf"
    assert published_kind({"num_hidden_layers": 1, "draft_vocab_size": 32000}) == "eagle3"
    assert published_kind({"architectures": ["LlamaForCausalLMEagle3"]}) == "eagle3"
    assert published_kind({"architectures": "LlamaForCausalLM"}) == ""
    folder = tmp_path / "repository"
    folder.mkdir()
    with pytest.raises(ModelUnavailable, match=r"config\.json"):
        convert(folder, out, header, "f16")
    for text in ("{", "[]", '{"architectures": ["LlamaForCausalLM"]}',
                 '{"speculators_model_type": "eagle"}'):  # fmt: skip
        (folder / "config.json").write_text(text)
        with pytest.raises(CannotLoad):
            convert(folder, out, header, "f16")
    (folder / "config.json").write_text(json.dumps(eagle3_config("plain")))
    with pytest.raises(ModelUnavailable, match="safetensors"):
        convert(folder, out, header, "f16")
    save_safetensors(folder / "model.safetensors", {"t2d": np.ones(3, bool)})
    with pytest.raises(CannotLoad, match="no tensor"):
        convert(folder, out, header, "f16")
