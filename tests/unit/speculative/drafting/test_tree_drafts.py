"""Draft trees: their layout, the choice of nodes, one text per seed, exact rejection."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from engines import FakeContext, NoSeats
from oracle import Oracle, Tokens, bias
from table_model import FakePool, FakeTable
from toys import (
    FULL,
    SAMPLERS,
    ChainToy,
    Leaves,
    NotTwice,
    Setup,
    V,
    into_dead_ends,
    is_eog,
    weights,
)
from windows import Answers

from specllama.backend.base import Lane
from specllama.backend.tree_layout import Layout
from specllama.cancel import Cancel
from specllama.engine.scheduler import Running, Scheduler
from specllama.errors import EngineError
from specllama.events import RoundDone
from specllama.settings.params import VerifyRule
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.draft_tree import TreeDrafter
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.merged import MergedDrafter
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.effects import Steps, run_alone
from specllama.speculative.round import Rounds
from specllama.speculative.rules import MATCH, REJECTION, RandomCoins, rule_of
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.tree import TreeBuilder
from specllama.speculative.types import Draft, Room
from specllama.speculative.window import Window


def grower(setup: Setup, agreement: float, siblings: int = 3) -> TreeDrafter:
    table = FakeTable(V, seed=6, sharpness=1.5, of=setup.table, agreement=agreement)
    drafter = TreeDrafter(FakeContext(table, n_ctx=256), n_vocab=V)
    drafter.siblings = siblings
    return drafter


PROPOSERS: dict[str, Callable[[Setup], Drafter]] = {
    "tree 0": lambda s: grower(s, 0.0),
    "tree half": lambda s: grower(s, 0.5),
    "tree same": lambda s: grower(s, 1.0),
    "pairs": lambda s: grower(s, 0.6, siblings=2),
    "merged": lambda s: MergedDrafter(NgramDrafter(n_min=1), grower(s, 0.6)),
}


# -- layout -------------------------------------------------------------------------------------


def test_queries_see_their_ancestors_and_sequences_have_no_gaps() -> None:
    """llama.cpp's rules, however many passes a tree grows by: a query sees the cells with its first
    id, at positions up to its own; sequences that a pass gives one token end alike before it."""
    rng = random.Random(0)
    for _ in range(300):
        n = rng.randint(1, 30)
        parents = [rng.randrange(-1, i) if i else -1 for i in range(n)]
        cuts = sorted({0, n, *(rng.randrange(n) for _ in range(rng.randint(0, 4)))})
        placed, owners = Layout(), list[set[int]]()
        for begin, end in itertools.pairwise(cuts):
            before = placed
            placed = placed.grown(parents[begin:end])
            for leaf, (source, n_above) in enumerate(placed.copies, before.n_leaves):
                for node, owned in enumerate(owners):
                    if source in owned and placed.depth[node] < n_above:
                        owned.add(leaf)
            ends = [sum(leaf in owned for owned in owners) for leaf in range(placed.n_leaves)]
            owners += map(set, placed.leaves)
            for node, leaves in enumerate(placed.leaves, begin):
                assert len({ends[leaf] for leaf in leaves}) == 1
                seen = {
                    j
                    for j, owned in enumerate(owners)
                    if leaves[0] in owned and placed.depth[j] <= placed.depth[node]
                }
                assert seen == set(placed.above(node))
        assert placed.n_leaves == len(set(range(n)) - set(parents))
        for leaf, end in enumerate(placed.ends):
            held = sorted(placed.depth[i] for i in range(n) if leaf in owners[i])
            assert held == list(range(len(placed.above(end))))


def test_a_grown_tree_has_the_rows_of_its_chains_and_any_path_can_stay() -> None:
    rng, table = random.Random(1), FakeTable(V, seed=2, order=64)
    lane = FakeContext(table, n_ctx=512, max_leaves=32, in_order=False, by_order=False)
    text = [1, 2, 3]
    lane.forward(text, outputs="none")
    for _ in range(60):
        line = rng.randrange(4)
        parents, tokens = list(range(-1, line - 1)), [rng.randrange(V) for _ in range(line)]
        for token in tokens:
            lane.forward([token], outputs="last")
        lane.reopen(line)
        for _ in range(rng.randint(1, 4)):
            known, more = len(parents), rng.randint(1, 5)
            parents += [rng.randrange(-1, i) if i else -1 for i in range(known, known + more)]
            tokens += [rng.randrange(V) for _ in range(more)]
            assert lane.branches(parents[known:]) >= 0
            rows = lane.forward(tokens[known:], outputs="all", parents=parents[known:])
            whole = Layout().grown(parents)
            for node, row in enumerate(rows, known):
                path = [tokens[i] for i in whole.above(node)]
                assert np.array_equal(row, table.row([*text, *path]))
        with pytest.raises(EngineError, match="settled"):
            lane.forward([1], outputs="last")
        kept = whole.above(rng.randrange(-1, len(parents)))
        lane.keep_path(kept)
        text = [*text, *(tokens[node] for node in kept)][:20]
        lane.rollback(min(len(lane.tokens), 20))
        assert lane.tokens == text
        assert lane.n_past == len(text)
        assert lane.pool.held == len(text)


def test_a_layout_needs_parents_before_children() -> None:
    for parents in ([0], [-1, 1], [-1, 2, 0], [-2]):
        with pytest.raises(ValueError, match="precede"):
            Layout().grown(parents)


def test_the_builder_joins_equal_children_and_keeps_its_bounds() -> None:
    tree = TreeBuilder(max_nodes=4, max_leaves=2)
    a = tree.add(-1, 5, "model", confidence=0.5)
    assert a is not None
    assert tree.add(-1, 5, "copy", confidence=0.7) == a
    b = tree.add(-1, 6, "model")
    assert b is not None
    assert tree.add(-1, 7, "model") is None  # a third leaf
    assert tree.add(a, 8, "copy") is not None  # longer, not wider
    assert tree.add(b, 9, "copy") is not None
    assert tree.add(b, 9, "model") is not None  # known
    assert tree.add(a, 8, "copy") is not None
    assert tree.room == 0
    draft = tree.build()
    assert draft.tokens == (5, 8, 6, 9)
    assert draft.parents == (-1, 0, -1, 2)
    assert draft.confidence[0] == 0.7
    assert draft.sources == ("model", "copy", "model", "copy")


# -- which nodes --------------------------------------------------------------------------------


def test_the_tree_holds_the_likeliest_nodes_of_all() -> None:
    """Compared with every node of the full tree, sorted by path probability."""
    table = FakeTable(4, seed=1, order=3, sharpness=1.0)
    sampling = dataclasses.replace(FULL, temperature=0.0)
    for n, last in itertools.product((1, 3, 6, 10), range(1, 4)):
        tokens = [2, last]
        proposer = TreeDrafter(FakeContext(table, n_ctx=64), n_vocab=4)
        proposer.siblings, proposer.floor = 4, 0.0
        proposer.start(
            Request(
                seed=0,
                rule=MATCH,
                coins=RandomCoins(0),
                is_eog=lambda t: False,
                leaves=64,
            )
        )
        draft = run_alone(proposer.draft(tokens, SamplerChain(sampling, tokens=tokens), Room(n)))
        every: list[float] = []
        level: list[tuple[list[int], float]] = [(tokens, 1.0)]
        for _ in range(6):
            further = []
            for path, weight in level:
                z = table.row(path).astype(float)
                p = np.exp(z - z.max())
                further += [([*path, t], weight * q) for t, q in enumerate(p / p.sum())]
            level = sorted(further, key=lambda item: -item[1])[:40]
            every += [weight for _, weight in level]
        assert sorted(weights(draft), reverse=True) == pytest.approx(
            sorted(every, reverse=True)[:n], rel=1e-5
        )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("verify", ["match", "rejection"])
@pytest.mark.parametrize("merged", [False, True])
def test_a_tree_takes_a_pass_per_depth(
    temperature: float, verify: VerifyRule, merged: bool
) -> None:
    """Beside the one that reads the text; where tokens are drawn as the target draws them, which
    passes it took cannot be told from it. No more is read than could have come in."""
    sampling, drawn = dataclasses.replace(FULL, temperature=temperature), 0
    for seed, n, leaves in itertools.product(range(6), (1, 4, 9, 24), (2, 16)):
        setup = Setup(sampling=sampling, seed=seed)
        tokens = [1, 2 + seed % 3, 3, 1, 2 + seed % 3]
        found: list[Draft] = []
        for branches in (64, 1):
            table = FakeTable(V, seed=6 + seed, sharpness=1.5, of=setup.table, agreement=0.5)
            lane = FakeContext(table, n_ctx=256, max_leaves=branches)
            model = TreeDrafter(lane, n_vocab=V)
            drafter = MergedDrafter(NgramDrafter(n_min=1), model) if merged else model
            rule = rule_of(verify, greedy=not temperature)
            drafter.start(
                Request(seed=seed, rule=rule, coins=RandomCoins(seed), is_eog=is_eog, leaves=leaves)
            )
            chain = SamplerChain(sampling, tokens=tokens)
            found.append(run_alone(drafter.draft(tokens, chain, Room(n))))
            whole = Layout().grown(found[-1].parents)
            if branches > 1:
                assert len(lane.passes) <= 1 + max(whole.depth, default=0) + 1
                assert model.lane.tokens[: len(tokens)] == tokens
                assert lane.growing is None
        if rule.common_noise:
            one, other = ((d.tokens, d.parents, d.confidence, d.sources) for d in found)
            assert one == other
            drawn += 1
    assert drawn or verify == "rejection"


def test_only_nodes_that_can_still_matter_are_read() -> None:
    setup = Setup(sampling=dataclasses.replace(FULL, temperature=0.0))
    proposer = grower(setup, 0.5)
    proposer.start(Request(seed=0, rule=MATCH, coins=RandomCoins(0), is_eog=is_eog, leaves=8))
    tokens = [1, 2, 3]
    context = proposer.lane
    assert isinstance(context, FakeContext)
    chain = SamplerChain(setup.sampling, tokens=tokens)
    run_alone(proposer.draft(tokens, chain, Room(2)))
    assert context.passes == [3, 1]  # behind the second there would be no place
    context.passes.clear()
    run_alone(proposer.draft([*tokens, 4], chain, Room(8)))
    assert sum(context.passes) <= 1 + 2 * 8
    context.passes.clear()
    alone = run_alone(
        proposer.draft(
            [*tokens, 5],
            chain,
            Room(8, Answers(further=lambda likely=None, rows=0: likely is None)),
        )
    )
    line = next((i for i, above in enumerate(alone.parents) if above != i - 1), len(alone))
    assert context.passes == [1] * len(context.passes)
    assert len(context.passes) <= 1 + line
    context.passes.clear()
    stopped = run_alone(
        proposer.draft(
            [*tokens, 6],
            chain,
            Room(8, Answers(further=lambda likely=None, rows=0: likely is not None)),
        )
    )
    assert len(context.passes) == 1  # the window forbade a second step
    assert set(stopped.parents) == {-1}


def test_trees_of_several_conversations_share_the_passes_of_their_model() -> None:
    setup = Setup(sampling=dataclasses.replace(FULL, temperature=0.0))
    table = FakeTable(V, seed=6, sharpness=1.5, of=setup.table, agreement=0.5)
    texts = [[1, 2, 3], [2, 4, 1, 3], [5, 1]]

    def drafting(pool: FakePool, tokens: list[int]) -> Steps[Draft]:
        drafter = TreeDrafter(pool.open(), n_vocab=V)
        drafter.start(Request(seed=0, rule=MATCH, coins=RandomCoins(0), is_eog=is_eog, leaves=8))
        return drafter.draft(tokens, SamplerChain(setup.sampling, tokens=tokens), Room(8))

    def pool() -> FakePool:
        return FakePool(table, lanes=3, max_leaves=48, in_order=False)

    alone: list[Draft] = []
    passes: list[int] = []
    for tokens in texts:
        one = pool()
        alone.append(run_alone(drafting(one, tokens)))
        passes.append(len(one.fake.passes))
    shared, together = pool(), dict[int, Draft]()

    def say(id: int, asking: Steps[Draft]) -> Any:
        together[id] = yield from asking

    scheduler = Scheduler(FakePool(table), NoSeats())
    for id, tokens in enumerate(texts):
        said = say(id, drafting(shared, tokens))
        scheduler.add(Running(id, said, lambda: 0, cast(Lane, None), Cancel()))
    assert scheduler.step() == []
    assert [together[id] for id in range(len(texts))] == alone
    assert len(shared.fake.passes) == max(passes)


def test_one_leaf_makes_a_chain() -> None:
    setup = Setup()
    proposer = grower(setup, 0.5)
    proposer.start(Request(seed=0, rule=MATCH, coins=RandomCoins(0), is_eog=is_eog))
    tokens = [1, 2, 3]
    draft = run_alone(proposer.draft(tokens, SamplerChain(FULL, tokens=tokens), Room(6)))
    assert draft.is_chain
    assert len(draft) > 2


# -- one seed, one text -------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_same_seed_same_text(name: str, temperature: float) -> None:
    sampling = dataclasses.replace(FULL, temperature=temperature)
    for seed, draft_max, leaves in ((1, 1, 8), (2, 3, 2), (3, 6, 8), (4, 16, 16), (5, 9, 3)):
        setup = Setup(sampling=sampling, seed=seed, draft_max=draft_max)
        assert setup.run(Leaves(PROPOSERS[name](setup), leaves)) == setup.run()


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("grammar", [False, True])
def test_every_sampler_gives_one_text(sampler: str, grammar: bool) -> None:
    for seed, name in enumerate(PROPOSERS):
        setup = Setup(
            sampling=SAMPLERS[sampler], seed=seed, grammar=grammar, draft_max=7, length=24
        )
        assert setup.run(Leaves(PROPOSERS[name](setup))) == setup.run(), name


def accepted(setup: Setup, proposer: Drafter) -> float:
    """Mean tokens accepted per round."""
    counts: list[int] = []

    def count(loop: Rounds, done: RoundDone) -> None:
        counts.append(len(done.accepted_path))

    setup.run(proposer, count)
    return sum(counts) / len(counts)


@pytest.mark.parametrize(("temperature", "chain_nodes"), [(0.0, 6), (1.0, 3)])
def test_a_tree_is_accepted_further_than_a_chain(temperature: float, chain_nodes: int) -> None:
    """Of as many nodes when greedy; under noise, of the depth that a tree of twice as many has.

    The fake draft is right far more often than its own probabilities say, which favours chains.
    """
    sampling = dataclasses.replace(FULL, temperature=temperature)
    trees = chains = 0.0
    for seed in range(8):
        setup = Setup(sampling=sampling, seed=seed, draft_max=6, eog_bias=-20.0)
        trees += accepted(setup, Leaves(grower(setup, 0.6)))
        setup = dataclasses.replace(setup, draft_max=chain_nodes)
        table = FakeTable(V, seed=6, sharpness=1.5, of=setup.table, agreement=0.6)
        chains += accepted(setup, ChainDrafter(FakeContext(table, n_ctx=256), n_vocab=V))
    assert trees > chains


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_rules_run_on_trees(rule: VerifyRule) -> None:
    for seed, name in itertools.product(range(4), PROPOSERS):
        setup = Setup(seed=seed, rule=rule, draft_max=6)
        chains = setup.judge.chains_only
        proposer = Leaves(PROPOSERS[name](setup), 1 if chains else 8)
        setup.run(proposer)
        assert sum(map(len, proposer.drafts)) > 0
        branched = any(not draft.is_chain for draft in proposer.drafts)
        assert branched is not chains or name == "tree 0"


# -- rejection, exactly -------------------------------------------------------------------------


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("case", ["plain", "truncated", "penalties"])
@pytest.mark.parametrize(
    ("name", "siblings", "nodes"),
    [("tree", 2, 3), ("tree", 3, 4), ("merged", 2, 3), ("merged", 3, 3), ("tree", 1, 2)],
)
def test_rejection_on_grown_trees_is_exact(
    name: str, siblings: int, nodes: int, case: str, grammar: bool
) -> None:
    """Sampled, fixed and hybrid children, over all outcomes of the coins."""
    sampling = {
        "plain": FULL,
        "truncated": dataclasses.replace(FULL, top_k=2, temperature=0.8),
        "penalties": dataclasses.replace(FULL, repeat_penalty=1.5, presence_penalty=0.5),
    }[case]
    prompt, length = [1, 2, 1, 2], 2
    setup = Setup(sampling=sampling, rule="rejection", grammar=grammar)
    table = FakeTable(3, seed=2, sharpness=0.8)
    other = FakeTable(3, seed=3, sharpness=0.8, of=table, agreement=0.4)
    shapes: set[tuple[int, ...]] = set()

    def program(oracle: Oracle) -> Tokens:
        tokens = list(prompt)
        target = FakeContext(table, n_ctx=16)
        target.forward(tokens[:-1], outputs="none")
        model = TreeDrafter(FakeContext(other, n_ctx=16), n_vocab=3)
        model.siblings = siblings
        proposer: Drafter = model
        if name == "merged":
            proposer = MergedDrafter(NgramDrafter(n_min=1), model)
        proposer.start(Request(seed=0, rule=REJECTION, coins=oracle, is_eog=is_eog, leaves=4))
        loop = Rounds(
            target=target,
            drafter=proposer,
            tokens=tokens,
            chain=SamplerChain(sampling, tokens=tokens, constraint=NotTwice() if grammar else None),
            window=Window(nodes),
            rule=REJECTION,
            seed=0,
            coins=oracle,
            is_stop=is_eog,
        )
        while len(tokens) < len(prompt) + length and not is_eog(tokens[-1]):
            shapes.add(run_alone(loop.round()).parents)
        return tuple(tokens[len(prompt) :])

    assert bias(program, ChainToy(setup, table, prompt), length).tv < 1e-9
    if siblings > 1 and not grammar:
        assert any(parents.count(-1) > 1 for parents in shapes)


# -- merged -------------------------------------------------------------------------------------


def test_a_copy_and_the_model_share_nodes_and_the_copy_learns() -> None:
    setup = Setup(
        sampling=dataclasses.replace(FULL, temperature=0.0), eog_bias=-20.0, length=150
    )  # long enough for a greedy text to run in circles
    copier = NgramDrafter(n_min=1)
    proposer = Leaves(MergedDrafter(copier, grower(setup, 0.6)))
    setup.run(proposer)
    sources = {source for draft in proposer.drafts for source in draft.sources}
    assert sources == {"tree", "ngram"}
    assert any({"tree", "ngram"} <= set(draft.sources) for draft in proposer.drafts)
    tried = sum(tries for _, tries in copier._hits.values())
    hit = sum(hits for hits, _ in copier._hits.values())
    assert 0 < hit <= tried


def test_the_model_goes_on_where_the_copy_ends() -> None:
    setup = Setup(sampling=dataclasses.replace(FULL, temperature=0.0), eog_bias=-20.0)
    proposer = MergedDrafter(NgramDrafter(n_min=1), grower(setup, 1.0))
    proposer.start(Request(seed=0, rule=MATCH, coins=RandomCoins(0), is_eog=is_eog, leaves=4))
    tokens = [4, 5, 4]  # the copy is one token long: 5, then 4 and the end of the text
    draft = run_alone(proposer.draft(tokens, SamplerChain(setup.sampling, tokens=tokens), Room(12)))
    copied = [i for i, source in enumerate(draft.sources) if source == "ngram"]
    assert copied
    assert any(draft.parents[i] in copied and draft.sources[i] == "tree" for i in range(len(draft)))


def test_trees_into_a_dead_end() -> None:
    into_dead_ends(lambda setup: Leaves(grower(setup, 0.4)))
