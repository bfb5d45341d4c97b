"""Calls as models write them: what becomes a call, and what stays text."""

import json
import random
import time
from typing import Any

import msgspec
import pytest
from fakes import Reply, ScriptedRecipe
from servers import Serving, serving

from specllama.server.chat_messages import Turn, messages_of
from specllama.server.tools import Tool, ToolReader, ToolUse

PATH = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
LIST = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "n": {"type": "integer"},
        "all": {"type": "boolean"},
        "sort": {"enum": ["name", "size"]},
    },
    "required": ["path"],
    "additionalProperties": False,
}
TOOLS = (Tool("read_file", "", PATH), Tool("list_dir", "", LIST), Tool("clock"))
Read = tuple[str, list[tuple[str, Any]]]
A = '{"name": "read_file", "arguments": {"path": "a.txt"}}'
B = '{"name": "list_dir", "arguments": {"path": "src", "n": 5}}'
a, b = ("read_file", {"path": "a.txt"}), ("list_dir", {"path": "src", "n": 5})
NESTED = json.dumps({"name": "read_file", "arguments": '{"path": "a.txt"}'})
SAME: list[tuple[str, list[Any]]] = [
    # alone, in fences
    *((text, [a]) for text in (A, f"{A}\n", f"\n {A}", f"```json\n{A}\n```", f"```\n{A}\n```\n")),
    *((f"```{info}\n{A}\n```", [a]) for info in ("tool_code", "xml", "json title", "Anything-1")),
    *(
        (text, [a])
        for text in (f"```json\n{A}", f"~~~\n{A}\n~~~", f"```json {A} ```", f"```{A}```")
    ),
    (f"```json\n{json.dumps(json.loads(A), indent=4)}\n```", [a]),
    # several
    *((text, [a, b]) for text in (f"{A}\n{B}", f"{A} {B}", f"{A}{B}", f"{A},\n{B}", f"[{A}, {B}]")),
    *((f"```json\n{text}\n```", [a, b]) for text in (f"{A}\n{B}", f"[{A},\n{B}]", f"{A};{B}")),
    (f"```json\n{A}\n```\n\n```json\n{B}\n```", [a, b]),
    *((f"<tool_call>\n{text}\n</tool_call>", [a, b]) for text in (f"{A}\n{B}", f"[{A}, {B}]")),
    (f"<tool_call>{A}<tool_call>{B}", [a, b]),
    # marks of any family, around and inside of fences
    *(
        (f"<{m}>{A}</{m}>", [a])
        for m in ("tool_call", "function_call", "tools", "TOOLCALL", "tool")
    ),
    *((f"[{m}]{A}[/{m}]", [a]) for m in ("TOOL_CALLS", "TOOL_CALL")),
    *((f"<|{m}|>{A}", [a]) for m in ("tool_call", "python_tag", "tool_calls")),
    (f"[TOOL_REQUEST]{A}[END_TOOL_REQUEST]", [a]),
    (f"{A}\n</tool_call>", [a]),
    (f"<tool_call>{A}\n</tool_response>", [a]),
    *((f"<tool_call>\nread_file{gap}{A}\n</tool_call>", [a]) for gap in ("\n", " ")),
    (f"<tool_call>\n{A}", [a]),
    *(
        (f"{first}{A}\n{last}", [a])
        for first in ("", "<tool_call>")
        for last in ("<tool_call>", "[TOOL_CALLS]\n")
    ),
    (f"```xml\n<tool_call>\n{A}\n</tool_call>\n```", [a]),
    (f"<tool_call>\n```json\n{A}\n```\n</tool_call>", [a]),
    (
        f"<tool_calls>\n<tool_call>{A}</tool_call>\n<tool_call>{B}</tool_call>\n</tool_calls>",
        [a, b],
    ),
    ('<|tool_call_start|>[read_file(path="a.txt")]<|tool_call_end|>', [a]),
    ('<function=read_file>{"path": "a.txt"}</function>', [a]),
    ("<function=read_file>\n<parameter=path>\na.txt\n</parameter>\n</function>\n</tool_call>", [a]),
    (
        '<function_calls>\n<invoke name="read_file">\n<parameter name="path">a.txt</parameter>\n'
        "</invoke>\n</function_calls>",
        [a],
    ),
    (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "read_file", '
        '"parameters": {"path": "a.txt"}}]<|END_ACTION|>',
        [a],
    ),
    *(
        (f'<{tag} name="read_file">{{"path": "a.txt"}}</{tag}>', [a])
        for tag in ("tool", "function", "invoke", "function_call")
    ),
    ('<tool name="read_file"><parameter name="path">a.txt</parameter></tool>', [a]),
    ('<invoke name="clock"></invoke>', [("clock", {})]),
    # braces
    *((text, [a]) for text in (f"{{{A}}}", f"{{{A}", f"{A}}}", A[:-1], A[:-2])),
    (A.replace("{", "{{").replace("}", "}}"), [a]),
    (f"<tool_call>\n{{{A}}}\n</tool_call>", [a]),
    (f"{{{A}}}\n{{{B}}}", [a, b]),
    # wrappers of APIs
    (NESTED, [a]),
    (f'{{"type": "function", "function": {NESTED}}}', [a]),
    (f'{{"tool_calls": [{{"id": "1", "type": "function", "function": {NESTED}}}, {B}]}}', [a, b]),
    (f'{{"role": "assistant", "content": null, "tool_calls": [{A}]}}', [a]),
    *((f'{{"{key}": {A}}}', [a]) for key in ("function_call", "tool_call", "function")),
    ('{"type": "tool_use", "id": "x", "name": "read_file", "input": {"path": "a.txt"}}', [a]),
    ('{"tool": "read_file", "args": {"path": "a.txt"}}', [a]),
    ('{"action": "read_file", "action_input": {"path": "a.txt"}}', [a]),
    (
        '{"tool_uses": [{"recipient_name": "functions.read_file", '
        '"parameters": {"path": "a.txt"}}]}',
        [a],
    ),
    # slips
    ("{'name': 'read_file', 'arguments': {'path': 'a.txt'}}", [a]),
    ('{name: "read_file", arguments: {path: "a.txt"}}', [a]),
    ('{"name": "read_file", "arguments": {"path": "a.txt",},}', [a]),
    (A.replace("a.txt", "a\nb"), [("read_file", {"path": "a\nb"})]),
    (A.replace("a.txt", "it\\'s"), [("read_file", {"path": "it's"})]),
    (
        "{'name': 'list_dir', 'arguments': {'path': 'src', 'all': True, \"n\": 5}}",
        [("list_dir", {"path": "src", "all": True, "n": 5})],
    ),
    # as in Python
    ('read_file(path="a.txt")', [a]),
    ("```python\nread_file(path='a.txt')\nlist_dir(path='src', n=5,)\n```", [a, b]),
    ('[read_file(path="a.txt"), list_dir(path="src", n=5)]', [a, b]),
    *((f"{n}read_file({{'path': 'a.txt'}} )", [a]) for n in ("", "functions.", "default_api.")),
    ('default_api.read_file(path="a.txt")', [a]),
    # notes
    ('{"name": "read_file", // reads\n "arguments": /* of it */ {"path": "a.txt"}}', [a]),
    ('{"name": "read_file", # reads\n "arguments": {"path": "a.txt" // last\n}}', [a]),
    (f"```python\n# read it\n{A}\n// and\n{B} # so\n```", [a, b]),
    (A[:-1] + ', "reason": "to see"}', [a]),
    ('{"thought": "so {far}", "name": "read_file", "arguments": {"path": "a.txt"}}', [a]),
    # without arguments
    *((f'{{"name": "clock"{more}}}', [("clock", {})]) for more in ("", ', "arguments": null')),
    ('{"name": "clock", "arguments": ""}', [("clock", {})]),
    ("<tool_call>clock</tool_call>", [("clock", {})]),
]
AROUND = [
    (f"I will look.\n\n```json\n{A}\n```", "I will look.", [a]),
    (f"```json\n{A}\n```\nThat is it.", "That is it.", [a]),
    (f"So:\n```json\n{A}\n```\nand\n```json\n{B}\n```\nDone.", "So:\nand\nDone.", [a, b]),
    (f"Look.\n{A}", "Look.", [a]),
    (f"Call: ```json\n{A}\n``` Done.", "Call: Done.", [a]),
    (f"I use ```{A}``` and ```{B}```.", "I use and.", [a, b]),
    (f"{A}\nThat is it.", "That is it.", [a]),
    (f"Now <tool_call>{A}</tool_call> it runs.", "Now it runs.", [a]),
    (f"```python\nprint(1)\n```\n{A}", "```python\nprint(1)\n```", [a]),
]
TEXTS = [
    '{"name": "nothing", "arguments": {}}',
    '{"name": "read_file", "arguments": {}}',
    '{"name": "read_file", "arguments": {"path": 5}}',
    '{"name": "read_file", "arguments": ["a.txt"]}',
    '{"name": "read_file", "description": "Reads.", "parameters": {"path": "x"}}',
    '{"name": "list_dir", "arguments": {"path": "x", "more": 1}}',
    '{"name": "list_dir", "arguments": {"path": "x", "sort": "age"}}',
    f"<tool_call>\n{A.replace('path', 'file')}\n</tool_call>",
    # two meanings
    '{"name": "read_file", "name": "clock", "arguments": {"path": "x"}}',
    '{"name": "read_file", "arguments": {"path": "x", "path": "y"}}',
    '{"name": "read_file", "arguments": {"path": "x"}, "parameters": {"path": "y"}}',
    A.replace("a.txt", 'a"b'),
    A.replace("a.txt", r"C:\data\new"),
    "{'name': 'read_file', 'arguments': {'path': 'it's'}}",
    # in the middle of other text
    f"Text, then {A}",
    f"{A} is the form.",
    f"`{A}`",
    "read_file(path='x').strip()",
    "read_file('x')",
    "read_file({'path': 'x'}, 1)",
    "read_file({'path': 5})",
    A.replace("a.txt", "a\" // b"),
    f"# {A}",
    f"// {A}",
    f"/* {A} */",
    f"```json\n// {A}\n```\n",
    "def read_file(path='x'): pass",
    "`read_file(path='x')` reads.",
    # not each piece is one
    f'```json\n{A}\n{{"a": 1}}\n```',
    f'```json\n{{"a": 1}}\n{A}\n```',
    "```python\nx = 1\nread_file(path='a')\n```\nDone.",
    f'[{A}, {{"name": "nothing"}}]',
    f'[\n{{"name": "read_file", "arguments": {{"path": 5}}}},\n{A}\n]',
    f"{A}\n{{\"rain\": 1}}",
    *("<tool_call>[]</tool_call>", "<tool_call>not JSON</tool_call>", "No call here."),
    "<tool_call>\n<function=nothing>\n</function>\n</tool_call>",
    *(f'{{"name": "read_file", "arguments": {odd}}}' for odd in ("5", '"{"')),
    # and anything else
    *("{", "[", "<", "```", "``", "read_file", "[1] and [2]\n[3]: x", "{1, 2} is a set"),
    *("<b>x</b> [TOOL", "a < b and <tool"),
    "```json\n{\"a\": [1, 2]}\n```\n",
    "| a | b |\n|---|---|\n",
    "{" * 3000,
    "[" * 3000,
]  # fmt: skip


