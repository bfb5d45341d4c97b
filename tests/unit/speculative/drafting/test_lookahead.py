"""Lookahead: the layout of the window, the pool, one text per seed."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from engines import FakeContext
from table_model import FakeTable
from toys import FULL, PROMPT, SAMPLERS, Setup, V, is_eog, started

from specllama.arrays import Row
from specllama.events import RoundDone
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.lookahead import LookaheadDrafter
from specllama.speculative.effects import Steps, run_alone
from specllama.speculative.round import Rounds
from specllama.speculative.rules import RandomCoins
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Room, Verdict


class Wide(Drafter):
    """Lookahead on a target that takes trees; checks what is asked of a draft."""

    name = "lookahead"

    def __init__(self, inner: LookaheadDrafter, leaves: int = 16, rows: int = 65) -> None:
        self.inner, self._leaves, self._rows = inner, leaves, rows

    def start(self, request: Request) -> None:
        self.inner.start(
            dataclasses.replace(request, leaves=self._leaves, pass_rows=self._rows, n_ctx=256)
        )

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        draft = yield from self.inner.draft(tokens, chain, room)
        assert len(draft) < self._rows
        assert len(draft) - sum(draft.scout) <= room.n
        for i, parent in enumerate(draft.parents):
            if parent >= 0 and draft.scout:
                assert draft.scout[i] == draft.scout[parent]
        return draft

    def read_rows(self, draft: Draft, row: object) -> None:
        self.inner.read_rows(draft, row)  # type: ignore[arg-type]

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        self.inner.commit(tokens, draft, verdict)

    def close(self) -> None:
        self.inner.close()


def ancestors(draft: Draft, node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = draft.parents[node]
    return path[::-1]


@pytest.mark.parametrize(("window", "ngram"), [(2, 3), (5, 4), (7, 6), (15, 5)])
def test_the_window_has_the_layout_of_the_definition(window: int, ngram: int) -> None:
    """Column i of level j sees level 0 up to i, then its own column: j + i tokens in all."""
    proposer = started(LookaheadDrafter(window=window, ngram=ngram, guesses=2))
    tokens = list(range(1, 40))
    draft = run_alone(proposer.draft(tokens, SamplerChain(FULL, tokens=tokens), Room(8)))
    assert all(draft.scout)
    assert len(draft) == window * (ngram - 1) - 1
    columns = proposer._columns
    assert len(columns) == window
    level_0 = [column[0] for column in columns]
    assert level_0[0] == -1  # the pending token itself
    for i, column in enumerate(columns):
        assert len(column) == ngram - 1
        for j, node in enumerate(column):
            assert (
                ancestors(draft, node)
                == [n for n in level_0[: i + 1] if n >= 0] + column[1 : j + 1]
            )


def test_every_column_gives_one_ngram_of_what_the_target_would_write() -> None:
    table = FakeTable(V, seed=5, order=2, sharpness=1.5)
    proposer = started(LookaheadDrafter(window=4, ngram=4, guesses=3))
    tokens = list(PROMPT)
    draft = run_alone(proposer.draft(tokens, SamplerChain(FULL, tokens=tokens), Room(8)))
    columns = [list(column) for column in proposer._columns]

    def row(node: int) -> Row:
        return table.row([*tokens, *(draft.tokens[n] for n in ancestors(draft, node))])

    proposer.read_rows(draft, row)
    for column in columns:
        way = [draft.tokens[n] for n in column[1:]]
        first = draft.tokens[column[0]] if column[0] >= 0 else tokens[-1]
        assert (*way, int(np.argmax(row(column[-1])))) in proposer._pool[first]


def test_a_settled_window_predicts_the_text() -> None:
    """With a greedy target the iteration converges: most of the text comes from the pool."""
    setup = Setup(
        sampling=dataclasses.replace(FULL, temperature=0.0), eog_bias=-20.0, length=120, draft_max=8
    )
    rounds: list[RoundDone] = []

    def look(loop: Rounds, done: RoundDone) -> None:
        rounds.append(done)

    plain = setup.run()
    inner = LookaheadDrafter(window=6, ngram=4, guesses=4)
    assert run(dataclasses.replace(setup), Wide(inner), look) == plain
    assert sum(len(r.accepted_path) for r in rounds) > 30
    assert all(len(r.accepted_path) <= 3 for r in rounds)  # N - 1


def run(setup: Setup, proposer: Wide, each: object = None) -> list[int]:
    """``Setup.run`` without its bound on the draft: scouts come on top of the window."""
    target, tokens = FakeContext(setup.table, n_ctx=256), list(PROMPT)
    coins, breakers = RandomCoins((setup.seed, 1)), frozenset({9})
    loop = setup.loop(proposer, target, tokens, coins=coins, breakers=breakers)
    end = len(PROMPT) + setup.length
    while len(tokens) < end and not is_eog(tokens[-1]):
        done = run_alone(loop.round(end - len(tokens) - 1))
        assert target.tokens == tokens[:-1]
        if each is not None:
            each(loop, done)  # type: ignore[operator]
    return tokens


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_same_seed_same_text(sampler: str, temperature: float) -> None:
    sampling = dataclasses.replace(SAMPLERS[sampler], temperature=temperature)
    for seed, draft_max, leaves, rows in ((1, 1, 16, 65), (2, 4, 5, 65), (3, 12, 16, 20)):
        setup = Setup(sampling=sampling, seed=seed, draft_max=draft_max, eog_bias=-6.0)
        inner = LookaheadDrafter(window=5, ngram=3 + seed % 2, guesses=3)
        assert run(setup, Wide(inner, leaves, rows)) == setup.run()


def test_rejection_runs() -> None:
    run(Setup(rule="rejection", eog_bias=-9.0, draft_max=6), Wide(LookaheadDrafter()))


def test_a_target_that_takes_chains_only_gets_no_draft() -> None:
    tokens = list(range(1, 20))
    proposer = started(LookaheadDrafter(), leaves=1)
    assert not len(run_alone(proposer.draft(tokens, SamplerChain(FULL, tokens=tokens), Room(8))))


def test_the_window_shrinks_to_the_end_of_the_context() -> None:
    proposer = started(LookaheadDrafter(window=8, ngram=4, guesses=4))
    for length in range(490, 513):
        tokens = [1 + i % 9 for i in range(length)]
        draft = run_alone(proposer.draft(tokens, SamplerChain(FULL, tokens=tokens), Room(8)))
        assert len(draft) <= 512 - length
        proposer.commit(tokens, draft, Verdict((), 1, "plain"))


def test_the_pool_can_be_forgotten() -> None:
    proposer = started(LookaheadDrafter())
    tokens = list(range(1, 20))
    run_alone(proposer.draft(tokens, SamplerChain(FULL, tokens=tokens), Room(8)))
    proposer.forget()
    assert not proposer._pool
    assert len(run_alone(proposer.draft(tokens, SamplerChain(FULL, tokens=tokens), Room(8))))
