"""Short replies under load in virtual time: what drafting decides, and what it would gain.

    python tests/lab/short_replies.py [--clients 1,2,4,8] [--waves 3] [--count 16] [--avx2]

Runs the engine of ``serve`` over the bundled pair with N requests at a time. No time is measured:
every pass takes what a table says, in plain steps of a 1 B target with a 60 M draft on two cores
(``TARGET``, ``DRAFT``; with ``--avx2`` of another processor), so a busy machine tells the same
figures as an idle one. Each way gets the same prompts, wave by wave, with a profile of its own:
cold for each number of clients, or with ``--warm`` after a wave of one client.

``peer`` is what llama-server does, played with our passes: the draft model reads each prompt at
once and every pass of the target again, and drafts 3 tokens a round whatever they gain.

Printed by clients and way: tokens a second over writing plainly, passes and rows of both models for
each reply, the same for the first wave alone, and the worst that a wave lost, in plain steps.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any


class VirtualClock:
    """Advances only when a pass takes its time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = VirtualClock()
time.perf_counter = CLOCK  # before anything of ours asks the time

from specllama.backend import llama_cache  # noqa: E402
from specllama.bench.prompts import load_prompts  # noqa: E402
from specllama.engine.engine import Engine  # noqa: E402
from specllama.events import Finished  # noqa: E402
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams  # noqa: E402

STEP_S = 0.02
# rows and plain steps, measured (1.0 B at Q4_0, 60 M at Q4_0; two cores, with and without AVX-512)
TARGET = ((1, 1.0), (2, 1.5), (3, 2.1), (4, 2.1), (5, 2.75), (6, 3.5), (8, 4.0), (9, 4.4),
          (12, 5.3), (16, 5.65), (64, 21.0), (512, 160.0))  # fmt: skip
DRAFT = ((1, 0.09), (2, 0.12), (4, 0.18), (16, 0.5), (64, 1.6), (128, 3.1), (512, 12.4))
TARGET_AVX2 = ((1, 1.0), (2, 1.74), (3, 2.6), (4, 2.6), (5, 3.3), (6, 3.96), (8, 5.0), (9, 5.8),
               (12, 7.4), (16, 8.3), (24, 12.9), (64, 25.5), (512, 204.0))  # fmt: skip
DRAFT_AVX2 = ((1, 0.11), (2, 0.18), (4, 0.26), (16, 0.8), (64, 2.7), (128, 5.3), (512, 21.5))
OWN = 0.005  # plain steps of our own between passes
SHARE = 1.2 * 0.06  # of the draft model in the bytes of the target, as the window expects its steps


def steps(table: Sequence[tuple[int, float]], rows: int) -> float:
    """What a pass of that many rows takes."""
    at = min(max(bisect_right(table, (rows, 1e9)) - 1, 0), len(table) - 2)
    (below, low), (above, high) = table[at], table[at + 1]
    return low + (high - low) * (rows - below) / (above - below)


@dataclass
class Passes:
    """Counts what is decoded, and lets it take its time."""

    counts: Counter[str] = field(default_factory=Counter)
    spent: Counter[str] = field(default_factory=Counter)
    target: Sequence[tuple[int, float]] = TARGET
    draft: Sequence[tuple[int, float]] = DRAFT
    again: bool = False  # the draft model reads every pass of the target again
    _whose: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ll = llama_cache.ll
        decode = ll.llama_decode

        def timed(ctx: Any, batch: Any) -> Any:
            whose = self._whose.get(ctx)
            if whose is None:
                large = ll.llama_model_n_params(ll.llama_get_model(ctx)) > 2_000_000
                whose = self._whose[ctx] = "target" if large else "draft"
            self.took(whose, batch.n_tokens)
            if self.again and whose == "target" and batch.n_tokens < 64:
                self.took("draft", batch.n_tokens)
            return decode(ctx, batch)

        ll.llama_decode = timed

    def took(self, whose: str, rows: int) -> None:
        cost = steps(self.target if whose == "target" else self.draft, rows)
        self.counts[whose] += 1
        self.counts[f"{whose} rows"] += rows
        self.spent[whose] += cost
        CLOCK.now += (cost + (OWN if whose == "target" else 0.0)) * STEP_S


