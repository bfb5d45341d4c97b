"""What an agent's session needs of a server, turn after turn."""

from collections.abc import Iterator
from typing import Any

import pytest
from servers import Serving, serving, table

from specllama.interface import Message
from specllama.server.chat_messages import steadied
from specllama.server.dialect import Job
from specllama.settings.params import GenerateParams

HEAD = "x-anthropic-billing-header: cc_version=2.1.{0}.3a3; cc_entrypoint=cli; cch={0:05x};"
SYSTEM = "you write short letters about the rain and the sea. " * 6
ASKED = [{"role": "user", "content": "the rain"}]


def text(part: str) -> dict[str, str]:
    return {"type": "text", "text": part}


def turns(system: Any, role: str = "system") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": system}, *ASKED], "max_tokens": 3}


def messages(system: Any) -> dict[str, Any]:
    return {"system": system, "messages": ASKED, "max_tokens": 3}


def items(**fields: Any) -> dict[str, Any]:
    return {"input": ASKED, "max_output_tokens": 3, **fields}


SHAPES: dict[str, tuple[str, Any]] = {
    "blocks": ("/v1/messages", lambda head: messages([text(head), text(SYSTEM)])),
    "block with line end": ("/v1/messages", lambda h: messages([text(h + "\n"), text(SYSTEM)])),
    "second block": ("/v1/messages", lambda h: messages([text("Claude."), text(h), text(SYSTEM)])),
    "first line": ("/v1/messages", lambda head: messages(f"{head}\r\n{SYSTEM}")),
    "same line": ("/v1/messages", lambda head: messages(f"{head}{SYSTEM}")),
    "system turn": ("/v1/messages", lambda head: turns(f"{head}\n{SYSTEM}")),
    "chat": ("/v1/chat/completions", lambda head: turns(f"{head}\n{SYSTEM}")),
    "parts": ("/v1/chat/completions", lambda h: turns([text(h), text(SYSTEM)], "developer")),
    "own turn": (
        "/v1/chat/completions",
        lambda head: {
            **turns(SYSTEM),
            "messages": [*turns(head)["messages"][:1], *turns(SYSTEM)["messages"]],
        },
    ),
    "instructions": ("/v1/responses", lambda head: items(instructions=f"{head}\n{SYSTEM}")),
    "item": (
        "/v1/responses",
        lambda h: items(input=[{"role": "developer", "content": f"{h}\n{SYSTEM}"}, *ASKED]),
    ),
    "ollama": (
        "/api/chat",
        lambda h: {
            "messages": turns(f"{h}\n{SYSTEM}")["messages"],
            "stream": False,
            "options": {"num_predict": 3},
        },
    ),
}


def figures(server: Serving, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["timings"]
    return found


@pytest.fixture(scope="module")
def literal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(
        table(tmp_path_factory.mktemp("tables")), params=GenerateParams(steady_prompts=False)
    ) as running:
        yield running


@pytest.mark.parametrize("shape", SHAPES)
def test_a_changing_head_costs_nothing(server: Serving, literal: Serving, shape: str) -> None:
    path, body = SHAPES[shape]
    for running, most in ((server, 1), (literal, 3000)):
        figures(running, path, body(HEAD.format(1)))
        again = figures(running, path, body(HEAD.format(2)))
        assert again["prompt_n"] <= most
        assert again["cache_n"] + again["prompt_n"] > len(SYSTEM)
    assert again["prompt_n"] > 300, "as it was sent, nothing behind the head is found"


@pytest.mark.parametrize(
    ("system", "left"),
    [
        (HEAD, None),
        (f"{HEAD}\n\n", None),
        (f"be brief\n{HEAD}\nbe kind", "be brief\nbe kind"),
        ("x-anthropic-billing-header: cch=1; cc=2\nbe kind", "be kind"),
        ("x-anthropic-billing-header: 123;\nbe kind; be brief", "be kind; be brief"),
        (f"the line {HEAD} is sent", f"the line {HEAD} is sent"),
        ("", ""),
        (SYSTEM, SYSTEM),
    ],
)
def test_only_that_line_is_left_out(system: str, left: str | None) -> None:
    asked = Message("user", f"{HEAD}\nwhat is this?")
    [prompt] = steadied(Job(((Message("system", system), asked),), GenerateParams())).prompts
    assert prompt == (*([] if left is None else [Message("system", left)]), asked)
    for other in ("the rain", (1, 2)):
        assert steadied(Job((other,), GenerateParams())).prompts == (other,)


def test_templates_show_what_a_model_gets(server: Serving) -> None:
    told = server.post("/apply-template", turns(f"{HEAD}\n{SYSTEM}")).json()["prompt"]
    assert told == server.post("/apply-template", turns(SYSTEM)).json()["prompt"]


TOO_LONG = "x" * 3000
N_CTX = 2048


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TOO_LONG}]}, "messages"),
        ("/v1/responses", {"input": TOO_LONG}, "input"),
        ("/v1/completions", {"prompt": TOO_LONG}, "prompt"),
        ("/completion", {"prompt": [5] * 2100}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 2100}, "prompt"),
        ("/v1/chat/completions", {"messages": ASKED * 2100}, "messages"),
        ("/v1/responses/compact", {"input": TOO_LONG}, "input"),
    ],
)
def test_a_prompt_that_is_too_long_names_its_field(
    server: Serving, path: str, body: dict[str, Any], param: str
) -> None:
    error = server.post(path, body).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", N_CTX)
    noun = (
        "messages" if isinstance(body.get("messages"), list) and "x" not in str(body) else "tokens"
    )
    assert f" {noun} exceeds the available context size of {N_CTX}" in error["message"]


