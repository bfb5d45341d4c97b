"""Rows of the target are looked at as far as they are judged, and none is copied."""

from typing import Any, ClassVar

import numpy as np
import pytest
from engines import FakeContext, engine_over
from table_model import FakeTable

from specllama.arrays import Rows
from specllama.events import RoundDone
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.draft_tree import TreeDrafter
from specllama.speculative.sampling import SamplerChain

GUESSES = 6


class Pass(np.ndarray[Any, np.dtype[np.float32]]):
    """The rows of a pass, which notes those that are taken from it."""

    looked: ClassVar[list[int]] = []

    def __getitem__(self, at: Any) -> Any:
        row = super().__getitem__(at)
        if isinstance(at, int) and self.ndim == 2:
            self.looked.append(at)
            return np.asarray(row)
        return row


class Watched(FakeContext):
    """A target whose rows are watched."""

    def __init__(self, table: FakeTable) -> None:
        super().__init__(table)
        self.given: Pass | None = None

    def forward(self, *args: Any, **named: Any) -> Rows:
        self.given = super().forward(*args, **named).view(Pass)
        Pass.looked.clear()
        return self.given


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
@pytest.mark.parametrize("proposer", ["draft", "tree"])
def test_rows_behind_the_first_rejection_are_not_read(
    proposer: str, verify: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = FakeTable(n_vocab=300, seed=3)
    target = Watched(table)
    draft = FakeContext(FakeTable(n_vocab=300, seed=9, of=table, agreement=0.8))
    law, own = SamplerChain.law, [0]

    def judged(self: SamplerChain, row: Any) -> Any:
        own[0] += target.given is not None and np.shares_memory(row, target.given)
        return law(self, row)

    drafters = {"draft": ChainDrafter(draft, n_vocab=300), "tree": TreeDrafter(draft, n_vocab=300)}
    engine = engine_over(target, drafters=drafters)
    params = GenerateParams(
        max_tokens=60,
        seed=1,
        proposer=proposer,
        verify=verify,
        window="fixed",
        draft_max=GUESSES,
        sampling=SamplingParams(temperature=temperature),
    )
    monkeypatch.setattr(SamplerChain, "law", judged)
    rounds = rejected = 0
    for event in engine.generate("the rain in spain", params):
        if not isinstance(event, RoundDone) or not event.drafted:
            continue
        looked, rows = target.given.looked, len(event.drafted) + 1
        rounds += 1
        rejected += len(set(looked)) < rows
        if verify == "block" and temperature:
            assert len(looked) <= rows, "block verification may look ahead"
        else:
            judged_last = event.target_token is not None  # else the path ends on a stop token
            assert len(looked) == len(event.accepted_path) + judged_last, "and no row more"
        assert len(looked) == len(set(looked)), "none twice"
    assert rounds > 5
    assert rejected
    assert own[0], "laws are told from the rows of the pass themselves"
