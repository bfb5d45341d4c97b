"""Drafts that are cut because others need the rows: unbiased, and booked for what was sent."""

from __future__ import annotations

from typing import Any, cast

import pytest
from engines import FakeContext, NoSeats
from fakes import learn
from oracle import Oracle, Tokens, Toy, bias
from table_model import FakePool, FakeTable
from windows import Pair, booking

from specllama.backend.base import Lane, Shared
from specllama.cancel import Cancel
from specllama.engine.scheduler import Running, Scheduler
from specllama.events import RoundDone
from specllama.settings.params import SamplingParams, VerifyRule
from specllama.speculative.budget import Bid
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.draft_tree import TreeDrafter
from specllama.speculative.drafting.drafter import Request
from specllama.speculative.effects import Offer
from specllama.speculative.round import Rounds
from specllama.speculative.rules import Coins, RandomCoins, rule_of
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Law
from specllama.speculative.window import Window

FULL = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
GREEDY = SamplingParams(temperature=0.0)
PROMPT, LENGTH = [1, 2], 3
TARGET = FakeTable(3, seed=2, sharpness=1.0)
DRAFT = FakeTable(3, seed=3, sharpness=1.0, of=TARGET, agreement=0.4)


class Steps(Window):
    """A third row of the pass is dear, and all behind it are free."""

    def bid(self, offer: Offer) -> Bid:
        return Bid(
            sorted(offer.survival, reverse=True),
            1.0,
            50.0,
            lambda rows: [0.0, 1.0, 1.0, *[2.0] * rows][: rows + 1],
        )


class Text(Toy):
    """The law that the round must reproduce."""

    def law(self, prefix: Tokens) -> Law:
        tokens = [*PROMPT, *prefix]
        return SamplerChain(FULL, tokens=tokens).law(TARGET.row(tokens))


def written(
    coins: Coins, rule: VerifyRule, *, tree: bool, peek: bool, rounds: list[RoundDone] | None = None
) -> Tokens:
    """What a round writes beside that of a greedy text, where the pass has five rows for both."""
    pool = FakePool(TARGET, n_ctx=16, lanes=2, max_rows=5)
    scheduler = Scheduler(pool, NoSeats())

    def begin(sampling: SamplingParams, law: VerifyRule, coins: Coins, most: int) -> Rounds:
        tokens, lane = list(PROMPT), pool.open()
        lane.forward(tokens[:-1], outputs="none")
        kind = TreeDrafter if tree else ChainDrafter
        drafter = kind(FakeContext(DRAFT, n_ctx=16), n_vocab=3)
        request = Request(
            seed=0, rule=rule_of(law), coins=coins, is_eog=_ends, leaves=3 if tree else 1
        )
        drafter.start(request)
        return Rounds(
            target=lane, drafter=drafter, tokens=tokens, window=Steps(most),
            chain=SamplerChain(sampling, tokens=tokens), rule=rule_of(law), seed=0, coins=coins,
            is_stop=_ends,
        )  # fmt: skip

    def say(loop: Rounds) -> Any:
        done = yield from loop.round()
        if rounds is not None:
            rounds.append(done)

    loop = begin(FULL, rule, coins, 3)
    loop._peek |= peek
    other = begin(GREEDY, "match", RandomCoins(1), 1)
    for id, one in enumerate((loop, other)):
        scheduler.add(Running(id, say(one), lambda: 0, cast(Lane, one.target), Cancel()))
    assert scheduler.step() == []
    assert loop.window._depth == len(loop.tokens) - len(PROMPT), "it learns from a cut round, too"
    return tuple(loop.tokens[len(PROMPT) :])


def _ends(token: int) -> bool:
    return token == 0


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("tree", [False, True])
def test_what_is_cut_for_others_biases_nothing(rule: VerifyRule, tree: bool) -> None:
    if tree and rule == "block":
        return  # chains only

    def program(oracle: Oracle) -> Tokens:
        return written(oracle, rule, tree=tree, peek=False)

    assert bias(program, Text(3, 0, eos=0), LENGTH).tv < 1e-9


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_control_a_cut_that_looks_at_drawn_tokens_is_caught(rule: VerifyRule) -> None:
    def program(oracle: Oracle) -> Tokens:
        return written(oracle, rule, tree=False, peek=True)

    assert bias(program, Text(3, 0, eos=0), LENGTH).tv > 1e-3


def test_drafts_are_really_cut_there() -> None:
    """Of three guesses and one the pass takes two and one."""
    for tree in (False, True):
        rounds: list[RoundDone] = []
        for seed in range(20):
            written(RandomCoins(seed), "rejection", tree=tree, peek=False, rounds=rounds)
        cut = [len(done.drafted) for done in rounds if "others share" in done.window_reason]
        assert len(cut) > 5
        assert max(cut) > 0


# -- what goes of a tree --------------------------------------------------------------------------

TREE = Draft(
    tokens=(1, 2, 3, 4, 5),
    parents=(-1, 0, 1, 0, -1),
    q=(None,) * 5,
    confidence=(0.6, 0.3, 0.9, 0.6, 0.35),
    sources=("tree",) * 5,
)


