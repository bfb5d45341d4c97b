"""Draft sources on their own: what they propose, what they keep, what they evaluate."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from engines import FakeContext
from hypothesis import given
from hypothesis import strategies as st
from table_model import FakeTable
from windows import Answers

from specllama.arrays import HiddenNeed
from specllama.settings.params import SamplingParams, VerifyRule
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.method import Kit
from specllama.speculative.drafting.mixed import MixedDrafter
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.drafting.suffix import SuffixDrafter
from specllama.speculative.effects import Steps, run_alone
from specllama.speculative.noise import draw
from specllama.speculative.rules import RandomCoins, rule_of
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT, Draft, Guess, Room, Verdict
from specllama.text_history import History, common_prefix

V = 20
FREE = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
GREEDY = SamplingParams(temperature=0.0)


def request(rule: VerifyRule = "match", **changes: float) -> Request:
    return Request(
        seed=7,
        rule=rule_of(rule),
        coins=RandomCoins(3),
        is_eog=lambda t: t == 0,
        p_min=changes.get("p_min", 0.0),
    )


def chain(tokens: Sequence[int], sampling: SamplingParams = FREE) -> SamplerChain:
    return SamplerChain(sampling, seed=7, tokens=tokens)


def table(**changes: float) -> FakeTable:
    return FakeTable(V, seed=1, sharpness=changes.get("sharpness", 2.0), eog_bias=-20.0)


def model(n_ctx: int = 64, rule: VerifyRule = "match", **options: int) -> ChainDrafter:
    proposer = ChainDrafter(FakeContext(table(), n_ctx=n_ctx), n_vocab=V, **options)
    proposer.start(request(rule))
    return proposer


def context_of(proposer: ChainDrafter) -> FakeContext:
    assert isinstance(proposer.lane, FakeContext)
    return proposer.lane


# -- none ----------------------------------------------------------------------------------------


def test_no_proposer_never_drafts() -> None:
    none = Drafter()
    none.start(request())
    assert run_alone(none.draft([1, 2], chain([1, 2]), Room(9))) is EMPTY_DRAFT
    none.close()


# -- draft model ---------------------------------------------------------------------------------


def test_a_draft_is_what_the_draft_model_alone_would_write() -> None:
    """Same noise, same chain: drafting is plain decoding of the draft model."""
    for sampling in (FREE, GREEDY, dataclasses.replace(FREE, repeat_penalty=1.5, top_k=4)):
        text = [3, 9, 4]
        draft = run_alone(model().draft(text, chain(text, sampling), Room(6)))
        expected: list[int] = []
        walking = chain(text, sampling)
        for _ in range(6):
            law = walking.law(table().row(text + expected))
            expected.append(draw(law, 7, walking.position)[0])
            walking.advance(expected[-1])
        assert list(draft.tokens) == expected
        assert draft.is_chain
        assert draft.source == "draft"


def test_q_is_the_law_that_was_drawn_from() -> None:
    rules: tuple[VerifyRule, ...] = ("match", "rejection", "block")
    for rule in rules:
        text = [3, 9, 4]
        sampling = dataclasses.replace(FREE, top_k=3, temperature=0.6)
        draft = run_alone(model(rule=rule).draft(text, chain(text, sampling), Room(5)))
        walking = chain(text, sampling)
        for i, token in enumerate(draft.tokens):
            expected = walking.law(table().row(text + list(draft.tokens[:i])))
            q = draft.q[i]
            np.testing.assert_array_equal(q.ids, expected.ids)
            np.testing.assert_array_equal(q.probs, expected.probs)
            assert q.prob(token) > 0.0
            walking.advance(token)


def test_q_of_a_large_vocabulary_outlives_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is cut, so that only who can win is timed; the next pass poisons the row."""
    monkeypatch.setitem(globals(), "V", 5_000)
    text = [3, 9, 4]
    draft = run_alone(model().draft(text, chain(text), Room(5)))
    walking = chain(text)
    for i, token in enumerate(draft.tokens):
        expected = walking.law(table().row(text + list(draft.tokens[:i])))
        q = draft.q[i]
        assert token == draw(expected, 7, walking.position)[0]
        np.testing.assert_array_equal(q.probs, expected.probs)
        walking.advance(token)


