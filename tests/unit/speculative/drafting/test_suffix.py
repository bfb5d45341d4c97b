"""Suffix decoding: what follows a state, what is drafted, one text per seed."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import FULL, Leaves, Setup, is_eog
from windows import Answers

from specllama.events import RoundDone
from specllama.settings.params import VerifyRule
from specllama.speculative.drafting import copying
from specllama.speculative.drafting.copying import Backoff
from specllama.speculative.drafting.drafter import Request
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.drafting.suffix import PAST, State, SuffixDrafter
from specllama.speculative.drafting.text_library import BREAK, Library
from specllama.speculative.effects import run_alone
from specllama.speculative.round import Rounds
from specllama.speculative.rules import MATCH, RandomCoins, Rule, rule_of
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Guess, Room, Verdict
from specllama.text_history import History


def occurrences(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """End positions of ``part`` in ``text``."""
    n = len(part)
    return [i + n for i in range(len(text) - n + 1) if list(text[i : i + n]) == list(part)]


def state(text: Sequence[int], part: Sequence[int]) -> State:
    return State.at(History(text), [end - 1 for end in occurrences(text, part)])


def test_followers_come_by_frequency_then_newest_first() -> None:
    at = state([1, 5, 1, 6, 1, 6, 1, 7, 1, BREAK, 1], [1])
    shares = [(token, share) for token, _, share in at.followers()]
    assert [token for token, _ in shares] == [6, 7, 5]  # and no break
    assert shares[0][1] == 0.5
    assert sum(share for _, share in shares) == pytest.approx(1.0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8))
def test_a_path_goes_the_way_of_the_first_followers(text: list[int], most: int) -> None:
    text = [BREAK if token == 3 else token for token in text]
    at = state(text, [text[0]])
    path = at.path(most, lambda token: False)
    for token in path:
        first, at, _ = at.followers()[0]
        assert first == token
    assert len(path) == most or not at.followers()
    ended = state(text, [text[0]]).path(most, lambda token: token == 2)
    assert ended == (path[: path.index(2) + 1] if 2 in path else path)


def test_what_follows_many_places_is_counted_at_the_newest() -> None:
    text = [*[1, 2] * 300, *[1, 3] * 20, 1]
    assert [token for token, _, _ in state(text, [1]).followers()] == [3, 2]


CHAIN = SamplerChain(FULL)  # which copies do not ask


# -- what is drafted ----------------------------------------------------------------------------


def started(proposer: SuffixDrafter, leaves: int = 1) -> SuffixDrafter:
    proposer.start(Request(seed=0, rule=MATCH, coins=RandomCoins(0), is_eog=is_eog, leaves=leaves))
    return proposer


def drafted(proposer: SuffixDrafter, tokens: Sequence[int], n: int = 8) -> Draft:
    return run_alone(proposer.draft(tokens, SamplerChain(FULL, tokens=tokens), Room(n)))


def test_the_longest_match_is_copied() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 9, 1, 2, 3, 4, 5]
    assert drafted(started(SuffixDrafter()), text).tokens[:3] == (6, 7, 8)


def beside(*texts: History, rule: Rule = MATCH) -> SuffixDrafter:
    """A drafter of a conversation alongside which these texts are written."""
    drafter = SuffixDrafter()
    coins = RandomCoins(0)
    drafter.start(Request(seed=0, rule=rule, coins=coins, is_eog=is_eog, beside=lambda: texts))
    return drafter


def test_what_is_written_alongside_is_copied_while_it_grows() -> None:
    text, other = History([1, 2, 9, 4, 5]), History([7, 3, 4, 5])
    drafter = beside(History(), other)
    assert drafter.guesses(text, CHAIN, 8) == []
    text.append(6)
    other.extend([6, 11, 12])
    [guess] = drafter.guesses(text, CHAIN, 8)
    assert (guess.source, guess.tokens, guess.match_length) == ("suffix-beside", (11, 12), 3)
    assert drafter.send(guess, 2, Room(8)).tokens == (11, 12)
    text.append(11)
    other.cut(5)
    other.extend([11, 13])
    assert drafter.guesses(text, CHAIN, 8)[0].tokens == (13,)


def test_what_is_written_alongside_has_to_match_longer() -> None:
    text = History([4, 5, 6, 8, 1, 4, 5, 6])
    sources = [g.source for g in beside(History([4, 5, 6, 9])).guesses(text, CHAIN, 8)]
    assert sources == ["suffix"]
    sources = [g.source for g in beside(History([1, 4, 5, 6, 9])).guesses(text, CHAIN, 8)]
    assert sources == ["suffix-beside", "suffix"]


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_coins_judge_nothing_that_the_same_coins_may_have_drawn(rule: VerifyRule) -> None:
    text, other = History([1, 2, 3]), History([7, 2, 3, 4])
    assert beside(other, rule=rule_of(rule)).guesses(text, CHAIN, 8) == []
    assert beside(other).guesses(text, CHAIN, 8)


def test_the_most_frequent_continuation_wins_over_the_newest() -> None:
    text = [*[3, 4, 5, 9] * 5, 3, 4, 5, 8, 3, 4, 5]
    assert drafted(started(SuffixDrafter()), text).tokens[0] == 9
    ngram = NgramDrafter()
    ngram.start(Request(seed=0, rule=MATCH, coins=RandomCoins(0), is_eog=is_eog))
    assert run_alone(ngram.draft(text, SamplerChain(FULL, tokens=text), Room(1))).tokens[0] == 8


def test_trees_hold_the_alternatives_where_the_target_takes_trees() -> None:
    text = [*[3, 4, 5, 6, 9, 1, 2] * 3, *[3, 4, 5, 6, 8, 7] * 2, 30, 3, 4, 5, 6]
    assert drafted(started(SuffixDrafter(), 1), text).is_chain
    tree = drafted(started(SuffixDrafter(), 4), text, 12)
    assert {t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == -1} == {9, 8}
    assert tree.tokens[0] == 9  # the more frequent branch first
    assert all(q is None for q in tree.q)


def test_nothing_is_drafted_without_a_match_and_nothing_behind_a_stop() -> None:
    assert not len(drafted(started(SuffixDrafter()), [1, 2, 3, 4]))
    assert not len(drafted(started(SuffixDrafter()), [5]))
    assert not len(drafted(started(SuffixDrafter()), [1, 2, 1, 2], n=0))
    text = [1, 2, 3, 0, 4, 5, 1, 2, 3]
    assert drafted(started(SuffixDrafter()), text).tokens == (0,)


def test_the_window_may_trim_a_copy() -> None:
    text = [*range(1, 30), *range(1, 15)]
    for limit in (0, 2, 99):
        asked: list[Guess] = []

        def pick(
            guesses: Sequence[Guess], limit: int = limit, asked: list[Guess] = asked
        ) -> tuple[int, int]:
            asked.extend(guesses)
            return 0, min(limit, len(guesses[0].tokens))

        proposer = started(SuffixDrafter(), 4)
        draft = run_alone(
            proposer.draft(text, SamplerChain(FULL, tokens=text), Room(6, Answers(pick=pick)))
        )
        habits = Backoff()
        habits.follow(History(text))
        copied = tuple(range(15, 21))
        assert asked == [Guess("suffix", copied, 14, habits.likely(copied))]
        assert draft.tokens == tuple(range(15, 15 + min(limit, 6)))


@pytest.mark.parametrize("worth", [0.0, 0.1, 1.1])
def test_branches_beside_a_copy_are_asked_for(worth: float) -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3, 6, 7, 1, 2, 3, 4, 8, 1, 2, 3]
    judge = Answers(pick=lambda guesses: (0, 2), row=lambda likely, keep=True: likely >= worth)
    room = Room(8, judge)
    draft = run_alone(
        started(SuffixDrafter(), 4).draft(text, SamplerChain(FULL, tokens=text), room)
    )
    assert draft.tokens[:2] == (4, 8)  # most often 4 followed, and 8 the last time
    assert draft.parents[:2] == (-1, 0)
    beside = {(parent, token) for parent, token in zip(draft.parents, draft.tokens, strict=True)}
    assert ((-1, 6) in beside) is (worth < 0.3)
    assert draft.is_chain is (worth > 1.0)
    copy = started(SuffixDrafter(), 4)
    guess = copy.guesses(text, CHAIN, 8)[0]
    assert copy.send(guess, 2, room) == draft
    alone = copy.send(guess, 2, Room(8))
    assert alone.tokens == (4, 8)
    assert alone.is_chain


def test_reliability_is_learnt_from_tested_guesses() -> None:
    proposer = started(SuffixDrafter())
    text = [*range(1, 30), *range(1, 5)]
    before = drafted(proposer, text).confidence[0]
    for _ in range(30):
        draft = drafted(proposer, text)
        proposer.commit(text, draft, Verdict((), 99, "recovered"))
    assert before is not None
    assert not len(draft) or (draft.confidence[0] or 0.0) < before / 2


def test_edited_texts_are_followed() -> None:
    proposer = started(SuffixDrafter())
    drafted(proposer, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    edited = [1, 2, 3, 11, 12, 13, 4, 5, 6, 7]
    assert drafted(proposer, edited).tokens == (8, 9)  # from before the edit


def test_past_texts_are_copied_from() -> None:
    past = [[20, 21, 22, 23, 24, 25, 26]]
    assert drafted(started(SuffixDrafter(library=Library(past))), [1, 20, 21, 22]).tokens[:2] == (
        23,
        24,
    )
    assert BREAK not in drafted(started(SuffixDrafter(library=Library(past))), [1, 25, 26]).tokens


@given(
    st.lists(st.lists(st.integers(1, 3), max_size=90), max_size=3),
    st.lists(st.integers(1, 3), min_size=1, max_size=90),
)
def test_a_library_finds_the_longest_end(texts: list[list[int]], end: list[int]) -> None:
    library = Library(texts)
    whole = [token for text in texts for token in (*text, BREAK)]
    assert list(library.text) == whole
    longest = max((n for n in range(65) if n <= len(end) and occurrences(whole, end[-n:])),
                  default=0) if whole else 0  # fmt: skip
    places, length = library.find(end, 4)
    assert length == longest
    if length:
        assert places == [i - 1 for i in occurrences(whole, end[-length:])][-4:]
    else:
        assert places == []


def test_an_earlier_text_is_asked_only_where_it_matches_longer() -> None:
    proposer = started(SuffixDrafter(library=Library([[18, 11, 12, 13, 19]])))
    here = [11, 12, 13, 17, 15, 16]
    as_long = proposer.guesses([*here, 11, 12, 13], CHAIN, 1)
    assert [(g.source, g.tokens, g.match_length) for g in as_long] == [("suffix", (17,), 3)]
    longer = proposer.guesses([*here, 18, 11, 12, 13], CHAIN, 1)
    assert [(g.source, g.tokens, g.match_length) for g in longer] == [
        (PAST, (19,), 4),
        ("suffix", (17,), 3),
    ]


def test_what_an_edit_replaced_can_still_be_copied() -> None:
    proposer = started(SuffixDrafter())
    drafted(proposer, [1, 2, 3, 31, 32, 33, 34, 35])
    guesses = proposer.guesses([1, 2, 3, 40, 31, 32], CHAIN, 2)
    assert [(g.source, g.tokens) for g in guesses] == [(PAST, (33, 34))]


def test_what_was_seen_can_be_forgotten() -> None:
    proposer = started(SuffixDrafter(library=Library([[20, 21, 22, 23, 24]])))
    drafted(proposer, [1, 2, 3, 4, 5, 6])
    proposer.forget()
    assert not len(drafted(proposer, [9, 2, 3, 4]))
    assert drafted(proposer, [9, 20, 21]).tokens[0] == 22  # kept texts stay


def test_what_is_kept_of_earlier_texts_is_bounded() -> None:
    proposer = started(SuffixDrafter(most=200))
    rng = random.Random(2)
    for _ in range(60):
        drafted(proposer, [rng.randrange(1, 9) for _ in range(50)])
    assert len(proposer._past.within) <= 200


# -- one seed, one text -------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_rules_run(rule: VerifyRule) -> None:
    setup = Setup(rule=rule, draft_max=6, eog_bias=-9.0, length=60)
    setup.run(Leaves(SuffixDrafter(), 1 if setup.judge.chains_only else 4))


def test_drafts_are_really_accepted() -> None:
    accepted = 0

    def count(loop: Rounds, done: RoundDone) -> None:
        nonlocal accepted
        accepted += len(done.accepted_path)

    setup = Setup(
        sampling=dataclasses.replace(FULL, temperature=0.0), eog_bias=-20.0, length=150, draft_max=8
    )
    setup.run(SuffixDrafter(), count)
    assert accepted > 50  # a greedy text runs in circles


# -- the text's own habits and a copied token --


def of(text: list[int]) -> Backoff:
    habits = Backoff()
    habits.follow(History(text))
    return habits


def test_the_estimate_is_that_of_witten_and_bell() -> None:
    habits = of([1, 2, 3, 9, 2, 3, 8, 2, 4, 1, 2])
    # after 2 came 3, 3, 4; after (1, 2) came 3
    one = (2 + 2 * 0.02) / (3 + 2)
    assert habits.likely([3]) == pytest.approx([(1 + 1 * one) / (1 + 1)])
    other = (1 + 2 * 0.02) / (3 + 2)
    assert habits.likely([4]) == pytest.approx([(0 + 1 * other) / (1 + 1)])
    assert habits.likely([7])[0] == pytest.approx(0.5 * (2 * 0.02) / 5)


def test_a_copied_token_is_judged_behind_those_before_it() -> None:
    habits = of([1, 2, 3, 4, 5, 1, 2])
    behind_3 = (1 + 0.02) / (1 + 1)
    first, second = habits.likely([3, 4])
    assert second == pytest.approx((1 + behind_3) / (1 + 1)), "behind (2, 3), where 4 always came"
    assert habits.likely([4])[0] < 0.01, "behind (1, 2) it never did"
    # copying proves nothing: the counts are those of the text
    assert habits.likely([3, 4]) == (first, second) == of([1, 2, 3, 4, 5, 1, 2]).likely([3, 4])


def test_what_always_follows_is_safer_than_one_of_many() -> None:
    key, colon = 1, 2
    values = of([key, colon, 10, key, colon, 11, key, colon, 12, key, colon])
    assert of([key, colon, 10, key, colon, 10, key, colon, 10, key, colon]).likely([10])[0] > 0.9
    assert values.likely([12])[0] < 0.4
    assert Backoff().likely([5, 6]) == (0.02, 0.02)


Change = tuple[int, list[int]]  # tokens kept (modulo the length), tokens that follow


@pytest.mark.parametrize("newest", [3, 4096])
@given(st.lists(st.tuples(st.integers(0, 40), st.lists(st.integers(0, 5), max_size=9)), max_size=9))
def test_following_changes_is_reading_at_once(newest: int, changes: list[Change]) -> None:
    """Whatever is counted one by one or sorted, appended or cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "_NEWEST", newest)
        text, habits, copied = History(), Backoff(), [0, 1, 2]
        for keep, more in changes:
            text.cut(keep)
            text.extend(more)
            habits.follow(text)
            assert habits.likely(copied) == pytest.approx(of(list(text)).likely(copied), abs=1e-15)
            assert all(0.0 < p < 1.0 for p in habits.likely(copied))
