"""The EAGLE-3 and Medusa heads that ship beside the bundled target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from eagle_files import NumpyHead
from head_lanes import begin_at, encode, feed

from specllama.backend.heads.head_pool import HeadLane
from specllama.backend.lane import CellLane
from specllama.bench.prompts import load_prompts
from specllama.engine.engine import Engine
from specllama.events import Finished, Notice
from specllama.models.refs import resolve
from specllama.settings.params import GenerateParams, SamplingParams

pytestmark = pytest.mark.e2e


def head_file() -> Path:
    return resolve("tiny-target").with_name("tiny-eagle3-q8_0.gguf")


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_it_is_found_and_small(tiny: Engine, kind: str) -> None:
    assert next(m for m in tiny.info.methods if m.name == kind).available
    file = resolve("tiny-target").with_name(f"tiny-{kind}-q8_0.gguf")
    assert file.stat().st_size <= 1_300_000


def test_its_logits_are_those_of_numpy(tiny: Engine) -> None:
    """Known text, then the head's own states, on the weights that ship.

    llama.cpp rounds what enters a Q8_0 matrix to 8 bits; the guesses must not depend on it.
    """
    tiny.reset()
    target, head = tiny.target, tiny.drafter("eagle3")._lane  # type: ignore[attr-defined]
    assert isinstance(target, CellLane)
    assert isinstance(head, HeadLane)
    reference = NumpyHead(head_file(), resolve("tiny-target"))
    target.capture(head.layers)
    agreed = steps = 0
    for prompt in load_prompts()[::30][:6]:
        target.rollback(0)
        text = tiny.encode(prompt.content)[0][:60]
        target.forward(text[:-1], outputs="none")
        features = target.hidden.rows(0, len(text) - 1)
        assert features is not None
        states = reference.fuse(features)
        begin_at(head, 1)
        tokens = text[1:]
        row, state = feed(head, tokens, encode(head, features))
        for _ in range(4):
            logits, own = reference.run(tokens, states)
            assert np.abs(row - logits[-1]).max() < 0.25 * logits[-1].std()
            agreed += int(row.argmax() == logits[-1].argmax())
            steps += 1
            tokens = [*tokens, int(row.argmax())]
            states = np.concatenate((states, own[-1:]))
            row, state = feed(head, tokens[-1:], state[None])
    assert agreed >= 0.9 * steps
    target.capture("nothing")
    tiny.reset()


def test_it_loses_nothing_when_another_method_answered_before(tiny: Engine) -> None:
    """What is in the cache without its states is read again, and said; the rest is not."""
    prompt = next(p for p in load_prompts() if p.slice == "code").content
    params = GenerateParams(
        sampling=SamplingParams(temperature=0.0), max_tokens=48, window="fixed", draft_max=4
    )
    with_head = params.replace(proposer="eagle3")

    def ask(params: GenerateParams) -> tuple[Finished, list[str]]:
        events = list(tiny.generate(prompt, params))
        done = events[-1]
        assert isinstance(done, Finished)
        return done, [e.message for e in events if isinstance(e, Notice)]

    tiny.reset()
    ask(params.replace(proposer="ngram"))
    fresh, _ = ask(params.replace(proposer="ngram"))
    after, said = ask(with_head)
    assert any("again" in message for message in said)
    again, said = ask(with_head)
    assert not said
    tiny.reset()
    alone, said = ask(with_head)
    assert not said
    assert after.token_ids == again.token_ids == alone.token_ids == fresh.token_ids
    assert after.draft_n_accepted == alone.draft_n_accepted > 0
    assert again.cached_n > after.cached_n