def test_anthropics_words_for_a_prompt_that_is_too_long(server: Serving) -> None:
    body = {"messages": [{"role": "user", "content": TOO_LONG}], "max_tokens": 4}
    for stream in (False, True):
        answer = server.post("/v1/messages", {**body, "stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert error["message"] == f"prompt is too long: 3000 tokens > {N_CTX} maximum"


def test_anthropic_names_its_own_fields(server: Serving) -> None:
    for body, field in (
        ({"stop_sequences": ["x" * 2000]}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        (
            {"thinking": {"type": "enabled"}, "output_config": {"effort": "a lot"}},
            "output_config.effort",
        ),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
    ):
        error = server.post("/v1/messages", {**messages("Be brief."), **body}).json()["error"]
        assert error["message"].startswith(field)


def test_no_tokens_of_anthropic_fill_the_cache(server: Serving) -> None:
    body = {"system": "the sea is wide and deep today. " * 8, "messages": ASKED, "max_tokens": 0}
    told = server.post("/v1/messages", body).json()
    assert (told["content"], told["stop_reason"]) == ([], "max_tokens")
    assert told["usage"]["output_tokens"] == 0
    assert told["usage"]["input_tokens"] > 250
    again = server.post("/v1/messages", {**body, "max_tokens": 4}).json()
    assert again["usage"]["input_tokens"] <= 1
    assert again["content"][0]["text"]
    kinds = [frame["type"] for frame in server.frames("/v1/messages", {**body, "stream": True})]
    assert kinds == ["message_start", "ping", "message_delta", "message_stop"]


def test_ollamas_context_may_be_larger_than_this_one(server: Serving) -> None:
    body = {"messages": ASKED, "stream": False, "options": {"num_ctx": 32768, "num_predict": 3}}
    assert server.post("/api/chat", body).json()["eval_count"] == 3
    generate = {"prompt": "the rain", "stream": False, "options": body["options"]}
    assert server.post("/api/generate", generate).status_code == 200
    body["messages"] = [{"role": "user", "content": TOO_LONG}]
    answer = server.post("/api/chat", body)
    assert (answer.status_code, "3000 tokens" in answer.json()["error"]) == (400, True)


@pytest.mark.parametrize("limit", [0, -1, -2])
def test_what_is_no_limit_to_ollama_is_none_here(server: Serving, limit: int) -> None:
    body = {"messages": ASKED, "stream": False}
    whole = server.post("/api/chat", {**body, "options": {"seed": 1, "num_predict": limit}}).json()
    free = server.post("/api/chat", {**body, "options": {"seed": 1}}).json()
    assert whole["message"] == free["message"]
    assert whole["eval_count"] == free["eval_count"] > 1
    assert whole["done_reason"] == "stop"


CHAT = [
    {"role": "system", "content": "be brief."},
    *({"role": role, "content": f"{i} {role} " * 20}
      for i in range(12) for role in ("user", "assistant")),
    {"role": "user", "content": "look at the file"},
    {"role": "assistant", "content": "",
     "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
    {"role": "tool", "content": "it is empty " * 10},
]  # fmt: skip


def test_ollama_leaves_out_the_oldest_messages_where_that_is_asked(server: Serving) -> None:
    body = {"messages": CHAT, "stream": False, "options": {"num_predict": 1}}
    assert server.post("/api/chat", body).status_code == 400
    assert server.post("/api/chat", {**body, "truncate": False}).status_code == 400
    whole = server.post("/api/chat", {**body, "truncate": True}).json()["prompt_eval_count"]
    most = max(len(turn["content"]) for turn in CHAT)
    assert N_CTX - 2 * most < whole <= N_CTX, "as few as need be"
    body["options"] = {"num_predict": 1, "num_ctx": 300}
    short = server.post("/api/chat", {**body, "truncate": True}).json()["prompt_eval_count"]
    system, *_, call, result = CHAT
    body["messages"] = [system, call, result]
    assert server.post("/api/chat", body).json()["prompt_eval_count"] <= short <= 300
    body["messages"] = [system, {"role": "user", "content": TOO_LONG}]
    assert server.post("/api/chat", {**body, "truncate": True}).status_code == 400


ITEMS = [
    {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"]}},
    {"type": "local_shell_call_output", "call_id": "c", "output": "a.txt"},
    {"type": "compaction", "encrypted_content": "gAAAA"},
    {"type": "tool_search_call", "arguments": {"any": "thing"}},
    {"type": "web_search_call", "action": {"query": "rain"}},
    {"type": "image_generation_call", "result": "aGk="},
    {"type": "computer_call_output", "output": {"type": "computer_screenshot"}},
    {"type": "something\nnew", "content": 5, "role": [], "tools": {}, "name": {}},
]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item["type"].split("\n")[0])
def test_items_that_are_not_known_are_left_out(
    server: Serving, item: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "specllama.server")
    plain = server.post("/v1/responses", items(seed=1)).json()
    told = server.post("/v1/responses", items(input=[item, *ASKED], seed=1)).json()
    assert told["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
    assert told["output"][0]["content"] == plain["output"][0]["content"]
    kind = item["type"].replace("\n", " ")
    assert [r.message for r in caplog.records if "left out" in r.message] == [
        f"input[0]: {kind} is left out"
    ]


BLOCKS = [
    {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "rain"}},
    {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "an_error"}},
    {"type": "mcp_tool_use", "id": "m", "name": "look", "server_name": "x", "input": {}},
    {"type": "redacted_thinking", "data": "aGk="},
    {"type": "something\nnew", "text": 5, "source": [], "content": 7, "id": {}},
]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block["type"].split("\n")[0])
def test_blocks_that_only_another_service_reads_are_left_out(
    server: Serving, block: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "specllama.server")
    body = messages(SYSTEM)
    plain = figures(server, "/v1/messages", {**body, "messages": [*ASKED, *ASKED]})
    mixed = [*ASKED, {"role": "user", "content": [block, text("the rain")]}]
    told = figures(server, "/v1/messages", {**body, "messages": mixed})
    sizes = [one["prompt_n"] + one["cache_n"] for one in (plain, told)]
    assert sizes[0] == sizes[1]
    kind = block["type"].replace("\n", " ")
    assert [r.message for r in caplog.records if "left out" in r.message] == [
        f"messages[1]: {kind} is left out"
    ]


@pytest.mark.parametrize(
    ("block", "held"),
    [
        ({"type": "tool_reference", "tool_name": "look"}, "look"),
        ({"type": "compaction", "content": "It rained."}, "It rained."),
        (
            {"type": "search_result", "source": "rain.example", "title": "Rain",
             "content": [text("It rains.")]},
            "Rain\nrain.example\nIt rains.",
        ),
    ],
)  # fmt: skip
def test_blocks_of_text_are_read(server: Serving, block: dict[str, Any], held: str) -> None:
    sizes = []
    for one in (block, text(held)):
        result = {"type": "tool_result", "tool_use_id": "t", "content": [one]}
        call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        body = {"messages": turns, "max_tokens": 1}
        told = figures(server, "/v1/messages", body)
        sizes.append(told["prompt_n"] + told["cache_n"])
    assert sizes[0] == sizes[1]


def test_a_block_that_is_known_is_read_strictly(server: Serving) -> None:
    def refused(content: Any, **more: Any) -> str:
        body = {"messages": [*ASKED, {"role": "user", "content": content}], "max_tokens": 1}
        answer = server.post("/v1/messages", {**body, **more})
        assert answer.status_code == 400
        said: str = answer.json()["error"]["message"].partition(": ")[0]
        return said

    assert refused([text("x"), {"type": "text", "text": 5}]) == "messages[1].content[1].text"
    assert refused([{"text": "x"}]) == "messages[1].content[0]"
    assert refused("x", system=[{"type": "text", "text": []}]) == "system[0].text"
    assert refused("x", tools=[{"input_schema": {}}]) == "tools[0]"


@pytest.mark.parametrize(
    ("item", "place"),
    [
        ({"role": "user", "content": 5}, "input[1].content"),
        ({"type": "function_call", "name": "look", "arguments": {}}, "input[1].arguments"),
        ({"role": "king", "content": "x"}, "input[1].role"),
    ],
)
def test_an_item_that_is_known_is_read_strictly(server: Serving, item: Any, place: str) -> None:
    answer = server.post("/v1/responses", items(input=[*ASKED, item]))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, place)


def test_probes_of_codex_are_answered_alike(server: Serving) -> None:
    probes = [{"input": ""}, {"input": []}, {}, {"input": [ITEMS[2]]}]
    for more in ({}, {"instructions": "Be brief."}):
        told = [
            server.post("/v1/responses", {"max_output_tokens": 1, "seed": 1, **probe, **more})
            for probe in probes
        ]
        if not more:  # the table has no template: an empty prompt is none
            assert {answer.json()["error"]["message"] for answer in told} == {"the prompt is empty"}
        else:
            assert len({answer.json()["usage"]["input_tokens"] for answer in told}) == 1


def test_a_conversation_is_compacted_and_goes_on(server: Serving) -> None:
    talk = [*ASKED, {"role": "assistant", "content": "It rains."}, {"type": "reasoning"}]
    for prefix in ("/v1", ""):
        told = server.post(
            f"{prefix}/responses/compact", {"model": "table", "input": talk, "seed": 1}
        ).json()
        assert told["object"] == "response.compaction"
        *said, summary = told["output"]
        assert [(one["role"], one["content"]) for one in said] == [("user", "the rain")]
        assert summary["type"] == "compaction"
        assert told["usage"]["output_tokens"] > 0
    bare = server.post("/v1/responses", items(input=said)).json()["usage"]["input_tokens"]
    gone_on = server.post("/v1/responses", items(input=[*said, summary])).json()
    more = gone_on["usage"]["input_tokens"] - bare
    assert more >= len(summary["encrypted_content"])
    assert server.post("/v1/responses/compact", {"input": TOO_LONG}).status_code == 400


PATHS: dict[str, dict[str, Any]] = {
    "/completion": {"prompt": "the wind and the sea. " * 9, "n_predict": 2},
    "/v1/chat/completions": {"messages": ASKED * 9, "max_tokens": 2},
    "/v1/messages": {"messages": ASKED * 9, "max_tokens": 2},
    "/api/generate": {"prompt": "the sun. " * 9, "raw": True, "stream": False,
                      "options": {"num_predict": 2}},
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_a_prompt_is_read_again_where_that_is_asked(server: Serving, path: str) -> None:
    body, off = {**PATHS[path]}, {"cache_prompt": False}
    if "options" in body:
        off = {"options": {**body["options"], **off}}
    first = figures(server, path, body)
    n = first["prompt_n"] + first["cache_n"]
    for _ in range(2):
        again = figures(server, path, {**body, **off})
        assert (again["prompt_n"], again["cache_n"]) == (n, 0)
    if "messages" in path or "chat" in path:  # a second reply goes on from the first
        both = figures(server, "/v1/chat/completions", {**body, "cache_prompt": False, "n": 2})
        assert both["prompt_n"] <= n + 1
    found = figures(server, path, {**body, "cache_prompt": True})
    assert found["prompt_n"] <= 1, "what was read afresh is there for others"


def test_the_slot_is_the_one_that_wrote(server: Serving) -> None:
    body = {"prompt": "the rain in a slot", "n_predict": 2}
    for slot in (2, 0, 3):
        assert server.post("/completion", {**body, "id_slot": slot}).json()["id_slot"] == slot
        frames = server.frames("/completion", {**body, "id_slot": slot, "stream": True})
        assert {frame["id_slot"] for frame in frames} == {slot}
    there = {slot["id"] for slot in server.http.get("/slots").json()}
    assert server.post("/completion", {**body, "id_slot": 50}).json()["id_slot"] in there


def test_a_reply_says_why_nothing_was_drafted(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECLLAMA_HOME", str(tmp_path))
    lines: list[str] = []
    (tmp_path / "tables").mkdir()
    with serving(table(tmp_path / "tables"), log=lines.append) as running:
        assert running.chat(specllama={"proposer": "none"}, seed=1)["timings"]["undrafted"] == "off"
        assert running.http.get("/props").json()["undrafted"] == "off"
        drafted = running.chat(specllama={"proposer": "draft", "window": "fixed"}, seed=1)
        assert drafted["timings"]["draft_n"] > 0
        assert "undrafted" not in drafted["timings"]
        assert running.http.get("/props").json()["undrafted"] is None
        why = running.chat(specllama={"proposer": "draft"}, max_tokens=3)["timings"]["undrafted"]
        assert why.startswith("no drafting for 3 tokens")
        *_, delta, _ = running.frames("/v1/messages", {**messages("Hi."), "stream": True})
        assert delta["timings"]["undrafted"] == why
    posts = [line for line in lines if "POST" in line]
    assert [line.partition("nothing drafted: ")[2] for line in posts] == [
        "off", "", why, why
    ]  # fmt: skip
