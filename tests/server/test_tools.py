"""Tools: calls in texts of three families, calls that are demanded, and every API's words."""

import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fakes import Reply, ScriptedRecipe
from servers import Serving, serving
from table_model import FakeVocab
from thinking import TagVocab

from specllama.engine.pair_loading import SamplerChains
from specllama.engine.prompting import Prompting
from specllama.errors import UsageError
from specllama.grammar.guide import Guides, require
from specllama.grammar.source import source_of
from specllama.interface import Message
from specllama.replies.tool_calls import respelled
from specllama.server.refusals import Refusal
from specllama.server.tools import Tool, ToolReader, ToolUse, bound, equipped, told, tool_use
from specllama.settings.params import GenerateParams, template_arguments

WEATHER = Tool("weather", "Of a town.", {"type": "object", "properties": {"town": {}}})
FUNCTION = {"name": "weather", "description": "Of a town.", "parameters": WEATHER.schema}
USE = ToolUse((WEATHER, Tool("clock")))
CALL = '{"name": "weather", "arguments": {"town": "Ulm"}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
PARAMETER = "<parameter=town>\nUlm\n</parameter>"
FUNCTION_CALL = f"<tool_call>\n<function=weather>\n{PARAMETER}\n</function>\n</tool_call>"

CALLS = {
    HERMES: ("", 1),
    f"Let me see.\n{HERMES}\n{HERMES}": ("Let me see.", 2),
    f"[TOOL_CALLS][{CALL}, {CALL}]": ("", 2),
    f"<|python_tag|>{CALL}": ("", 1),
    '{"name": "weather", "parameters": {"town": "Ulm"}}': ("", 1),
    f"Well.\n{FUNCTION_CALL}\n{FUNCTION_CALL}": ("Well.", 2),
    '{"name": "weather", "arguments": "{\\"town\\": \\"Ulm\\"}"}': ("", 1),
    # GLM
    "<tool_call>weather\n<arg_key>town</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>": (
        "",
        1,
    ),
    # MiniMax
    'So:\n<minimax:tool_call>\n<invoke name="weather">\n<parameter name="town">Ulm</parameter>\n'
    '</invoke>\n<invoke name="weather"><parameter name="town">Ulm</parameter></invoke>\n'
    "</minimax:tool_call>": ("So:", 2),
    # Kimi K2
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"town": "Ulm"}<|tool_call_end|><|tool_call_begin|>functions.weather:1'
    '<|tool_call_argument_begin|>{"town": "Ulm"}<|tool_call_end|><|tool_calls_section_end|>': (
        "",
        2,
    ),
    # DeepSeek V3.1, and R1
    "Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
    '{"town": "Ulm"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>': ("Yes.", 1),
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    '{"town": "Ulm"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>': ("", 1),
    # Mistral, with and without ids
    '[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{"town": "Ulm"}': ("", 1),
    '[TOOL_CALLS]weather[ARGS]{"town": "Ulm"}[TOOL_CALLS]weather[ARGS]{"town": "Ulm"}': ("", 2),
    # Gemma 4
    '<|tool_call>call:weather{town:<|"|>Ulm<|"|>}<tool_call|>': ("", 1),
    # Granite 3
    f"<|tool_call|>[{CALL}]": ("", 1),
}


def read(text: str, rng: random.Random) -> tuple[str, list[dict[str, Any]]]:
    reader = ToolReader(USE)
    shown, at = "", 0
    while at < len(text):
        n = rng.randrange(1, 9)
        shown += reader.feed(text[at : at + n])
        at += n
    shown += reader.finish()
    return shown, [json.loads(call.arguments) for call in reader.calls]


@pytest.mark.parametrize("text", CALLS)
def test_calls_are_found_wherever_the_text_is_cut(text: str) -> None:
    shown, n = CALLS[text]
    for seed in range(20):
        assert read(text, random.Random(seed)) == (shown, [{"town": "Ulm"}] * n)


