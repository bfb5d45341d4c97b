"""What the terminal app costs: until it is there, while it is idle, beside a reply.

``pytest -s tests/lab/bench/test_app.py`` prints the figures; nothing is asserted of a clock.
``SPECLLAMA_BENCH_TARGET`` names a model for the speed beside the app (default: the bundled one).
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from terminals import DEMO, Terminal, terminal

from specllama.store.sessions import SessionStore, StoredMessage

TARGET = os.environ.get("SPECLLAMA_BENCH_TARGET", "tiny")
ROUNDS = int(os.environ.get("SPECLLAMA_BENCH_ROUNDS", "5"))
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
DEMO_TOK_PER_S = 73.2  # of the demonstration at speed 1
APP = [sys.executable, "-P", "-m", "specllama", "chat"]


def used(pid: int) -> float:
    """Processor seconds of one process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) * TICK_S


def slow(speed: float, times: int) -> str:
    return DEMO.replace(
        "speed=1.0", f"__import__('demo_engine').DEMO_REPLY * {times}, speed={speed}, n_ctx=65536"
    )


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def share(t: Terminal) -> float:
    """Of one core, from the first text of a reply to its end."""
    before = len(t.words)
    t.type("What is speculative decoding?\r")
    t.until(lambda: "Speculative decoding makes" in t.words[before:])
    begun, at = used(t.process.pid), time.monotonic()
    t.until(lambda: "seed 1" in t.words[before:])
    return (used(t.process.pid) - begun) / (time.monotonic() - at)


def test_start(tmp_path: Path) -> None:
    paint, ready = [], []
    for _ in range(ROUNDS):
        begun = time.monotonic()
        with terminal(tmp_path, command=APP, size=(100, 30)) as t:
            t.until(lambda: "Write a message" in t.words)
            paint.append(time.monotonic() - begun)
            t.until(lambda: "● CPU" in t.words)
            ready.append(time.monotonic() - begun)
    print(f"\nfirst paint {spread(paint)} s, ready {spread(ready)} s")


def test_idle(tmp_path: Path) -> None:
    with terminal(tmp_path, command=APP, size=(100, 30)) as t:
        t.until(lambda: "to download" in t.words)  # the recording is over
        (child,) = t.children()
        begun = used(t.process.pid) + used(child)
        for _ in range(100):
            t.read(0.1)
        print(f"\nidle: {used(t.process.pid) + used(child) - begun:.2f} s of processor in 10 s")


@pytest.mark.parametrize("tok_per_s", [40, 200])
@pytest.mark.parametrize("size", [(80, 24), (160, 50)], ids=["80x24", "160x50"])
def test_beside_a_reply(tmp_path: Path, tok_per_s: int, size: tuple[int, int]) -> None:
    patch = slow(tok_per_s / DEMO_TOK_PER_S, 4)
    with terminal(tmp_path, patch=patch, max_tokens=2000, size=size) as t:
        t.until(lambda: "demo-target" in t.words)
        print(f"\n{tok_per_s} tok/s, {size}: {share(t):.1%} of a core")


@pytest.fixture
def long_chat(home: Path) -> str:
    """Fifty turns, about 20,000 tokens."""
    with SessionStore.open() as store:
        session = store.create(title="long")
        for i in range(50):
            words = "\n\n".join(f"Turn {i}, part {j}: " + "some words " * 20 for j in range(9))
            store.put(session, 2 * i, StoredMessage("user", f"Question {i}?"))
            store.put(session, 2 * i + 1, StoredMessage("assistant", words))
    return session


def test_a_long_conversation(tmp_path: Path, long_chat: str) -> None:
    for more in ("", f"session_id={long_chat!r}"):
        patch = slow(40 / DEMO_TOK_PER_S, 2)
        with terminal(tmp_path, patch=patch, more=more, max_tokens=2000, size=(100, 30)) as t:
            t.until(lambda: "demo-target" in t.words)
            stream = share(t)
            begun = used(t.process.pid)
            for _ in range(20):
                t.type("\x1b[5~")
                t.read(0.3)
            page = (used(t.process.pid) - begun) / 20
            name = "after 50 turns" if more else "first turn"
            print(f"\n{name}: {stream:.1%} of a core while streaming, {1000 * page:.0f} ms a page")


def test_decoding_beside_the_app(tmp_path: Path) -> None:
    words = ["run", "-m", TARGET, "--no-spec", "--seed", "1", "--max-tokens", "96", "--no-log"]
    ask = "Tell me a long story about a fox and a crow."
    ratios = []
    patch = "GenerateParams = __import__('functools').partial(GenerateParams, speculate=False)"
    for _ in range(ROUNDS):
        ran = subprocess.run(
            [sys.executable, "-P", "-m", "specllama", *words, ask], capture_output=True, text=True
        )
        alone = float(re.search(r"([\d.]+) tok/s", ran.stderr).group(1))  # type: ignore[union-attr]
        with terminal(tmp_path, target=TARGET, patch=patch, max_tokens=96, size=(100, 30)) as t:
            t.until(lambda: "● CPU" in t.words)
            t.type(f"{ask}\r")
            t.until(lambda: re.search(r"[\d.]+ tok/s · plain", t.words))
            found = re.search(r"([\d.]+) tok/s · plain", t.words)
        assert found
        ratios.append(float(found.group(1)) / alone)
    print(f"\ndecoding beside the app: {spread(ratios)} of run's")
