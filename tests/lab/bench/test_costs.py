"""What the parts of a round cost on long texts and large vocabularies, in the process's own time.

``pytest -s tests/lab/bench/test_costs.py`` prints the figures; nothing is asserted of a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from time import process_time
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specllama.settings.params import SamplingParams
from specllama.speculative.drafting.copying import TextFollower
from specllama.speculative.drafting.drafter import Copier, Request
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.drafting.suffix import SuffixDrafter
from specllama.speculative.noise import draw
from specllama.speculative.rules import MATCH, RandomCoins
from specllama.speculative.sampling import SamplerChain
from specllama.text_history import History

V = 152_064
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def took(work: Callable[[], object]) -> float:
    """Milliseconds of processor time."""
    begin = process_time()
    work()
    return (process_time() - begin) * 1e3


def text_of(n: int) -> list[int]:
    """Tokens as frequent as words are, with passages that come again."""
    rng = np.random.default_rng(0)
    words = (rng.zipf(1.2, n) - 1) % V
    for _ in range(n // 500):
        begin, at = rng.integers(0, n - 60, 2)
        words[at : at + 60] = words[begin : begin + 60].copy()
    return [int(token) for token in words]


@pytest.mark.parametrize("n", [8_000, 32_000, 128_000])
def test_free_sources(n: int) -> None:
    tokens, reader = text_of(n + 2_000), TextFollower()
    sources: list[Copier] = [SuffixDrafter(reader=reader), NgramDrafter(reader=reader)]
    for source in sources:
        source.start(Request(seed=0, rule=MATCH, coins=RandomCoins(0), is_eog=lambda t: False))
    text, chain = History(tokens[:n]), SamplerChain(SamplingParams())

    def ask() -> None:
        for source in sources:
            source.guesses(text, chain, 15)

    first = took(ask)
    rounds = []
    for step in range(400):
        text.extend(tokens[len(text) : len(text) + 1 + step % 4])
        rounds.append(took(ask))
    text.cut(n // 2)
    text.extend(tokens[:1_000])
    edit = took(ask)
    print(
        f"\nfree sources at {n} tokens: first {first:.1f} ms, a round {np.median(rounds):.3f} "
        f"(9 of 10 below {np.quantile(rounds, 0.9):.3f}), after an edit {edit:.1f}"
    )


def row(kind: str) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(1)
    z = rng.normal(0.0, 2.2, V).astype(np.float32)
    if kind != "noise":
        z[rng.integers(0, V, 5 if kind == "peaked" else 60)] += 18 if kind == "peaked" else 11
    z.flags.writeable = False
    return z


@pytest.mark.parametrize("kind", ["peaked", "usual", "noise"])
def test_samplers(kind: str) -> None:
    cases: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "default": {},
        "temperature only": OFF,
        "top-k": {**OFF, "top_k": 40},
        "top-p": {**OFF, "top_p": 0.95},
        "min-p": {**OFF, "min_p": 0.05},
        "typical": {**OFF, "typical_p": 0.9},
        "XTC": {**OFF, "top_k": 40, "xtc_probability": 1.0},
        "penalties, 8k": {"repeat_penalty": 1.1, "repeat_last_n": -1},
        "DRY, 8k": {"dry_multiplier": 0.8},
        "DRY, 128k": {"dry_multiplier": 0.8},
    }
    z, text = row(kind), text_of(128_000)
    print(f"\n{kind} row of {V} logits, ms a row:")
    for name, changes in cases.items():
        tokens = text if name.endswith("128k") else text[:8_000]
        chain = SamplerChain(SamplingParams(**changes), seed=1, tokens=tokens)
        chain.law(z)

        def sample(chain: SamplerChain = chain) -> None:
            ahead = chain.fork()
            ahead.advance(draw(ahead.law(z), 1, ahead.position)[0])
            ahead.law(z)

        print(f"  {name}: {np.median([took(sample) for _ in range(15)]) / 2:.2f}")
