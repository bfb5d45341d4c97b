"""The layouts of weights on a real file: chosen once, part of what texts are proved for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specllama.engine import repacking
from specllama.engine.engine import Engine
from specllama.engine.profiles import PairKey
from specllama.events import Finished
from specllama.models.quantize import prepare, run
from specllama.models.refs import bundled
from specllama.settings.params import DRAFT_MAX, EngineOptions, GenerateParams, SamplingParams

pytestmark = pytest.mark.e2e


def load(target: Path | None = None, **options: Any) -> Engine:
    target, draft = target or bundled("tiny-target"), bundled("tiny-draft")
    return Engine.load(target, draft, EngineOptions(threads=1, n_ctx=512, **options))


def written(engine: Engine, temperature: float, proposer: str) -> tuple[int, ...]:
    engine.reset()
    sampling = SamplingParams(temperature=temperature)
    params = GenerateParams(max_tokens=40, seed=3, proposer=proposer, sampling=sampling)
    finished = list(engine.generate("Tell me of the river.", params))[-1]
    assert isinstance(finished, Finished)
    return finished.token_ids


def test_it_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repacking, "LEAST_BYTES", 0)
    measured = []
    speed = repacking.speed
    monkeypatch.setattr(
        "specllama.engine.gguf_models.speed", lambda *a: measured.append(1) or speed(*a)
    )
    with load() as first, load() as again:
        assert first.info.target.repacked is again.info.target.repacked
    assert len(measured) == 2  # one load of each layout


@pytest.fixture(scope="module")
def q4_k_m(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts") / "tiny-q4_k_m.gguf"
    run(prepare(bundled("tiny-target"), path, "q4_k_m", requantize=True, threads=1))
    return path


def test_a_file_that_is_exact_in_one_layout_is_loaded_in_it(
    q4_k_m: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On x86, Q4_K rounds wide passes where it is repacked."""
    exact = set()
    for repack in ("on", "off"):
        with load(q4_k_m, repack=repack) as engine:
            if engine.info.exact_rows > DRAFT_MAX:
                exact.add(engine.info.target.repacked)
    monkeypatch.setattr(repacking, "LEAST_BYTES", 0)
    with load(q4_k_m) as engine:
        assert not exact or engine.info.target.repacked in exact


@pytest.mark.parametrize("repack", ["on", "off"])
def test_drafts_change_no_text_in_either_layout(repack: str) -> None:
    with load(repack=repack) as engine:
        assert engine.info.target.repacked is (repack == "on")
        for temperature in (0.0, 0.8):
            ways = [written(engine, temperature, name) for name in ("none", "draft", "ngram")]
            # some processors compute wide passes otherwise where weights are repacked
            assert len(set(ways)) == 1 or not engine.info.exactness.startswith("bitwise")


def test_what_was_learnt_belongs_to_a_layout() -> None:
    with load(repack="on") as one, load(repack="off") as other:
        assert PairKey.of(one.info) != PairKey.of(other.info)
