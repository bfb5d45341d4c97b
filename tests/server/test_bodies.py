"""Bodies: their encoding, whole numbers with a point, and budgets of thoughts by every name."""

import json
from typing import Any

import msgspec
import pytest
from servers import Serving

from specllama.server import anthropic, chat_completions, native, ollama_api, responses
from specllama.server.dialect import Job
from specllama.server.refusals import Refusal
from specllama.settings.params import GenerateParams

TURNS = [{"role": "user", "content": "the rain"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 3},
    "/v1/completions": {"prompt": "the rain", "max_tokens": 3},
    "/v1/responses": {"input": "the rain", "max_output_tokens": 3},
    "/v1/messages": {"messages": TURNS, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": TURNS},
    "/completion": {"prompt": "the rain", "n_predict": 3},
    "/tokenize": {"content": "the rain"},
    "/apply-template": {"messages": TURNS},
    "/api/chat": {"messages": TURNS, "stream": False, "options": {"num_predict": 3}},
    "/api/generate": {"prompt": "the rain", "stream": False, "options": {"num_predict": 3}},
}
PLACES = {"messages": "messages[0].content", "prompt": "prompt", "input": "input",
          "content": "content"}  # fmt: skip


def post(server: Serving, path: str, body: bytes) -> Any:
    return server.http.post(path, content=body, headers={"Content-Type": "application/json"})


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize(
    ("rain", "says"),
    [
        (b"\\ud83d", "`\\ud83d` is half of a character of UTF-16"),
        (b"\\udca0", "`\\udca0` is half of a character of UTF-16"),
        (b"\\ude00\\ud83d", "`\\ude00` is half"),
        (b"\xe4", "byte 0xE4 is not UTF-8"),
        (b"\xed\xa0\x80", "byte 0xED is not UTF-8"),
        (b"\xc3\xa4 \x80", "byte 0x80 is not UTF-8"),
    ],
)
def test_what_is_no_text_is_named_with_its_place(
    server: Serving, path: str, rain: bytes, says: str
) -> None:
    answer = post(server, path, json.dumps(ROUTES[path]).encode().replace(b"rain", b"rain" + rain))
    assert answer.status_code == 400
    place = next(PLACES[name] for name in ROUTES[path] if name in PLACES)
    error = answer.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert message.startswith(f"{place}: {says}")
    assert f"at character {8 + 2 * rain.startswith(bytes([0xC3]))}" in message


@pytest.mark.parametrize("path", ROUTES)
def test_a_mark_of_utf8_is_skipped(server: Serving, path: str) -> None:
    body = {**ROUTES[path], "seed": 1}
    marked = post(server, path, b"\xef\xbb\xbf" + json.dumps(body).encode())
    assert marked.status_code == 200, marked.text


def test_pairs_of_halves_are_characters(server: Serving) -> None:
    for text in ("\\ud83d\\ude00", "\\\\ud83d", "\u00e4"):
        body = b'{"messages": [{"role": "user", "content": "%s"}]}' % text.encode()
        assert post(server, "/apply-template", body).status_code == 200, text


@pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "utf-32"])
def test_other_encodings_are_named(server: Serving, code: str) -> None:
    body = json.dumps(ROUTES["/v1/chat/completions"]).encode(code)
    answer = post(server, "/v1/chat/completions", body)
    assert answer.status_code == 400
    assert "UTF-16" in answer.text


def test_a_body_that_is_cut_or_deep_is_told_apart(server: Serving) -> None:
    for body, says in (
        (b'{"messages": [', "truncated"),
        (b'{"messages": "x\xe4', "byte 0xE4 is not UTF-8"),
        (b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", "nested too deeply"),
    ):
        answer = post(server, "/v1/chat/completions", body)
        assert answer.status_code == 400
        assert says in answer.text


WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"max_tokens": 3, "n": 2, "seed": 4, "top_k": 5}),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "seed": 1}),
    ("/v1/completions", {"prompt": [5, 6], "logprobs": 1, "seed": 3}),
    ("/v1/responses", {"max_output_tokens": 3, "seed": 7}),
    ("/v1/messages", {"max_tokens": 4, "top_k": 3, "seed": 1}),
    ("/completion", {"prompt": [[5, 6], [7]], "n_predict": 4, "seed": 1}),
    ("/completion", {"n_probs": 2, "logit_bias": [[5, 1], [6, -1]], "seed": 2}),
    ("/api/chat", {"options": {"num_predict": 3, "num_ctx": 100, "seed": 3}}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/v1/chat/completions", {"specllama": {"draft_max": 3}, "seed": 3}),
]


def pointed(value: Any) -> Any:
    """Whole numbers as 3.0."""
    if isinstance(value, dict):
        return {name: pointed(one) for name, one in value.items()}
    if isinstance(value, list):
        return [*map(pointed, value)]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@pytest.mark.parametrize(("path", "fields"), WHOLE)
