"""A drawn seed survives every JSON reader."""

from __future__ import annotations

from engines import FakeContext, fake_info, loaded
from table_model import FakeTable, FakeVocab

from specllama.engine.engine import Engine
from specllama.events import Finished
from specllama.settings.params import GenerateParams


def test_drawn_seeds_are_exact_in_a_double() -> None:
    engine = Engine(loaded(target=FakeContext(FakeTable()), vocab=FakeVocab(), info=fake_info()))
    seeds = []
    for _ in range(60):
        *_, last = engine.generate("the rain", GenerateParams(max_tokens=1))
        assert isinstance(last, Finished)
        seeds.append(last.seed)
    assert max(seeds) < 2**53
    assert max(seeds) > 2**48
    assert len(set(seeds)) == len(seeds)
