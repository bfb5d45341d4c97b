"""The bundled pair behind HTTP: replies under load are those of the same requests alone."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from engines import measured
from servers import LANES, Serving, serving

from specllama.bench.prompts import BenchPrompt, load_prompts
from specllama.engine import serving as inside
from specllama.engine.engine import Engine
from specllama.engine.host import LoadEngine
from specllama.interface import Message, Stepped
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

LENGTH = 24


@pytest.fixture(scope="module")
def served(module_home: Path) -> Iterator[Serving]:
    options = EngineOptions(n_ctx=1024, threads=1, parallel=LANES)
    measured("tiny", None, options).close()  # else nobody shares a pass
    with serving(LoadEngine("tiny", None, options)) as running:
        assert running.host.info.exact_rows > 1, "measured in this home, for another process"
        yield running


def test_replies_under_load_are_those_of_requests_alone(served: Serving) -> None:
    asked: list[dict[str, Any]] = [
        {
            "messages": [{"role": m.role, "content": m.content} for m in prompt.messages],
            "seed": seed,
            "temperature": temperature,
            "max_tokens": LENGTH,
            "specllama": {"proposer": proposer, "window": "fixed", "draft_max": 4},
        }
        for prompt in load_prompts()[1::41][:4]
        for seed, temperature, proposer in ((1, 0.0, "draft"), (2, 0.9, "mixed"))
    ]

    def ask(body: dict[str, Any]) -> tuple[str, int, int]:
        reply = served.post("/v1/chat/completions", body, timeout=120).json()
        took = reply["timings"]
        return reply["choices"][0]["message"]["content"], took["predicted_n"], took["near_ties"]

    with ThreadPoolExecutor(len(asked)) as pool:
        replies = list(pool.map(ask, asked))
    with Engine.load("tiny", None, EngineOptions(n_ctx=1024, threads=1)) as alone:
        for body, (text, n, near_ties) in zip(asked, replies, strict=True):
            params = GenerateParams(
                seed=body["seed"],
                max_tokens=LENGTH,
                proposer="none",
                sampling=SamplingParams(temperature=body["temperature"]),
            )
            alone.reset()
            turns = [Message(**turn) for turn in body["messages"]]
            *_, last = alone.generate(turns, params.on_card(alone.info.target.card))
            assert (text, n) == (last.text, len(last.token_ids))
            assert near_ties == 0


def test_json_that_fits_a_schema(served: Serving) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    body = {
        "messages": [{"role": "user", "content": "How many?"}],
        "max_tokens": 60,
        "seed": 3,
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
    }

    text = served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert isinstance(json.loads(text)["n"], int)
    tools = [{"type": "function", "function": {"name": "count", "parameters": schema}}]
    forced = {**body, "response_format": None, "tools": tools, "tool_choice": "required"}
    [choice] = served.post("/v1/chat/completions", forced).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert isinstance(json.loads(call["function"]["arguments"])["n"], int)


class NewPair(LoadEngine):
    """A pair of which nothing is measured, until several conversations were there for a moment."""

    def __call__(self, progress: inside.OnEvent, /) -> Stepped:
        inside.REST_S, inside.KEEP_S = 0.02, 60.0  # it never rests
        return super().__call__(progress)


def test_a_crowd_soon_shares_passes_and_writes_the_same() -> None:
    options = EngineOptions(n_ctx=1024, threads=1, parallel=LANES)
    prompts = load_prompts()[2::37][:LANES]

    def ask(prompt: BenchPrompt) -> str:
        messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
        body = {"messages": messages, "temperature": 0.0, "max_tokens": 400}
        reply = running.post("/v1/chat/completions", body, timeout=120).json()
        return str(reply["choices"][0]["message"]["content"])

    with serving(NewPair("tiny", None, options)) as running, ThreadPoolExecutor(LANES) as pool:
        alone = [ask(prompt) for prompt in prompts]
        for _ in range(5):
            assert list(pool.map(ask, prompts)) == alone
        metrics = running.http.get("/metrics").text
    lines = [line for line in metrics.splitlines() if line.startswith("specllama:pass_rows_")]
    found = {line.split("{")[0][20:]: float(line.split()[-1]) for line in lines}
    assert found["sum"] > 1.3 * found["count"]
