"""The sampling of the model's card: below what the user says, above the defaults."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import ggufs
import pytest
from engines import FakeContext, engine_over, fake_info
from table_model import FakeTable

from specllama.bench.experiment import EngineArm, Task
from specllama.bench.prompts import BenchPrompt
from specllama.bench.proof import wish_of
from specllama.interface import EngineInfo
from specllama.models.gguf import read_header
from specllama.replies.card import read_card
from specllama.session import Session
from specllama.settings.config_file import apply_text, load_settings
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.store.codec import params_from_dict, params_to_dict
from specllama.store.rounds import Logged, iter_lines
from specllama.store.sessions import SessionStore

KEYS = {
    "general.sampling.temp": 0.6,
    "general.sampling.top_k": 20,
    "general.sampling.top_p": 0.95,
    "general.sampling.min_p": 0.0,
    "general.sampling.penalty_last_n": 256,
    "general.sampling.penalty_repeat": 1.05,
    "general.sampling.xtc_probability": 0.5,
    "general.sampling.xtc_threshold": 0.2,
}
FIELDS = {
    "temperature": 0.6,
    "top_k": 20,
    "top_p": 0.95,
    "min_p": 0.0,
    "repeat_last_n": 256,
    "repeat_penalty": 1.05,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
}


def carded(**card: float) -> EngineInfo:
    return fakes.engine_info(target=replace(fakes.model_info("target"), card=card))


def test_a_file_recommends(tmp_path: Path) -> None:
    card = read_card(read_header(ggufs.write_llama(tmp_path / "m.gguf", keys=KEYS)).metadata)
    assert card.values == FIELDS  # as typed, not as single precision stores them
    assert card.left_out == ()
    assert read_card(read_header(ggufs.write_llama(tmp_path / "n.gguf")).metadata).values == {}


@pytest.mark.parametrize(
    ("value", "why"), [(-1.0, "[0, 100]"), (float("nan"), "nan"), ("warm", "warm"), (True, "True")]
)
def test_a_bad_value_is_named_and_left_out(value: Any, why: str) -> None:
    card = read_card({"general.sampling.temp": value, "general.sampling.top_k": 20})
    assert card.values == {"top_k": 20}
    assert why in card.left_out[0]


def test_numbers_of_any_type_are_read() -> None:
    assert read_card({"general.sampling.top_k": "40", "general.sampling.temp": 1}).values == {
        "top_k": 40,
        "temperature": 1.0,
    }
    endless = read_card({"general.sampling.top_k": float("inf")})
    assert endless.values == {}
    assert len(endless.left_out) == 1


def test_what_cannot_be_followed_is_named() -> None:
    card = read_card({"general.sampling.sequence": "top_k;temp", "general.sampling.mirostat": 2})
    assert card.values == {}
    assert [line.partition(":")[0] for line in card.left_out] == list(
        ("general.sampling.sequence", "general.sampling.mirostat")
    )
    assert read_card({"general.sampling.mirostat": 0}).left_out == ()


def test_whoever_says_otherwise_wins(tmp_path: Path) -> None:
    project = tmp_path / "specllama.toml"
    project.write_text("top-p = 0.5\n")
    settings = load_settings(environ={"SPECLLAMA_TOP_K": "7"}, project=project)
    settings = settings.with_flags({"min-p": 0.05})  # the default, but typed
    sampling = settings.generate_params().on_card(FIELDS).sampling
    assert sampling.temperature == 0.6
    assert (sampling.top_k, sampling.top_p, sampling.min_p) == (7, 0.5, 0.05)


def test_a_library_gets_what_it_asks_for() -> None:
    assert GenerateParams().on_card(FIELDS).sampling == SamplingParams()


def test_set_wins_over_the_card_and_none_gives_it_back() -> None:
    params = load_settings(environ={}).generate_params()
    params = apply_text(params, "temperature", "0.8")
    assert params.on_card(FIELDS).sampling.temperature == 0.8
    params = apply_text(params, "temperature", "none")
    assert params.on_card(FIELDS).sampling.temperature == 0.6
    assert params.on_card({}).sampling.temperature == 0.8
    assert params_from_dict(params_to_dict(params)) == params


def test_a_session_samples_as_each_of_its_models_recommends() -> None:
    engine = fakes.ScriptedEngine(info=carded(temperature=0.3))
    params, store = load_settings(environ={}).generate_params(), SessionStore.unstored()
    session = Session(engine, store, params=params, log_rounds=False)
    list(session.send("Hi"))
    session.engine = other = fakes.ScriptedEngine(info=carded(top_k=3))
    list(session.send("And you?"))
    asked = [engine.requests[-1].params.sampling, other.requests[-1].params.sampling]
    assert [(one.temperature, one.top_k) for one in asked] == [(0.3, 40), (0.8, 3)]


def test_the_engine_takes_from_the_card_what_a_request_leaves_to_it() -> None:
    fake = fake_info()
    target = replace(fake.target, card={"temperature": 0.3, "top_k": 3})
    engine = engine_over(FakeContext(FakeTable()), info=replace(fake, target=target))
    left = load_settings(environ={}).generate_params()
    typed = left.choose("temperature", 0.0)
    asked = [engine.prepare("a b", one).params.sampling for one in (left, typed, GenerateParams())]
    assert [(one.temperature, one.top_k) for one in asked] == [(0.3, 3), (0.0, 3), (0.8, 40)]
    assert engine.chain(left, 1, [1], 1).params == asked[0], "what a proof draws again"
    wish = wish_of(left, 0.7, 8, 1, "fixed")
    assert engine.prepare("a b", wish).params.sampling == replace(asked[0], temperature=0.7)


def test_a_log_keeps_what_the_engine_made_of_a_request() -> None:
    engine = Logged(fakes.ScriptedEngine(info=carded(temperature=0.3)))
    for typed in (None, 0.9):
        params = load_settings(environ={}).generate_params().choose("temperature", typed)
        list(engine.generate("Hi", params))
    log = engine.log
    engine.close()
    told = [one for one in iter_lines(log.path) if one and one["type"] in ("run", "start")]
    assert [one["params"]["sampling"]["temperature"] for one in told] == [0.3, 0.3, 0.9]


def test_an_arm_has_the_temperature_of_its_task_and_all_else_of_the_card() -> None:
    engine: Any = fakes.ScriptedEngine(info=carded(temperature=0.3, top_k=3))
    arm = EngineArm("ours", engine, load_settings(environ={}).generate_params())
    arm.answer(Task(BenchPrompt("p", "chat", text="Hi"), temperature=0.9, max_tokens=8, seed=1))
    sampling = engine.requests[-1].params.sampling
    assert (sampling.temperature, sampling.top_k) == (0.9, 3)
