"""Requests as real clients send them, and what those clients need to find in the answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import model_info
from scripted_server import Rule, Rules
from servers import Serving, serving

from specllama.remote.address import Address, events_of
from specllama.remote.remote_engine import RemoteEngine
from specllama.server.ollama_api import _about
from specllama.server.usage import short
from specllama.settings.params import GenerateParams

CALLS = {
    "USE_LOOKUP": '{"name": "mcp__demo.lookup", "arguments": {"word": "plum"}}',
    "USE_EXEC": '{"name": "functions.exec", "arguments": {"input": "text(1)"}}',
    "USE_BASH": '{"name": "Bash", "arguments": {"command": "ls"}}',
}
EMPTY = {"type": "object", "properties": {}}


@pytest.fixture(scope="module")
def scripted() -> Iterator[Serving]:
    rules = (
        Rule("It rains.", when="tool_response"),
        *(Rule(f"<tool_call>{call}</tool_call>", when=asked) for asked, call in CALLS.items()),
        Rule('{"town": "Ulm"}', schema=True),
        Rule("Hello."),
    )
    with serving(Rules(rules)) as running:
        yield running


def posted(server: Serving, path: str, body: Any) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


CODEX: dict[str, Any] = {
    "model": "scripted",
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a205bb",
    "client_metadata": {"thread_id": "01a205bb"},
    "text": {"verbosity": "low"},
}
LOOKUP = {"type": "function", "name": "lookup", "strict": False, "parameters": EMPTY}
EXEC = {
    "type": "custom",
    "name": "exec",
    "description": "Run a script.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


def asked_by_codex(text: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "message",
            "id": "msg_1",
            "role": role,
            "content": [{"type": "input_text", "text": said}],
        }
        for role, said in (("developer", "You write code."), ("user", text))
    ]


def test_codex_calls_a_tool_of_an_mcp_server(scripted: Serving) -> None:
    """Tools of MCP servers stand in namespaces, and a call has to name its own."""
    namespace = {"type": "namespace", "name": "mcp__demo", "description": "", "tools": [LOOKUP]}
    tools = [{"type": "function", "name": "exec_command"}, namespace, {"type": "web_search"}]
    turns = asked_by_codex("USE_LOOKUP")
    events = scripted.frames(
        "/v1/responses", {**CODEX, "input": turns, "tools": tools, "stream": True}
    )
    [call] = events[-1]["response"]["output"]
    assert (call["type"], call["namespace"], call["name"]) == (
        "function_call",
        "mcp__demo",
        "lookup",
    )
    assert call["arguments"] == '{"word":"plum"}'
    result = {"type": "function_call_output", "call_id": call["call_id"],
              "output": [{"type": "input_text", "text": "a fruit"}]}  # fmt: skip
    more = {**CODEX, "input": [*turns, call, result], "tools": tools}
    [message] = posted(scripted, "/v1/responses", more)["output"]
    assert message["content"][0]["text"] == "It rains."


def test_codex_brings_tools_in_its_conversation_whose_input_is_a_text(scripted: Serving) -> None:
    functions = {"type": "namespace", "name": "functions", "tools": [EXEC, LOOKUP]}
    more = {"type": "additional_tools", "role": "developer", "tools": [functions]}
    turns = [more, *asked_by_codex("USE_EXEC")]
    events = scripted.frames("/v1/responses", {**CODEX, "input": turns, "stream": True})
    assert "response.custom_tool_call_input.delta" in [event["type"] for event in events]
    [done] = [e for e in events if e["type"] == "response.custom_tool_call_input.done"]
    assert done["input"] == "text(1)"
    [call] = events[-1]["response"]["output"]
    assert (call["type"], call["namespace"], call["name"], call["input"]) == (
        "custom_tool_call", "functions", "exec", "text(1)",
    )  # fmt: skip
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "1"}
    [message] = posted(
        scripted, "/v1/responses", {**CODEX, "input": [*turns, call, result]}
    )["output"]  # fmt: skip
    assert message["content"][0]["text"] == "It rains."


@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        ({"type": "function", "namespace": "mcp__demo", "name": "lookup"}, "function_call"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "message"),
    ],
)
def test_a_choice_among_tools_of_a_namespace(scripted: Serving, choice: Any, kind: str) -> None:
    tools = [{"type": "namespace", "name": "mcp__demo", "tools": [LOOKUP]}]
    body = {"input": "USE_LOOKUP", "tools": tools, "tool_choice": choice}
    [item] = posted(scripted, "/v1/responses", body)["output"]
    assert item["type"] == kind


def test_claude_code(scripted: Serving) -> None:
    assert scripted.http.head("/").status_code == 200
    asked = {
        "model": "scripted",
        "max_tokens": 32000,
        "stream": True,
        "system": [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "USE_BASH"}]}],
        "tools": [
            {"name": "Bash", "description": "", "input_schema": EMPTY},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        ],
        "metadata": {"user_id": "{}"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "max"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }
    events = scripted.frames("/v1/messages?beta=true", asked)
    [start] = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert (start["type"], start["name"]) == ("tool_use", "Bash")
    call = {**start, "input": {"command": "ls"}}
    results = [{"type": "tool_result", "tool_use_id": call["id"], "content": "a.txt"},
               {"type": "text", "text": "go on"}]  # fmt: skip
    turns = [*asked["messages"], {"role": "assistant", "content": [call]},
             {"role": "user", "content": results}]  # fmt: skip
    reply = posted(scripted, "/v1/messages", {**asked, "messages": turns, "stream": False})
    assert reply["content"] == [{"type": "text", "text": "It rains."}]


def test_tools_that_anthropic_runs_are_left_out(scripted: Serving) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    counts = [
        posted(scripted, "/v1/messages/count_tokens", {"messages": turns, "tools": some})
        for some in ([], tools)
    ]
    assert counts[0] == counts[1]


def test_anthropics_client_sends_all_where_no_thread_is_kept(scripted: Serving) -> None:
    """Its runner of tools begins a thread, and goes on with the new turn alone."""
    asked: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
    first = posted(scripted, "/v1/messages", {**asked, "thread": {"type": "create"}})
    on = {"type": "continue", "previous_message_id": first["id"]}
    refused = scripted.post("/v1/messages", {**asked, "thread": on})
    assert refused.status_code == 404
    assert refused.json()["error"]["details"] == {"error_code": "thread_not_found"}


def test_json_in_anthropics_words(scripted: Serving) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {}}}
    asked = {"max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
    reply = posted(scripted, "/v1/messages", {**asked, "output_config": {"format": form}})
    assert reply["content"][0]["text"] == '{"town": "Ulm"}'


def test_a_text_as_a_document(scripted: Serving) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "USE_BASH"}
    turns = [{"role": "user", "content": [{"type": "document", "source": source}]}]
    asked = {"max_tokens": 50, "messages": turns}
    assert "Bash" in posted(scripted, "/v1/messages", asked)["content"][0]["text"]


def test_models_for_everybody(scripted: Serving) -> None:
    """OpenAI's and Anthropic's clients ask at the same place; editors look for the context."""
    found = posted_models(scripted)
    [model] = found["data"]
    assert found["has_more"] is False
    assert (found["object"], model["object"], model["type"]) == ("list", "model", "model")
    assert model["id"] == model["display_name"] == found["first_id"] == found["last_id"]
    assert model["max_model_len"] == model["context_length"] == model["max_input_tokens"]
    assert model["created_at"].startswith("20")


def posted_models(server: Serving) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/v1/models").json()
    return found


def test_zed_finds_what_its_structs_need(scripted: Serving) -> None:
    chunks = scripted.frames(
        "/v1/chat/completions",
        {
            "model": "scripted",
            "messages": [{"role": "user", "content": "USE_BASH"}],
            "tools": [{"type": "function", "function": {"name": "Bash", "parameters": EMPTY}}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
    )
    assert chunks.pop() == "[DONE]"
    for chunk in chunks:
        assert {"id", "object", "created", "model", "choices"} <= chunk.keys()
        assert all("index" in choice for choice in chunk["choices"])
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    [call, rest] = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert (call["index"], call["type"], call["function"]["name"]) == (0, "function", "Bash")
    assert call["function"]["arguments"] == ""
    assert json.loads(rest["function"]["arguments"])
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["total_tokens"] > 0


def test_copilot_finds_a_model_of_ollamas_that_calls_tools(scripted: Serving) -> None:
    version = scripted.http.get("/api/version").json()["version"]
    assert all(part.isdigit() for part in version.split("."))
    [model] = scripted.http.get("/api/tags").json()["models"]
    shown = posted(scripted, "/api/show", {"model": model["model"]})
    assert {"completion", "tools", "thinking"} <= set(shown["capabilities"])
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] > 0


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_tools_that_may_be_called(scripted: Serving, mode: str) -> None:
    allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "Bash"}}]}
    reply = scripted.chat(
        "USE_BASH",
        tools=[{"type": "function", "function": {"name": name}} for name in ("Bash", "Read")],
        tool_choice={"type": "allowed_tools", "allowed_tools": allowed},
        max_tokens=50,
    )
    [call] = reply["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "Bash"


def test_a_refusal_goes_back_as_what_was_said(scripted: Serving) -> None:
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    turns = [{"role": "user", "content": "Hm"}, refused, {"role": "user", "content": "Why?"}]
    assert posted(scripted, "/v1/chat/completions", {"messages": turns})["choices"]


def test_what_is_not_offered_is_not_asked_for_again(scripted: Serving) -> None:
    answer = scripted.post("/v1/embeddings", {"input": "Hi"})
    assert answer.status_code == 501
    assert answer.headers["x-should-retry"] == "false"


ENDS = "one\u2028two\u2029three\x85four"


@pytest.fixture(scope="module")
def lines() -> Iterator[Serving]:
    with serving(Rules((Rule(ENDS),))) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_no_character_of_a_text_ends_a_line(lines: Serving, path: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hm"}], "stream": True}
    with lines.http.stream("POST", path, json=body) as answer:
        told = [line.removeprefix("data: ") for line in answer.iter_lines()]
    frames = [json.loads(line) for line in told if line.startswith("{")]
    deltas = [f["message"] if "message" in f else f["choices"][0]["delta"] for f in frames]
    assert "".join(delta.get("content") or "" for delta in deltas) == ENDS
    assert all(line.startswith(("{", "[DONE]")) for line in told if line)


def test_our_own_client_reads_every_text(lines: Serving) -> None:
    with RemoteEngine(Address(lines.url)) as engine:
        *_, end = engine.generate("Hm", GenerateParams(max_tokens=50))
    assert end.text == ENDS


def test_events_come_in_pieces_of_any_length() -> None:
    wire = f'data: {{"text": "{ENDS}"}}\n\n: still here\n\ndata: {{"n": 1}}\n\n'.encode()
    for n in range(1, len(wire)):
        parts = [wire[at : at + n] for at in range(0, len(wire), n)]
        assert list(events_of(parts)) == [{"text": ENDS}, {"n": 1}]


def test_ollamas_command_line_finds_what_it_prints(scripted: Serving) -> None:
    for path in ("/api/tags", "/api/ps"):
        [model] = scripted.http.get(path).json()["models"]
        assert len(bytes.fromhex(model["digest"])) == 32
        assert model["details"]["parameter_size"][-1] in "BMK"
    known = scripted.http.get("/api/tags").json()["models"][0]["name"]
    for name, status in ((known, 200), (f"{known}:latest", 200), ("nothing", 404), (None, 404)):
        answer = scripted.post("/api/show", {"model": name})
        assert answer.status_code == status
        assert status == 200 or "not found" in answer.json()["error"]


@pytest.mark.parametrize(
    ("n", "said"), [(7_300_000, "7.3M"), (8_030_000_000, "8.0B"), (512, "0.5K")]
)
def test_parameters_are_counted_in_ollamas_words(n: int, said: str) -> None:
    assert short(n) == said


def test_what_ollama_shows_of_a_file() -> None:
    file = Path(__file__).parents[2] / "models" / "tiny" / "tiny-target-q4_0.gguf"
    about = _about(model_info("target", path=str(file), architecture="llama"))
    for key in ("block_count", "embedding_length", "attention.head_count"):
        assert about[f"llama.{key}"] > 0
    assert about["tokenizer.ggml.model"]
    assert about["tokenizer.ggml.tokens"] is None, "as Ollama's short form"
    assert "tokenizer.chat_template" not in about
    assert about["general.license"] == "MIT"