@pytest.mark.parametrize("n", range(5))
def test_the_likeliest_nodes_go_with_their_parents(n: int) -> None:
    offer = Offer(TREE, 5, True, Window(8))
    assert offer.survival == pytest.approx([0.6, 0.18, 0.162, 0.36, 0.35])
    sent = offer.cut(n)
    assert sent.tokens == [(), (1,), (1, 4), (1, 4, 5), (1, 2, 4, 5)][n]
    assert sent.parents == [(), (-1,), (-1, 0), (-1, 0, -1), (-1, 0, 0, -1)][n]


@pytest.mark.parametrize("n", range(5))
def test_unseen_only_the_first_line_goes(n: int) -> None:
    offer = Offer(TREE, 8, False, Window(8))
    assert len(offer.survival) == 8
    assert offer.cut(n).tokens == (1, 2, 3)[:n]


# -- what it costs --------------------------------------------------------------------------------


@pytest.mark.parametrize("peek", [True, False])
def test_what_was_cut_is_not_booked_as_rejected(peek: bool) -> None:
    """Two of four guesses went and both were accepted: nothing is known of the third."""
    pair = Pair().tuned([0.0, *(1 + 0.03 * n for n in range(16))], 0.02)
    window = pair.window(peek=peek)
    window.drafts_with(booking("draft"))
    judge = window.plan(8).judge
    assert judge is not None
    assert judge.read("draft", 1) == 1
    for token in (4, 5, 6, 7):
        assert judge.take(0.9, 3.0 if peek else None, token if peek else None)
        judge.further()
    source = pair.learned.sources["draft"]
    learn(
        window, 2, 2, (4, 5, 6), 0.1, 1.3, Shared(lanes=2, tokens=6, ms=1.2, first=True, guesses=4)
    )
    # the target wrote the third guess itself, which tells of a guess that may be looked at
    assert source.labels == (3 if peek else 2)
    assert source.mean > 0.75


def test_a_shared_pass_is_booked_once_and_for_all_its_rows() -> None:
    verify = [0.0, *(1 + 0.1 * n for n in range(16))]
    pair = Pair().tuned(verify, 0.02)
    target = pair.costs.target
    before = target.upto(8), dict(target.counts)
    for first in (True, False):
        window = pair.window()
        window.drafts_with(booking("draft"))
        window.plan(8)
        learn(window, 0, 0, (1,), 0.0, 1.5, Shared(3, 6, 1.5, first, 3))
    assert target.upto(8) == pytest.approx(before[0])
    assert sum(target.counts.values()) == sum(before[1].values()) + 1
    assert target.counts[6] == before[1][6] + 1


def test_rows_are_told_at_the_price_that_they_have_beside_others() -> None:
    """Where passes are flat from the fourth row on, others make drafts cheap."""
    verify = [0.0, 1.0, 2.0, 3.0, *(3.0 + 0.001 * n for n in range(16))]
    longest = {}
    for lanes in (1, 3):
        pair = Pair().tuned(verify, 0.02)
        window = pair.window()
        window.drafts_with(booking("draft"))
        if lanes > 1:
            learn(window, 0, 0, (1,), 0.0, 3.0, Shared(3, 3, 3.0, True, 0))
        judge = window.plan(8).judge
        assert judge is not None
        n = 0
        if judge.read("draft", 1):
            while n < 8 and judge.take(0.8, 2.0, 4) and judge.further():
                n += 1
        longest[lanes] = n
    assert longest[1] == 0 < longest[3]


def test_what_others_read_of_a_prompt_is_not_a_drafts_loss() -> None:
    """A pass of 40 rows takes four times as long as one of four, whatever is drafted in it."""
    verify = [0.0, *(1 + 0.1 * n for n in range(64))]
    lost = {}
    for tokens, guesses in ((40, 2), (4, 2), (40, 36)):
        pair = Pair().tuned(verify, 0.02)
        window = pair.window()
        window.drafts_with(booking("draft"))
        judge = window.plan(8).judge
        assert judge is not None
        assert judge.read("draft", 1)
        for token in (4, 5):
            judge.take(0.9, 3.0, token)
            judge.further()
        before = pair.ledger.total
        shared = Shared(2, tokens, verify[tokens], True, guesses)
        learn(window, 2, 0, (1,), 0.1, 0.1 + verify[tokens], shared)
        window.finish()
        lost[tokens, guesses] = before - pair.ledger.total
    assert lost[40, 2] == pytest.approx(lost[4, 2], abs=0.1)
    assert lost[40, 36] > lost[40, 2] + 1.0  # but all that is guessed is


def test_what_one_drafts_all_who_wait_for_it_lose() -> None:
    """Of two lanes one has the draft model read for 3 ms: that is 3 ms of both."""
    verify = [0.0, *(1 + 0.1 * n for n in range(64))]
    lost = {}
    for draft_ms, asked in ((3.0, True), (0.0, True), (0.0, False)):
        pair = Pair().tuned(verify, 0.02)
        window = pair.window()
        window.drafts_with(booking("draft"))
        if asked:
            window.plan(8)
        before = pair.ledger.total
        shared = Shared(2, 2, verify[2], True, 0, drafting_ms=3.0)
        learn(window, 0, 0, (1,), draft_ms, draft_ms + verify[2], shared)
        learn(window, 0, 0, (1,), 0.0, verify[2], Shared(2, 2, verify[2], True, 0))
        window.finish()
        lost[draft_ms, asked] = before - pair.ledger.total
    assert list(lost.values()) == pytest.approx([lost[3.0, True]] * 3, rel=0.1)
    assert lost[3.0, True] > 2.0
