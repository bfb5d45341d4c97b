"""Conversations of every dialect: results of tools by id, a call at the end, pictures."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from servers import Serving

from specllama.server import anthropic, chat_completions, ollama_api, responses
from specllama.server.refusals import Refusal
from specllama.settings.params import GenerateParams

# a conversation of the tests: texts of the user, ("calls", (id, name)…), ("results", (id, text)…)
Step = str | tuple[Any, ...]


def _arguments(name: str) -> dict[str, str]:
    return {"thing": name}


def openai(steps: Sequence[Step]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for step in steps:
        if isinstance(step, str):
            out.append({"role": "user", "content": step})
        elif step[0] == "calls":
            calls = [
                {"id": id, "type": "function",
                 "function": {"name": name, "arguments": json.dumps(_arguments(name))}}
                for id, name in step[1:]
            ]  # fmt: skip
            out.append({"role": "assistant", "content": None, "tool_calls": calls})
        else:
            out += [{"role": "tool", "tool_call_id": id, "content": t} for id, t in step[1:]]
    return out


def ollama(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Without ids: a result names the tool, as the id of these steps ends with it."""
    out = openai(steps)
    for turn in out:
        for call in turn.get("tool_calls", ()):
            del call["id"]
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        if (id := turn.pop("tool_call_id", None)) is not None:
            turn["tool_name"] = id.rpartition("/")[2]
    return out


