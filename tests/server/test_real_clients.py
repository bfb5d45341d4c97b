"""The clients that people have, against a real server; each where it is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from fakes import Reply, ScriptedRecipe
from servers import Serving, serving

CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Ulm"}}</tool_call>'
SEED = {"seed": 1}
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}


@pytest.fixture(scope="module")
def caller() -> Iterator[Serving]:
    """A server whose model calls a tool."""
    with serving(ScriptedRecipe((Reply(CALL),))) as running:
        yield running


def test_openai(server: Serving, caller: Serving) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["table"]
        turns = [{"role": "user", "content": "the rain"}]
        asked = {"model": "table", "messages": turns, "seed": 1, "max_tokens": 24}
        whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        text = whole.choices[0].message.content
        assert text
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        stream = client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert said == text
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        done = client.completions.create(model="table", prompt="the rain", max_tokens=5, seed=1)
        assert done.choices[0].text
        response = client.responses.create(model="table", input="the rain", extra_body=SEED)
        assert response.output_text
        with client.responses.stream(model="table", input="the rain", extra_body=SEED) as events:
            assert events.get_final_response().output_text
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**asked, "temperature": -1})
        assert refused.value.param == "temperature"
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    with openai.OpenAI(base_url=f"{caller.url}/v1", api_key="none") as client:
        reply = client.chat.completions.create(model="x", messages=turns, tools=[tool])
        [call] = reply.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"town": "Ulm"}


def test_anthropic(server: Serving, caller: Serving) -> None:
    anthropic = pytest.importorskip("anthropic")
    turns = [{"role": "user", "content": "the rain"}]
    asked = {"model": "table", "messages": turns, "max_tokens": 200, "extra_body": {"seed": 1}}
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        assert client.messages.create(**asked).content[0].text
        with client.messages.stream(**asked) as events:
            assert events.get_final_message().content[0].text
        counted = client.messages.count_tokens(model="table", messages=turns)
        assert counted.input_tokens == 8
    tool = {"name": "weather", "input_schema": SCHEMA}
    with anthropic.Anthropic(base_url=caller.url, api_key="none") as client:
        with client.messages.stream(**asked, tools=[tool]) as events:
            message = events.get_final_message()
        assert message.stop_reason == "tool_use"
        assert message.content[0].input == {"town": "Ulm"}


def test_ollama(server: Serving, caller: Serving) -> None:
    ollama = pytest.importorskip("ollama")
    client = ollama.Client(host=server.url)
    assert [model.model for model in client.list().models] == ["table"]
    turns = [{"role": "user", "content": "the rain"}]
    options = {"seed": 1, "num_predict": 24}
    whole = client.chat(model="table", messages=turns, options=options).message.content
    parts = client.chat(model="table", messages=turns, options=options, stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole != ""
    assert client.generate(model="table", prompt="the rain", options=options).response == whole
    assert client.show("table").capabilities
    with pytest.raises(ollama.ResponseError):
        client.pull("x")
    tool = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
    reply = ollama.Client(host=caller.url).chat(model="x", messages=turns, tools=[tool])
    assert reply.message.tool_calls[0].function.arguments == {"town": "Ulm"}
