"""A verification rule is added by one file and one line."""

from pathlib import Path

import pytest
from engines import FakeContext, fake_info, loaded
from table_model import FakeTable, FakeVocab

from specllama.engine.engine import Engine
from specllama.errors import UsageError
from specllama.events import RoundDone
from specllama.settings.params import VERIFY_RULES, GenerateParams, SamplingParams
from specllama.speculative.drafting.method import Kit

FOLDER = Path(__file__).parents[2] / "new_method"


def engine() -> Engine:
    table = FakeTable(24, seed=3, sharpness=2.0, eog_bias=-4.0)
    target = FakeContext(table)
    draft = FakeContext(FakeTable(24, seed=4, sharpness=2.0, of=table, agreement=0.9))
    return Engine(
        loaded(
            target=target,
            vocab=FakeVocab(24),
            info=fake_info(512, 24),
            drafters=Kit(target, draft).all(),
        )
    )


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setitem(VERIFY_RULES, "one at a time", "one_at_a_time:RULE")


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_it_judges_drafts_and_changes_no_token(temperature: float) -> None:
    params = GenerateParams(
        seed=5,
        proposer="draft",
        window="fixed",
        draft_max=4,
        max_tokens=60,
        ignore_eos=True,
        verify="one at a time",
        sampling=SamplingParams(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0),
    )
    *events, last = engine().generate([1, 2, 3], params)
    assert last.verify == "one at a time"
    rounds = [event for event in events if isinstance(event, RoundDone)]
    assert {event.accepted for event in rounds} == {0, 1}
    assert max(len(event.drafted) for event in rounds) == 4
    *_, plain = engine().generate([1, 2, 3], params.replace(speculate=False))
    assert last.token_ids == plain.token_ids


def test_what_it_states_is_asked_for() -> None:
    """It judges chains only, so what drafts trees alone is refused and no branch is drafted."""
    params = GenerateParams(
        seed=5, window="fixed", draft_max=4, max_tokens=20, verify="one at a time"
    )
    with pytest.raises(UsageError, match="judges chains only"):
        list(engine().generate([1, 2, 3], params.replace(proposer="lookahead")))
    events = list(engine().generate([1, 2, 3], params.replace(proposer="tree")))
    drafts = [event.parents for event in events if isinstance(event, RoundDone)]
    assert any(drafts)
    assert all(parents == tuple(range(-1, len(parents) - 1)) for parents in drafts)
