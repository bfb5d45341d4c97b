"""Losslessness in company: replies written side by side against the same requests alone.

Requests arrive at random and share passes, cells and the beginnings of their prompts; some are
cancelled, and what they wrote until then has to be the beginning of what they write alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from specllama.bench.prompts import BenchPrompt
from specllama.bench.proof import Case, ProofReply, compared, finish, wish_of
from specllama.engine.engine import Engine
from specllama.settings.params import GenerateParams, WindowKind
from specllama.told import Told

_ARRIVES = 0.3  # chance of a further request between two steps
_LEAVES = 0.002


@dataclass(frozen=True, slots=True)
class _Sent:
    prompt: BenchPrompt
    params: GenerateParams


def prove_together(
    engine: Engine,
    prompts: Sequence[BenchPrompt],
    *,
    proposers: Sequence[str],
    temperatures: Sequence[float],
    draft_max: Sequence[int],
    max_tokens: int,
    seed: int,
    base: GenerateParams,
    window: WindowKind,
) -> Iterator[Case]:
    """Write all replies side by side, then each prompt alone and plainly, and compare.

    Prompt number n (from 0) is drawn with ``seed + n``.
    """
    rng = random.Random(seed)
    asked = [
        _Sent(
            prompt,
            wish_of(prompt.bound(base), temperature, max_tokens, seed + n, window).replace(
                proposer=proposer, draft_max=width
            ),
        )
        for (n, prompt), temperature, proposer, width in product(
            enumerate(prompts), temperatures, proposers, draft_max
        )
    ]
    rng.shuffle(asked)
    written = _written(engine, asked, rng)
    written.sort(key=lambda one: (one[0].prompt.id, one[0].params.sampling.temperature))
    bitwise = engine.info.exact_rows > 1 and engine.info.exact_trees
    plain: dict[tuple[str, float], ProofReply] = {}
    for one, reply in written:
        key = one.prompt.id, one.params.sampling.temperature
        if key not in plain:
            engine.reset()
            plain[key] = finish(engine, one.prompt, one.params.replace(proposer="none"))
        alone, beside = plain[key], replace(reply, exact=bitwise)
        if reply.reply.reason == "cancelled":
            n = len(reply.reply.token_ids)
            alone, beside = alone.cut(n), beside.cut(n)
        yield compared(engine, one.prompt, one.params, alone, beside, way="beside")


def _written(
    engine: Engine, asked: Sequence[_Sent], rng: random.Random
) -> list[tuple[_Sent, ProofReply]]:
    """Return the replies to all, in the order in which they ended."""
    waiting, out = list(asked), list[tuple[_Sent, ProofReply]]()
    running: dict[int, tuple[_Sent, Told]] = {}
    while waiting or running:
        while waiting and engine.free and (not running or rng.random() < _ARRIVES):
            one = waiting.pop()
            running[engine.submit(one.prompt.content, one.params.replace(chances=0))] = one, Told()
        for id, said in engine.step():
            if isinstance(said, Exception):
                raise said
            one, told = running[id]
            told.take(said)
            if said.ends:
                del running[id]
                out.append((one, ProofReply.of(told, exact=False)))
        if running and rng.random() < _LEAVES:
            engine.cancel(rng.choice(list(running)))
    return out
