"""The block drafter on a table: one text per seed, exact rejection, states or no draft."""

import random
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from engines import FakeContext
from fakes import learn
from head_fakes import FakeBlocks, Pairs
from replay import VirtualClock
from table_model import FakeTable
from toys import FULL, LAYERS, Setup, V, is_eog
from windows import Answers, Pair, booking

from specllama.speculative.drafting.dflash import Block, DflashDrafter
from specllama.speculative.drafting.drafter import Request
from specllama.speculative.effects import run_alone
from specllama.speculative.rules import RandomCoins, rule_of
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT, Draft, DraftJudge, Room, Verdict


def drafter_for(setup: Setup, target: FakeContext, kind: str = "dflash") -> DflashDrafter:
    table = FakeTable(V, seed=6, sharpness=1.5, of=setup.table, agreement=0.7)
    return drafter_of(FakeBlocks(table, target, setup.table, kind), target)


def drafter_of(lane: FakeBlocks, target: FakeContext, n_vocab: int = V) -> DflashDrafter:
    return DflashDrafter(lane, target, lane.places, lane.markov, n_vocab=n_vocab)


def lane_of(drafter: DflashDrafter) -> FakeBlocks:
    assert isinstance(drafter._lane, FakeBlocks)
    return drafter._lane


def test_laws_follow_what_was_drawn() -> None:
    rng, markov = np.random.default_rng(1), Pairs(9)
    rows = rng.normal(size=(3, 9)).astype(np.float32)
    best = [int(t) for t in rows.argmax(axis=1)]
    ids = np.arange(9, dtype=np.int32)
    plain = Block(rows, 8, told=np.array([0.5, 0.6, 0.7], np.float32))
    assert np.array_equal(plain.row([5]), rows[1, :8]), "tokens that the target lacks are left out"
    assert plain.sure([5]) == pytest.approx(0.6)
    biased = Block(rows, 9, markov, np.array([0.5, 0.6, 0.7], np.float32))
    for token in range(9):
        wanted = rows[1] + markov.bias(ids, token) - markov.bias(ids, best[0])
        np.testing.assert_allclose(biased.row([token]), wanted, atol=1e-5)
        odds = 0.6 / 0.4 * np.exp(markov.trust(token) - markov.trust(best[0]))
        assert biased.sure([token]) == pytest.approx(odds / (1 + odds))
    assert np.array_equal(biased.row([]), rows[0])
    candidates = np.array([[3, 1], [0, 2]], np.int32)
    scores = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    few = Block(rows[:0], 9, candidates=candidates, scores=scores)
    assert few.sure([3]) is None
    for behind, place in ((3, 0), (1, 1)):
        row = few.row([behind])
        assert np.array_equal(np.flatnonzero(np.isfinite(row)), [0, 2])
        assert row[0] == scores[1, place, 0]
        assert row[2] == scores[1, place, 1]


def propose(
    drafter: DflashDrafter, tokens: list[int], room: Room | None = None, leaves: int = 1
) -> Draft:
    rule, coins = rule_of("match"), RandomCoins((1,))
    request = Request(seed=1, rule=rule, coins=coins, is_eog=is_eog, leaves=leaves)
    drafter.start(request)
    chain = SamplerChain(FULL, seed=1, tokens=tokens)
    return run_alone(drafter.draft(tokens, chain, room or Room(4)))


def begun(tokens: Iterable[int] = (1, 2, 3, 4)) -> tuple[FakeContext, DflashDrafter]:
    """A target that has read a text, with its drafter."""
    setup = Setup(eog_bias=-20.0)
    target = FakeContext(setup.table, n_ctx=128)
    target.capture(LAYERS)
    target.forward(list(tokens), outputs="none")
    return target, drafter_for(setup, target)


def test_only_what_was_accepted_is_read() -> None:
    target, drafter = begun()
    lane = lane_of(drafter)
    assert len(propose(drafter, [1, 2, 3, 4, 5])) == 4
    target.forward([5, 6, 7, 8], outputs="all")
    target.rollback(6)  # 5 and 6 are known now, 9 is pending
    assert len(propose(drafter, [1, 2, 3, 4, 5, 6, 9])) == 4
    assert lane.reads == [4, 2]
    assert lane.blocks == [4, 4]
    # the text is cut and goes on otherwise: nothing is read twice
    target.rollback(3)
    target.forward([7, 8], outputs="none")
    assert len(propose(drafter, [1, 2, 3, 7, 8, 9], Room(9))) == 6
    assert lane.reads == [4, 2, 2]
    assert lane.blocks[-1] == lane.places.guesses, "never more than a block"