def test_greedy_drafts_are_point_masses() -> None:
    draft = run_alone(model(rule="rejection").draft([3, 9], chain([3, 9], GREEDY), Room(4)))
    assert draft.q == (None,) * 4


def test_the_chain_that_was_lent_is_not_moved() -> None:
    text = [3, 9, 4]
    lent = chain(text, dataclasses.replace(FREE, repeat_penalty=1.5))
    before = lent.law(table().row(text))
    run_alone(model().draft(text, lent, Room(6)))
    assert lent.position == 3
    np.testing.assert_array_equal(lent.law(table().row(text)).probs, before.probs)


def test_only_unseen_tokens_are_evaluated() -> None:
    proposer = model()
    text = [3, 9, 4, 8, 2]
    draft = run_alone(proposer.draft(text, chain(text), Room(4)))
    context = context_of(proposer)
    assert context.passes == [5, 1, 1, 1]
    assert context.tokens == text + list(draft.tokens[:3])
    context.passes.clear()
    # two accepted, then another token: one new token is read
    text = [*text, *draft.tokens[:2], (draft.tokens[2] + 1) % V]
    run_alone(proposer.draft(text, chain(text), Room(2)))
    assert context.passes == [1, 1]
    # all accepted and a bonus: the last draft was never evaluated, so two are read
    draft = run_alone(proposer.draft(text, chain(text), Room(3)))
    context.passes.clear()
    text = [*text, *draft.tokens, 5]
    run_alone(proposer.draft(text, chain(text), Room(1)))
    assert context.passes == [2]
    # the same text again: its last token is evaluated anew, for its row
    context.passes.clear()
    run_alone(proposer.draft(text, chain(text), Room(1)))
    assert context.passes == [1]


def test_a_long_backlog_is_read_in_batches() -> None:
    proposer = model(n_ctx=128, batch=10)
    text = [1 + i % 9 for i in range(45)]
    run_alone(proposer.draft(text, chain(text), Room(2)))
    assert context_of(proposer).passes == [10, 10, 10, 10, 5, 1]


@pytest.mark.parametrize("n_ctx", [3, 4, 5, 8, 64])
def test_the_draft_context_bounds_the_draft(n_ctx: int) -> None:
    """The last draft needs no cell of its own."""
    text = [3, 9, 4]
    assert len(run_alone(model(n_ctx=n_ctx).draft(text, chain(text), Room(6)))) == min(6, n_ctx - 2)


@pytest.mark.parametrize("n_ctx", [4, 5, 8, 13])
def test_a_text_that_outgrows_the_cache_is_followed_from_its_newer_part(n_ctx: int) -> None:
    """The table looks two tokens back, so a short memory drafts what a long one does."""
    small, large = model(n_ctx=n_ctx), model(n_ctx=256)
    text = [3, 9]
    for step in range(40):
        expected = run_alone(large.draft(text, chain(text), Room(3))).tokens
        draft = run_alone(small.draft(text, chain(text), Room(3))).tokens
        assert draft == expected[: len(draft)]
        assert len(draft) >= 1
        assert context_of(small).n_past <= n_ctx
        text = [*text, *draft[: step % 3], 1 + step % 5]
    # a new reply to a shorter text
    small.start(request())
    assert (
        run_alone(small.draft([3, 9], chain([3, 9]), Room(1))).tokens
        == run_alone(model().draft([3, 9], chain([3, 9]), Room(1))).tokens
    )


