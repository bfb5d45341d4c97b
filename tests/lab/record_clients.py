"""A real server whose model says what a script says, and which writes down what it is asked.

    python tests/lab/record_clients.py SCRIPT.json --port 8485 --record asked.jsonl

The rules of a script are those of ``tests/support/scripted_server.py``:

    [{"when": "tool_response", "say": "It rains."},
     {"when": "weather", "say": "<tool_call>{\\"name\\": \\"weather\\"}</tool_call>"},
     {"say": "Hello."}]
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from scripted_server import CONTEXT, Rule, Rules
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specllama.engine.host import EngineHost
from specllama.server import server_process
from specllama.server.guard import Access
from specllama.server.loaded_models import Models
from specllama.server.request_queue import RequestQueue
from specllama.server.served import ServedModel
from specllama.server.service import Service


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
    service = Service(
        Models([ServedModel(RequestQueue(host, given.alias, lanes=1, most=given.queue))]),
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