def test_a_prompt_is_read_as_the_target_reads_it() -> None:
    text = [1 + i % 7 for i in range(40)]
    target, drafter = begun(text[:20])
    run_alone(drafter.read_prompt(text, 20))
    assert target.hidden.end == target.hidden.first, "its states are not kept"
    target.forward(text[20:39], outputs="none")
    run_alone(drafter.read_prompt(text, 39))
    lane = lane_of(drafter)
    assert lane.reads == [16, 4, 16, 3]
    assert len(propose(drafter, text)) == 4
    assert sum(lane.reads) == 39
    assert drafter.reusable(text, 39) == 39


def test_a_window_may_shorten_the_memory() -> None:
    target, drafter = begun([1 + i % 7 for i in range(30)])
    text = [*target.tokens, 5]
    lags: list[int] = []

    def begin(source: str, lag: int) -> int:
        lags.append(lag)
        return [0, 10, 100][len(lags) - 1]

    assert len(propose(drafter, text, Room(4, Answers(read=begin)))) == 0
    assert lane_of(drafter).reads == []
    assert len(propose(drafter, text, Room(4, Answers(read=begin)))) == 4
    assert (lane_of(drafter).first, lane_of(drafter).end) == (20, 30)
    target.forward([5], outputs="all")
    assert len(propose(drafter, [*text, 6], Room(4, Answers(read=begin)))) == 4
    assert lags == [30, 30, 1]
    assert (lane_of(drafter).first, lane_of(drafter).end) == (20, 31)


def test_states_that_nobody_reads_do_not_pile_up() -> None:
    """Where the window drafts nothing for long, the memory begins later instead."""
    setup = Setup(eog_bias=-20.0)
    target = FakeContext(setup.table, n_ctx=4096)
    target.capture(LAYERS)
    drafter, text = drafter_for(setup, target), [1]
    for i in range(3000):
        target.forward([text[-1]], outputs="none")
        text.append(1 + i % 6)
        drafter.commit(text, EMPTY_DRAFT, Verdict((), text[-1], "plain"))
        assert target.hidden.end - target.hidden.first <= 2048
    assert len(propose(drafter, text)) == 4
    assert 1000 < lane_of(drafter).first < lane_of(drafter).end == 3000


@pytest.mark.parametrize("n_ctx", [5, 8])
def test_a_full_cache_begins_anew(n_ctx: int) -> None:
    target, drafter = begun()
    lane_of(drafter).n_ctx = n_ctx
    text = [1, 2, 3, 4, 5]
    for _ in range(12):
        propose(drafter, text)
        target.forward([text[-1]], outputs="all")
        text.append(1 + len(text) % 6)
    assert lane_of(drafter).blocks


def test_it_asks_for_its_layers() -> None:
    assert begun()[1].needs == LAYERS


# -- the window ---------------------------------------------------------------------------------


