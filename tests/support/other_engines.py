"""Other engines as scripted servers: what they answered, or would by their documentation.

A script is a file of ``tests/data/engines``: what GET answers, streams and whole replies by path.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "engines"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.json"))


class OtherEngine:
    """One scripted server that is running.

    Attributes:
        script: what it answers; may be changed between requests.
        asked: the bodies that were posted, with their paths. gets: the paths that were looked at.
        hold: called before each event of a stream is sent.
        left: a client closed its connection before its stream ended.
    """

    def __init__(self, script: dict[str, Any]) -> None:
        self.script = script
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.gets: list[str] = []
        self.hold: Callable[[int], object] = lambda number: None
        self.left = threading.Event()
        self.url = ""

    def get(self, path: str) -> tuple[int, bytes]:
        self.gets.append(path)
        if path in self.script.get("errors", {}):
            status, text = self.script["errors"][path]
            return status, text.encode()
        found = self.script["get"].get(path)
        if found is not None:
            return 200, found.encode()
        if "other" in self.script:
            return 200, self.script["other"].encode()
        return 404, b'{"detail":"Not Found"}'

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> tuple[int, bytes]:
        self.asked.append((path, body, headers))
        if path in self.script.get("errors", {}):
            status, text = self.script["errors"][path]
            return status, text.encode()
        kind = "stream" if body.get("stream") else "whole"
        if body.get("logprobs") and "logprobs" in self.script:
            return 200, self.script["logprobs"].encode()
        found = self.script[kind].get(path)
        if found is None:
            return 404, b'{"detail":"Not Found"}'
        return 200, found if isinstance(found, bytes) else found.encode()


def script(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


@contextmanager
def running(told: dict[str, Any] | str) -> Iterator[OtherEngine]:
    engine = OtherEngine(script(told) if isinstance(told, str) else told)

    class Handler(BaseHTTPRequestHandler):
        def version_string(self) -> str:
            return str(engine.script.get("headers", {}).get("server", "scripted"))

        def log_message(self, *args: Any) -> None:
            """Nothing."""

        def answer(self, status: int, parts: list[bytes]) -> None:
            self.send_response(status)
            if engine.script.get("echo"):
                self.send_header("x-request-id", self.headers.get("x-request-id", ""))
            self.end_headers()
            try:
                for number, part in enumerate(parts):
                    engine.hold(number)
                    self.wfile.write(part)
                    self.wfile.flush()
            except OSError:
                engine.left.set()

        def do_GET(self) -> None:
            status, body = engine.get(self.path)
            self.answer(status, [body])

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, answer = engine.post(self.path, body, headers)
            self.answer(status, answer.splitlines(keepends=True))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