def read(text: str, size: int) -> Read:
    reader = ToolReader(ToolUse(TOOLS))
    parts = [reader.feed(text[at : at + size]) for at in range(0, len(text), size)]
    shown = "".join(parts) + reader.finish()
    return shown, [(call.name, json.loads(call.arguments)) for call in reader.calls]


@pytest.mark.parametrize("size", [1, 3, 8, 10_000])
def test_calls_are_read_however_they_are_wrapped(size: int) -> None:
    for text, calls in SAME:
        assert read(text, size) == ("", calls), text
    for text, shown, calls in AROUND:
        assert read(text, size) == (shown, calls), text


@pytest.mark.parametrize("size", [1, 3, 8, 10_000])
def test_what_is_none_stays_as_it_was_written(size: int) -> None:
    for text in TEXTS:
        assert read(text, size) == (text, []), text


@pytest.mark.parametrize(
    "text",
    [
        *('{"title', '{"name": "x', '{"name": "read_files', '{"content": "H', "{1", "[1", "{{{"),
        *("```python\np", "```json\n{\"b", "```\nso", "<b", "a <tool x", "[TOOL]x", "read_me", "I"),
        *("<tool_call>I", "<tool_call>{\"b", '{"tool_calls": [1', "[x", "read_file x"),
        '{"name": "read_file", "note',
    ],
)  # fmt: skip
def test_what_can_become_no_call_is_let_go_at_once(text: str) -> None:
    assert "".join(map(ToolReader(ToolUse(TOOLS)).feed, text)) == text


