"""Sessions of real clients, asked again: each reply is read as its client reads it.

How they were recorded: `tests/lab/client_transcript.py`. In each, the client read a file, changed
it and ran a command; their texts are ours, of the same sizes.
"""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
from client_answers import FOLDER, Heard, heard, session
from fakes import Reply, ScriptedEngine, engine_info, model_info
from servers import Serving, serving

from specllama.events import Event, LoadProgress
from specllama.interface import Message, Prompt
from specllama.settings.params import GenerateParams

CHANGES = {
    "claude-code": "names arguments in an order of its own",
    "open-webui-ollama": "leaves out the text beside a call",
}
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


class ThinkingEngine(ScriptedEngine):
    """Writes down what it is asked, a line each; it is in a process of its own."""

    asked: Path

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: threading.Event | None = None
    ) -> Iterator[Event]:
        turns = [[turn.role, turn.content] for turn in prompt if isinstance(turn, Message)]
        with self.asked.open("a", encoding="utf-8") as out:
            out.write(json.dumps(turns) + "\n")
        yield from super().generate(prompt, params, cancel=cancel)

    def thinks(self) -> bool:
        return True

    def template(self) -> tuple[str, str, str]:
        return "", "", ""


@dataclass(frozen=True)
class Says:
    """A recipe of an engine that says these in turn."""

    texts: tuple[str, ...]
    asked: Path

    def __call__(self, progress: Any, /) -> ScriptedEngine:
        progress(LoadProgress("target", "scripted.gguf", 1.0))
        info = engine_info(target=model_info("target", n_ctx=200_000, n_ctx_train=200_000))
        engine = ThinkingEngine([Reply(text) for text in self.texts], info=info)
        engine.asked = self.asked
        return engine


def named(body: dict[str, Any]) -> dict[str, Any]:
    """Name our model where the body names one."""
    return {key: "table" if key in ("model", "name") else value for key, value in body.items()}


def asked(server: Serving, exchange: dict[str, Any], headers: dict[str, str]) -> httpx2.Response:
    body = exchange.get("body")
    sent = {} if body is None else {"json": named(body), "headers": headers}
    return server.http.request(exchange["method"], exchange["path"], **sent)


def continues(before: list[dict[str, Any]], body: dict[str, Any]) -> int | None:
    """Return which of the earlier requests this one goes on with."""
    turns = without_marks(body.get("messages", body.get("input")))
    for i in reversed(range(len(before))):
        had = before[i]["body"]
        old = without_marks(had.get("messages", had.get("input")))
        if had.get("tools") == body.get("tools") and old == turns[: len(old)] != turns:
            return i
    return None


def without_marks(value: Any) -> Any:
    """Leave out Anthropic's marks of what to cache: they wander."""
    if isinstance(value, dict):
        return {key: without_marks(one) for key, one in value.items() if key != "cache_control"}
    return [without_marks(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("name", NAMES)
def test_a_session_of_a_client(name: str, tmp_path: Path) -> None:
    """Each reply is read as it was, and what was read and written stands in the next prompt."""
    told, seen = session(name), tmp_path / "asked.jsonl"
    replied = [one for one in told["exchanges"] if "heard" in one]
    replies = [Heard(**one["heard"]) for one in replied]
    with serving(Says(tuple(reply.written() for reply in replies), seen)) as server:
        for exchange in told["exchanges"]:
            answer = asked(server, exchange, told["headers"])
            assert answer.status_code == exchange["status"], answer.text
            if "heard" in exchange:
                assert vars(heard(exchange["path"], answer.text)) == exchange["heard"]
    assert any(reply.calls or "```" in reply.text for reply in replies), "nothing was done"
    prompts = [json.loads(line) for line in seen.read_text("utf-8").splitlines()]
    goes_on = [(i, continues(replied[:i], one["body"])) for i, one in enumerate(replied)]
    assert any(before is not None for _, before in goes_on) or name.startswith("aider")
    for i, before in goes_on:
        if before is not None:
            was = Heard("", replies[before].text, replies[before].calls)
            turns = prompts[before] + [["assistant", was.written()]] * (name not in CHANGES)
            assert prompts[i][: len(turns)] == turns