def test_it_follows_any_history() -> None:
    """Edits, retries, cut replies: the draft depends on the text alone."""
    rng = np.random.default_rng(2)
    used = model()
    for _ in range(40):
        text = rng.integers(1, 4, int(rng.integers(1, 12))).tolist()
        fresh = run_alone(model().draft(text, chain(text), Room(3)))
        assert run_alone(used.draft(text, chain(text), Room(3))).tokens == fresh.tokens


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_to_a_history_its_lane_holds_the_end_of_it(seed: int) -> None:
    """Cuts, other requests, backlogs that may not be read, and a cache that the text outgrows."""
    rng = np.random.default_rng(seed)
    used = model(n_ctx=int(rng.integers(6, 40)))
    text, drafts = History([3]), 0
    for _ in range(150):
        text.cut(int(rng.integers(1, len(text) + 1)) if rng.random() < 0.2 else len(text))
        text.extend(rng.integers(1, 4, int(rng.integers(0, 6))).tolist())
        if rng.random() < 0.1:
            used.start(request())
        allowed = int(rng.integers(0, 9))

        def begin(source: str, lag: int, allowed: int = allowed) -> int:
            return min(lag, allowed)

        draft = run_alone(used.draft(text, chain(text), Room(4, Answers(read=begin)))).tokens
        if draft:
            drafts += 1
            held = list(used.lane.tokens)
            assert [*text, *draft[:-1]][-len(held) :] == held
    assert drafts > 50


def test_it_ends_at_an_end_of_turn() -> None:
    proposer = ChainDrafter(FakeContext(FakeTable(V, seed=1, eog_bias=50.0)), n_vocab=V)
    proposer.start(request())
    assert run_alone(proposer.draft([3], chain([3]), Room(9))).tokens == (0,)


def test_p_min_is_judged_before_the_draw() -> None:
    """The same number of drafts whatever the coins show at the last position."""
    proposer = ChainDrafter(FakeContext(table(sharpness=0.1)), n_vocab=V)
    proposer.start(request("rejection", p_min=0.9))
    assert len(run_alone(proposer.draft([3], chain([3]), Room(5)))) == 0
    proposer.start(request("rejection", p_min=0.0))
    draft = run_alone(proposer.draft([3], chain([3]), Room(5)))
    assert len(draft) == 5
    assert all(c is not None and 0 < c < 0.2 for c in draft.confidence)


def test_the_window_can_stop_it() -> None:
    asked = 0

    def further(likely: float | None = None, rows: int = 0) -> bool:
        nonlocal asked
        asked += 1
        return asked < 2

    draft = run_alone(model().draft([3, 4], chain([3, 4]), Room(6, Answers(further=further))))
    assert len(draft) == 2
    assert asked == 2


def test_unknown_tokens_silence_it() -> None:
    proposer = ChainDrafter(FakeContext(FakeTable(8)), n_vocab=V)
    proposer.start(request())
    assert run_alone(proposer.draft([3, 15], chain([3, 15]), Room(3))) == EMPTY_DRAFT
    draft = run_alone(proposer.draft([3, 5], chain([3, 5]), Room(3)))
    assert len(draft) > 0
    assert max(draft.tokens) < 8
    larger = ChainDrafter(FakeContext(FakeTable(60, seed=4)), n_vocab=V)
    larger.start(request())
    for first in range(1, V):
        assert max(run_alone(larger.draft([first], chain([first]), Room(4))).tokens, default=0) < V


def test_the_lane_is_for_the_engine_to_close() -> None:
    proposer = model()
    assert proposer.lanes == (context_of(proposer),)
    proposer.close()
    assert not context_of(proposer).closed


# -- n-gram --------------------------------------------------------------------------------------


def naive(tokens: Sequence[int], n_max: int, n_min: int, room: int) -> list[int]:
    """What followed the newest earlier occurrence of the longest end of the text."""
    for n in range(n_max, n_min - 1, -1):
        if len(tokens) <= n:
            continue
        end = list(tokens[-n:])
        for at in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[at - n : at]) == end:
                return list(tokens[at : at + room])
    return []