def test_what_the_model_is_told() -> None:
    [system, user] = told([Message("user", "Hi")], USE)
    assert system.role == "system"
    assert '"weather"' in system.content
    assert user.content == "Hi"
    [both, _] = told([Message("system", "Be short."), user], USE)
    assert both.content.startswith("Be short.\n\n")


def test_a_template_that_knows_of_tools_is_given_them() -> None:
    base = GenerateParams(template_args=("a=1",))
    turns = [Message("user", "Hi"), Message("assistant", f"Well.\n{HERMES}"), Message("user", "?")]
    assert equipped(turns, base, USE, "")[1] == base
    same, params = equipped(turns, base, USE, "json")
    assert same == turns
    [weather, clock] = template_arguments(params.template_args)["tools"]
    assert weather == {"type": "function", "function": FUNCTION}
    assert clock["function"]["name"] == "clock"
    other, _ = equipped(turns, base, USE, "xml")
    assert other == [turns[0], Message("assistant", f"Well.\n{FUNCTION_CALL}"), turns[2]]
    for text in ("<tool_call>\n[1]\n</tool_call>", "<tool_call>\n{\n</tool_call>"):
        assert respelled(Message("assistant", text), "xml").content == text


def test_calls_that_never_end_are_looked_for_once() -> None:
    text = "<tool_call>\n" * 40_000
    begin = time.process_time()
    assert respelled(Message("assistant", text), "xml").content == text
    assert time.process_time() - begin < 10  # for each opening anew: minutes
    both = f"{HERMES}{HERMES}\n<tool_call>\n"
    assert respelled(Message("assistant", both), "xml").content.count("<function=") == 2


@pytest.mark.parametrize("syntax", ["xml", "glm", "minimax"])
def test_earlier_calls_are_written_as_they_are_read(syntax: str) -> None:
    own = respelled(Message("assistant", f"Well.\n{HERMES}"), syntax).content
    assert "weather" in own
    assert '{"name"' not in own
    assert read(own, random.Random(1)) == ("Well.", [{"town": "Ulm"}])


def test_values_of_gemma_are_json_in_other_quotes() -> None:
    body = 'n:5,list:[1,{a:<|"|>x: y, "z"<|"|>}],deep:{ok:true,none:null},text:<|"|>{a:1}<|"|>'
    reader = ToolReader(ToolUse((Tool("f"),)))
    reader.feed(f"<|tool_call>call:f{{{body}}}<tool_call|>")
    assert reader.finish() == ""
    [call] = reader.calls
    assert json.loads(call.arguments) == {
        "n": 5,
        "list": [1, {"a": 'x: y, "z"'}],
        "deep": {"ok": True, "none": None},
        "text": "{a:1}",
    }


def test_templates_are_told_apart_by_their_calls() -> None:
    shown = "{% for t in tools %}{{ t | tojson }}{% endfor %}"
    calls = {
        "kimi": "<|tool_call_argument_begin|>",
        "deepseek": "<｜tool▁call▁begin｜>",
        "glm": "<arg_key>",
        "minimax": '<invoke name="',
        "mistral": "[TOOL_CALLS]",
        "gemma": "<|tool_call>call:",
        "granite": "<|tool_call|>",
        "": "something else",
    }
    for syntax, mark in calls.items():
        earlier = "{% for m in messages %}{% if m.tool_calls %}" + mark + "{% endif %}{% endfor %}"
        assert Prompting(FakeVocab(), shown + earlier).tool_syntax() == syntax
        assert Prompting(FakeVocab(), earlier).tool_syntax() == "", "no place for tools"


