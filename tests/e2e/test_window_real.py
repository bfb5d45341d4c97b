"""The window on the bundled pair: random sleeps change what is drafted, never what is written."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from typing import Any

import pytest
from windows import Pair, play

from specllama.bench.prompts import BenchPrompt, load_prompts
from specllama.engine.engine import Engine
from specllama.engine.profiles import Profile, Windows
from specllama.events import Finished, RoundDone
from specllama.settings.params import GenerateParams, SamplingParams

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def prompts() -> list[BenchPrompt]:
    return load_prompts()[:8]


def answer(engine: Engine, prompt: BenchPrompt, **changes: Any) -> tuple[Finished, list[RoundDone]]:
    engine.reset()
    params = GenerateParams(max_tokens=48, seed=7, min_speculative_tokens=0).replace(**changes)
    events = list(engine.generate(prompt.content, params))
    finished = events[-1]
    assert isinstance(finished, Finished)
    return finished, [e for e in events if isinstance(e, RoundDone)]


@pytest.fixture
def sleepy(own_tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> random.Random:
    """Every pass takes longer by chance, the target's more: drafting pays, in varying lengths."""
    rng = random.Random(1)
    kind = type(own_tiny.target)
    forward = kind.forward

    def slow(self: Any, *args: Any, **kwargs: Any) -> Any:
        time.sleep(rng.random() * (2e-3 if self is own_tiny.target else 1e-4))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", slow)
    # what other tests lost is not this one's: an account that is empty drafts nothing
    windows = Windows(Profile(), own_tiny.info)
    monkeypatch.setattr(own_tiny, "_loaded", replace(own_tiny._loaded, windows=windows))
    return rng


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_random_sleeps_never_change_a_token(
    own_tiny: Engine, prompts: list[BenchPrompt], sleepy: random.Random, temperature: float
) -> None:
    sampling = SamplingParams(temperature=temperature)
    drafted = 0
    for prompt in prompts:
        plain, _ = answer(own_tiny, prompt, sampling=sampling, speculate=False)
        for proposer in ("mixed", "draft", "ngram"):
            spec, rounds = answer(own_tiny, prompt, sampling=sampling, proposer=proposer)
            assert spec.token_ids == plain.token_ids
            assert len(spec.token_ids) == spec.draft_n_accepted + spec.rounds - spec.cut
            assert all(r.window_reason for r in rounds)
            drafted += spec.draft_n
    assert drafted > 0


def test_logged_rounds_replay_within_the_ledger(
    own_tiny: Engine, prompts: list[BenchPrompt]
) -> None:
    """Real drafts, real confidences: what the window would lose at several costs of a pass."""
    from replay import trace_of_rounds

    from specllama.speculative.policy.constants import EPSILON
    from specllama.speculative.policy.ledger import Ledger

    for n, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=float(n % 2))
        _, rounds = answer(
            own_tiny, prompt, sampling=sampling, proposer="draft", window="fixed", draft_max=4
        )
        trace = trace_of_rounds(rounds)
        for extra, step in ((0.1, 0.05), (0.5, 0.1), (0.9, 0.6)):
            verify = [0.0, *(1 + extra * (k - 1) for k in range(1, 18))]
            pair = Pair().tuned(verify, step)
            result = play(trace, verify, step, pair=pair)
            assert result.worst_loss(EPSILON) <= Ledger().total + 1e-6
