"""Layers left out of a loaded model, and the choice of the best ones, on real files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import ggufs
import numpy as np
import pytest

from specllama.backend.lane import CellLane
from specllama.backend.layer_skip import SkippingContext
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_pool import open_pool
from specllama.bench.layer_choice import choose_layers, write_texts
from specllama.bench.prompts import load_prompts
from specllama.cli import invoke
from specllama.engine.engine import Engine
from specllama.engine.profiles import measured_passes
from specllama.errors import ContextFull, EngineError, UnsupportedModel
from specllama.models import pruned
from specllama.models.gguf import read_header
from specllama.settings.params import EngineOptions

pytestmark = pytest.mark.e2e

OPTIONS = EngineOptions(threads=1, n_ctx=512).resolved(on_gpu=False)
BLOCKS = 5


def open_context(path: Path) -> tuple[LlamaModel, CellLane]:
    model = LlamaModel(path)
    context = open_pool(model, n_ctx=512, max_rows=8, threads=1, options=OPTIONS, flash="on").open()
    return model, context


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return ggufs.write_llama(tmp_path / "m.gguf", blocks=BLOCKS)


def faint_tokens(name: str, values: np.ndarray) -> np.ndarray:
    """Embeddings that do not drown what the layers say, scaled as in Gemma or not."""
    return values * 0.02 if name == "token_embd.weight" else values


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
@pytest.mark.parametrize("drop", [(2,), (0,), (4,), (1, 3), (0, 1, 4), (1, 2, 3), (0, 1, 2, 3)])
def test_a_layer_left_out_is_a_layer_cut_out(
    drop: tuple[int, ...], architecture: str, tmp_path: Path
) -> None:
    sizes = {f"{architecture}.attention.{kind}_length": 32 for kind in ("key", "value")}
    target = ggufs.write_llama(
        tmp_path / "m.gguf",
        blocks=BLOCKS,
        architecture=architecture,
        tied=architecture == "gemma",
        keys=sizes,
        weights=faint_tokens,
    )
    text = [5 + (i * 37) % 300 for i in range(180)]
    prompt, reply = text[:100], text[100:]
    model, context = open_context(target)
    skipping = SkippingContext(context.pool, n_ctx=256)
    found = skipping.choices(prompt, reply, drop)
    whole = skipping.choices(prompt, reply, ())
    skipping.close()
    model.close()
    cut = pruned.make_draft(read_header(target), drop, into=tmp_path / "made", threads=1)
    model, context = open_context(cut.path)
    context.forward(prompt[:-1], outputs="none")
    rows = [
        int(context.forward([token], outputs="last")[0].argmax())
        for token in [prompt[-1], *reply[:-1]]
    ]
    model.close()
    assert (found == rows).mean() > 0.97  # near-ties of a random model
    assert (found == whole).mean() < 0.9, "the layers do something"


def test_what_cannot_be_asked(target: Path) -> None:
    model, context = open_context(target)
    skipping = SkippingContext(context.pool, n_ctx=256)
    with pytest.raises(ContextFull, match="256"):
        skipping.choices([5] * 200, [6] * 100, (1,))
    with pytest.raises(EngineError, match="a prompt"):
        skipping.choices([], [6], (1,))
    with pytest.raises(EngineError, match="vocabulary"):
        skipping.choices([10**6], [6], (1,))
    with pytest.raises(EngineError, match="told apart"):
        skipping.choices([5, 6, 7], [8, 9], (BLOCKS + 3,))
    assert len(skipping.choices([5, 6, 7], [8, 9], (1,))) == 2
    skipping.close()
    skipping.close()
    with pytest.raises(EngineError, match="closed"):
        skipping.choices([5], [6], (1,))
    model.close()


def test_an_interrupt_in_a_pass_is_not_lost(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, context = open_context(target)
    skipping = SkippingContext(context.pool, n_ctx=256)

    def interrupted(tensor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(skipping, "_put_back", interrupted)
        with pytest.raises(KeyboardInterrupt):
            skipping.choices([5, 6, 7], [8, 9], (1,))
    assert len(skipping.choices([5, 6, 7], [8, 9], (1,))) == 2
    skipping.close()
    model.close()


def idle_layers(name: str, values: np.ndarray) -> np.ndarray:
    """Layers 1 and 3 add nothing to the residual stream."""
    idle = name.startswith(("blk.1.", "blk.3.")) and name.endswith(
        ("attn_output.weight", "ffn_down.weight")
    )
    return np.zeros_like(values) if idle else values


def test_layers_that_do_nothing_are_dropped(tmp_path: Path) -> None:
    path = ggufs.write_llama(tmp_path / "idle.gguf", blocks=BLOCKS, weights=idle_layers)
    header = read_header(path)
    with Engine.load(path, None, EngineOptions(threads=1, n_ctx=512)) as engine:
        prompts = load_prompts()[:8]
        choice, again = (
            choose_layers(engine, header, prompts, passes=[0.0, *[1.0] * 9], seconds=300)
            for _ in range(2)
        )
    assert choice.best.drop == (1, 3)
    assert choice.best.survival[:4] == (1.0,) * 4
    assert choice.best.cost == pytest.approx(pruned.draft_work(header, (1, 3)))
    assert choice.best.pays
    assert "layers 1,3 of 0-4" in choice.words
    assert "it pays here" in choice.words
    assert choice.complete
    assert again == choice


def test_time_that_is_over_still_gives_a_choice(target: Path) -> None:
    with Engine.load(target, None, EngineOptions(threads=1, n_ctx=512)) as engine:
        choice = choose_layers(engine, read_header(target), load_prompts()[:2], seconds=1e-6)
    assert not choice.complete
    assert choice.best.drop == pruned.middle_half(BLOCKS)
    assert choice.checked == choice.positions > 0, "the only text serves for both"


def test_a_prompt_that_does_not_fit_is_passed_over(target: Path) -> None:
    prompts = load_prompts()[:3]
    with Engine.load(target, None, EngineOptions(threads=1, n_ctx=512)) as engine:
        lengths = [len(engine.encode(prompt.content)[0]) for prompt in prompts]
        texts = write_texts(engine, prompts)
    assert len(texts) == sum(length < 512 for length in lengths)


def test_a_target_of_one_layer(tmp_path: Path) -> None:
    path = ggufs.write_llama(tmp_path / "one.gguf", blocks=1)
    with (
        Engine.load(path, None, EngineOptions(threads=1, n_ctx=512)) as engine,
        pytest.raises(UnsupportedModel, match="1 layer"),
    ):
        choose_layers(engine, read_header(path), load_prompts()[:1])


def test_tune_measures_it_at_its_own_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = ggufs.write_llama(tmp_path / "idle.gguf", blocks=BLOCKS, weights=idle_layers)
    flags = ["-m", str(path), "--quick", "--max-tokens", "8", "--temperature", "0", "-t", "1"]
    assert invoke(["tune", *flags, "--json"]) == 0
    own = json.loads(capsys.readouterr().out)["self"]
    assert own["passes"] == "measured"
    assert own["pays"] is (own["speed"] > 1)
    assert len(own["survival"]) >= 4
    kept = pruned.stored_choice(read_header(path))
    assert kept is not None
    assert kept["drop"] == own["drop"]
    with Engine.load(path, None, EngineOptions(threads=1)) as engine:
        costs = measured_passes(engine.info, 9)
        other = dataclasses.replace(engine.info, threads=7)
    assert costs is not None
    assert len(costs) == 10
    assert costs[1] > 0
    assert measured_passes(other, 9) is None
    capsys.readouterr()
    assert invoke(["tune", *flags, "--no-save"]) == 0
    said = capsys.readouterr().out
    assert "drafting with its own layers (--proposer self)\nwithout layer" in said
    assert any(f"{word} here" in said for word in ("it pays", "cannot pay", "tried pays"))
