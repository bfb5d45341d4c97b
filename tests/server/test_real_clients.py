"""The clients that people have, against a real server."""

import gc
import importlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pydantic
import pytest
from scripted_server import Rule, Rules
from servers import Serving, served, serving, several

from specllama.server.loaded_models import Models
from specllama.server.service import Service

CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Ulm"}}</tool_call>'
SEED = {"seed": 1}
SCHEMA = {"type": "object", "properties": {"town": {"type": "string"}}}
RULES = (
    Rule("It rains in Ulm.", when="tool_response"),
    Rule('{"town": "Ulm"}', schema=True),
    Rule(CALL, when="weather"),
    Rule("<think>Well, well.</think>Yes.", when="think"),
    Rule("one two three four five", when="slowly", delay_s=0.2),
    Rule("Hello."),
)


# some of these libraries leave their sockets, and nothing else, to the collector of garbage
pytestmark = pytest.mark.filterwarnings(
    "ignore:unclosed <s(ocket|sl):ResourceWarning",
    r"ignore:Exception ignored in. <s(ocket|sl):pytest.PytestUnraisableExceptionWarning",
)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """What a client leaves open is collected here, not in the test of another file."""
    yield
    gc.collect()


class Town(pydantic.BaseModel):
    town: str


def _imported(name: str) -> Any:
    """A client as a fixture: heavy to import, so only who runs its tests does it."""

    @pytest.fixture(scope="module", name=name)
    def imported() -> Any:
        return importlib.import_module(name)

    return imported


openai, anthropic, ollama = map(_imported, ("openai", "anthropic", "ollama"))


def turns(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def scripted() -> Iterator[Serving]:
    """A server whose model thinks, writes JSON and calls a tool; one request may wait."""
    with serving(Rules(RULES), most=1) as running:
        yield running


def test_openai(server: Serving, openai: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["table"]
        asked: Any = {"model": "table", "messages": turns("the rain"), "seed": 1, "max_tokens": 24}
        whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
        text = whole.choices[0].message.content
        assert text
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        stream = client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
        done = client.completions.create(model="table", prompt="the rain", max_tokens=5, seed=1)
        assert done.choices[0].text
        assert client.responses.create(model="table", input="the rain", extra_body=SEED).output_text
        with client.responses.stream(model="table", input="the rain", extra_body=SEED) as events:
            assert events.get_final_response().output_text
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**{**asked, "temperature": -1})
        assert refused.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("gpt")


def test_openai_expects_an_output(server: Serving, openai: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        fixed = {"seed": 3, "specllama": {"window": "fixed", "proposer": "prediction"}}
        asked: Any = {"model": "table", "messages": turns("the rain"), "max_tokens": 24}
        plain = client.chat.completions.create(**asked, extra_body=fixed)
        none = plain.usage.completion_tokens_details
        assert (none.accepted_prediction_tokens, none.rejected_prediction_tokens) == (0, 0)
        text = plain.choices[0].message.content
        parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
        for content in (text, parts, text[:12] + "?" + text[13:], "quite another text"):
            asked["prediction"] = {"type": "content", "content": content}
            whole = client.chat.completions.create(**asked, extra_body=fixed)
            assert whole.choices[0].message.content == text
            stream = client.chat.completions.create(
                **asked, extra_body=fixed, stream=True, stream_options={"include_usage": True}
            )
            for usage in (whole.usage, list(stream)[-1].usage):
                told = usage.completion_tokens_details
                proposed = told.accepted_prediction_tokens + told.rejected_prediction_tokens
                assert proposed > 0
                assert (told.accepted_prediction_tokens > 6) is (content != "quite another text")
                if content in (text, parts):
                    assert told.accepted_prediction_tokens > usage.completion_tokens // 2
        asked["prediction"] = {"type": "content", "content": [{"type": "image_url"}]}
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**asked)
        assert refused.value.param == "prediction.content"


def test_openai_calls_tools_and_parses(scripted: Serving, openai: Any) -> None:
    function = {"name": "weather", "parameters": SCHEMA}
    tools: Any = [{"type": "function", "function": function}]
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none") as client:
        chat: Any = client.chat.completions
        said = turns("weather")
        with chat.stream(model="x", messages=said, tools=tools) as events:
            message = events.get_final_completion().choices[0].message
        [call] = message.tool_calls
        assert json.loads(call.function.arguments) == {"town": "Ulm"}
        result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
        said += [message.model_dump(exclude_none=True), result]
        reply = chat.create(model="x", messages=said, tools=tools)
        assert reply.choices[0].message.content == "It rains in Ulm."
        parsed = chat.parse(model="x", messages=turns("Hi"), response_format=Town)
        assert parsed.choices[0].message.parsed == Town(town="Ulm")


def test_openais_responses_call_tools_think_and_parse(scripted: Serving, openai: Any) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": False}]
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none") as client:
        ask: Any = client.responses
        items = turns("weather")
        with ask.stream(model="x", input=items, tools=tools) as events:
            [call] = events.get_final_response().output
        assert json.loads(call.arguments) == {"town": "Ulm"}
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
        items += [call.model_dump(exclude_none=True), result]
        assert ask.create(model="x", input=items, tools=tools).output_text == "It rains in Ulm."
        assert ask.parse(model="x", input="Hi", text_format=Town).output_parsed == Town(town="Ulm")
        with ask.stream(model="x", input="think") as events:
            thought, message = events.get_final_response().output
        assert thought.content[0].text == "Well, well."
        assert message.content[0].text == "Yes."


def test_who_hears_429_asks_again(scripted: Serving, openai: Any) -> None:
    asked: Any = {"model": "x", "messages": turns("slowly")}
    queue = scripted.queue

    def until(said: Any) -> None:
        end = time.monotonic() + 10
        while not said() and time.monotonic() < end:
            time.sleep(0.01)

    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=6) as client:
        chat = client.chat.completions
        others = [threading.Thread(target=lambda: chat.create(**asked)) for _ in range(2)]
        others[0].start()
        until(lambda: queue.running)
        others[1].start()
        until(lambda: queue.n_waiting)
        reply = chat.with_raw_response.create(model="x", messages=turns("Hi"))
        for other in others:
            other.join()
    assert reply.retries_taken >= 1
    assert reply.parse().choices[0].message.content == "Hello."


