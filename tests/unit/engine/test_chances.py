"""How likely each token was: told where it was asked for, of drafts as of plain steps."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engines import FakeContext, fake_info, loaded
from table_model import FakeTable, FakeVocab

from specllama.engine.engine import Engine
from specllama.errors import UsageError
from specllama.events import Chances, RoundDone, event_from_dict
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.sampling import likeliest
from specllama.store.rounds import RoundLog, list_runs, read_run

V = 48
PROMPT = "the rain in spain, the rain in "
FREE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def rounds(**changes: Any) -> list[RoundDone]:
    table = FakeTable(V, seed=1, sharpness=2.0, eog_bias=-9.0)
    other = FakeTable(V, seed=99, sharpness=2.0, of=table, agreement=0.7)
    engine = Engine(
        loaded(
            target=FakeContext(table, n_ctx=256),
            vocab=FakeVocab(V),
            info=fake_info(256, V, exact_rows=65),
            drafters={"draft": ChainDrafter(FakeContext(other, n_ctx=256), n_vocab=V, batch=64)},
        )
    )
    params = GenerateParams(sampling=FREE, seed=3, max_tokens=40, proposer="draft")
    return [
        event
        for event in engine.generate(PROMPT, params.replace(**changes))
        if isinstance(event, RoundDone)
    ]


def told(found: list[RoundDone]) -> list[Chances]:
    return [chances for done in found for chances in done.chances]


@pytest.mark.parametrize("n_vocab", [3, 64, 5000, 100_000])
def test_the_likeliest_are_those_of_the_softmax(n_vocab: int) -> None:
    row = (np.random.default_rng(n_vocab).normal(size=n_vocab) * 3).astype(np.float32)
    row[n_vocab // 2 + 1] = -np.inf
    wide = row.astype(np.float64)
    logs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    best = np.argsort(-wide, kind="stable")
    for n in (0, 1, 3, 128):
        (token, logprob), *top = likeliest(row, 1, n)
        assert (token, logprob) == (1, pytest.approx(logs[1], abs=1e-5))
        assert [t for t, _ in top] == [int(t) for t in best[:n]]
        assert [p for _, p in top] == pytest.approx([logs[t] for t in best[:n]], abs=1e-5)


def test_nothing_is_told_unless_it_is_asked_for() -> None:
    assert told(rounds()) == []
    with pytest.raises(UsageError, match="chances"):
        GenerateParams(chances=129)


@pytest.mark.parametrize("n", [0, 3])
def test_accepted_drafts_have_the_chances_of_plain_decoding(n: int) -> None:
    drafted, plain = rounds(chances=n), rounds(chances=n, speculate=False)
    assert any(done.accepted for done in drafted)
    for done in drafted:
        assert [c.token for c in done.chances] == list(done.emitted)
        assert all(len(c.top) == n for c in done.chances)
    assert told(drafted) == told(plain)


def test_they_survive_json() -> None:
    done = rounds(chances=3)[1]
    assert event_from_dict(done.to_dict()) == done


def test_a_round_log_keeps_them_and_older_logs_are_read() -> None:
    found = rounds(chances=3)
    params = GenerateParams(seed=3, chances=3)
    log = RoundLog(fake_info(256, V), params)
    for done in found:
        assert log.write(done) is None
    log.close()
    (path,) = list_runs()
    assert read_run(path).rounds == found
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for name in ("chances", "balance"):
            line.pop(name, None)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    older = [replace(done, chances=(), balance=None) for done in found]
    assert read_run(path).rounds == older