def test_a_long_value_is_not_read_again_with_each_piece() -> None:
    text = json.dumps({"name": "read_file", "arguments": {"path": "word " * 20_000}})
    begin = time.process_time()
    assert read(text, 4)[1][0][0] == "read_file"
    assert read("<tool_call>\n" * 5000, 12) == ("<tool_call>\n" * 5000, [])
    assert time.process_time() - begin < 20


PARTS = (
    *(A, B, "```", "```json\n", "~~~", "`", "\n", " ", "<tool_call>", "</tool_call>", "I"),
    *("[", "]", "\\", "<|tool_call>", "<｜tool▁call▁begin｜>"),
    *("{", "}", "{{", "}}", ",", "read_file(path='x')", "read_file", "(", ")", "=", ":", "'", '"'),
    *("[TOOL_CALLS]", "[ARGS]", "<function=read_file>", "</function>", "functions."),
    *('{"path": "x"}', '"name"', '"read_file"', '"arguments"', "<|\"|>"),
    *("//", "/*", "*/", "/", "#", "functions.", "[END_TOOL_REQUEST]"),
    *("<arg_key>path</arg_key>", "<arg_value>x</arg_value>", "clock", '"""', "5", "true", "call:"),
)  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_where_a_text_is_cut_into_pieces_changes_nothing(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(60):
        text = "".join(rng.choice(PARTS) for _ in range(rng.randrange(1, 14)))
        whole = read(text, 10_000)
        assert [read(text, size) for size in (1, 2, 7)] == [whole] * 3, text


ROUTES = {
    "/v1/chat/completions": ('"tool_calls"', '"finish_reason":"length"'),
    "/v1/messages": ('"tool_use"', '"stop_reason":"max_tokens"'),
    "/api/chat": ('"tool_calls"', '"done_reason":"length"'),
    "/v1/responses": ('"function_call"', '"status":"incomplete"'),
}
CUT = "<tool_call>\n<function=read_file>\n<parameter=path>\nhello wor"


def asked(path: str, stream: bool) -> dict[str, Any]:
    turns = [{"role": "user", "content": "Go on"}]
    function = {"name": "read_file", "parameters": PATH}
    return {
        "stream": stream,
        "max_tokens": 500,
        **({"input": "Go on"} if path == "/v1/responses" else {"messages": turns}),
        "tools": [
            {"name": "read_file", "input_schema": PATH}
            if path == "/v1/messages"
            else {"type": "function", **function}
            if path == "/v1/responses"
            else {"type": "function", "function": function}
        ],
    }


@pytest.mark.parametrize("stream", [False, True])
def test_every_dialect_delivers_what_stands_in_a_fence(stream: bool) -> None:
    with serving(ScriptedRecipe((Reply(f"So:\n```json\n{A}\n```"),))) as server:
        for path, (mark, _) in ROUTES.items():
            text = server.post(path, asked(path, stream)).text
            assert mark in text
            assert "```" not in text


@pytest.mark.parametrize("text", [f"```json\n{A[:-9]}", CUT], ids=["fence", "tags"])
@pytest.mark.parametrize("stream", [False, True])
def test_no_dialect_delivers_a_call_that_was_cut(stream: bool, text: str) -> None:
    with serving(ScriptedRecipe((Reply(text, reason="length"),))) as server:
        for path, (mark, end) in ROUTES.items():
            answer = server.post(path, asked(path, stream))
            assert answer.status_code == 200, answer.text
            assert end in answer.text
            for hidden in ("```", "hello wor", "a.txt", mark):
                assert hidden not in answer.text


def odd(**tool: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "clock"}}, {"type": "function", **tool}]


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        (odd(), "no function"),
        (odd(function={"name": "with space"}), "letters, digits"),
        (odd(function={"name": "clock"}), "another tool"),
        (odd(function={"name": "x", "parameters": {"type": "string"}}), "are an object"),
        (odd(function={"name": "x", "parameters": {"properties": []}}), "must be an object"),
    ],
)
def test_an_odd_tool_is_named_by_its_place(server: Serving, tools: Any, says: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    for path in ("/v1/chat/completions", "/api/chat"):
        answer = server.post(path, body)
        assert answer.status_code == 400
        assert answer.text.count("tools[1]") >= 1
        assert says in answer.text
    left_out = [*odd(function={"name": "x"}), {"type": "web_search"}]
    assert server.post("/v1/chat/completions", {**body, "tools": left_out}).status_code == 200
    nameless = {"input": "Hi", "tools": [{"type": "function"}]}
    assert "tools[0]" in server.post("/v1/responses", nameless).text


@pytest.fixture(scope="module")
def server() -> Any:
    with serving(ScriptedRecipe((Reply("Hello."),))) as running:
        yield running


def test_a_call_from_before_there_were_tools_stays_in_the_prompt() -> None:
    function = {"name": "read_file", "arguments": '{"path": "a.txt"}'}
    for call in ({"function_call": function}, {"tool_calls": [{"function": function}]}):
        [turn] = messages_of(msgspec.convert([{"role": "assistant", **call}], list[Turn]))
        assert turn.content == f"<tool_call>\n{A}\n</tool_call>"
    results = [Turn("user", "a"), Turn("tool", "b"), Turn("function", "c")]
    assert [turn.content.count("<tool_response>") for turn in messages_of(results)] == [0, 2]
