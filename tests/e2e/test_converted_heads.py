"""The bundled EAGLE-3 head as it would be published, converted, and drafting again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from engines import proved
from published_heads import eagle3_config, write_repository

from specllama.bench.prompts import load_prompts
from specllama.cli import invoke
from specllama.engine.engine import Engine
from specllama.models.convert_eagle3 import IN_LAYER, TOP
from specllama.models.gguf import read_header
from specllama.models.layer_inputs import read_draft_ids, read_layers
from specllama.models.refs import resolve
from specllama.models.tensors import read_bytes, read_tensor
from specllama.settings.params import EngineOptions

pytestmark = pytest.mark.e2e

TARGET = resolve("tiny-target")
HEAD = TARGET.with_name("tiny-eagle3-q8_0.gguf")


def publish(folder: Path) -> Path:
    """The bundled head in the speculators format, its matrices as they are when read."""
    head = read_header(HEAD)
    names = TOP | {"layers.0." + name: "blk.0." + ours for name, ours in IN_LAYER.items()}
    published = {ours: name for name, ours in names.items()}
    weights = {}
    for name in head.by_name:
        if name == "d2t":
            ids = read_draft_ids(head)
            weights[name] = ids - np.arange(len(ids))
            continue
        values = read_tensor(head, name)
        if name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight"):
            heads = len(values) // head.key_length
            pairs = values.reshape(heads, -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        weights[published[name]] = values
    config = eagle3_config(
        "speculators",
        hidden_size=head.embedding_length,
        intermediate_size=head.feed_forward_length,
        num_attention_heads=head.head_count,
        num_key_value_heads=head.head_count_kv,
        head_dim=head.key_length,
        rms_norm_eps=head.number("eagle3.attention.layer_norm_rms_epsilon"),
        rope_theta=head.number("eagle3.rope.freq_base"),
        norm_before_residual=head.flag("eagle3.norm_before_residual") is True,
        eagle_aux_hidden_state_layer_ids=list(read_layers(head, 3)),
    )
    return write_repository(folder, config, weights)


def test_a_published_head_drafts_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECLLAMA_HOME", str(tmp_path / "home"))
    folder, out = publish(tmp_path / "repository"), tmp_path / "head.gguf"
    arguments = ["convert", str(folder), str(out), "--target", "tiny-target", "--json"]
    assert invoke(arguments) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["head"] == "eagle3"
    assert f"--head {out} --proposer eagle3" in told.err
    before, after = read_header(HEAD), read_header(out)
    assert set(before.by_name) == set(after.by_name)
    for name in before.by_name:  # packed from the same numbers
        assert np.array_equal(read_bytes(before, name), read_bytes(after, name)), name
    with Engine.load(TARGET, None, EngineOptions(threads=1, heads=(str(out),))) as engine:
        drafted, accepted = proved(engine, load_prompts()[:4], "eagle3", temperatures=(0.0, 0.8))
    assert accepted > 0.4 * drafted
