"""The round loop over the fake backend: caches, groups, and one text per seed whatever drafts."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from engines import FakeContext
from head_fakes import knowing, medusa_of, state_of
from hypothesis import given, settings
from hypothesis import strategies as st
from table_model import FakeTable
from toys import EXACT, FULL, LENGTH, PROMPT, SAMPLERS, Leaves, Setup, V, grower, into_dead_ends
from windows import Answers

from specllama.arrays import Rows
from specllama.backend.base import Outputs, Shared
from specllama.errors import Cancelled, ContextFull, EngineError
from specllama.events import RoundDone
from specllama.settings.params import SamplingParams, VerifyRule
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.forced import ForcedDrafter
from specllama.speculative.drafting.merged import MergedDrafter
from specllama.speculative.drafting.mixed import MixedDrafter
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.drafting.suffix import SuffixDrafter
from specllama.speculative.effects import Effect, Keep, Steps, perform, run_alone
from specllama.speculative.round import Rounds
from specllama.speculative.rules import RandomCoins
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Room
from specllama.speculative.window import Plan, Window

# -- proposers made to hurt ----------------------------------------------------------------------


class Stub(Drafter):
    """A drafter with nothing to keep."""

    name = "stub"

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        yield from ()
        return self.guess(tokens, chain, room)

    def guess(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        return Draft()


class RandomTree(Stub):
    """Trees of any shape, of any tokens, some of them right, some of them scouts."""

    def __init__(self, truth: Sequence[int] = ()) -> None:
        self._rng = np.random.default_rng(0)
        self._truth = list(truth)

    def guess(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        rng = self._rng
        n = int(rng.integers(0, room.n + 1))
        parents = tuple(int(rng.integers(-1, i)) if i else -1 for i in range(n))
        drafted: list[int] = []
        depth: list[int] = []
        for parent in parents:
            depth.append(0 if parent < 0 else depth[parent] + 1)
            at = len(tokens) + depth[-1]
            right = at < len(self._truth) and rng.random() < 0.6
            drafted.append(self._truth[at] if right else int(rng.integers(0, V)))
        return Draft(
            tokens=tuple(drafted),
            parents=parents,
            q=(None,) * n,
            confidence=(None,) * n,
            sources=(self.name,) * n,
            scout=tuple(bool(rng.random() < 0.1) for _ in range(n)),
        )


class Cheat(Stub):
    """Knows the text; ``shift`` 0 is always right, any other always wrong."""

    def __init__(self, truth: Sequence[int], shift: int = 0, sometimes: bool = False) -> None:
        self._truth = list(truth)
        self._shift = shift
        self._sometimes = sometimes

    def guess(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        rest = self._truth[len(tokens) : len(tokens) + room.n]
        if self._sometimes and len(rest) > 1:
            rest[len(tokens) % len(rest)] += 1
        return Draft.chain([(t + self._shift) % V for t in rest], self.name)


class Fork(Cheat):
    """The same with a wrong token beside its first."""

    def guess(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        line = super().guess(tokens, chain, Room(room.n - 1))
        wrong = (line.tokens[0] + 1) % V
        n = len(line) + 1
        return Draft(
            (*line.tokens, wrong), (*line.parents, -1), (None,) * n, (None,) * n, (self.name,) * n
        )


class Ender(Stub):
    """Drafts the end of the turn, at every depth, and tokens behind it."""

    def __init__(self, truth: Sequence[int]) -> None:
        self._truth = list(truth)

    def guess(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        rest = self._truth[len(tokens) : len(tokens) + room.n]
        at = len(tokens) % 3
        rest = [*rest[:at], 0, *rest[at:]]
        return Draft.chain(rest[: room.n], self.name)


# -- running a loop -----------------------------------------------------------------------------


def draft_model(setup: Setup, agreement: float, **options: int) -> ChainDrafter:
    table = FakeTable(V, seed=6, sharpness=1.5, of=setup.table, agreement=agreement)
    return ChainDrafter(FakeContext(table, n_ctx=256), n_vocab=V, **options)


PROPOSERS: dict[str, Callable[[Setup, list[int]], Drafter]] = {
    "draft 0": lambda s, truth: draft_model(s, 0.0),
    "draft half": lambda s, truth: draft_model(s, 0.5),
    "draft same": lambda s, truth: draft_model(s, 1.0),
    "ngram": lambda s, truth: NgramDrafter(n_min=1),
    "mixed": lambda s, truth: MixedDrafter([NgramDrafter(n_min=2), draft_model(s, 0.7)]),
    "forced": lambda s, truth: ForcedDrafter(),
    "forced and others": lambda s, truth: MixedDrafter(
        [ForcedDrafter(), NgramDrafter(n_min=2), draft_model(s, 0.7)]
    ),
    "tree": lambda s, truth: Leaves(grower(s, 0.5), 3),
    "tree same": lambda s, truth: Leaves(grower(s, 1.0), 16),
    "pairs": lambda s, truth: Leaves(grower(s, 0.6, siblings=2)),
    "merged": lambda s, truth: Leaves(MergedDrafter(NgramDrafter(n_min=1), grower(s, 0.6))),
    "suffix": lambda s, truth: Leaves(SuffixDrafter(), 1),
    "suffix tree": lambda s, truth: Leaves(SuffixDrafter(), 6),
    "medusa chain": lambda s, truth: Leaves(medusa_of(knowing(s.table), state_of), 1),
    "medusa": lambda s, truth: Leaves(medusa_of(knowing(s.table, noise=2.0), state_of), 8),
    "random tree": lambda s, truth: RandomTree(truth),
    "always right": lambda s, truth: Cheat(truth),
    "always wrong": lambda s, truth: Cheat(truth, shift=1),
    "sometimes wrong": lambda s, truth: Cheat(truth, sometimes=True),
    "ends early": lambda s, truth: Ender(truth),
}


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.5])
def test_same_seed_same_text_whoever_drafts(name: str, temperature: float) -> None:
    for seed, draft_max in ((1, 0), (1, 1), (2, 2), (3, 4), (5, 16)):
        setup = Setup(
            sampling=dataclasses.replace(FULL, temperature=temperature),
            seed=seed,
            draft_max=draft_max,
        )
        plain = setup.run()
        assert setup.run(PROPOSERS[name](setup, plain)) == plain


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("grammar", [False, True])
def test_every_sampler_gives_one_text(sampler: str, grammar: bool) -> None:
    for seed, name in enumerate(PROPOSERS):
        setup = Setup(sampling=SAMPLERS[sampler], seed=seed, grammar=grammar, length=20)
        plain = setup.run()
        for exact_rows in (0, 3):
            setup = dataclasses.replace(setup, exact_rows=exact_rows)
            assert setup.run(PROPOSERS[name](setup, plain)) == plain, name


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("exact_rows", [1, 3, 7])
def test_narrow_passes_change_nothing(name: str, exact_rows: int) -> None:
    """Stop tokens at every depth included: passes stay narrow, the text the same."""
    for seed in range(3):
        wide = Setup(seed=seed, draft_max=9, eog_bias=0.0)
        narrow = dataclasses.replace(wide, exact_rows=exact_rows)
        plain = wide.run()
        proposer = PROPOSERS[name](wide, plain)
        widths: list[int] = []

        def look(loop: Rounds, done: RoundDone, widths: list[int] = widths) -> None:
            widths.extend(loop.target.passes[1:])
            loop.target.passes[1:] = []

        assert narrow.run(proposer, look) == plain
        assert max(widths, default=0) <= exact_rows


@settings(max_examples=35, deadline=None)
@given(
    name=st.sampled_from(sorted(PROPOSERS)),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    seed=st.integers(0, 2**64 - 1),
    draft_max=st.integers(0, 16),
    exact_rows=st.sampled_from([0, 1, 2, 3, 7]),
    grammar=st.booleans(),
    eog_bias=st.sampled_from([-4.0, 0.0, 2.0]),
    sampling=st.builds(
        SamplingParams,
        top_k=st.sampled_from([0, 1, 3, 40]),
        top_p=st.sampled_from([0.3, 0.9, 1.0]),
        min_p=st.sampled_from([0.0, 0.05, 0.4]),
        typical_p=st.sampled_from([0.5, 1.0]),
        repeat_penalty=st.sampled_from([1.0, 1.2]),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        repeat_last_n=st.sampled_from([-1, 0, 4]),
        dry_multiplier=st.sampled_from([0.0, 1.0]),
        dry_allowed_length=st.sampled_from([1, 2]),
        xtc_probability=st.sampled_from([0.0, 0.6]),
        logit_bias=st.sampled_from([{}, {3: 1.5, 200: 9.0, 7: -math.inf}]),
    ),
)
def test_any_combination_gives_one_text(
    name: str,
    temperature: float,
    seed: int,
    draft_max: int,
    exact_rows: int,
    grammar: bool,
    eog_bias: float,
    sampling: SamplingParams,
) -> None:
    setup = Setup(
        sampling=dataclasses.replace(sampling, temperature=temperature),
        seed=seed,
        draft_max=draft_max,
        exact_rows=exact_rows,
        grammar=grammar,
        eog_bias=eog_bias,
        length=16,
    )
    plain = dataclasses.replace(setup, draft_max=0, exact_rows=0).run()
    assert setup.run(PROPOSERS[name](setup, plain)) == plain


def test_the_texts_differ_between_seeds_and_drafts_are_really_accepted() -> None:
    """Otherwise the tests above would prove nothing."""
    texts = {tuple(Setup(seed=seed).run()) for seed in range(10)}
    assert len(texts) == 10
    accepted: dict[str, int] = {}
    for name, make in PROPOSERS.items():
        setup = Setup(seed=3)

        def count(loop: Rounds, done: RoundDone, name: str = name) -> None:
            accepted[name] = accepted.get(name, 0) + len(done.accepted_path)

        setup.run(make(setup, setup.run()), count)
    assert accepted["always wrong"] == 0
    assert accepted["always right"] == accepted["draft same"] >= 0.7 * LENGTH
    assert accepted["draft 0"] < accepted["draft half"] < accepted["draft same"]
    assert accepted["random tree"] > 0


# -- rejection and block through the whole loop, exactly ------------------------------------------


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("case", EXACT)
@pytest.mark.parametrize("beside", [[], [ForcedDrafter]])
def test_the_whole_loop_is_exact(
    rule: VerifyRule, grammar: bool, case: str, beside: list[Callable[[], Drafter]]
) -> None:
    """Draft model, loop and sampler chain together, over all outcomes of their coins."""
    table = FakeTable(3, seed=2, sharpness=1.0)
    other = FakeTable(3, seed=3, sharpness=1.0, of=table, agreement=0.4)

    def make(target: FakeContext) -> Drafter:
        model = ChainDrafter(FakeContext(other, n_ctx=16), n_vocab=3)
        return MixedDrafter([*(make() for make in beside), model]) if beside else model

    setup = Setup(sampling=EXACT[case], seed=0, rule=rule, grammar=grammar, draft_max=2)
    assert setup.off_by(make, table, [1, 2], 3) < 1e-9


# -- the loop's own rules -------------------------------------------------------------------------


def a_loop(
    proposer: Drafter,
    *,
    n_ctx: int = 64,
    max_rows: int = 65,
    draft_max: int = 8,
    tokens: list[int] | None = None,
) -> Rounds:
    table = FakeTable(V, seed=5, sharpness=1.5, eog_bias=-9.0)
    target = FakeContext(table, n_ctx=n_ctx, max_rows=max_rows)
    tokens, coins = tokens if tokens is not None else list(PROMPT), RandomCoins(1)
    return Setup(draft_max=draft_max).loop(proposer, target, tokens, coins=coins)


def truth(n: int) -> list[int]:
    loop = a_loop(Drafter(), n_ctx=512)
    while len(loop.tokens) < len(PROMPT) + n:
        run_alone(loop.round())
    return loop.tokens


def test_a_draft_never_overshoots_what_is_wanted() -> None:
    for wanted in (1, 2, 3, 5, 9, 20):
        done = run_alone(a_loop(Cheat(truth(40))).round(wanted - 1))
        assert len(done.emitted) == min(wanted, 9)
        assert done.draft_max == min(wanted - 1, 8)
    assert run_alone(a_loop(Cheat(truth(40))).round(0)).window_reason == "last token"


def test_a_draft_never_overshoots_the_context_or_the_rows() -> None:
    known = truth(60)
    loop = a_loop(Cheat(known), n_ctx=20)
    plan = loop.target.pool.plan
    while loop.target.n_past < 20:
        run_alone(loop.round(plan.guesses(len(loop.tokens) - 1, 99)))
        assert loop.target.n_past == len(loop.tokens) - 1
    assert loop.tokens == known[:21]
    with pytest.raises(ContextFull):
        run_alone(loop.round())
    assert loop.target.tokens == known[:20]
    narrow = a_loop(Cheat(known), max_rows=3).target.pool.plan
    assert [narrow.guesses(7, left) for left in (1, 2, 99)] == [0, 1, 2]


def test_a_prompt_of_one_token_works() -> None:
    loop = a_loop(NgramDrafter(n_min=1), tokens=[4])
    for _ in range(8):
        run_alone(loop.round())
        assert loop.target.tokens == loop.tokens[:-1]


def test_the_first_token_is_drawn_from_the_row_of_the_prompts_own_pass() -> None:
    loop, plain = a_loop(Cheat(truth(9))), a_loop(Cheat(truth(9)))
    row = loop.target.forward(PROMPT[-1:], outputs="last")[0]
    passes = len(loop.target.passes)
    done = run_alone(loop.round(first=row))
    assert (len(done.drafted), done.draft_max, done.target_kind) == (0, 0, "plain")
    assert done.window_reason == "first token"
    assert len(loop.target.passes) == passes, "nothing was evaluated"
    assert loop.target.tokens == loop.tokens[:-1]
    assert done.emitted == run_alone(plain.round()).emitted[:1]


def test_a_first_round_without_a_pass_tells_the_window_nothing() -> None:
    loop = a_loop(Cheat(truth(9)))
    seen: list[object] = []
    loop.window.observe = lambda *round: seen.append(round)  # type: ignore[method-assign]
    run_alone(loop.round(first=loop.target.forward(PROMPT[-1:], outputs="last")[0]))
    assert seen == []
    run_alone(loop.round())
    assert len(seen) == 1


@pytest.mark.parametrize("kept", [1, 3, 6])
@pytest.mark.parametrize("tree", [False, True])
def test_what_comes_behind_a_stop_is_never_committed(kept: int, tree: bool) -> None:
    known = truth(30)
    loop = a_loop(Fork(known) if tree else Cheat(known))
    loop.accept = lambda tokens: min(kept, len(tokens))
    done = run_alone(loop.round())
    assert list(done.emitted) == known[len(PROMPT) :][:kept]
    assert (done.accepted, done.cut) == (kept, 1)
    assert loop.tokens == known[: len(PROMPT) + kept]
    assert loop.target.tokens == loop.tokens[:-1]


def test_a_cancel_while_a_state_is_read_again_takes_no_text_back() -> None:
    """What was accepted is in the reply: a cut that is not finished must not part the two."""
    known = truth(30)
    loop = a_loop(Cheat(known))
    loop.accept = lambda tokens: 1

    def answer(effect: Effect) -> object:
        if isinstance(effect, Keep):
            raise Cancelled("while a running state is read again")
        return perform(effect)

    done = run_alone(loop.round(), answer)
    assert loop.tokens == known[: len(PROMPT) + 1] == [*PROMPT, *done.emitted]


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_failure_inside_a_round_leaves_the_caches_as_they_were(tree: bool, at: int) -> None:
    """The target refuses the n-th pass, or hands out a row of NaN: nothing is committed."""

    class Failing(FakeContext):
        countdown = -1
        poison = False

        def forward(
            self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
        ) -> Rows:
            self.countdown -= 1
            rows = super().forward(tokens, outputs=outputs, parents=parents)
            if self.countdown == 0:
                if self.poison:
                    rows[...] = np.nan
                else:
                    raise EngineError("injected")
            return rows

    for poison in (False, True):
        known = truth(30)
        proposer: Drafter = RandomTree(known) if tree else Cheat(known)
        loop = a_loop(proposer, draft_max=6)
        target = Failing(FakeTable(V, seed=5, sharpness=1.5, eog_bias=-9.0))
        target.forward(PROMPT[:-1], outputs="none")
        loop.target = target
        target.poison = poison
        target.countdown = at
        before = list(loop.tokens)
        try:
            for _ in range(3):
                run_alone(loop.round())
                before = list(loop.tokens)
        except EngineError:
            assert loop.tokens == before
            assert target.tokens == before[:-1]
        else:
            pytest.fail("the failure was not reached")


def test_a_cache_that_was_lost_ends_the_round_with_its_own_error() -> None:
    """A recurrent model whose replay fails holds nothing: there is nothing to roll back to."""

    class Losing(FakeContext):
        def forward(self, tokens: Sequence[int], **more: object) -> Rows:
            self.rollback(0)
            raise EngineError("lost")

    loop = a_loop(Drafter())
    loop.target = Losing(FakeTable(V, seed=5))
    with pytest.raises(EngineError, match="lost"):
        run_alone(loop.round())


def test_windows_learn_from_every_round() -> None:
    seen: list[tuple[RoundDone, float]] = []

    class Watching(Window):
        def observe(self, done: RoundDone, verify_ms: float, shared: Shared | None = None) -> None:
            seen.append((done, verify_ms))

    loop = a_loop(Cheat(truth(30)))
    loop.window = Watching(3)
    first = run_alone(loop.round())
    second = run_alone(loop.round(0))  # no room for a draft
    assert [done.source for done in (first, second)] == ["stub", "none"]
    assert [len(done.drafted) for done, _ in seen] == [3, 0]
    for (record, verify_ms), done in zip(seen, (first, second), strict=True):
        assert record is done
        assert verify_ms >= done.verify_ms >= 0.0
        assert done.other_ms >= -1e-6


def test_a_window_may_change_its_mind_every_round() -> None:
    """Results never depend on the window (and so never on timing)."""

    class Erratic(Window):
        def __init__(self, seed: int) -> None:
            super().__init__(8)
            self._rng = np.random.default_rng(seed)

        def plan(self, room: int) -> Plan:
            n = min(room, int(self._rng.integers(0, 9)))
            return Plan(n, "dice", Answers(further=self._further))

        def _further(self, likely: float | None = None, rows: int = 0) -> bool:
            return bool(self._rng.random() < 0.7)

    setup = Setup(seed=8)
    plain = setup.run()
    for seed in range(5):
        loop = a_loop(draft_model(setup, 0.6), n_ctx=128)
        reference = a_loop(Drafter(), n_ctx=128)
        loop.window = Erratic(seed)
        while len(loop.tokens) < 50:
            run_alone(loop.round())
        while len(reference.tokens) < len(loop.tokens):
            run_alone(reference.round())
        assert loop.tokens == reference.tokens
    assert len(plain) > len(PROMPT)


def test_chains_into_a_dead_end() -> None:
    into_dead_ends(lambda setup: draft_model(setup, 0.3))
