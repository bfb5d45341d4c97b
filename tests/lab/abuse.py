"""Clients that leave, dawdle or stop reading, while an honest one goes on asking.

    python tests/lab/abuse.py [-m MODEL] [--cancels 10000] [--readers 1000] [--asks 100]
                                [--turns 3] [--parallel 4] [--connections 256]

A server is started. An honest client asks ``--asks`` times, alone; then the same while others
cancel requests in all stages; then again alone, and while others stopped reading their streams or
never sent a whole request, in turns. Printed are its latencies (median, 95 %; "alone over itself"
compares every other one of those alone with the rest: what the machine's noise makes of nothing),
and before and after each: resident bytes of both processes (without those of idle texts, which have
their bound), open files, cells that are held and requests that go on. The exit status is 1 where
something leaked or a reply changed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import httpx2
from servers import Serving, serving

from specllama.bench.report import percentile
from specllama.engine.host import EngineFactory, LoadEngine
from specllama.server.guard import Access
from specllama.settings.params import EngineOptions

CHAT = "/v1/chat/completions"
WORKERS = 24
MAY_GROW = 24 << 20  # resident bytes that allocators keep


def body(text: str, n: int, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": text}]
    return {"messages": turns, "max_tokens": n, "seed": 7, "temperature": 0.8, **more}


def honest(server: Serving, asks: int) -> tuple[list[float], list[str]]:
    """Seconds and texts of requests one after another."""
    took: list[float] = []
    texts: list[str] = []
    for i in range(asks):
        begin = time.perf_counter()
        reply = server.post(CHAT, body(f"the rain {i}", 16), timeout=120)
        took.append(time.perf_counter() - begin)
        texts.append(reply.json()["choices"][0]["message"]["content"])
    return took, texts


def canceller(server: Serving, seed: int, n: int) -> None:
    """Requests that are given up: before, within and behind their first words."""
    rng = random.Random(seed)
    with httpx2.Client(base_url=server.url, timeout=60) as http:
        for _ in range(n):
            asked = body(f"a ship {rng.random()}", 200, stream=rng.random() < 0.8)
            with contextlib.suppress(httpx2.HTTPError):
                if not asked["stream"]:
                    http.post(CHAT, json=asked, timeout=rng.uniform(0.001, 0.05))
                    continue
                with http.stream("POST", CHAT, json=asked) as reply:
                    lines = reply.iter_lines()
                    for _ in range(rng.randrange(4)):
                        next(lines, None)


@contextmanager
def dead_readers(server: Serving, n: int) -> Iterator[None]:
    """Sockets whose owners asked and read nothing, or never finished asking; goes on once the
    engine has written all that they asked for, and they still do not read."""
    port = int(server.url.rpartition(":")[2])
    more = {"stream": True, "timings_per_token": True, "logprobs": True, "top_logprobs": 60}
    asked = json.dumps(body("on and on", 48, **more)).encode()
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    whole = head % CHAT.encode() + b"Content-Length: %d\r\n\r\n" % len(asked) + asked
    lines: list[socket.socket] = []
    try:
        for i in range(n):
            line = socket.socket()
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            lines.append(line)
            with contextlib.suppress(OSError):
                line.connect(("127.0.0.1", port))
                line.sendall(whole if i % 2 else whole[: i % len(whole)])
        time.sleep(0.5)
        _idle(server)
        yield
    finally:
        for line in lines:
            line.close()


def state(server: Serving) -> dict[str, float]:
    """What must not grow; waits until nothing goes on."""
    _idle(server)
    queue = server.queue
    told, pid = server.http.get("/metrics").text, server.host.pid
    cells = re.search(r'kv_cells{[^}]*"live"} (\d+)', told)
    parked = re.search(r"kv_parked_bytes{[^}]*} (\d+)", told)
    return {
        "going on": len(queue.running) + queue.n_waiting,
        "tasks": _tasks(server),
        "cells": float(cells[1]) if cells else -1.0,
        "parent bytes": _resident(os.getpid()),
        "child bytes": (_resident(pid) if pid else 0.0) - float(parked[1] if parked else 0),
        "open files": len(os.listdir("/proc/self/fd")),
    }


def _idle(server: Serving, seconds: float = 120.0) -> None:
    queue, until = server.queue, time.monotonic() + seconds
    while (queue.running or queue.n_waiting) and time.monotonic() < until:
        time.sleep(0.05)


def _tasks(server: Serving) -> int:
    """Of the server's event loop, once they had time to end."""
    loop = server.queue._loop
    assert loop is not None
    time.sleep(0.3)
    return len(asyncio.all_tasks(loop))


def _resident(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return float(pages * os.sysconf("SC_PAGE_SIZE"))


def figures(
    factory: EngineFactory,
    *,
    cancels: int,
    readers: int,
    asks: int,
    turns: int = 1,
    connections: int = 256,
) -> dict[str, Any]:
    """Everything that is printed; "wrong" names what must not be."""
    out: dict[str, Any] = {}
    wrong: list[str] = []
    with serving(factory, access=Access(connections=connections), most=1024) as server:
        _, usual = honest(server, asks)
        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(lambda s: canceller(server, s, 4), range(WORKERS)))
        before = state(server)

        def beside(
            name: str, others: Callable[[], contextlib.AbstractContextManager[Any]], turns: int = 1
        ) -> None:
            first = before
            alone: list[float] = []
            took: list[float] = []
            for turn in range(turns):
                alone += honest(server, asks)[0]
                with others():
                    seconds, texts = honest(server, asks)
                took += seconds
                if texts != usual:
                    wrong.append(f"{name}: replies changed")
                if turn == 0 and turns > 1:  # the allocator keeps what so many need at once
                    first = state(server)
            after = state(server)
            out[name] = {
                "alone": _spread(alone),
                "beside": _spread(took),
                "95 % over alone": _over(took, alone),
                "alone over itself": _over(alone[::2], alone[1::2]),
                "before": first,
                "after": after,
            }
            more = {one: after[one] - first[one] for one in ("tasks", "open files")}
            if after["going on"] or more["tasks"] > 4 or more["open files"] > WORKERS:
                wrong.append(f"{name}: something goes on")
            for one in ("parent bytes", "child bytes"):
                if after[one] > first[one] + MAY_GROW:
                    wrong.append(f"{name}: {one} grew by {after[one] - first[one]:.0f}")

        @contextmanager
        def cancelling() -> Iterator[None]:
            each = -(-cancels // WORKERS)
            threads = [
                threading.Thread(target=canceller, args=(server, seed, each))
                for seed in range(WORKERS)
            ]
            for thread in threads:
                thread.start()
            yield
            for thread in threads:
                thread.join()

        beside("cancels", cancelling)
        beside("dead readers", lambda: dead_readers(server, readers), turns)
    return {**out, "wrong": wrong}


def _spread(took: list[float]) -> dict[str, float | None]:
    return {"median s": percentile(took, 0.5), "95 % s": percentile(took, 0.95)}


def _over(took: list[float], alone: list[float]) -> float:
    return (percentile(took, 0.95) or 0.0) / (percentile(alone, 0.95) or 1.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--model", default="tiny")
    parser.add_argument("--cancels", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=1_000)
    parser.add_argument("--asks", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--connections", type=int, default=256)
    args = parser.parse_args()
    options = EngineOptions(n_ctx=4096, parallel=args.parallel, kv_ram=64)
    found = figures(
        LoadEngine(args.model, None, options),
        cancels=args.cancels,
        readers=args.readers,
        asks=args.asks,
        turns=args.turns,
        connections=args.connections,
    )
    print(json.dumps(found, indent=1))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