@given(
    tokens=st.lists(st.integers(1, 4), min_size=1, max_size=40),
    n_min=st.integers(1, 3),
    extra=st.integers(0, 3),
    room=st.integers(0, 6),
    step=st.integers(1, 5),
)
def test_ngram_equals_a_naive_search(
    tokens: list[int], n_min: int, extra: int, room: int, step: int
) -> None:
    """Fed step by step, with detours to other texts on the way."""
    proposer = NgramDrafter(n_max=n_min + extra, n_min=n_min)
    proposer.start(request())
    for end in range(1, len(tokens) + 1, step):
        text = tokens[:end]
        draft = run_alone(proposer.draft(text, chain([]), Room(room)))
        assert list(draft.tokens) == naive(text, n_min + extra, n_min, room)
        if end % 3 == 0:
            run_alone(proposer.draft([9, *text[::-1]], chain([]), Room(room)))


def test_ngram_drafts_end_at_an_end_of_turn() -> None:
    proposer = NgramDrafter(n_min=2)
    proposer.start(request())
    assert run_alone(proposer.draft([1, 2, 3, 0, 4, 5, 1, 2], chain([]), Room(6))).tokens == (3, 0)


def test_ngram_is_a_point_mass_that_learns_its_confidence() -> None:
    proposer = NgramDrafter(n_min=2)
    proposer.start(request())
    text = [1, 2, 3, 4, 1, 2]
    draft = run_alone(proposer.draft(text, chain([]), Room(2)))
    assert draft.q == (None, None)
    assert draft.confidence == (0.5, 0.5)
    proposer.commit(text, draft, Verdict((0, 1), 1, "bonus"))
    better = run_alone(proposer.draft(text, chain([]), Room(2))).confidence[0]
    assert better is not None
    assert better > 0.5
    proposer.commit(text, draft, Verdict((), 1, "recovered"))
    worse = run_alone(proposer.draft(text, chain([]), Room(2))).confidence[0]
    assert worse is not None
    assert worse < better
    proposer.start(request())
    assert run_alone(proposer.draft(text, chain([]), Room(2))).confidence == (0.5, 0.5)


# -- mixed ---------------------------------------------------------------------------------------


def test_mixed_takes_the_first_that_has_something() -> None:
    drafts = model()
    proposer = MixedDrafter([NgramDrafter(n_min=3), drafts])
    proposer.start(request())
    fresh = [1, 2, 3, 4, 5]
    assert run_alone(proposer.draft(fresh, chain(fresh), Room(3))).source == "draft"
    passes = len(context_of(drafts).passes)
    again = [1, 2, 3, 4, 5, 1, 2, 3]
    draft = run_alone(proposer.draft(again, chain(again), Room(2)))
    assert (draft.source, draft.tokens) == ("ngram", (4, 5))
    assert len(context_of(drafts).passes) == passes, "the model was not asked"
    proposer.commit(again, draft, Verdict((0, 1), 1, "bonus"))
    # the model catches up with all that it did not see
    later = [*again, 4, 5, 9]
    alone = run_alone(model().draft(later, chain(later), Room(3)))
    assert run_alone(proposer.draft(later, chain(later), Room(3))).tokens == alone.tokens
    assert proposer.lanes == (context_of(drafts),)


