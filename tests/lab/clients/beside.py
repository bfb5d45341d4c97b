"""A server in a process of its own, and what a running stream and ``/health`` feel of a request.

Whoever listens to the stream and whoever polls ``/health`` are threads here, the server is not: a
gap is the server's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "seed": 1}
ENDLESS = {
    "messages": [{"role": "user", "content": "Tell me a long story."}],
    "max_tokens": 1000,
    "ignore_eos": True,
    "seed": 1,
    "stream": True,
}
POLL_S = 0.02
QUIET_S = 1.5
LEFT = -1  # a status: the client went away unanswered

Request = Callable[["Running"], int]
"""Sends something and returns the status that it was answered with."""


@dataclass
class Felt:
    """Moments at which something came; a gap is between two of them, or up to now."""

    moments: list[float] = field(default_factory=list)
    open: float | None = None  # since when something is expected

    def came(self) -> None:
        self.open = time.monotonic()
        self.moments.append(self.open)

    def longest(self, since: float) -> float:
        """The longest wait of which a part lies behind ``since``."""
        now, gaps, last = time.monotonic(), [0.0], None
        for moment in tuple(self.moments):
            if last is not None and moment > since:
                gaps.append(moment - last)
            last = moment
        if self.open is not None:
            gaps.append(now - self.open)
        return max(gaps)


@dataclass
class Running:
    """A server, with a stream that never ends beside whatever is asked of it."""

    url: str
    process: subprocess.Popen[bytes]
    folder: Path
    stream: Felt = field(default_factory=Felt)
    health: Felt = field(default_factory=Felt)
    most_bytes: int = 0
    quiet: tuple[float, float] = (0.0, 0.0)  # longest gaps of the stream and of /health when alone
    quiet_bytes: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    def post(self, path: str, body: Any, within_s: float = 60.0, **more: Any) -> int:
        """The status of the answer; ``LEFT`` if there is none in time and the client goes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **more.pop("headers", {})}
        with httpx2.Client(base_url=self.url, timeout=within_s) as http:
            try:
                return http.post(path, content=data, headers=headers, **more).status_code
            except httpx2.TimeoutException:
                return LEFT

    def watch(self) -> None:
        for target in (self._listen, self._poll):
            threading.Thread(target=target, daemon=True).start()
        deadline = time.monotonic() + 60
        while len(self.stream.moments) < 20:
            assert time.monotonic() < deadline, "nothing is streamed"
            time.sleep(POLL_S)
        since = time.monotonic()
        time.sleep(QUIET_S)
        self.quiet = self.stream.longest(since), self.health.longest(since)
        self.quiet_bytes = self.most_bytes

    def well(self) -> bool:
        """Whether stream and ``/health`` go on."""
        since = time.monotonic()
        while time.monotonic() < since + 10:
            if self.stream.moments[-1] > since and self.health.moments[-1] > since:
                return True
            time.sleep(POLL_S)
        return False

    def end(self) -> None:
        self._over.set()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            for pid in (self.process.pid, *_children(self.process.pid)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()

    def _listen(self) -> None:
        with httpx2.Client(base_url=self.url, timeout=120) as http:
            while not self._over.is_set():
                with (
                    contextlib.suppress(httpx2.HTTPError),
                    http.stream("POST", CHAT, json=ENDLESS) as answer,
                ):
                    for _ in answer.iter_raw():
                        self.stream.came()
                        if self._over.is_set():
                            return
                # from here to the first piece of the next reply nothing is promised
                self.stream.open = None

    def _poll(self) -> None:
        with httpx2.Client(base_url=self.url, timeout=120) as http:
            while not self._over.is_set():
                self.health.open = time.monotonic()
                with contextlib.suppress(httpx2.HTTPError):
                    if http.get("/health").status_code == 200:
                        self.health.came()
                self.most_bytes = max(self.most_bytes, self._bytes())
                time.sleep(POLL_S)

    def _bytes(self) -> int:
        return sum(_resident(pid) for pid in (self.process.pid, *_children(self.process.pid)))


def _children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
    except OSError:
        return []
    return [int(word) for word in text.split()]


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def server(folder: Path, *options: str) -> Iterator[Running]:
    """``specllama serve`` with the bundled pair, and a stream from it that goes on."""
    log = folder / "server.log"
    environment = {**os.environ, "SPECLLAMA_HOME": str(folder / "home")}
    command = [sys.executable, "-P", "-m", "specllama", "serve", "-m", "tiny", "--port", "0"]
    command += ["-t", "1", "--parallel", "4", "-c", "4096", *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    running = Running("", process, folder)
    try:
        running.url = _listening(process, log)
        running.watch()
        yield running
    finally:
        running.end()


def _listening(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        said = log.read_text("utf-8", "replace")
        at = said.find("http://127.0.0.1:")
        url = said[at:].split()[0].rstrip("/.,") if at >= 0 and "\n" in said[at:] else ""
        if url:
            with contextlib.suppress(httpx2.HTTPError):
                if httpx2.get(f"{url}/health").status_code == 200:
                    return url
        assert process.poll() is None, f"the server ended:\n{said}"
        time.sleep(0.1)
    raise AssertionError("the server did not start")


class Stood(AssertionError):
    """The stream or ``/health`` stood still."""


def beside(running: Running, request: Request, within_s: float = 20.0) -> int:
    """What a request is answered, if stream and ``/health`` hardly feel it.

    The bounds are generous: the machine that runs the tests is busy with others. What is looked
    for takes seconds, or never ends.

    Raises:
        Stood: they do feel it.
    """
    before = time.monotonic()
    answered: list[int] = []
    thread = threading.Thread(target=lambda: answered.append(request(running)), daemon=True)
    thread.start()
    thread.join(within_s)
    time.sleep(2 * POLL_S)
    stream, health = running.stream.longest(before), running.health.longest(before)
    quiet_stream, quiet_health = running.quiet
    if stream > 5 * quiet_stream + 0.5:
        raise Stood(f"the stream stood still for {stream:.2f} s")
    if health > 5 * quiet_health + 0.5:
        raise Stood(f"/health took {health:.2f} s")
    grown = (running.most_bytes - running.quiet_bytes) / 2**20
    assert grown <= 400, f"the server took {grown:.0f} MiB more"
    assert answered, "the request was not answered"
    return answered[0]
