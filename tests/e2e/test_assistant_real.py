"""Gemma 4 assistants in llama.cpp, on random pairs that agree now and then."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggufs_gemma4 import NumpyGemma4, write_assistant, write_gemma4
from head_lanes import begin_at, feed

from specllama.backend.heads.llama_heads import AssistantLane, AssistantPool
from specllama.bench.prompts import load_prompts
from specllama.bench.proof import prove
from specllama.cli import invoke
from specllama.engine.engine import Engine
from specllama.errors import EngineError
from specllama.events import Finished
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

SHARED = {"pattern": (True, False, True, False, True, False), "shared": 2}
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {  # target, options, tolerance
    "plain": ({}, {}, 1e-3),
    "layers that share": (SHARED, {"flash_attn": "off"}, 1e-3),
    "window kept only": (SHARED, {"swa_full": False}, 1e-3),
    "8-bit cache": ({}, {"kv_type_k": "q8_0", "kv_type_v": "q8_0"}, 2e-2),
}


class Opened:
    def __init__(self, folder: Path, target: dict[str, Any], options: dict[str, Any]) -> None:
        self.target = write_gemma4(folder / "target.gguf", **target)
        self.head = write_assistant(folder / "head.gguf")
        settings = EngineOptions(threads=1, n_ctx=256, heads=(str(self.head),), **options)
        self.engine = Engine.load(self.target, None, settings)

    @property
    def look(self) -> AssistantLane:
        look = self.engine.drafters["mtp"]._lane  # type: ignore[attr-defined]
        assert isinstance(look, AssistantLane)
        return look

    def ask(self, prompt: str, proposer: str, **changes: Any) -> Finished:
        sampling = SamplingParams(temperature=changes.pop("temperature", 0.0), top_k=0)
        base = GenerateParams(sampling=sampling, ignore_eos=True, seed=3, max_tokens=48)
        params = base.replace(proposer=proposer, window="fixed", draft_max=4, **changes)
        *_, finished = self.engine.generate(prompt, params)
        assert isinstance(finished, Finished)
        return finished


@pytest.fixture(scope="module", params=LAYOUTS)
def opened(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Opened, float]]:
    target, options, tolerance = LAYOUTS[request.param]
    folder = tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(folder))
        pair = Opened(folder, target, options)
        with pair.engine:
            yield pair, tolerance


def test_it_computes_what_numpy_computes(opened: tuple[Opened, float]) -> None:
    pair, tolerance = opened
    lane: Any = pair.engine.target
    ids = (pair.engine.encode(load_prompts()[0].content)[0] * 9)[:120]
    numpy = NumpyGemma4(pair.target, pair.head)
    lane.rollback(0)
    lane.capture("nextn")
    lane.forward([*ids, 5, 6, 7], outputs="all" if lane.max_rows > 200 else "none")
    lane.rollback(len(ids))  # what is no longer there is not seen
    expected_logits, states = numpy.read(ids)
    state = lane.hidden.rows(len(ids) - 1, len(ids)).copy()
    assert np.abs(state[0] - states[-1]).max() < tolerance * np.abs(states[-1]).max()
    token = int(expected_logits[-1].argmax())
    for _ in range(4):
        begin_at(pair.look, len(ids))
        logits, own = feed(pair.look, [token], state)
        expected, after = numpy.guess(token, state[0], len(ids))
        assert np.abs(logits - expected).max() < tolerance * np.abs(expected).max()
        assert np.abs(own - after).max() < tolerance * np.abs(after).max()
        token, state = int(logits.argmax()), own[None]
    begin_at(pair.look, len(ids) - 1)
    with pytest.raises(EngineError, match="ends at"):
        feed(pair.look, [token], state)
    lane.capture("nothing")
    pair.engine.reset()


def test_the_text_is_that_of_plain_decoding(opened: tuple[Opened, float]) -> None:
    engine = opened[0].engine
    trees = ("lookahead",) if engine.target.max_leaves > 1 else ()
    cases = list(
        prove(
            engine,
            load_prompts()[:2],
            proposers=("mtp", "auto", *trees, "mtp"),
            temperatures=(0.0, 0.8),
            draft_max=(1, 4),
            max_tokens=40,
        )
    )
    assert [case for case in cases if not case.identical] == []
    assert all(case.law_holds for case in cases)
    mine = [case for case in cases if case.proposer == "mtp"]
    assert 0 < sum(case.accepted for case in mine) < sum(case.drafted for case in mine)


def test_a_second_turn_and_a_full_context(opened: tuple[Opened, float]) -> None:
    pair = opened[0]
    for temperature in (0.0, 0.8):
        said = {}
        for proposer in ("none", "mtp"):
            pair.engine.reset()
            first = pair.ask("def return", proposer, temperature=temperature)
            second = pair.ask("def return the" + first.text, proposer, temperature=temperature)
            third = pair.ask(
                "the model and", proposer, temperature=temperature, max_tokens=400, on_full="shift"
            )
            said[proposer] = [first.token_ids, second.token_ids, third.token_ids]
            assert (third.draft_n_accepted > 0) is (proposer == "mtp")
        assert said["mtp"] == said["none"]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_it_drafts_under_the_other_rules(opened: tuple[Opened, float], rule: Any) -> None:
    finished = opened[0].ask("def return the model", "mtp", temperature=1.0, verify=rule, seed=5)
    assert 0 < finished.draft_n_accepted < finished.draft_n


def test_it_is_opened_before_its_target_reads(opened: tuple[Opened, float]) -> None:
    engine = opened[0].engine
    opened[0].ask("def", "none")
    lane: Any = engine.target
    with pytest.raises(EngineError, match="before its target reads"):
        AssistantPool(lane.pool.model, lane.pool)


def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECLLAMA_HOME", str(tmp_path / "home"))
    target, head = write_gemma4(tmp_path / "t.gguf"), write_assistant(tmp_path / "h.gguf")
    arguments = ["run", "-m", str(target), "-c", "256", "-n", "16", "the model", "--temperature=0"]
    texts = []
    for more in (["--no-spec"], ["--head", str(head), "--proposer", "mtp", "--draft-max", "3"]):
        assert invoke([*arguments, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != ""
    assert invoke(["pair", str(target)]) == 0
    assert f"with --head {head}" in capsys.readouterr().out
    assert invoke([*arguments, "--proposer", "mtp"]) == 2
    assert "--head FILE" in capsys.readouterr().err
    assert invoke(["run", "-m", str(head), "Hi"]) == 5
    assert "give it beside its target" in capsys.readouterr().err
