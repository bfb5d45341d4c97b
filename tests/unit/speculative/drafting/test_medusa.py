"""Medusa: the heads' arithmetic, the best tree, one text per seed, exact rejection."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
from fakes import learn
from head_fakes import knowing, medusa_of, state_of
from medusa_numpy import Heads, MedusaHead, silu
from toys import FULL, Leaves, Setup, into_dead_ends, is_eog, weights
from windows import Answers, Pair, booking

from specllama.events import RoundDone
from specllama.settings.params import VerifyRule
from specllama.speculative.drafting.drafter import Request
from specllama.speculative.drafting.medusa import MedusaDrafter
from specllama.speculative.effects import Effect, Steps, perform, run_alone
from specllama.speculative.policy.costs import Costs
from specllama.speculative.policy.policy import Policy
from specllama.speculative.round import Rounds
from specllama.speculative.rules import RandomCoins, rule_of
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.tree import BestFirst
from specllama.speculative.types import Draft, Room

# -- the heads ----------------------------------------------------------------------------------


def random_heads(
    width: int, rows: int, *, heads: int = 2, blocks: int = 2, own: bool = False, proj: bool = True
) -> Heads:
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    made = tuple(
        MedusaHead(
            tuple((matrix(width, width), matrix(width)) for _ in range(blocks)),
            matrix(width, width) if proj else None,
            matrix(rows, width) if own else None,
        )
        for _ in range(heads)
    )
    return Heads(made, None if own else matrix(rows, width), None, rows)


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("proj", [False, True])
@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_a_head_computes_its_definition(own: bool, proj: bool, blocks: int) -> None:
    """Against sums written out one number at a time."""
    width, rows = 5, 7
    heads = random_heads(width, rows, blocks=blocks, own=own, proj=proj)
    hidden = np.random.default_rng(1).standard_normal(width).astype(np.float32)
    for depth, head in enumerate(heads.heads, start=1):
        x = [float(v) for v in hidden]
        for weight, offset in head.blocks:
            moved = []
            for i in range(width):
                z = math.fsum(float(weight[i, j]) * x[j] for j in range(width)) + float(offset[i])
                moved.append(x[i] + z / (1.0 + math.exp(-z)))
            x = moved
        if head.proj is not None:
            x = [math.fsum(float(w) * v for w, v in zip(row, x, strict=True)) for row in head.proj]
        output = heads.output if head.output is None else head.output
        assert output is not None
        expected = [math.fsum(float(w) * v for w, v in zip(r, x, strict=True)) for r in output]
        assert heads.logits(hidden, depth) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_reduced_vocabulary_leaves_the_rest_impossible() -> None:
    full = random_heads(4, 9)
    ids = np.array([7, 2, 5], np.int32)
    reduced = dataclasses.replace(full, output=full.output[ids], ids=ids)
    hidden = np.ones(4, np.float32)
    row, whole = reduced.logits(hidden, 1), full.logits(hidden, 1)
    assert row[ids] == pytest.approx(whole[ids])
    assert np.isneginf(np.delete(row, ids)).all()
    assert len(row) == 9


def test_states_together_have_the_logits_that_each_has_alone() -> None:
    heads = dataclasses.replace(random_heads(4, 6), ids=np.array([7, 2, 5, 0, 1, 8]), n_vocab=9)
    states = np.random.default_rng(2).standard_normal((3, 4)).astype(np.float32)
    for depth in (1, 2):
        alone = np.stack([heads.logits(state, depth) for state in states])
        assert heads.logits(states, depth) == pytest.approx(alone, rel=1e-5, abs=1e-5)


def test_silu_has_no_trouble_far_out() -> None:
    y = silu(np.array([-1e30, -100.0, -1.0, 0.0, 1.0, 100.0, 1e30], np.float32))
    assert y.dtype == np.float32
    assert np.isfinite(y).all()
    assert y[:2] == pytest.approx([0.0, 0.0], abs=1e-4)
    assert y[2:] == pytest.approx([-0.268941, 0.0, 0.731059, 100.0, 1e30], rel=1e-5)


# -- the tree -----------------------------------------------------------------------------------


class Levels(BestFirst):
    """Every node of a level is followed by the same guesses."""

    def __init__(
        self,
        levels: Sequence[Sequence[float]],
        n: int,
        leaves: int = 64,
        is_end: Callable[[int], bool] = lambda token: False,
        beside: Callable[..., bool] = lambda likely, keep=True: True,
    ) -> None:
        super().__init__(Room(n, Answers(row=beside)), leaves=leaves, is_end=is_end)
        self.levels = levels
        self.looked: list[int] = []

    def read(self, node: int) -> Steps[None]:
        yield from ()
        depth = self.depth(node)
        self.looked.append(depth)
        if node == self.trunk:
            self.best = 10 * depth
        for rank, share in enumerate(self.levels[depth] if depth < len(self.levels) else ()):
            self.offer(node, 10 * depth + rank, share, "medusa")


def grown(levels: Sequence[Sequence[float]], n: int, leaves: int = 64) -> Draft:
    return run_alone(Levels(levels, n, leaves).grow())


def best_sum(levels: Sequence[Sequence[float]], n: int) -> float:
    """The largest expected acceptance of any n nodes that hold their parents: all sets tried."""
    nodes: list[tuple[int, float]] = []  # parent, weight
    before: list[tuple[int, float]] = [(-1, 1.0)]
    for level in levels:
        after = []
        for parent, weight in before:
            for share in level:
                nodes.append((parent, weight * share))
                after.append((len(nodes) - 1, weight * share))
        before = after
    best = 0.0
    for chosen in itertools.combinations(range(len(nodes)), min(n, len(nodes))):
        inside = set(chosen)
        if all(nodes[i][0] < 0 or nodes[i][0] in inside for i in chosen):
            best = max(best, math.fsum(nodes[i][1] for i in chosen))
    return best


def test_no_tree_of_as_many_nodes_is_accepted_further() -> None:
    rng = np.random.default_rng(3)
    for shape in ((2, 2), (3, 2), (2, 2, 2), (4,), (1, 3)):
        for _ in range(3):
            levels = [sorted(rng.dirichlet([1.0] * (k + 1))[:k], reverse=True) for k in shape]
            total = sum(math.prod(shape[: d + 1]) for d in range(len(shape)))
            for n in range(1, min(total, 6) + 1):
                draft = grown(levels, n)
                assert len(draft) == n
                assert sum(weights(draft)) == pytest.approx(best_sum(levels, n))


def test_bounds_ends_and_refusals() -> None:
    levels = [[0.5, 0.4], [0.9, 0.05], [0.9]]
    assert grown(levels, 6, leaves=1).is_chain
    assert len(grown(levels, 6, leaves=1)) == 3
    asked: list[float] = []

    def beside(likely: float) -> bool:
        asked.append(likely)
        return False

    assert run_alone(Levels(levels, 9, 9, beside=beside).grow()).tokens == (0, 10, 20)
    assert asked
    assert asked[0] == pytest.approx(0.4)
    draft = run_alone(Levels(levels, 9, 9, is_end=lambda token: token == 0).grow())
    assert 0 in draft.tokens
    assert draft.children(draft.tokens.index(0)) == []
    assert draft.children(draft.tokens.index(1)) != []


def test_what_follows_is_looked_up_only_when_it_can_matter() -> None:
    tree = Levels([(0.3, 0.25, 0.2)] * 4, 3)
    run_alone(tree.grow())
    # below the best guess before siblings of 0.25; below those of 0.09 never
    assert [depth for depth in tree.looked if depth < 2] == [0, 1, 1]
    assert max(tree.looked) == 1


def test_a_head_is_asked_once_a_round() -> None:
    proposer = medusa(Setup())
    proposer.start(request())
    asked: list[int] = []

    def answer(ask: Effect) -> object:
        asked.append(ask.head)
        return perform(ask)

    chain = SamplerChain(FULL, tokens=[1, 2, 3])
    run_alone(proposer.draft([1, 2, 3], chain, Room(12)), answer)
    assert asked == [1, 2, 3]


# -- drafting -----------------------------------------------------------------------------------


def medusa(setup: Setup, noise: float = 0.0, ranks: int = 3) -> MedusaDrafter:
    return medusa_of(knowing(setup.table, noise=noise), state_of, ranks=ranks)


def test_heads_that_know_the_future_are_accepted_whole() -> None:
    setup = Setup(sampling=dataclasses.replace(FULL, temperature=0.0), eog_bias=-20.0, draft_max=3)
    paths: list[int] = []
    setup.run(medusa(setup), follow(paths))
    # the first pending token is the prompt's, which the target did not choose
    assert set(paths[1:-1]) == {3}


def follow(paths: list[int]) -> Callable[[Rounds, RoundDone], None]:
    """Notes how far every round was accepted."""

    def note(loop: Rounds, done: RoundDone) -> None:
        paths.append(len(done.accepted_path))

    return note


def request(rule: VerifyRule = "match", leaves: int = 8, p_min: float = 0.0) -> Request:
    return Request(
        seed=0, rule=rule_of(rule), coins=RandomCoins(0), is_eog=is_eog, leaves=leaves, p_min=p_min
    )


def test_without_a_hidden_state_or_room_nothing_is_drafted() -> None:
    setup = Setup()
    chain = SamplerChain(FULL, tokens=[1, 2, 3])
    blind = medusa_of(knowing(setup.table), lambda tokens: None)
    blind.start(request())
    assert len(run_alone(blind.draft([1, 2, 3], chain, Room(4)))) == 0
    seeing = medusa(setup)
    seeing.start(request())
    assert (
        len(run_alone(seeing.draft([1, 2, 3], chain, Room(4, Answers(read=lambda source, lag: 0)))))
        == 0
    )
    assert len(run_alone(seeing.draft([1, 2, 3], chain, Room(4)))) == 4
    seeing.start(request(p_min=1.1))
    assert len(run_alone(seeing.draft([1, 2, 3], chain, Room(4)))) == 0


@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_the_window_is_asked_before_each_head_and_shown_no_token_it_may_not_see(
    rule: VerifyRule,
) -> None:
    setup = Setup()
    proposer = medusa(setup)
    proposer.start(request(rule))
    seen: list[tuple[float | None, int | None]] = []
    asked = 0

    def take(confidence: float | None, lead: float | None, token: int | None) -> bool:
        seen.append((lead, token))
        return len(seen) < 3

    def further(likely: float | None = None, rows: int = 0) -> bool:
        nonlocal asked
        asked += 1
        return True

    room = Room(30, Answers(further=further, take=take, row=lambda likely, keep=True: False))
    draft = run_alone(proposer.draft([1, 2, 3], SamplerChain(FULL, tokens=[1, 2, 3]), room))
    assert len(draft) == 2
    assert asked == 2
    if rule == "match":
        assert [token for _, token in seen[:2]] == list(draft.tokens)
        assert all(lead is not None and lead >= 0 for lead, _ in seen)
    else:
        assert seen == [(None, None)] * 3


# -- the window ---------------------------------------------------------------------------------


def window(slope: float) -> Policy:
    """Where a further row costs ``slope`` plain steps, after plain steps of 10 ms."""
    pair = Pair()
    for rows in range(1, 18):
        pair.costs.target.set(rows, 10.0 * (1 + slope * (rows - 1)))
    pair.costs.steps(booking("medusa")).set(1, 0.1)
    made = pair.window(draft_max=16)
    made.drafts_with(booking("medusa"))
    for _ in range(20):
        made.plan(100)
        learn(made, 0, 0, (1,), 0.0, 10.0)
    return made


def test_side_nodes_join_where_rows_are_cheap_only() -> None:
    for slope, likely, joins in ((0.05, 0.2, True), (0.5, 0.2, False), (0.5, 0.8, True)):
        judge = window(slope).plan(100).judge
        assert judge.row(likely) is joins, (slope, likely)


def test_side_nodes_end_where_the_balance_does() -> None:
    judge = window(0.3).plan(100).judge
    joined = 0
    while judge.row(0.99):
        joined += 1
    assert 0 < joined <= 16


def test_steps_of_heads_are_not_those_of_a_draft_model() -> None:
    costs = Costs()
    costs.draft.set(1, 5.0)
    costs.steps(booking("medusa")).set(1, 0.2)
    assert costs.steps(booking("draft")) is costs.steps(booking("mixed")) is costs.draft
    kept = msgspec.convert(msgspec.to_builtins(costs, str_keys=True), Costs, str_keys=True)
    assert kept.draft.ms(1) == pytest.approx(5.0)
    assert kept.steps(booking("medusa")).ms(1) == pytest.approx(0.2)


def test_heads_into_a_dead_end() -> None:
    into_dead_ends(lambda setup: Leaves(medusa(setup, 1.0)))
