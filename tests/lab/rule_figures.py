"""How much each verification rule is expected to accept, told from the laws of a pair.

    python tests/lab/rule_figures.py [-m MODEL] [-d DRAFT] [--count PROMPTS] [-n TOKENS]

Plain replies to bundled prompts that nothing is tuned on; at every fourth place a draft is sampled
from the draft model, and the target reads it. Of the first guess common noise (``match``) and
``rejection`` accept so much, of whole drafts ``rejection`` and ``block``: expectations over all
that a rule could draw, so few places tell it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

from specllama.arrays import FloatArray
from specllama.bench.prompts import half, load_prompts
from specllama.engine.engine import Engine
from specllama.settings.params import EngineOptions, SamplingParams
from specllama.speculative.noise import draw
from specllama.speculative.rules import RandomCoins
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Law
from specllama.text_history import common_prefix

LENGTHS = (4, 8)
APART = 4  # tokens between two places


def dense(law: Law, n: int) -> FloatArray:
    p = np.zeros(n)
    p[law.ids] = law.probs
    return p


def common_noise(p: FloatArray, q: FloatArray) -> float:
    """How likely two draws with the same noise agree (Daliri, Musco and Suresh 2024)."""
    some = (p > 0.0) | (q > 0.0)
    p, q = p[some], q[some]
    both = (p > 0.0) & (q > 0.0)
    ways = np.maximum(p / p[both, None], q / q[both, None])
    return float((1.0 / ways.sum(axis=1)).sum())


def rejection(ratios: Sequence[float]) -> float:
    """Guesses of a draft that are accepted."""
    return float(np.minimum(1.0, ratios).cumprod().sum())


def block(ratios: Sequence[float], p: Sequence[FloatArray], q: Sequence[FloatArray]) -> float:
    """The same of block verification, see ``rules``; ``p`` has one law more than ``q``."""
    n, a, heads = len(ratios), 1.0, []
    for i, ratio in enumerate(ratios, 1):
        a = min(1.0, a * ratio)
        z = float(np.maximum(a * p[i] - q[i], 0.0).sum()) if i < n else 0.0
        heads.append(a if i == n else z / (z + 1.0 - a) if z > 1e-12 else 0.0)
    left, expected = 1.0, 0.0
    for i in range(n, 0, -1):
        expected += left * heads[i - 1] * i
        left *= 1.0 - heads[i - 1]
    return expected


class Places:
    """The laws along drafts at places of a text."""

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self.target: Any = engine.target
        self.draft: Any = engine.drafters["draft"].lane  # type: ignore[attr-defined]
        self.sampling = sampling
        self.n = max(self.target.n_vocab, self.draft.n_vocab)
        self.shared = min(self.target.n_vocab, self.draft.n_vocab)
        self.coins = RandomCoins(1)

    def chain(self, tokens: list[int], seed: int = 0) -> SamplerChain:
        return SamplerChain(self.sampling, seed=seed, tokens=tokens)

    def read(self, lane: Any, tokens: list[int]) -> Any:
        """The row after them."""
        have = min(common_prefix(lane.tokens, tokens), len(tokens) - 1)
        lane.rollback(have)
        return lane.forward(tokens[have:], outputs="last")[-1].copy()

    def reply(self, prompt: list[int], n: int, seed: int) -> list[int]:
        chain, text = self.chain(prompt, seed), list(prompt)
        while len(text) < len(prompt) + n:
            token, _ = draw(chain.law(self.read(self.target, text)), seed, chain.position)
            chain.advance(token)
            text.append(token)
        return text

    def drafted(self, text: list[int], most: int) -> tuple[list[int], Any, Any]:
        """A sampled draft, and the laws of target and draft along it."""
        chain, tokens, q = self.chain(text), list[int](), []
        for _ in range(most):
            law = chain.law(self.read(self.draft, [*text, *tokens])[: self.shared])
            q.append(dense(law, self.n))
            tokens.append(self.coins.pick(law.ids, law.probs))
            chain.advance(tokens[-1])
        self.read(self.target, text)
        self.target.rollback(len(text) - 1)
        rows = self.target.forward([text[-1], *tokens], outputs="all").copy()
        chain, p = self.chain(text), []
        for row, token in zip(rows, [*tokens, None], strict=True):
            p.append(dense(chain.law(row), self.n))
            if token is not None:
                chain.advance(token)
        return tokens, p, q


def figures(engine: Engine, temperature: float, count: int, n: int) -> None:
    places = Places(engine, SamplingParams(temperature=temperature))
    first: list[tuple[float, float]] = []
    whole: dict[int, list[tuple[float, float]]] = {length: [] for length in LENGTHS}
    for seed, prompt in enumerate(half(load_prompts(), "bench")[:count], 1):
        tokens = [int(token) for token in engine.encode(prompt.content)[0]]
        text = places.reply(tokens, n, seed)
        for at in range(len(tokens), len(text) - 1, APART):
            drafted, p, q = places.drafted(text[:at], max(LENGTHS))
            first.append((common_noise(p[0], q[0]), float(np.minimum(p[0], q[0]).sum())))
            ratios = [p[i][x] / q[i][x] for i, x in enumerate(drafted)]
            for length in LENGTHS:
                some = ratios[:length]
                whole[length].append((1.0 + rejection(some), 1.0 + block(some, p, q)))
    told = [f"first guess: match {np.mean(first, 0)[0]:.3f}, rejection {np.mean(first, 0)[1]:.3f}"]
    for length, pairs in whole.items():
        mean, gap = np.mean(pairs, 0), np.diff(pairs, axis=1)
        told.append(
            f"of {length}: rejection {mean[0]:.3f}, block {mean[1]:.3f} "
            f"({gap.mean():+.3f} ± {gap.std() / len(gap) ** 0.5:.3f})"
        )
    print(f"T = {temperature:g}, {len(first)} places; {'; '.join(told)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-m", "--model", default="tiny")
    parser.add_argument("-d", "--draft")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("-n", "--tokens", type=int, default=48)
    given = parser.parse_args()
    options = EngineOptions(n_ctx=1024, threads=1)
    engine = Engine.load(given.model, given.draft, options)
    for temperature in (0.7, 1.0):
        figures(engine, temperature, given.count, given.tokens)
    engine.close()


if __name__ == "__main__":
    main()
