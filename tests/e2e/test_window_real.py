"""Rounds of the bundled pair, replayed at several costs of a pass."""

from __future__ import annotations

from typing import Any

import pytest
from windows import Pair, play

from specllama.bench.prompts import BenchPrompt, load_prompts
from specllama.engine.engine import Engine
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