def test_values_are_what_the_schema_says() -> None:
    kinds = {"zip": "string", "n": "integer", "on": "boolean"}
    tool = Tool("f", "", {"properties": {key: {"type": kind} for key, kind in kinds.items()}})
    reader = ToolReader(ToolUse((tool,)))
    parts = {"zip": "08845", "n": "3", "on": "True", "more": "{1"}
    body = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parts.items())
    reader.feed(f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>")
    assert reader.finish() == ""
    [call] = reader.calls
    assert json.loads(call.arguments) == {"zip": "08845", "n": 3, "on": True, "more": "{1"}


def test_choices() -> None:
    assert tool_use([WEATHER], "none") is None
    assert tool_use([], None) is None
    assert tool_use([WEATHER], None) == ToolUse((WEATHER,), "auto")
    assert tool_use([WEATHER], "required") == ToolUse((WEATHER,), "any")
    for tools, choice in (([WEATHER], "clock"), ([Tool("a b")], None)):
        with pytest.raises(Refusal):
            tool_use(tools, choice)


def test_a_demanded_call_leaves_the_model_nothing_else() -> None:
    base = GenerateParams()
    assert bound(base, USE) is base
    one = json.loads(bound(base, ToolUse(USE.tools, "clock")).json_schema or "")
    assert one["properties"]["name"] == {"const": "clock"}
    assert len(json.loads(bound(base, ToolUse(USE.tools, "any")).json_schema or "")["anyOf"]) == 2


def test_a_demanded_call_has_a_schema_of_several_parts() -> None:
    leads = {"$ref": "#/$defs/town"}
    schema = {"type": "object", "properties": {"town": leads}, "$defs": {"town": {"const": "Ulm"}}}
    odd = {"type": "object", "properties": {"towns": {"type": "array", "uniqueItems": True}}}
    tools = (Tool("weather", "", schema), Tool("list", "", odd, "tools[1]"))
    params = bound(GenerateParams(), ToolUse(tools, "weather"))
    require("schema", params.json_schema or "")
    assert schema == {"type": "object", "properties": {"town": leads}, "$defs": schema["$defs"]}
    form = json.loads(params.json_schema or "")["properties"]["arguments"]
    assert form["additionalProperties"] is False, "nothing is written that nobody reads"
    merged = {**schema, "allOf": [{"properties": {"n": {}}}]}
    for parts in (merged, {**schema, "required": ["n"]}, {**schema, "additionalProperties": True}):
        own = bound(GenerateParams(), ToolUse((Tool("x", "", parts),), "x")).json_schema or ""
        require("schema", own)
        assert json.loads(own)["properties"]["arguments"].get("additionalProperties") is not False
    with pytest.raises(
        UsageError, match=r"uniqueItems \(at tools\[1\].parameters.properties.towns"
    ):
        require("schema", bound(GenerateParams(), ToolUse(tools, "any")).json_schema or "")


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(ScriptedRecipe((Reply(f"Let me see.\n{HERMES}"),))) as running:
        yield running


TURNS = [
    {"role": "user", "content": "And in Ulm?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]


def test_calls_as_items_of_output(server: Serving) -> None:
    asked = {
        "instructions": "Be short.",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "And in Ulm?"}]},
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "rain"},
        ],
        "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
    }
    reply = server.post("/v1/responses", asked).json()
    assert reply["status"] == "completed"
    message, call = reply["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (call["type"], call["name"]) == ("function_call", "weather")
    events = server.frames("/v1/responses", {**asked, "stream": True})
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.output_item.added") == 2
    assert kinds.count("response.output_item.done") == 2
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(delta["delta"] for delta in deltas) == "Let me see."
    assert {delta["output_index"] for delta in deltas} == {0}
    final = events[-1]["response"]["output"]
    assert [item["type"] for item in final] == ["message", "function_call"]
    assert final[0]["content"][0]["text"] == "Let me see."


@pytest.mark.parametrize(
    ("fields", "status"), [({"previous_response_id": "resp_1"}, 400), ({"background": True}, 501)]
)
def test_responses_that_cannot_be(server: Serving, fields: Any, status: int) -> None:
    answer = server.post("/v1/responses", {"input": "Hi", **fields})
    assert answer.status_code == status, answer.text


WRITE = Tool("write_file", "", {"type": "object", "required": ["path", "content"]})
FILES = ToolUse((WRITE, Tool("clock")))
PATH_ONLY = {
    "xml": "<tool_call>\n<function=write_file>\n<parameter=path>\n/etc/hosts\n</parameter>\n",
    "glm": "<tool_call>write_file\n<arg_key>path</arg_key>\n<arg_value>/etc/hosts</arg_value>\n",
    "minimax": '<minimax:tool_call>\n<invoke name="write_file">\n'
    '<parameter name="path">/etc/hosts</parameter>\n',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.write_file:0"
    '<|tool_call_argument_begin|>{"path": "/etc/hosts"',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>write_file<｜tool▁sep｜>"
    '{"path": "/etc/hosts"',
    "mistral": '[TOOL_CALLS]write_file[ARGS]{"path": "/etc/hosts"',
    "gemma": '<|tool_call>call:write_file{path:<|"|>/etc/hosts<|"|>',
    "json": '<tool_call>\n{"name": "write_file", "arguments": {"path": "/etc/hosts"',
}
CONTENT = {
    "xml": "<parameter=content>\nhello wor",
    "glm": "<arg_key>content</arg_key>\n<arg_value>hello wor",
    "minimax": '<parameter name="content">hello wor',
    "gemma": ',content:<|"|>hello wor',
}


@pytest.mark.parametrize("reason", ["length", "context", "cancelled", "stop_string"])
@pytest.mark.parametrize("syntax", PATH_ONLY)
def test_a_call_that_was_cut_is_none_and_not_shown(syntax: str, reason: Any) -> None:
    whole = PATH_ONLY[syntax] + CONTENT.get(syntax, ', "content": "hello wor')
    for n in range(3, len(whole) + 1):
        reader = ToolReader(FILES)
        shown = reader.feed(f"So:\n{whole[:n]}") + reader.finish(reason)
        assert (shown, reader.calls) == ("So:", [])


@pytest.mark.parametrize("text", ["if a <", "a [", "```py", "{", "So:\n{\n", "I", '{"rain": "u'])
def test_a_cut_text_that_is_none_of_a_call_stays(text: str) -> None:
    reader = ToolReader(FILES)
    assert reader.feed(text) + reader.finish("length") == text


def test_a_demanded_call_that_was_cut_is_not_shown() -> None:
    reader = ToolReader(ToolUse(FILES.tools, "any"))
    assert reader.feed('{\n "na') + reader.finish("length") == ""
    assert not reader.calls


def test_the_calls_before_the_cut_stay() -> None:
    first = '<invoke name="clock"></invoke>'
    cut = '<invoke name="write_file"><parameter name="path">/etc/hosts</parameter>'
    reader = ToolReader(FILES)
    assert reader.feed(f"<minimax:tool_call>\n{first}\n{cut}") == ""
    assert reader.finish("length") == ""
    assert [call.name for call in reader.calls] == ["clock"]


def test_a_closing_that_was_a_stop_string_closes() -> None:
    reader = ToolReader(USE)
    reader.feed(f"<tool_call>\n<function=weather>\n{PARAMETER}\n")
    assert reader.finish("stop_string", "</function>") == ""
    assert [call.name for call in reader.calls] == ["weather"]
    cut = ToolReader(FILES)
    cut.feed("<tool_call>\n<function=write_file>\n<parameter=path>\n/etc")
    cut.finish("stop_string", "</function>")
    assert not cut.calls, "a value is open"


@pytest.mark.parametrize("reason", ["length", "stop_token"])
def test_a_call_without_what_it_requires_is_text(reason: Any) -> None:
    text = '<tool_call>{"name": "write_file", "arguments": {"path": "/etc/hosts"}}</tool_call>'
    reader = ToolReader(FILES)
    assert reader.feed(text) + reader.finish(reason) == text
    assert not reader.calls


@pytest.mark.parametrize(
    "prose",
    [
        "Write a <tool_call> and its arguments behind it. " * 3,
        "The mark [TOOL_CALLS] comes first, then a list.",
        'An object such as <tool_call>{"town": 1}</tool_call> names nothing.',
        "<tool_call>\n<function=nothing>\n</function>\n</tool_call> is unknown here.",
        '{"town": "Ulm", "rain": true} is what I found.',
    ],
)
def test_a_mention_of_a_call_holds_nothing_back(prose: str) -> None:
    reader = ToolReader(USE)
    more = " And so on."
    assert "".join(map(reader.feed, prose)) + reader.feed(more) == prose + more
    assert (reader.finish(), reader.calls) == ("", [])


def test_text_behind_a_call_is_shown() -> None:
    for seed in range(20):
        shown, calls = read(f"So:\n{HERMES}\nThat is all.", random.Random(seed))
        assert (shown, len(calls)) == ("So:\nThat is all.", 1)


def test_the_mark_of_an_end_inside_of_a_value() -> None:
    text = "Write </tool_call> behind it, and <tool_call> before."
    call = json.dumps({"name": "weather", "arguments": {"town": text}})
    for body in (call, f"<function=weather>\n<parameter=town>\n{text}\n</parameter>\n</function>"):
        for seed in range(20):
            shown, calls = read(f"<tool_call>\n{body}\n</tool_call>", random.Random(seed))
            assert (shown, calls) == ("", [{"town": text}])


def test_one_call_where_only_one_is_wanted() -> None:
    reader = ToolReader(ToolUse(USE.tools, parallel=False))
    assert reader.feed(f"{HERMES}\n{FUNCTION_CALL}\n{HERMES}") + reader.finish() == ""
    assert len(reader.calls) == 1


def test_only_one_call_is_made_where_the_client_says_so() -> None:
    with serving(ScriptedRecipe((Reply(f"{HERMES}\n{HERMES}"),))) as two:
        turns = [{"role": "user", "content": "And in Ulm?"}]
        chat = {"messages": turns, "tools": [{"type": "function", "function": FUNCTION}]}
        for parallel, n in ((None, 2), (True, 2), (False, 1)):
            reply = two.post("/v1/chat/completions", {**chat, "parallel_tool_calls": parallel})
            assert len(reply.json()["choices"][0]["message"]["tool_calls"]) == n
        asked = {
            "max_tokens": 100,
            "messages": turns,
            "tools": [{"name": "weather", "input_schema": WEATHER.schema}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        }
        said = two.post("/v1/messages", asked).json()
        assert [block["type"] for block in said["content"]] == ["tool_use"]
        items = {"input": "And in Ulm?", "tools": [{"type": "function", **FUNCTION}]}
        response = two.post("/v1/responses", {**items, "parallel_tool_calls": False}).json()
        assert len(response["output"]) == 1


@pytest.mark.parametrize("tools", [[], [{"type": "function", "function": FUNCTION}]])
def test_a_choice_of_an_unknown_tool_is_wrong(server: Serving, tools: Any) -> None:
    named = {"type": "function", "function": {"name": "nothing"}}
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [named]}}
    for choice in (named, some, *([] if tools else ["required"])):
        body = {"messages": TURNS[:1], "tools": tools, "tool_choice": choice}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tool_choice"


