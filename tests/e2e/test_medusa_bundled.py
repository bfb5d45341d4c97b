"""The Medusa heads that ship with the tiny target: they belong to it, help, and change nothing."""

from __future__ import annotations

import pytest
from medusa_numpy import load_heads

from specllama.bench.prompts import load_prompts
from specllama.bench.proof import prove
from specllama.engine.engine import Engine
from specllama.models.gguf import read_header
from specllama.models.medusa_file import read_facts
from specllama.models.refs import resolve
from specllama.paths import bundled_dir

pytestmark = pytest.mark.e2e

HEADS = bundled_dir() / "tiny-medusa-q8_0.gguf"


def test_the_bundled_heads_are_small_and_belong_to_the_bundled_target() -> None:
    header = read_header(HEADS)
    facts = read_facts(header)
    assert header.file_bytes <= 1_300_000
    assert facts.heads == 3
    assert facts.needs_target_output
    target = read_header(resolve("tiny-target"))
    load_heads(HEADS, target)


def test_bundled_heads_are_accepted_and_change_no_token(tiny: Engine) -> None:
    assert next(m for m in tiny.info.methods if m.name == "medusa").available
    cases = list(
        prove(
            tiny,
            load_prompts()[:8],
            proposers=("medusa",),
            temperatures=(0.0, 0.7, 1.0),
            draft_max=(4,),
            max_tokens=48,
        )
    )
    assert [c for c in cases if not c.ok] == []
    assert all(c.identical for c in cases) or tiny.info.exact_rows < 9
    greedy = [c for c in cases if c.temperature == 0.0]
    # a blind guess among 4096 tokens would add nothing
    assert sum(c.accepted for c in greedy) > 0.25 * sum(c.rounds for c in greedy)
    assert sum(c.accepted for c in cases) > 0.2 * sum(c.rounds for c in cases)