@dataclass
class Wave:
    tokens: int
    steps: float
    counts: Counter[str]
    spent: Counter[str]


def wave(engine: Engine, passes: Passes, prompts: Sequence[Any], n: int, params: Any) -> Wave:
    """Write the replies, N at a time."""
    waiting, going, tokens = list(prompts), 0, 0
    begin, counts, spent = CLOCK.now, Counter(passes.counts), Counter(passes.spent)
    while waiting or going:
        while waiting and going < n:
            engine.submit(waiting.pop(0).content, params)
            going += 1
        for _, event in engine.step():
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Finished):
                tokens += len(event.token_ids)
                going -= 1
    took = (CLOCK.now - begin) / STEP_S
    return Wave(tokens, took, passes.counts - counts, passes.spent - spent)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {"proposer": "none"},
    "peer": {"proposer": "draft", "window": "fixed", "draft_max": 3},
    "auto": {"proposer": "auto"},
    "draft": {"proposer": "draft"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", default="1,2,4,8")
    parser.add_argument("--ways", default="plain,peer,auto")
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--warm", action="store_true")
    parser.add_argument("--avx2", action="store_true")
    asked = parser.parse_args()
    passes = Passes(target=TARGET_AVX2, draft=DRAFT_AVX2) if asked.avx2 else Passes()
    for clients in map(int, asked.clients.split(",")):
        plain: list[Wave] = []
        for way in asked.ways.split(","):
            with tempfile.TemporaryDirectory() as home:
                os.environ["SPECLLAMA_HOME"] = home
                if asked.warm:
                    written(passes, way, 1, 1, asked)
                waves = written(passes, way, clients, asked.waves, asked)
            plain = plain or waves
            print(told(clients, way, waves, plain), flush=True)


def written(
    passes: Passes, way: str, clients: int, waves: int, asked: argparse.Namespace
) -> list[Wave]:
    """Waves of N clients, of an engine that is loaded for them."""
    prompts, passes.again = load_prompts(None), False
    options = EngineOptions(threads=1, n_ctx=1024 * clients, parallel=clients)
    with Engine.load("tiny", None, options) as engine:
        passes.again = way == "peer"
        engine.windows.profile.costs.draft_share = SHARE
        sampling = SamplingParams(temperature=asked.temperature)
        params = GenerateParams(seed=1, max_tokens=asked.tokens, sampling=sampling, **WAYS[way])
        if clients == waves == 1:  # others than are asked later
            prompts.reverse()
        n = asked.count
        parts = [prompts[i * n : (i + 1) * n] for i in range(waves)]
        return [wave(engine, passes, part, clients, params) for part in parts]


def told(clients: int, way: str, waves: list[Wave], plain: list[Wave]) -> str:
    ratios = [
        (w.tokens / w.steps) / (p.tokens / p.steps) for w, p in zip(waves, plain, strict=True)
    ]
    total = sum((w.counts for w in waves), Counter())
    spent = sum((w.spent for w in waves), Counter())
    n = sum(w.tokens for w in waves)
    each = ", ".join(f"{key} {value / n:.2f}" for key, value in sorted(total.items()))
    cost = ", ".join(f"{key} {value / n:.3f}" for key, value in sorted(spent.items()))
    speed = (n / sum(w.steps for w in waves)) / (
        sum(p.tokens for p in plain) / sum(p.steps for p in plain)
    )
    by_wave = " ".join(f"{ratio:.3f}" for ratio in ratios)
    return f"{clients} {way:6} {speed:.3f} ({by_wave}); a token: {each}; steps {cost}"


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
