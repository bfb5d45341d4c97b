"""A real server on a free port, over an engine in a child process."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from table_model import LoadTable

from specllama.engine.host import EngineFactory, EngineHost, LoadEngine
from specllama.server.guard import Access
from specllama.server.loaded_models import Models
from specllama.server.request_queue import RequestQueue
from specllama.server.served import ServedModel
from specllama.server.server_process import bind, run, url_of
from specllama.server.service import Service
from specllama.settings.params import EngineOptions, GenerateParams

LANES = 4


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@dataclass
class Serving:
    """A server and a client of it."""

    url: str
    service: Service
    host: EngineHost
    http: httpx2.Client

    @property
    def models(self) -> Models:
        return self.service.models

    @property
    def queue(self) -> RequestQueue:
        """Of the first model."""
        return self.models.first.queue

    def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        return self.http.post(path, json=body, **more)

    def chat(self, text: str = "the rain", **fields: Any) -> dict[str, Any]:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 24, **fields}
        answer = self.post("/v1/chat/completions", body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def frames(self, path: str, body: Any) -> list[Any]:
        """What a stream of events says; texts that are no JSON stay texts."""
        with self.http.stream("POST", path, json=body) as answer:
            text = answer.read().decode()
        assert answer.status_code == 200, text
        assert answer.headers["content-type"].startswith("text/event-stream")
        out: list[Any] = []
        for block in text.split("\n\n"):
            for line in block.splitlines():
                if line.startswith("data: "):
                    data = line[6:]
                    out.append(json.loads(data) if data.startswith("{") else data)
        return out


def table(folder: Path, *, gap: bool = False, **options: Any) -> LoadEngine:
    """A target and a draft that agree somewhat, without weights; ``gap``: they fill gaps."""
    for name, more in (("target", {}), ("draft", {"agreement": 0.9})):
        told = {"sharpness": 3.0, "eog_bias": 2.0, "gap": gap, **more}
        (folder / f"{name}.table").write_text(json.dumps(told), "utf-8")
    options = {"parallel": LANES, "n_ctx": 2048, **options}
    return LoadTable(
        str(folder / "target.table"), str(folder / "draft.table"), EngineOptions(**options)
    )


def several(folder: Path, *names: str, **more: Any) -> list[ServedModel]:
    """Models over such tables, which write different texts."""
    models = []
    for seed, name in enumerate(names, 1):
        (folder / name).mkdir()
        recipe = table(folder / name)
        for path in (folder / name).glob("*.table"):
            told = json.loads(path.read_text("utf-8"))
            path.write_text(json.dumps({**told, "seed": seed}), "utf-8")
        queue = RequestQueue(EngineHost(recipe, close_grace_s=1.0), name, lanes=LANES)
        models.append(ServedModel(queue, recipe=recipe, **more))
    return models


@contextmanager
def serving(
    factory: EngineFactory,
    *,
    access: Access | None = None,
    params: GenerateParams | None = None,
    most: int = 64,
    wait: bool = True,
    drain_s: float = 2.0,
    **more: Any,
) -> Iterator[Serving]:
    host = EngineHost(factory, close_grace_s=1.0)
    queue = RequestQueue(host, "table", lanes=LANES, most=most)
    models = Models([ServedModel(queue, params or GenerateParams())])
    with served(Service(models, access or Access(), **more), wait=wait, drain_s=drain_s) as running:
        yield running


@contextmanager
def served(
    service: Service, *, wait: bool = True, drain_s: float = 2.0, load: bool = True
) -> Iterator[Serving]:
    """A running server."""
    listening = bind("127.0.0.1", 0)
    stop, ready = threading.Event(), threading.Event()
    url = url_of(listening)
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            run(service, listening, stop=stop, ready=ready.set, drain_s=drain_s, load=load)
        except BaseException as error:
            failed.append(error)
            ready.set()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        assert not wait or ready.wait(30)
        if failed:
            raise failed[0]
        with httpx2.Client(base_url=url, timeout=30) as http:
            yield Serving(url, service, service.models.first.queue.host, http)
    finally:
        stop.set()
        thread.join(20)
        assert not thread.is_alive(), "the server did not end"


def line_to(server: Serving, source: str = "127.0.0.1", window: int = 0) -> socket.socket:
    """Return a connection; ``window``: bytes that its system takes for it."""
    line = socket.socket()
    if window:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    line.settimeout(30)
    line.bind((source, 0))
    line.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
    return line


def rest(line: socket.socket) -> bytes:
    """Return everything that comes until the other side ends."""
    out = b""
    with suppress(ConnectionError):
        while part := line.recv(1 << 16):
            out += part
    return out
