"""A race's runs write one text again and again; none may copy it from another."""

from __future__ import annotations

import pytest

from specllama.bench.experiment import ask_all, plain_and
from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.interface import Message
from specllama.settings.params import GenerateParams, SamplingParams

pytestmark = pytest.mark.e2e


def test_no_run_copies_what_another_wrote(own_tiny: Engine) -> None:
    fixed = GenerateParams(
        proposer="suffix",
        window="fixed",
        draft_max=4,
        max_tokens=40,
        sampling=SamplingParams(temperature=0.0),
    )
    question = (Message("user", "What is speculative decoding?"),)
    runs = [
        run for lap in range(2) for run in plain_and(question, fixed, [("drafted", fixed)], lap)
    ]
    for _ in own_tiny.generate(question, fixed.replace(seed=1)):
        pass  # the conversation beside it wrote the same, too
    ask_all(own_tiny, runs, Cancel(), lambda run: None, log=False)
    first, second = (run for run in runs if run.name == "drafted")
    assert first.tokens == second.tokens
    drafts = [[(one.drafted, one.accepted) for one in run.passes] for run in (first, second)]
    assert drafts[0] == drafts[1]
    assert len(first.passes) > len(first.tokens) / 2  # copies of the whole reply would take 8
