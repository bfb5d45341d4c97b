"""A real server whose model says what a script says, and which writes down what it is asked.

    python tests/support/scripted_server.py SCRIPT.json --port 8485 --record asked.jsonl

For clients whose prompts are longer than what the bundled models read. A script is a list of
rules; the first whose ``when`` (a regular expression) is found in what came since the last reply
answers. A thought stands in ``<think>`` tags, a call of a tool is written as models write it
(see ``server/tools.py``).

    [{"when": "tool_response", "say": "It rains."},
     {"when": "weather", "say": "<tool_call>{\\"name\\": \\"weather\\"}</tool_call>"},
     {"say": "Hello."}]

``schema: true`` answers only requests that want JSON; ``delay_s`` are seconds a round; ``fails``
ends the request with an error before it began.
"""

from __future__ import annotations

import argparse
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fakes import Reply, ScriptedEngine, engine_info, model_info
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specllama.engine.host import EngineHost
from specllama.errors import EngineError
from specllama.events import Event, LoadProgress
from specllama.interface import Message as Turn
from specllama.interface import Prompt
from specllama.server import server_process
from specllama.server.guard import Access
from specllama.server.loaded_models import Models
from specllama.server.request_queue import RequestQueue
from specllama.server.served import ServedModel
from specllama.server.service import Service
from specllama.settings.params import GenerateParams

CONTEXT = 200_000


@dataclass(frozen=True)
class Rule:
    say: str = ""
    when: str = ""
    schema: bool = False
    delay_s: float = 0.0
    fails: str = ""

    def answers(self, asked: str, params: GenerateParams) -> bool:
        wants_json = params.json_schema is not None
        return re.search(self.when, asked) is not None and (wants_json or not self.schema)


def since_last_reply(prompt: Prompt) -> str:
    """What a client said after the model did."""
    if isinstance(prompt, str):
        return prompt
    turns = [turn for turn in prompt if isinstance(turn, Turn)]
    replies = [i for i, turn in enumerate(turns) if turn.role == "assistant"]
    new = turns[replies[-1] + 1 if replies else 0 :]
    return "\n".join(turn.content for turn in new if turn.role != "system")


class RuleEngine(ScriptedEngine):
    """Answers by rules instead of by order."""

    def __init__(self, rules: Sequence[Rule], n_ctx: int = CONTEXT) -> None:
        target = model_info("target", n_ctx=n_ctx, n_ctx_train=n_ctx)
        super().__init__(info=engine_info(target=target))
        self._rules = rules

    def thinks(self) -> bool:
        return True

    def template(self) -> tuple[str, str, str]:
        return "", "", ""

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: threading.Event | None = None
    ) -> Iterator[Event]:
        asked = since_last_reply(prompt)
        rule = next((r for r in self._rules if r.answers(asked, params)), Rule("Hello."))
        failed = EngineError(rule.fails) if rule.fails else None
        self.replies = [Reply(rule.say, delay_s=rule.delay_s, raise_first=failed)]
        yield from super().generate(prompt, params, cancel=cancel)


@dataclass(frozen=True)
class Rules:
    """A recipe for EngineHost that crosses into the child."""

    rules: tuple[Rule, ...]
    n_ctx: int = CONTEXT

    def __call__(self, progress: Callable[[Event], None], /) -> RuleEngine:
        progress(LoadProgress("target", "scripted.gguf", 1.0))
        return RuleEngine(self.rules, self.n_ctx)


class Recorder:
    """Writes down every request and its answer, a line of JSON each."""

    def __init__(self, app: ASGIApp, file: Path) -> None:
        self._app = app
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, answer, status = bytearray(), bytearray(), 0

        async def hear() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def tell(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            answer.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, hear, tell)
        finally:
            self._write(scope, bytes(body), status, answer.decode("utf-8", "replace"))

    def _write(self, scope: Scope, body: bytes, status: int, answer: str) -> None:
        try:
            asked: Any = json.loads(body) if body else None
        except ValueError:
            asked = body.decode("utf-8", "replace")
        line = {
            "method": scope["method"],
            "path": scope["path"],
            "query": scope["query_string"].decode(),
            "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
            "status": status,
            "body": asked,
            "answer": answer,
        }
        with self._file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("script", type=Path)
    parser.add_argument("--port", type=int, default=8485)
    parser.add_argument("--alias", default="scripted")
    parser.add_argument("--queue", type=int, default=64)
    parser.add_argument("--ctx-size", type=int, default=CONTEXT)
    parser.add_argument("--key", action="append", default=[])
    parser.add_argument("--record", type=Path)
    given = parser.parse_args()
    rules = tuple(Rule(**rule) for rule in json.loads(given.script.read_text("utf-8")))
    host = EngineHost(Rules(rules, given.ctx_size))
    queue = RequestQueue(host, given.alias, lanes=1, most=given.queue)
    service = Service(
        Models([ServedModel(queue)]),
        Access(keys=tuple(given.key)),
    )
    if given.record is not None:
        record, plain = given.record, server_process.make_app
        server_process.make_app = lambda service: Recorder(plain(service), record)  # type: ignore
    listening = server_process.bind("127.0.0.1", given.port)
    print(f"{given.alias} is served at {server_process.url_of(listening)}", flush=True)
    try:
        server_process.run(
            service, listening, stop=threading.Event(), ready=lambda: None, drain_s=1.0
        )
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
