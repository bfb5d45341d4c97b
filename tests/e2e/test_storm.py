"""A small storm over the bundled pair; ``tests/tools/under_load.py`` makes larger ones."""

from __future__ import annotations

import random

import pytest
from engines import measured
from under_load import Storm

from specllama.bench.prompts import load_prompts
from specllama.settings.params import EngineOptions

pytestmark = pytest.mark.e2e


def test_every_reply_is_the_one_of_its_request_alone() -> None:
    one = EngineOptions(n_ctx=512, threads=1)
    many = EngineOptions(n_ctx=512, threads=1, parallel=4, kv_ram=8)
    with measured("tiny", None, many) as engine, measured("tiny", None, one) as alone:
        texts = [engine.encode(prompt.content)[0] for prompt in load_prompts()[::20]]
        methods = [name for name in engine.drafters if name != "none"]
        storm = Storm(engine, texts, methods, random.Random(5), longest=24)
        storm.run(30)
        assert storm.check(alone) == []
    counts = storm.counts
    assert counts["equal"] == len(storm.done) == 30 - counts["dropped"]
    assert counts["most at once"] > 1
    for what in ("fork", "park", "accepted", "goes on"):
        assert counts[what] > 0, what