def test_anthropic(server: Serving, anthropic: Any) -> None:
    asked: Any = {"model": "table", "messages": turns("the rain"), "max_tokens": 200}
    asked["extra_body"] = SEED
    with anthropic.Anthropic(base_url=server.url, api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["table"]
        assert client.messages.create(**asked).content[0].text
        with client.messages.stream(**asked) as events:
            assert events.get_final_message().content[0].text
        counted = client.messages.count_tokens(model="table", messages=asked["messages"])
        assert counted.input_tokens == 8
        with pytest.raises(anthropic.BadRequestError):
            client.messages.create(**{**asked, "extra_body": {"temperature": -1}})


def test_anthropic_calls_tools_thinks_and_parses(scripted: Serving, anthropic: Any) -> None:
    asked: Any = {"model": "x", "max_tokens": 200}
    tools: Any = [{"name": "weather", "input_schema": SCHEMA}]
    with anthropic.Anthropic(base_url=scripted.url, api_key="none") as client:
        said = turns("weather")
        with client.messages.stream(**asked, messages=said, tools=tools) as events:
            message = events.get_final_message()
        assert message.stop_reason == "tool_use"
        [call] = message.content
        assert call.input == {"town": "Ulm"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        said += [{"role": "assistant", "content": message.content},
                 {"role": "user", "content": [result]}]  # fmt: skip
        reply = client.messages.create(**asked, messages=said, tools=tools)
        assert reply.content[0].text == "It rains in Ulm."
        thought, answer = client.messages.create(**asked, messages=turns("think")).content
        assert (thought.thinking, answer.text) == ("Well, well.", "Yes.")
        parsed = client.messages.parse(**asked, messages=turns("Hi"), output_format=Town)
        assert parsed.parsed_output == Town(town="Ulm")


def test_anthropics_tool_runner(scripted: Serving, anthropic: Any) -> None:
    """It has the server keep the conversation where it can; here it cannot."""

    @anthropic.beta_tool
    def weather(town: str) -> str:
        """The weather of a town.

        Args:
            town: its name
        """
        return f"rain in {town}"

    with anthropic.Anthropic(base_url=scripted.url, api_key="none") as client:
        runner = client.beta.messages.tool_runner(
            model="x", max_tokens=200, messages=turns("weather"), tools=[weather]
        )
        assert runner.until_done().content[0].text == "It rains in Ulm."


def test_ollama(server: Serving, ollama: Any) -> None:
    client = ollama.Client(host=server.url)
    assert [model.model for model in client.list().models] == ["table"]
    options = {"seed": 1, "num_predict": 24}
    asked: Any = {"model": "table", "messages": turns("the rain"), "options": options}
    whole = client.chat(**asked).message.content
    parts = client.chat(**asked, stream=True)
    assert "".join(part.message.content or "" for part in parts) == whole != ""
    assert client.generate(model="table", prompt="the rain", options=options).response == whole
    assert client.generate(model="table").done_reason == "load"
    assert client.show("table").capabilities
    with pytest.raises(ollama.ResponseError):
        client.pull("x")


def test_ollama_with_two_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ollama: Any
) -> None:
    """Loaded by name, kept for as long as it says, unloaded by ``keep_alive=0``."""
    monkeypatch.setenv("SPECLLAMA_HOME", str(tmp_path / "home"))
    with served(Service(Models(several(tmp_path, "first", "second")))) as server:
        client = ollama.Client(host=server.url)
        assert [model.model for model in client.list().models] == ["first", "second"]
        assert [model.model for model in client.ps().models] == ["first"]
        reply = client.generate("second", "the rain", options={"num_predict": 4}, keep_alive="5m")
        assert (reply.model, reply.done) == ("second", True)
        assert [model.model for model in client.ps().models] == ["first", "second"]
        assert client.ps().models[1].expires_at.tzinfo is not None
        gone = client.generate("second", keep_alive=0)
        assert (gone.done, gone.done_reason) == (True, "unload")
        end = time.monotonic() + 20
        while len(client.ps().models) > 1:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert client.chat("first", keep_alive=-1).done_reason == "load"
        with pytest.raises(ollama.ResponseError, match="'third' not found"):
            client.generate("third", "the rain")


def test_ollama_calls_tools_thinks_and_parses(scripted: Serving, ollama: Any) -> None:
    client = ollama.Client(host=scripted.url)
    said = turns("weather")
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    message = client.chat(model="x", messages=said, tools=tools).message
    assert message.tool_calls[0].function.arguments == {"town": "Ulm"}
    said += [message, {"role": "tool", "tool_name": "weather", "content": "rain"}]
    assert client.chat(model="x", messages=said, tools=tools).message.content == "It rains in Ulm."
    thought = client.chat(model="x", messages=turns("think"), think=True).message
    assert (thought.thinking, thought.content) == ("Well, well.", "Yes.")
    told = client.chat(model="x", messages=turns("Hi"), format=Town.model_json_schema())
    assert Town.model_validate_json(told.message.content or "") == Town(town="Ulm")


def test_llm(scripted: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    known = {"model_id": "here", "model_name": "x", "api_base": f"{scripted.url}/v1"}
    models = [{**known, "supports_tools": True, "supports_schema": True}]  # JSON is YAML, too
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models), "utf-8")
    import llm

    def weather(town: str) -> str:
        return f"rain in {town}"

    model = llm.get_model("here")
    model.key = "none"
    assert model.prompt("Hi").text() == "Hello."
    assert "".join(model.prompt("Hi", stream=True)) == "Hello."
    assert json.loads(model.prompt("Hi", schema=Town).text()) == {"town": "Ulm"}
    assert model.chain("weather", tools=[weather]).text() == "It rains in Ulm."