def test_a_whole_number_may_have_a_point(server: Serving, path: str, fields: Any) -> None:
    told = []
    for asked in (fields, pointed(fields)):
        answer = server.post(path, {**ROUTES.get(path, {}), **asked})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        told.append([
            one.get(name)
            for one in (found if isinstance(found, list) else [found])
            for name in ("choices", "content", "response", "message")
        ])  # fmt: skip
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("path", "fields", "place"),
    [
        ("/v1/chat/completions", {"max_tokens": 10.5}, "max_tokens"),
        ("/v1/chat/completions", {"max_tokens": 10.0, "n": 1.5}, "n"),
        ("/v1/chat/completions", {"specllama": {"draft_max": 0.5}}, "specllama.draft_max"),
        ("/v1/completions", {"prompt": [5.0, 6.5]}, "prompt[1]"),
        ("/v1/responses", {"max_output_tokens": 2.5}, "max_output_tokens"),
        ("/v1/messages", {"max_tokens": 1e-3}, "max_tokens"),
        ("/completion", {"n_predict": 4.25}, "n_predict"),
        ("/api/chat", {"options": {"num_predict": 1.1}}, "options.num_predict"),
    ],
)
def test_a_part_of_a_token_is_refused_by_name(
    server: Serving, path: str, fields: Any, place: str
) -> None:
    answer = server.post(path, {**ROUTES[path], **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error if isinstance(error, str) else error["message"]).startswith(f"{place}: ")


# -- thoughts --

CHATS: dict[str, tuple[type, Any, dict[str, Any]]] = {
    "openai": (chat_completions.ChatRequest, chat_completions.parse_chat, {"messages": TURNS}),
    "responses": (responses.ResponsesRequest, responses.parse, {"input": "a"}),
    "anthropic": (
        anthropic.MessagesRequest,
        anthropic.parse,
        {"messages": TURNS, "max_tokens": 5},
    ),
    "ollama": (ollama_api.OllamaChat, ollama_api.parse_chat, {"messages": TURNS}),
    "generate": (ollama_api.GenerateRequest, ollama_api.parse_generate, {"prompt": "a"}),
}
RAW: dict[str, tuple[type, Any, dict[str, Any]]] = {
    "completions": (
        chat_completions.CompletionRequest,
        chat_completions.parse_completion,
        {"prompt": "a"},
    ),
    "native": (native.NativeCompletion, native.parse, {"prompt": "a"}),
    "ids": (native.NativeCompletion, native.parse, {"prompt": [1, 2]}),
    "raw": (ollama_api.GenerateRequest, ollama_api.parse_generate, {"prompt": "a", "raw": True}),
}
BUDGETS = ("thinking_budget_tokens", "thinking_budget", "thinking_token_budget",
           "reasoning_budget_tokens", "reasoning_budget")  # fmt: skip


def job(family: tuple[type, Any, dict[str, Any]], **fields: Any) -> Job:
    kind, parse, body = family
    read: Job = parse(msgspec.convert({**body, **fields}, kind), GenerateParams())
    return read


@pytest.mark.parametrize("name", CHATS)
def test_a_budget_has_many_names(name: str) -> None:
    family = CHATS[name]
    assert job(family).params.think_budget is None
    for field in BUDGETS:
        assert job(family, **{field: 64}).params.think_budget == 64, field
        assert job(family, **{field: 0}).params.think_budget == 0
        assert job(family, **{field: -1}).params.think_budget is None
        with pytest.raises(Refusal, match=field) as caught:
            job(family, **{field: -5})
        assert (caught.value.status, caught.value.param) == (400, field)
    thinking = job(family, thinking={"type": "enabled", "budget_tokens": 2048}).params
    assert (thinking.think, thinking.think_budget) == ("on", 2048)
    reasoning = job(family, reasoning={"max_tokens": 100, "effort": "low"}).params
    assert (reasoning.think, reasoning.think_budget) == ("low", 100)
    if name in ("ollama", "generate"):
        assert job(family, options={"thinking_budget": 7}).params.think_budget == 7


@pytest.mark.parametrize("name", CHATS)
def test_thoughts_are_switched_by_every_name(name: str) -> None:
    family = CHATS[name]
    for off in (
        {"enable_thinking": False},
        {"thinking": {"type": "disabled"}},
        {"reasoning": {"enabled": False}},
        {"reasoning": {"effort": "none"}},
        {"reasoning_effort": "none"},
    ):
        assert job(family, **off).params.think == "off", off
    for on in ({"enable_thinking": True}, {"thinking": {"type": "adaptive"}},
               {"reasoning": {"enabled": True}}):  # fmt: skip
        assert job(family, **on).params.think == "on", on
    assert job(family).params.think == GenerateParams().think


@pytest.mark.parametrize("name", RAW)
def test_a_raw_text_has_no_thoughts_to_limit(name: str) -> None:
    for field in BUDGETS:
        with pytest.raises(Refusal, match=field) as caught:
            job(RAW[name], **{field: 64})
        assert caught.value.status == 501
        assert job(RAW[name], **{field: -1}).params.think_budget is None
    job(RAW[name], enable_thinking=False, reasoning_effort="none")


# -- formats --


@pytest.mark.parametrize("field", ["output_format", "output_config"])
def test_anthropics_formats_are_honoured(field: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}

    def asked(form: Any) -> GenerateParams:
        return job(
            CHATS["anthropic"], **{field: form if field == "output_format" else {"format": form}}
        ).params

    assert json.loads(asked(form).json_schema or "") == schema
    assert asked(None).json_schema is None
    place = "output_format" if field == "output_format" else "output_config.format"
    for wrong in ({"type": "xml"}, {"type": "json_schema"}):
        with pytest.raises(Refusal, match=place) as caught:
            asked(wrong)
        assert caught.value.status == 400


@pytest.mark.parametrize("name", ["responses", "openai"])
def test_formats_of_no_kind_are_refused(name: str) -> None:
    field = {"responses": "text", "openai": "response_format"}[name]
    for form in ({"type": "xml"}, {"type": "json_schema"}):
        with pytest.raises(Refusal, match=r"format"):
            job(CHATS[name], **{field: {"format": form} if name == "responses" else form})
    plain: dict[str, Any] = {"type": "text"}
    asked = {"format": plain} if name == "responses" else plain
    assert job(CHATS[name], **{field: asked}).params.json_schema is None
