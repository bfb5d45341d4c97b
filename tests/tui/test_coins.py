"""The coins of rejection sampling are thrown again, or nothing is said of them."""

from __future__ import annotations

import dataclasses

import pytest
from engines import FakeContext, fake_info, loaded
from table_model import FakeTable, FakeVocab

from specllama.engine.engine import Engine
from specllama.events import Event
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.mixed import MixedDrafter
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.tui.coins import RecordedCoins
from specllama.tui.record import Record, fate_of

V = 48


def events(seed: int, proposer: str = "draft", verify: str = "rejection") -> list[Event]:
    table = FakeTable(V, seed=1, sharpness=2.0, eog_bias=-2.0)
    other = FakeTable(V, seed=99, sharpness=2.0, of=table, agreement=0.7)
    draft = ChainDrafter(FakeContext(other, n_ctx=256), n_vocab=V, batch=64)
    drafters: dict[str, Drafter] = {
        "draft": draft,
        "mixed": MixedDrafter([NgramDrafter(n_min=3), draft]),
    }
    engine = Engine(
        loaded(
            target=FakeContext(table, n_ctx=256),
            vocab=FakeVocab(V),
            info=fake_info(256, V, exact_rows=65),
            drafters=drafters,
        )
    )
    params = GenerateParams(
        sampling=SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0),
        seed=seed,
        max_tokens=60,
        proposer=proposer,
        verify=verify,
        draft_max=4,
    )
    return list(engine.generate("the rain in spain, the rain in ", params))


def check(record: Record) -> int:
    """Every guess that was judged has its coin, which says what became of it."""
    coins, seen = RecordedCoins(record), 0
    for at, done in enumerate(record.rounds):
        tosses = coins.of(at)
        for i, fate in enumerate(fate_of(done)):
            assert (i in tosses) == (fate != "untested" and done.p[i] != 0.0)
            if i in tosses:
                assert (tosses[i].u < tosses[i].ratio) == (fate == "accepted")
                seen += 1
    return seen


@pytest.mark.parametrize("proposer", ["draft", "mixed"])
@pytest.mark.parametrize("seed", range(6))
def test_every_coin_of_a_reply_is_known(seed: int, proposer: str) -> None:
    assert check(Record.of("t", events(seed, proposer))) > 10


def test_a_record_of_several_requests_has_the_coins_of_each() -> None:
    assert check(Record.of("t", [*events(3), *events(4)])) > 20


def test_other_coins_are_noticed_and_nothing_is_said() -> None:
    record = Record.of("t", events(3))
    first, started = record.starts[0]
    record.starts[0] = (first, dataclasses.replace(started, seed=4))
    coins = RecordedCoins(record)
    assert not coins.of(len(record.rounds) - 1)
    said = sum(len(coins.of(at)) for at in range(len(record.rounds)))
    assert said < len(record.rounds)


@pytest.mark.parametrize("verify", ["match", "block"])
def test_other_rules_throw_no_coins_of_this_kind(verify: str) -> None:
    record = Record.of("t", events(3, verify=verify))
    coins = RecordedCoins(record)
    assert not any(coins.of(at) for at in range(len(record.rounds)))


def test_nothing_is_said_behind_a_sampled_sibling() -> None:
    """What it left of the law is not in the events."""
    record = Record.of("t", events(3))
    at = next(i for i, done in enumerate(record.rounds) if done.drafted and not done.accepted)
    done = record.rounds[at]
    record.rounds[at] = dataclasses.replace(
        done,
        drafted=(done.drafted[0], 1),
        parents=(-1, -1),
        drafted_text=("a", "b"),
        confidence=(None, None),
        p=(done.p[0], 0.1),
        q=(done.q[0], None),
    )
    coins = RecordedCoins(record)
    assert set(coins.of(at)) == {0}
    assert not any(coins.of(i) for i in range(at + 1, len(record.rounds)))