def test_all_copies_are_weighed_and_the_model_is_asked_only_without_one() -> None:
    weighed: list[list[Guess]] = []
    answers: list[tuple[int, int]] = []

    def pick(guesses: Sequence[Guess]) -> tuple[int, int]:
        weighed.append(list(guesses))
        return answers.pop(0)

    drafts = model()
    proposer = MixedDrafter([SuffixDrafter(), NgramDrafter(), drafts])
    assert proposer.paid == "draft"
    proposer.start(request())
    # the newest way on behind (2, 3) is 9, the most frequent one is 4
    text = [2, 3, 4, 5, 2, 3, 4, 6, 2, 3, 9, 8, 2, 3]
    answers = [(1, 2)]
    draft = run_alone(proposer.draft(text, chain(text), Room(4, Answers(pick=pick))))
    assert (draft.source, draft.tokens) == ("ngram", (9, 8))
    assert [(g.source, g.tokens[0]) for g in weighed[0]] == [("suffix", 4), ("ngram", 9)]
    frequent, newest = (guess.shares[0] for guess in weighed[0])
    assert frequent > 1.9 * newest > 0.0
    assert not context_of(drafts).passes
    answers = [(0, 0)]
    assert (
        run_alone(proposer.draft(text, chain(text), Room(4, Answers(pick=pick)))).source == "draft"
    )
    # a model that stays out leaves the round to the copies again
    answers = [(0, 0), (0, 1)]
    silent = Room(4, Answers(pick=pick, read=lambda source, lag: 0))
    assert run_alone(proposer.draft(text, chain(text), silent)).tokens == (4,)
    assert not answers
    # with nobody to weigh them, a match has to be long to go before the model
    assert run_alone(proposer.draft(text, chain(text), Room(4))).source == "draft"


def test_a_mixture_asks_the_target_for_what_its_head_needs() -> None:
    class Head(Drafter):
        def __init__(self, name: str, needs: HiddenNeed) -> None:
            self.name, self.needs = name, needs
            self.read = 0

        def reusable(self, tokens: Sequence[int], cached: int) -> int:
            return cached // 2

        def read_prompt(self, tokens: Sequence[int], n: int) -> Steps[None]:
            yield from ()
            self.read += n

    head = Head("eagle3", (1, 2, 3))
    mixed = Kit(FakeContext(FakeTable(V)), made={"eagle3": head}).drafter("mixed")
    assert (mixed.paid, mixed.needs) == ("eagle3", (1, 2, 3))
    run_alone(mixed.read_prompt([1] * 9, 8))
    assert head.read == 8
    assert mixed.reusable([1] * 9, 8) == 4

    heads = {"eagle3": head, "mtp": Head("mtp", "nextn"), "self": Head("self", "nothing")}
    best = Kit(FakeContext(FakeTable(V)), made=dict(heads)).drafter("mixed")
    assert best.needs == "nextn"
    pair = Kit(FakeContext(FakeTable(V)), FakeContext(FakeTable(V)), made=dict(heads)).all()
    assert isinstance(pair["mixed"], MixedDrafter)
    assert (pair["mixed"].paid, pair["mixed"].needs) == ("draft", "nothing")
    assert pair["mixed"].advice() == ""
    bare = Kit(FakeContext(FakeTable(V))).drafter("mixed")
    assert bare.paid == ""
    assert bare.reusable([1] * 9, 8) == 8


# -- helpers and types ---------------------------------------------------------------------------


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=30))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(a, b) == expected
    assert common_prefix(a, a + b) == len(a)


def test_drafts_are_checked() -> None:
    with pytest.raises(ValueError, match="length"):
        Draft(
            tokens=(1, 2), parents=(-1,), q=(None, None), confidence=(None,) * 2, sources=("x",) * 2
        )
    for parents in ((0,), (-2,), (1, 0)):
        n = len(parents)
        with pytest.raises(ValueError, match="parent"):
            Draft((1,) * n, parents, (None,) * n, (None,) * n, ("x",) * n)
    tree = Draft((1, 2, 3), (-1, -1, 0), (None,) * 3, (None,) * 3, ("a", "b", "a"))
    assert not tree.is_chain
    assert not tree.is_line
    assert tree.source == "a+b"
    assert [tree.children(i) for i in (-1, 0, 1)] == [[0, 1], [2], []]
    line = Draft((1, 2), (-1, 0), (None,) * 2, (None,) * 2, ("a", "a"), (False, True))
    assert (line.is_line, line.is_chain) == (True, False)
    assert EMPTY_DRAFT.is_chain
    assert EMPTY_DRAFT.source == "none"