def blocks(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Anthropic's: what a user and tools say between two replies is one message."""
    out: list[dict[str, Any]] = []
    for step in steps:
        role = "user"
        if isinstance(step, str):
            content = [{"type": "text", "text": step}]
        elif step[0] == "calls":
            role = "assistant"
            content = [{"type": "tool_use", "id": id, "name": name, "input": _arguments(name)}
                       for id, name in step[1:]]  # fmt: skip
        else:
            content = [{"type": "tool_result", "tool_use_id": id, "content": text}
                       for id, text in step[1:]]  # fmt: skip
        if out and out[-1]["role"] == role:
            out[-1]["content"] += content
        else:
            out.append({"role": role, "content": content})
    return out


def items(steps: Sequence[Step]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for step in steps:
        if isinstance(step, str):
            out.append({"role": "user", "content": step})
        elif step[0] == "calls":
            out += [
                {"type": "function_call", "call_id": id, "name": name,
                 "arguments": json.dumps(_arguments(name))}
                for id, name in step[1:]
            ]  # fmt: skip
        else:
            out += [{"type": "function_call_output", "call_id": id, "output": text}
                    for id, text in step[1:]]  # fmt: skip
    return out


@dataclass(frozen=True)
class Family:
    """One dialect: how it spells the steps, and what reads them."""

    path: str
    spell: Callable[[Sequence[Step]], list[dict[str, Any]]]
    kind: type
    parse: Callable[[Any, GenerateParams], Any]
    field: str = "messages"
    id: str = "tool_call_id"

    def body(self, turns: Any, **more: Any) -> dict[str, Any]:
        return {self.field: turns, "max_tokens": 5, **more}

    def prompt(self, turns: Any) -> str:
        job = self.parse(msgspec.convert(self.body(turns), self.kind), GenerateParams())
        return "\n".join(turn.content for turn in job.prompts[0])

    def refused(self, turns: Any) -> Refusal:
        with pytest.raises(Refusal) as caught:
            self.prompt(turns)
        assert caught.value.status == 400
        return caught.value


FAMILIES = {
    "openai": Family(
        "/v1/chat/completions", openai, chat_completions.ChatRequest, chat_completions.parse_chat
    ),
    "anthropic": Family(
        "/v1/messages", blocks, anthropic.MessagesRequest, anthropic.parse, id="tool_use_id"
    ),
    "responses": Family(
        "/v1/responses", items, responses.ResponsesRequest, responses.parse, "input", "call_id"
    ),
    "ollama": Family("/api/chat", ollama, ollama_api.OllamaChat, ollama_api.parse_chat,
                     id="tool_name"),
}  # fmt: skip


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


PRICES = {"1/bicycle": "741 euros", "2/pencil": "2 euros", "3/boat": "9000 euros"}
CALLS = ("calls", *((id, id[2:]) for id in PRICES))


def order(prompt: str, *texts: str) -> list[str]:
    assert all(prompt.count(text) == 1 for text in texts), prompt
    return sorted(texts, key=prompt.index)


@pytest.mark.parametrize("sent", itertools.permutations(PRICES))
def test_results_stand_in_the_order_of_their_calls(family: Family, sent: Sequence[str]) -> None:
    results = [(id, PRICES[id]) for id in sent]
    in_order = ["what?", CALLS, ("results", *PRICES.items())]
    whole = family.spell(["what?", CALLS, ("results", *results)])
    assert family.prompt(whole) == family.prompt(family.spell(in_order))
    texts = ["first", *PRICES.values(), "last"]
    steps = ["what?", CALLS, "first", *(("results", one) for one in results), "last"]
    assert order(family.prompt(family.spell(steps)), *texts) == texts


def test_text_between_results_keeps_its_place(family: Family) -> None:
    steps = ["what?", CALLS, ("results", ("2/pencil", "two")), "first", ("results", ("3/boat", "3"),
             ("1/bicycle", "one")), "last"]  # fmt: skip
    texts = ["one", "first", "two", "last"]
    assert order(family.prompt(family.spell(steps)), *texts) == texts


def test_ids_come_again_in_later_turns(family: Family) -> None:
    again = [*CALLS[1:]]
    steps = [
        "what?", CALLS, ("results", *((id, f"old {PRICES[id]}") for id in reversed(PRICES))),
        "and now?", ("calls", *reversed(again)),
        ("results", *((id, f"new {PRICES[id]}") for id in PRICES)), "so?",
    ]  # fmt: skip
    texts = [*(f"old {one}" for one in PRICES.values()),
             *(f"new {one}" for one in reversed(PRICES.values()))]  # fmt: skip
    assert order(family.prompt(family.spell(steps)), *texts) == texts


def place(family: Family, nth: int) -> str:
    """Of the result that comes as the ``nth`` behind a question and two calls."""
    return {
        "openai": f"messages[{2 + nth}].tool_call_id",
        "anthropic": f"messages[2].content[{nth}].tool_use_id",
        "responses": f"input[{3 + nth}].call_id",
        "ollama": f"messages[{2 + nth}].tool_name",
    }[next(name for name, one in FAMILIES.items() if one is family)]


TWO = ("calls", ("1/a", "a"), ("2/b", "b"))


def test_an_id_that_no_call_has_is_refused_with_its_place(family: Family) -> None:
    for results in ([("2/b", "two"), ("x/c", "one")], [("1/a", "one"), ("2/b", "2"), ("x/c", "3")]):
        refused = family.refused(family.spell(["what?", TWO, ("results", *results)]))
        assert refused.param == place(family, len(results) - 1)
        assert "c'" in refused.message
    for before in (["what?"], ["what?", TWO, ("results", ("1/a", "1"), ("2/b", "2")),
                               ("calls", ("3/d", "d"))]):  # fmt: skip
        known = any(not isinstance(step, str) for step in before)
        if known or family.path != "/api/chat":  # whose results have no ids
            family.refused(family.spell([*before, ("results", ("1/a", "1"))]))


def test_a_second_result_of_a_call_is_refused_with_both_places(family: Family) -> None:
    results = [("1/a", "one"), ("2/b", "two"), ("1/a", "other")]
    refused = family.refused(family.spell(["what?", TWO, ("results", *results)]))
    assert refused.param == place(family, 2)
    assert place(family, 0).rpartition(".")[0] in refused.message


def test_a_call_without_a_result_beside_others_is_refused(family: Family) -> None:
    """A model would take the only result for that of the first call."""
    for id in ("1/a", "2/b"):
        refused = family.refused(family.spell(["what?", TWO, ("results", (id, "one")), "so?"]))
        assert refused.param
        assert "no result" in refused.message
    family.prompt(family.spell(["what?", TWO, "never mind"]))


def test_two_calls_of_a_reply_have_different_ids(family: Family) -> None:
    if family.path == "/api/chat":
        pytest.skip("its calls have no ids")
    steps = ["what?", ("calls", ("1", "a"), ("1", "b")), ("results", ("1", "x"), ("1", "y"))]
    assert "another call" in family.refused(family.spell(steps)).message


def without(turns: list[dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """The same without ids (and names) of results."""
    for turn in turns:
        content = turn.get("content")
        for part in [turn, *(content if isinstance(content, list) else ())]:
            if part.get("type") != "function_call":
                for name in names:
                    part.pop(name, None)
    return turns


def test_a_missing_id_is_refused_where_it_leaves_a_choice(family: Family) -> None:
    results = ("results", ("1/a", "one"), ("2/b", "two"))
    turns = without(family.spell(["what?", TWO, results]), family.id)
    if family.path == "/api/chat":  # older clients send the results in order, and no names
        assert order(family.prompt(turns), "one", "two") == ["one", "two"]
        return
    refused = family.refused(turns)
    assert refused.param == place(family, 0)
    assert "missing" in refused.message


def test_clients_without_ids_call_one_tool(family: Family) -> None:
    for more in ([], ["and?", ("calls", ("1/a", "a")), ("results", ("1/a", "again"))]):
        steps = ["what?", ("calls", ("1/a", "a")), ("results", ("1/a", "one")), *more]
        assert "one" in family.prompt(without(family.spell(steps), family.id))
    function = {"name": "a", "arguments": "{}"}
    old = [{"role": "user", "content": "what?"}, {"role": "assistant", "function_call": function},
           {"role": "function", "name": "a", "content": "one"}]  # fmt: skip
    assert "one" in FAMILIES["openai"].prompt(old)
    old[-1]["name"] = "b"
    assert FAMILIES["openai"].refused(old).param == "messages[2].name"


def test_results_of_ollama_name_their_tool_or_their_call() -> None:
    own = FAMILIES["ollama"]
    twice = ollama(["what?", ("calls", ("1/a", "a"), ("2/b", "b"), ("3/a", "a")),
                    ("results", ("2/b", "two"), ("1/a", "one"), ("3/a", "three"))])  # fmt: skip
    assert order(own.prompt(twice), "one", "two", "three") == ["one", "two", "three"]
    by_id = openai(["what?", TWO, ("results", ("2/b", "two"), ("1/a", "one"))])
    for turn in by_id:
        for call in turn.get("tool_calls", ()):
            call["function"]["arguments"] = {}
    assert order(own.prompt(by_id), "one", "two") == ["one", "two"]


def test_calls_of_one_reply_may_come_as_several_turns() -> None:
    single = [("calls", ("1/a", "a")), ("calls", ("2/b", "b"))]
    steps = ["what?", *single, ("results", ("2/b", "two"), ("1/a", "one"))]
    for family in FAMILIES.values():
        assert order(family.prompt(family.spell(steps)), "one", "two") == ["one", "two"]


def test_a_reply_that_ends_in_calls_is_not_gone_on_with(server: Serving, family: Family) -> None:
    for steps in (["what?", TWO], [TWO], ["what?", TWO, ("calls", ("3/c", "c"))]):
        answer = server.post(family.path, family.body(family.spell(steps), stream=False))
        assert answer.status_code == 400, answer.text
        assert "call of a tool" in answer.text
    followed = family.spell(["what?", TWO, "never mind"])
    assert server.post(family.path, family.body(followed, stream=False)).status_code == 200


def test_what_only_counts_or_reads_may_end_in_calls(server: Serving) -> None:
    turns, said = openai(["what?", TWO]), blocks(["what?", TWO])
    for path, body in (
        ("/v1/chat/completions/input_tokens", {"messages": turns}),
        ("/apply-template", {"messages": turns}),
        ("/tokenize", {"messages": turns}),
        ("/v1/messages/count_tokens", {"messages": said}),
        ("/v1/messages", {"messages": said, "max_tokens": 0}),
        ("/v1/responses/input_tokens", {"input": items(["what?", TWO])}),
    ):
        assert server.post(path, body).status_code == 200, path


def test_templates_show_results_in_order(server: Serving) -> None:
    steps = ["what?", TWO, ("results", ("2/b", "two"), ("1/a", "one"))]
    prompt = server.post("/apply-template", {"messages": openai(steps)}).json()["prompt"]
    assert order(prompt, "one", "two") == ["one", "two"]
    steps[-1] = ("results", ("2/b", "two"), ("x", "one"))
    for path in ("/apply-template", "/tokenize"):
        answer = server.post(path, {"messages": openai(steps)})
        assert answer.status_code == 400
        assert "messages[3].tool_call_id" in answer.text


# -- pictures --

PICTURES: list[tuple[str, str, Any, str]] = [
    ("openai", "image_url", {"type": "image_url", "image_url": {"url": "data:,"}}, "content[1]"),
    ("openai", "input_audio", {"type": "input_audio", "input_audio": {"data": "aGk="}},
     "content[1]"),
    ("openai", "file", {"type": "file", "file": {"file_id": "f"}}, "content[1]"),
    ("anthropic", "source", {"type": "image", "source": {"type": "url", "url": "u"}},
     "content[1]"),
    ("responses", "image_url", {"type": "input_image", "image_url": "data:,"}, "content[1]"),
    ("responses", "file_data", {"type": "input_file", "file_data": "data:,"}, "content[1]"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "field", "picture", "where"), PICTURES)
def test_a_picture_in_a_history_is_named_and_null_is_none(
    server: Serving, name: str, field: str, picture: dict[str, Any], where: str
) -> None:
    family = FAMILIES[name]
    kind = "input_text" if name == "responses" else "text"
    said = {"type": kind, "text": "look"}
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
             {"role": "user", "content": [said, picture]}]  # fmt: skip
    answer = server.post(family.path, family.body(turns))
    assert answer.status_code == 501
    assert f"{family.field}[2].{where}: {picture['type']}: " in answer.text
    for nothing in (None, "", {"url": None} if isinstance(picture[field], dict) else None):
        if nothing is None or name != "anthropic":
            turns[2]["content"] = [said, {**picture, field: nothing}]
            answer = server.post(family.path, family.body(turns))
            assert answer.status_code == 200, answer.text


def test_a_picture_of_ollama_is_named() -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "a"} for _ in range(3)]
    for nothing in (None, [], [""], [None]):
        turns[1]["images"] = nothing
        assert FAMILIES["ollama"].prompt(turns) == "a\na\na"
    turns[1]["images"] = ["aGk="]
    with pytest.raises(Refusal, match=r"messages\[1\]: images: models here read text only"):
        FAMILIES["ollama"].prompt(turns)
