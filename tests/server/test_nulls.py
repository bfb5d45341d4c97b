"""Clients in Go write null for a field that was not given: that is what an optional field is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec.inspect as inspect
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from servers import Serving

from specllama.server import anthropic, chat_completions, native, ollama_api, responses

REQUESTS = (
    anthropic.MessagesRequest,
    chat_completions.ChatRequest,
    chat_completions.CompletionRequest,
    native.NativeCompletion,
    native.InfillRequest,
    native.TokenizeRequest,
    native.DetokenizeRequest,
    native.TemplateRequest,
    ollama_api.OllamaChat,
    ollama_api.GenerateRequest,
    ollama_api.ShowRequest,
    responses.ResponsesRequest,
)


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
def test_every_optional_field_is_null_or_left_out(request_type: type) -> None:
    found = list(structs(inspect.type_info(request_type), set()))
    refused = [
        f"{struct.cls.__name__}.{field.name}"
        for struct in found
        for field in struct.fields
        if not field.required and not (field.default is None and takes_null(field.type))
    ]
    assert refused == []


def test_ollamas_go_client_loads_a_model(server: Serving) -> None:
    for path, field in (("/api/chat", "messages"), ("/api/generate", "prompt")):
        asked = {"model": "m", field: None, "stream": None, "options": None, "keep_alive": None}
        assert server.post(path, asked).json()["done_reason"] == "load"
