"""The layouts of weights on a real file: chosen once, part of what texts are proved for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specllama.engine.engine import Engine
from specllama.engine.profiles import pair_key
from specllama.events import Finished
from specllama.models.quantization import prepare, run
from specllama.models.refs import bundled
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

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


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.mark.parametrize("kind", ["q4_0", "q4_k_s", "iq4_nl", "q8_0"])
def test_the_layout_that_the_types_choose_is_the_exact_one(files: Path, kind: str) -> None:
    """The table in the rule is compared with what this processor computes."""
    path = files / f"tiny-{kind}.gguf"
    run(prepare(bundled("tiny-target"), path, kind, requantize=True, pure=True, threads=1))
    rows: dict[bool, int] = {}
    for repack in ("on", "off"):
        with load(path, repack=repack) as engine:
            assert engine.measure()
            rows[engine.info.target.repacked] = engine.info.exact_rows
    with load(path, kernels="off") as engine:
        taken = engine.info.target.repacked
    assert rows[taken] == max(rows.values())


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
        assert pair_key(one.info) != pair_key(other.info)
