"""How often the interval of a live verdict holds the true ratio, plain and drafted replies in turn.

``pytest -s tests/lab/bench/test_calibration.py`` prints the figures; nine of ten hold it.
``SPECLLAMA_BENCH_TARGET`` and ``SPECLLAMA_BENCH_DRAFT`` name a pair (default: the bundled one, too
quick for many verdicts), ``SPECLLAMA_BENCH_REPLIES`` how many of each kind, ``SPECLLAMA_BENCH_OUT``
a file to which the rounds are appended as JSON lines.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from specllama.engine.engine import Engine
from specllama.events import Finished, RoundDone
from specllama.interface import Message
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

TARGET = os.environ.get("SPECLLAMA_BENCH_TARGET", "tiny")
DRAFT = os.environ.get("SPECLLAMA_BENCH_DRAFT")
REPLIES = int(os.environ.get("SPECLLAMA_BENCH_REPLIES", "20"))
TOKENS = int(os.environ.get("SPECLLAMA_BENCH_TOKENS", "48"))
OUT = os.environ.get("SPECLLAMA_BENCH_OUT")
ASKED = [Message("user", "Tell me a long story about a llama and a small dog by the sea.")]
BASE = GenerateParams(
    sampling=SamplingParams(temperature=0.0), seed=3, max_tokens=TOKENS, ignore_eos=True
)
WAYS = {
    "fixed": BASE.replace(proposer="draft", window="fixed", draft_max=4),
    "auto": BASE.replace(proposer="draft"),
    "auto-ngram": BASE.replace(proposer="ngram"),
}


@contextmanager
def busy_core(busy: bool) -> Iterator[None]:
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
    try:
        yield
    finally:
        if other is not None:
            other.kill()
            other.wait()


def reply(engine: Engine, params: GenerateParams) -> tuple[Finished, list[RoundDone]]:
    rounds: list[RoundDone] = []
    for event in engine.generate(ASKED, params):
        if isinstance(event, RoundDone):
            rounds.append(event)
        elif isinstance(event, Finished):
            return event, rounds
    raise AssertionError("a reply ends")


def each_ms(end: Finished) -> float:
    return end.timings.decode_ms / (len(end.token_ids) - 1)


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.timeout(900)
def test_nine_of_ten_intervals_hold_the_true_ratio(way: str, busy: bool) -> None:
    engine = Engine.load(TARGET, DRAFT, EngineOptions(n_ctx=2048))
    plain: list[Finished] = []
    drafted: list[Finished] = []
    kept: list[dict[str, Any]] = []
    with busy_core(busy):
        for _ in range(REPLIES):
            for params, ends in ((BASE.replace(proposer="none"), plain), (WAYS[way], drafted)):
                begin = time.perf_counter()
                end, rounds = reply(engine, params)
                ends.append(end)
                told = [done.to_dict() for done in rounds]
                kept.append({"begin_s": begin, "end": end.to_dict(), "rounds": told})
    if OUT:
        with Path(OUT).open("a") as file:
            file.write(json.dumps({"way": way, "busy": busy, "replies": kept}) + "\n")
    logs = [math.log(each_ms(a) / each_ms(b)) for a, b in zip(plain, drafted, strict=True)]
    pairs = [
        fmean([each_ms(plain[i]), each_ms(plain[min(i + 1, REPLIES - 1)])]) / each_ms(drafted[i])
        for i in range(REPLIES)
    ]
    truth = math.exp(fmean(logs))
    verdicts = [end.verdict for end in drafted]
    told = [
        (one.low, one.high, pair)
        for one, pair in zip(verdicts, pairs, strict=True)
        if one is not None and one.low is not None and one.high is not None
    ]
    held = sum(low <= truth <= high for low, high, _ in told)
    own = sum(low <= pair <= high for low, high, pair in told)
    answers = [one.answer for one in verdicts if one is not None]
    wide = median(high / low for low, high, _ in told) if told else math.nan
    print(
        f"\n{way}, {'busy' if busy else 'idle'}: true {truth:.2f} (pairs {min(pairs):.2f} to "
        f"{max(pairs):.2f}); told {len(told)}/{REPLIES}, of these hold it {held}, hold that of "
        f"their own pair {own}; high over low {wide:.2f}; "
        + ", ".join(f"{answers.count(one)} {one}" for one in dict.fromkeys(answers))
        + f"; load {os.getloadavg()[0]:.1f}"
    )
    assert held >= 0.9 * len(told)
