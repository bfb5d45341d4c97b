"""Forced text on the bundled pair: drafted from what constrains a reply, and the text the same."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from engines import measured
from requests_made import finish

from specllama.bench.prompts import schema_prompts
from specllama.bench.proof import prove
from specllama.engine.engine import Engine
from specllama.events import Finished
from specllama.interface import Message
from specllama.server.tools import Tool, ToolUse, bound
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

GBNF = r"""root ::= "{" ws "\"animal\"" ws ":" ws ("\"cat\"" | "\"dog\"") ws "}"
ws ::= [ \n]*"""
CALL = ToolUse(
    (
        Tool(
            "set_light",
            schema={
                "type": "object",
                "properties": {
                    "room": {"enum": ["kitchen", "bath"]},
                    "brightness": {"type": "integer", "maximum": 100},
                },
                "required": ["room", "brightness"],
                "additionalProperties": False,
            },
        ),
    ),
    "set_light",
)


@dataclass(frozen=True)
class Bound:
    name: str
    question: str
    constraint: dict[str, Any]

    def params(self, proposer: str, temperature: float, **more: Any) -> GenerateParams:
        wish = GenerateParams(
            proposer=proposer,
            speculate=proposer != "none",
            sampling=SamplingParams(temperature=temperature),
            window="fixed",
            draft_max=6,
            max_tokens=60,
            min_speculative_tokens=0,
            seed=5,
        )
        wish = bound(wish, CALL) if self.name == "call" else wish.replace(**self.constraint)
        return wish.replace(**more)


SCHEMA = schema_prompts()[0].schema
BOUND = (
    Bound("schema", "Write a JSON object of Nela, who keeps a cat.", {"json_schema": SCHEMA}),
    Bound("grammar", "Which animal?", {"grammar": GBNF}),
    Bound("regex", "When?", {"regex": r"On (Monday|Tuesday|Friday) at [0-9]{2}:00 in Harbour"}),
    Bound("choice", "Is it so?", {"regex": "(certainly not|certainly)"}),
    Bound("call", "Dim the light in the bath.", {}),
)


def reply(engine: Engine, it: Bound, params: GenerateParams) -> Finished:
    engine.reset()
    return finish(engine, [Message("user", it.question)], params)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("it", BOUND, ids=lambda it: it.name)
def test_the_text_is_that_of_plain_decoding(tiny: Engine, it: Bound, temperature: float) -> None:
    plain = reply(tiny, it, it.params("none", temperature))
    for proposer in ("forced", "auto", "tree"):
        drafted = reply(tiny, it, it.params(proposer, temperature))
        assert drafted.token_ids == plain.token_ids, proposer
        if proposer == "forced":
            assert drafted.draft_n_accepted > 0
            assert drafted.rounds < plain.rounds
    learning = it.params("auto", temperature, window="auto")
    assert reply(tiny, it, learning).token_ids == plain.token_ids


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_other_rules_take_forced_text(tiny: Engine, verify: str) -> None:
    it = BOUND[0]
    assert reply(tiny, it, it.params("forced", 1.0, verify=verify)).draft_n_accepted > 0
    plain = reply(tiny, it, it.params("none", 0.0))
    assert reply(tiny, it, it.params("auto", 0.0, verify=verify)).token_ids == plain.token_ids


def test_without_a_constraint_it_is_silent(tiny: Engine) -> None:
    it = Bound("free", "What does the sailor carry?", {})
    assert reply(tiny, it, it.params("forced", 0.7)).draft_n == 0


def test_prompts_with_schemas_are_proved(tiny: Engine) -> None:
    cases = list(
        prove(tiny, schema_prompts()[:3], proposers=("forced", "mixed"), max_tokens=32, warm=True)
    )
    assert [case for case in cases if not case.identical] == []
    for name in ("forced", "mixed"):
        assert sum(case.accepted for case in cases if case.proposer == name) > 0


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("three")))
        options = EngineOptions(threads=1, n_ctx=3072, parallel=3)
        with measured("tiny", None, options) as engine:
            yield engine


def test_side_by_side_they_are_the_same(three: Engine) -> None:
    cases = list(
        prove(
            three,
            schema_prompts()[:3],
            proposers=("forced", "mixed"),
            temperatures=(0.0, 1.0),
            draft_max=(4,),
            max_tokens=32,
            seed=1,
            base=GenerateParams(),
            beside=True,
        )
    )
    assert cases
    assert [case for case in cases if not case.identical] == []
