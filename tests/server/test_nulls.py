"""Clients in Go write null for a field that was not given: every optional field takes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec.inspect as inspect
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from servers import Serving

from specllama.server import anthropic, chat_completions, completions, native, ollama, responses

REQUESTS = (
    anthropic.MessagesRequest,
    chat_completions.ChatRequest,
    completions.CompletionRequest,
    native.NativeCompletion,
    native.InfillRequest,
    native.TokenizeRequest,
    native.DetokenizeRequest,
    native.TemplateRequest,
    ollama.OllamaChat,
    ollama.GenerateRequest,
    ollama.ShowRequest,
    responses.ResponsesRequest,
)
TURNS = [{"role": "user", "content": "the rain"}]


def structs(kind: Any, seen: set[type]) -> Iterator[inspect.StructType]:
    """A type and every struct in it."""
    if isinstance(kind, inspect.StructType):
        if kind.cls in seen:
            return
        seen.add(kind.cls)
        yield kind
        for field in kind.fields:
            yield from structs(field.type, seen)
    elif isinstance(kind, inspect.UnionType):
        for one in kind.types:
            yield from structs(one, seen)
    elif isinstance(kind, inspect.ListType):
        yield from structs(kind.item_type, seen)


def takes_null(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.UnionType):
        return any(map(takes_null, kind.types))
    return isinstance(kind, (inspect.NoneType, inspect.AnyType))


@pytest.mark.parametrize("request_type", REQUESTS, ids=lambda kind: kind.__module__ + kind.__name__)
def test_every_optional_field_takes_null(request_type: type) -> None:
    found = list(structs(inspect.type_info(request_type), set()))
    refused = [
        f"{struct.cls.__name__}.{field.name}"
        for struct in found
        for field in struct.fields
        if not field.required and not takes_null(field.type)
    ]
    assert refused == []


@pytest.mark.parametrize(
    ("path", "body", "request_type"),
    [
        ("/v1/chat/completions", {"messages": TURNS}, chat_completions.ChatRequest),
        ("/v1/completions", {"prompt": "the rain"}, completions.CompletionRequest),
        ("/v1/responses", {"input": "the rain"}, responses.ResponsesRequest),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 4}, anthropic.MessagesRequest),
        ("/api/chat", {"messages": TURNS, "stream": False}, ollama.OllamaChat),
        ("/api/generate", {"prompt": "the rain", "stream": False}, ollama.GenerateRequest),
        ("/completion", {"prompt": "the rain", "n_predict": 4}, native.NativeCompletion),
        ("/tokenize", {"content": "the rain"}, native.TokenizeRequest),
        ("/detokenize", {"tokens": [2]}, native.DetokenizeRequest),
        ("/apply-template", {"messages": TURNS}, native.TemplateRequest),
    ],
)
def test_nulls_are_what_was_left_out(
    server: Serving, path: str, body: Any, request_type: Any
) -> None:
    nulls = dict.fromkeys(request_type.__struct_fields__)
    bound = {"max_tokens": 4, "seed": 1} if path.startswith("/v1") else {}
    if path == "/v1/responses":
        bound = {"max_output_tokens": 4, "seed": 1}
    answer = server.post(path, {**nulls, **bound, **body})
    assert answer.status_code == 200, answer.text


def test_ollamas_go_client_loads_a_model(server: Serving) -> None:
    for path, field in (("/api/chat", "messages"), ("/api/generate", "prompt")):
        asked = {"model": "m", field: None, "stream": None, "options": None, "keep_alive": None}
        assert server.post(path, asked).json()["done_reason"] == "load"
