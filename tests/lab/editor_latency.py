"""How long a key press in an editor waits for what it shows, on servers that run already.

    python tests/lab/editor_latency.py ours=http://127.0.0.1:8484 theirs=http://127.0.0.1:8012

Someone types on in a Python file, with some 4,000 tokens around the gap. Each key sends what
llama.vim sends: 256 lines ahead, at most 250 ms of writing, or to the end of the line. Printed for
each server: milliseconds to the reply, 50th and 95th percentile, and the tokens of the prompt that
were read; then the same for keys every 100 ms of which each cancels the one before, from the last
key on.
"""

from __future__ import annotations

import argparse
import inspect
import json
import socket
import statistics
import time
from typing import Any

import httpx2

KEYS = 20
CHARACTERS = 5  # of a token
LINES = 256  # ahead of the gap


def gap(tokens: int) -> tuple[str, str, str]:
    """What is ahead of a gap in a long file, what is typed there, and what is behind it."""
    text = inspect.getsource(argparse)
    at = text.index("    def _get_optional_kwargs(")
    at = text.index("\n        # ", at) + 1
    return text[:at], text[at : at + 200], text[at + 200 : at + 200 + tokens // 2 * CHARACTERS]


def request(before: str, after: str) -> dict[str, Any]:
    """Build what llama.vim sends."""
    *lines, line = before.split("\n")
    return {
        "input_prefix": "\n".join([*lines[-LINES:], ""]),
        "input_suffix": after,
        "input_extra": [],
        "prompt": line,
        "n_predict": 128,
        "n_indent": len(line) - len(line.lstrip()),
        "top_k": 40,
        "top_p": 0.9,
        "seed": 1,
        "samplers": ["top_k", "top_p", "infill"],
        "cache_prompt": True,
        "t_max_prompt_ms": 500,
        "t_max_predict_ms": 250,
    }


def press(http: httpx2.Client, body: dict[str, Any]) -> tuple[float, int, float]:
    """Send one key; return milliseconds, tokens read, and milliseconds of reading."""
    begin = time.perf_counter()
    told = http.post("/infill", json=body).json()
    ms = (time.perf_counter() - begin) * 1e3
    return ms, told["timings"]["prompt_n"], told["timings"]["prompt_ms"]


def hurried(http: httpx2.Client, bodies: list[dict[str, Any]]) -> tuple[float, int]:
    """Send all but the last, each taken back by the next after 100 ms; return what the last took
    and read."""
    for body in bodies[:-1]:
        sent = json.dumps(body).encode()
        head = f"POST /infill HTTP/1.1\r\nHost: {http.base_url.host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(sent)}\r\n\r\n"
        with socket.create_connection((http.base_url.host, http.base_url.port or 80)) as one:
            one.sendall(head.encode() + sent)
            time.sleep(0.1)
    return press(http, bodies[-1])[:2]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("servers", nargs="+", metavar="NAME=URL")
    options.add_argument("--tokens", type=int, default=4000)
    options.add_argument("--keys", type=int, default=KEYS)
    args = options.parse_args()
    before, typed, after = gap(args.tokens)
    bodies = [request(before + typed[:n], after) for n in range(2 * args.keys + 1)]
    servers = dict(server.split("=", 1) for server in args.servers)
    clients = {name: httpx2.Client(base_url=url, timeout=600) for name, url in servers.items()}
    told: dict[str, list[tuple[float, int, float]]] = {name: [] for name in clients}
    for body in bodies[: args.keys + 1]:  # in turn, as the machine may have more to do
        for name, http in clients.items():
            told[name].append(press(http, body))
    for name, http in clients.items():
        first, *later = told[name]
        ms = [one[0] for one in later]
        last_ms, last_n = hurried(http, bodies[args.keys + 1 :])
        slow = statistics.quantiles(ms, n=20)[-1]
        print(
            f"{name}: first {first[0]:.0f} ms ({first[1]} tokens); "
            f"a key {statistics.median(ms):.0f} ms, p95 {slow:.0f} ms, "
            f"of it reading {statistics.median(one[2] for one in later):.0f} ms, "
            f"{statistics.median(one[1] for one in later):.0f} tokens read, "
            f"at most {max(one[1] for one in later)}; hurried {last_ms:.0f} ms ({last_n} tokens)",
            flush=True,
        )


if __name__ == "__main__":
    main()