def test_a_tool_use_has_an_id(server: Serving) -> None:
    used = {"type": "tool_use", "name": "weather", "input": {}}
    asked = {"max_tokens": 5, "messages": [{"role": "assistant", "content": [used]}]}
    assert server.post("/v1/messages", asked).status_code == 400


# ---- a text that has to fit a schema, or calls instead

ANSWER = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORECAST = ToolUse(
    (
        Tool(
            "weather",
            schema={
                "type": "object",
                "properties": {
                    "town": {"type": "string"},
                    "days": {"type": "integer"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
                "required": ["town"],
            },
        ),
        Tool("clock"),
        Tool("zip", schema={"type": "object", "properties": {"code": {"type": "string",
             "pattern": "^[0-9]{5}$"}}, "required": ["code"]}),
    )
)  # fmt: skip
ULM = '{"town": "Ulm", "days": 3}'
WRITTEN = {
    "json": '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>',
    "": '<tool_call>{"name": "weather", "arguments": %s}</tool_call>',
    "xml": "<tool_call>\n<function=weather>\n<parameter=town>\nUlm\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>weather\n<arg_key>town</arg_key>\n<arg_value>Ulm</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="weather">\n'
    '<parameter name="town">Ulm</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
    "<|tool_call_argument_begin|>%s<|tool_call_end|><|tool_calls_section_end|>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
    "```json\n%s\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "gemma": "<|tool_call>call:weather%s<tool_call|>",
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": %s}]',
    "granite": '<|tool_call|>[{"name": "weather", "arguments": %s}]',
    "llama": '<|python_tag|>{"name": "weather", "parameters": %s}',
}


def fits(syntax: str, text: str, use: ToolUse = FORECAST, **constraint: str) -> bool:
    params = bound(GenerateParams(**constraint), use, syntax)  # type: ignore[arg-type]
    [(kind, source)] = [
        (kind, given)
        for kind in ("schema", "grammar", "regex")
        if (given := getattr(params, "json_schema" if kind == "schema" else kind)) is not None
    ]
    marks = sorted(set(re.findall(r"<[^<>\s=]*tool[^<>\s=]*>|<\|[^<>\s]*>|\[[A-Z_]+\]", text)))
    vocab = TagVocab(marks)  # of control tokens: they count as these alone
    chains = SamplerChains(vocab)  # type: ignore[arg-type]
    whole = source_of(kind, source).beside(params.calls, chains._spelled)  # type: ignore[arg-type]
    guides = Guides([vocab.piece(t) for t in range(256 + len(marks))], [])
    it = guides.matcher(whole)
    ids = vocab.tokenize(text, add_special=False, parse_special=True)
    return it.validate_tokens(ids) == len(ids) and bool(
        it.consume_tokens(ids) and it.is_accepting()
    )


@pytest.mark.parametrize("syntax", WRITTEN)
def test_a_reply_that_has_to_fit_a_schema_may_be_calls_in_the_models_own_syntax(
    syntax: str,
) -> None:
    call = WRITTEN[syntax].replace("%s", ULM)
    schema = json.dumps(ANSWER)
    assert fits(syntax, call, json_schema=schema)
    assert not fits(syntax, call.replace("weather", "whether"), json_schema=schema)
    assert fits(syntax, '{"answer": "It rains."}', json_schema=schema)
    assert not fits(syntax, "It rains.", json_schema=schema)
    assert fits(syntax, call, grammar='root ::= "yes" | "no"')
    assert fits(syntax, "no", regex="(yes|no)")
    key = "parameters" if syntax == "llama" else "arguments"
    bare = f'{{"name": "zip", "{key}": {{"code": "89073"}}}}'
    assert fits(syntax, bare, json_schema=schema), "also what tags could not keep to"
    assert not fits(syntax, bare.replace("89073", "Ulm"), json_schema=schema)
    reader = ToolReader(FORECAST, alone=True)
    shown = "".join(map(reader.feed, call)) + reader.finish()
    assert (shown, [(one.name, json.loads(one.arguments)) for one in reader.calls]) == (
        "",
        [("weather", {"town": "Ulm", "days": 3})],
    )


def test_several_calls_only_where_the_request_allows_them() -> None:
    two, schema = "\n".join([HERMES, HERMES]), json.dumps(ANSWER)
    assert fits("json", two, json_schema=schema)
    assert not fits("json", two, replace(FORECAST, parallel=False), json_schema=schema)


def test_a_text_that_fits_a_schema_is_no_call_whatever_it_quotes() -> None:
    text = json.dumps({"answer": "<tool_call>clock</tool_call>"})
    reader = ToolReader(FORECAST, alone=True)
    assert "".join(map(reader.feed, text)) + reader.finish() == text
    assert reader.calls == []


def test_a_demanded_call_is_no_text_and_none_stays_text() -> None:
    schema = GenerateParams(json_schema=json.dumps(ANSWER))
    named = bound(schema, replace(FORECAST, choice="weather"), "json")
    assert named.calls == ""
    assert "answer" not in (named.json_schema or "")
    assert tool_use([WEATHER], "none") is None
    assert bound(GenerateParams(), FORECAST, "json").calls == "", "nothing has to fit anything"