def played(method: str, right: float, rounds: int = 400) -> tuple[Pair, float, float]:
    """Rounds of a source whose passes take 6 ms beside steps of 10: what is known then, tokens
    drafted per round of the last half, and tokens in the time of a plain step."""
    pair, clock, rng = Pair(), VirtualClock(), random.Random(1)
    for rows in range(1, 18):
        pair.costs.target.set(rows, 10.0 * (1 + 0.02 * (rows - 1)))
    window = pair.window(clock, draft_max=8)
    booked = booking(method)
    window.drafts_with(booked)
    drafted = written = 0
    for i in range(rounds):
        begin, n, accepted, plan = clock.now, 0, 0, window.plan(100)
        right_so_far = True
        judge = plan.judge
        if judge is not None and judge.read(method, 1):
            clock.now += 6e-3
            while True:
                truth = rng.random() < right
                if not judge.take(0.9 if truth else 0.6, 2.0 if truth else 0.3, 5 if truth else 4):
                    break
                n, right_so_far = n + 1, right_so_far and truth
                accepted += right_so_far
                if n == plan.draft_max or not judge.further():
                    break
                clock.now += 1e-5 if booked.at_once else 6e-3
        draft_ms = (clock.now - begin) * 1e3
        verify_ms = 10.0 * (1 + 0.02 * n)
        clock.now += verify_ms / 1e3
        learn(window, n, accepted, (5,) * (accepted + 1), draft_ms, draft_ms + verify_ms)
        written += accepted + 1
        drafted += n * (i >= rounds // 2)
    return pair, drafted / (rounds // 2), written * 10e-3 / clock.now


def test_further_guesses_of_a_block_are_free() -> None:
    """A whole block pays where as many steps of a chain drafter would not."""
    pair, each, gained = played("dflash", 0.85)
    assert pair.costs.own["dflash"].level == pytest.approx(6.0, rel=0.1), "one pass, not a mean"
    chain, steps, slower = played("eagle3", 0.85)
    assert chain.costs.own["eagle3"].level == pytest.approx(6.0, rel=0.1)
    assert each > 4
    assert steps < 3
    assert gained > 1.5 > slower


def test_a_block_that_is_wrong_is_not_asked_for_long() -> None:
    _, each, gained = played("dflash", 0.05, 1000)
    assert each < 0.3
    assert gained > 0.97


def grown(row: float) -> list[Draft]:
    """Drafts where a further row of the target costs this share of a plain step."""
    pair = Pair()
    for rows in range(1, 18):
        pair.costs.target.set(rows, 10.0 * (1 + row * (rows - 1)))
    pair.costs.steps(booking("dflash")).set(1, 1.0)
    window = pair.window(draft_max=8)
    window.drafts_with(booking("dflash"))
    drafts = []
    for last in range(1, 7):
        _, drafter = begun()
        plan = window.plan(100)
        drafts.append(
            propose(
                drafter, [1, 2, 3, 4, last], Room(plan.draft_max, plan.judge or DraftJudge()), 4
            )
        )
    return drafts


def test_the_price_of_a_row_decides_between_chains_and_trees() -> None:
    cheap, some, dear = grown(0.005), grown(0.2), grown(0.35)
    assert not any(draft.is_chain for draft in cheap)
    assert {draft.is_chain for draft in some} == {True, False}
    assert all(draft.is_chain for draft in dear)
    assert sum(map(len, cheap)) > sum(map(len, some)) > sum(map(len, dear)) > 0


@pytest.mark.parametrize(
    ("kind", "penalty", "places"), [("dflash", 1.0, 6), ("dflash", 1.3, 0), ("dspark", 1.0, 0)]
)
def test_a_row_is_read_once_for_all_nodes_after_which_it_says_the_same(
    kind: str, penalty: float, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties, a grammar and the token before may tell them apart."""
    sampling, reads = replace(FULL, repeat_penalty=penalty), list[int]()
    law, tokens = SamplerChain.law, [1, 2, 3, 4, 5]
    monkeypatch.setattr(
        SamplerChain, "law", lambda chain, row: (reads.append(1), law(chain, row))[1]
    )

    def drafted() -> tuple[Draft, int]:
        setup = Setup(eog_bias=-20.0)
        target = FakeContext(setup.table, n_ctx=128)
        target.capture(LAYERS)
        target.forward(tokens[:-1], outputs="none")
        drafter = drafter_for(setup, target, kind)
        rule, coins = rule_of("match"), RandomCoins((1,))
        drafter.start(Request(seed=1, rule=rule, coins=coins, is_eog=is_eog, leaves=6))
        chain = SamplerChain(sampling, seed=1, tokens=tokens)
        reads.clear()
        return run_alone(drafter.draft(tokens, chain, Room(16))), len(reads)

    together, few = drafted()
    monkeypatch.setattr(DflashDrafter, "alike", lambda drafter, path: path)
    apart, many = drafted()
    assert together.tokens == apart.tokens
    assert together.parents == apart.parents
    assert together.confidence == apart.confidence
    assert not together.is_chain
    assert few <= places < many if places else few <= many
    assert penalty == 1.0 or few == many
