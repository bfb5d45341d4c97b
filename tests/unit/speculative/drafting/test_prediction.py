"""What a caller expects: followed from its beginning, found again behind differences, exact."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from table_model import FakeTable
from toys import FULL, PROMPT, SAMPLERS, Setup, is_eog

from specllama.events import RoundDone
from specllama.settings.params import VerifyRule
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.mixed import MixedDrafter
from specllama.speculative.drafting.ngram import NgramDrafter
from specllama.speculative.drafting.prediction import PredictionDrafter
from specllama.speculative.drafting.suffix import SuffixDrafter
from specllama.speculative.effects import Steps
from specllama.speculative.policy.learned import Acceptance, match_features
from specllama.speculative.round import Rounds
from specllama.speculative.rules import MATCH, RandomCoins
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT, Draft, Guess, Room, Verdict

OLD = random.Random(1).choices(range(1, 40), k=600)  # few tokens: every one stands in many places


def expecting(prediction: Sequence[int], **more: object) -> PredictionDrafter:
    drafter = PredictionDrafter()
    request = Request(seed=0, rule=MATCH, coins=RandomCoins(0), is_eog=is_eog)
    drafter.start(dataclasses.replace(request, prediction=prediction, **more))  # type: ignore[arg-type]
    return drafter


CHAIN = SamplerChain(FULL)  # which copies do not ask


def guesses(reply: Sequence[int], old: Sequence[int], most: int = 8) -> list[tuple[int, int]]:
    """(place in the reply, guesses that are right) of every pass that writes it."""
    drafter, text, found = expecting(old), [9, 9, 9], []
    at = 0
    while at < len(reply):
        told = drafter.guesses(text, CHAIN, most) if at else []
        guess = told[0].tokens if told else ()
        right = next(
            (i for i, (a, b) in enumerate(zip(guess, reply[at:], strict=False)) if a != b),
            min(len(guess), len(reply) - at),
        )
        found.append((at, right))
        new = list(reply[at : at + right + 1])
        text += new
        at += len(new)
        path = tuple(range(right)) if len(new) > right else tuple(range(right - 1))
        drafter.commit(text, EMPTY_DRAFT, Verdict(path, new[-1], "bonus"))
    return found


def test_the_first_token_is_guessed_at_once() -> None:
    drafter = expecting([5, 6, 7])
    [guess] = drafter.guesses([1, 2, 3], CHAIN, 8)
    assert guess.tokens == (5, 6, 7)
    assert guess.match_length > 1, "the caller's word stands for a match"
    assert drafter.guesses([1, 2, 3], CHAIN, 2)[0].tokens == (5, 6)


def test_without_a_prediction_nothing_is_guessed() -> None:
    assert expecting([]).guesses([1, 2], CHAIN, 8) == []
    told = expecting([4, 5])
    told.start(Request(seed=0, rule=MATCH, coins=RandomCoins(0), is_eog=is_eog))
    assert told.guesses([1, 2], CHAIN, 8) == [], "that of the reply before is gone"


NEW = [50, 51, 52]  # tokens that the old text lacks
EDITS = {
    "nothing": lambda old: old,
    "replaced": lambda old: [*old[:300], 50, *old[301:]],
    "by more": lambda old: [*old[:300], *NEW, *old[301:]],
    "inserted": lambda old: [*old[:300], *NEW, *old[300:]],
    "deleted": lambda old: [*old[:300], *old[312:]],
    "by a known token": lambda old: [*old[:300], old[301], *old[301:]],
    "in front": lambda old: [*NEW, *old],
    "moved": lambda old: [*old[:200], *old[300:400], *old[200:300], *old[400:]],
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_difference_is_passed_within_a_few_tokens(edit: str) -> None:
    reply = EDITS[edit](OLD)
    found = guesses(reply, OLD, most=15)
    best = -(-len(reply) // 16) + 1  # the first token comes with the prompt
    assert len(found) <= best + {"nothing": 0, "moved": 12}.get(edit, 5)


def test_of_equal_places_the_nearest_goes_on() -> None:
    line = [7, 8, 9, 10]
    old = [token for n in range(20) for token in (*line, 100 + n)]
    assert len(guesses(old, old, most=15)) == 8
    assert len(guesses([*old[:49], 1, *old[50:]], old, most=15)) <= 9
    assert len(guesses([*old[:49], 1, 2, 3, *old[50:]], old, most=15)) <= 12


@given(st.lists(st.integers(1, 6), max_size=40), st.lists(st.integers(1, 6), max_size=30))
def test_any_reply_may_follow(reply: list[int], old: list[int]) -> None:
    for at, right in guesses(reply, old):
        assert right <= len(reply) - at


def test_a_thought_is_no_part_of_the_reply() -> None:
    thinking = True
    drafter = expecting([5, 6, 7], thinking=lambda: thinking)
    for text in ([1, 8], [1, 8, 6]):
        drafter.commit(text, EMPTY_DRAFT, Verdict((), text[-1], "plain"))
        assert drafter.guesses(text, CHAIN, 8) == []
    thinking = False
    drafter.commit([1, 8, 6, 9], EMPTY_DRAFT, Verdict((), 9, "plain"))
    assert drafter.guesses([1, 8, 6, 9], CHAIN, 8)[0].tokens == (5, 6, 7), "it has not begun"


def test_a_wrong_one_is_soon_believed_no_more() -> None:
    here = Acceptance("prediction")

    def likely(drafter: PredictionDrafter, text: Sequence[int]) -> float:
        [guess] = drafter.guesses(text, CHAIN, 1)
        return here.predict(match_features(guess.match_length, 0, guess.shares[0]))

    right, wrong = expecting(OLD), expecting(OLD)
    assert likely(wrong, [9]) > 0.75, "the caller's word"
    for n in (1, 2, 3):
        right.commit(OLD[:n], EMPTY_DRAFT, Verdict((), OLD[n - 1], "plain"))
        wrong.commit([50] * n, EMPTY_DRAFT, Verdict((), 50, "plain"))
    assert likely(right, OLD[:3]) > 0.85
    assert likely(wrong, [50] * 3) < 0.2


# -- one seed, one text; no law is bent -----------------------------------------------------------


class Expecting(Drafter):
    """A drafter of a reply for which something is expected."""

    def __init__(self, inner: Drafter, prediction: Sequence[int]) -> None:
        self.inner, self.name, self._prediction = inner, inner.name, prediction
        self.drafts: list[Draft] = []

    def start(self, request: Request) -> None:
        self.inner.start(dataclasses.replace(request, prediction=self._prediction))

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        draft = yield from self.inner.draft(tokens, chain, room)
        self.drafts.append(draft)
        return draft

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        self.inner.commit(tokens, draft, verdict)


def edited(reply: Sequence[int], n: int) -> list[int]:
    """Every n-th token is another one, doubled or left out."""
    rng, out = random.Random(n), []
    for i, token in enumerate(reply, 1):
        out += rng.choice(([1 + token % 15], [token, token], [])) if i % n == 0 else [token]
    return out


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.5])
def test_same_seed_same_text(sampler: str, temperature: float) -> None:
    sampling = dataclasses.replace(SAMPLERS[sampler], temperature=temperature)
    for seed, draft_max in ((1, 3), (3, 16)):
        setup = Setup(sampling=sampling, seed=seed, draft_max=draft_max, eog_bias=-9.0, length=45)
        plain = setup.run()
        for prediction in (plain[len(PROMPT) :], edited(plain[len(PROMPT) :], 7), [1, 2] * 40):
            alone = Expecting(PredictionDrafter(), prediction)
            assert setup.run(alone) == plain
            copies = [SuffixDrafter(), NgramDrafter(), PredictionDrafter()]
            assert setup.run(Expecting(MixedDrafter(copies), prediction)) == plain
            assert any(map(len, alone.drafts))


def test_what_is_expected_is_written_in_few_passes() -> None:
    setup = Setup(eog_bias=-20.0, length=120, draft_max=15)
    reply = setup.run()[len(PROMPT) :]
    passes = 0

    def count(loop: Rounds, done: RoundDone) -> None:
        nonlocal passes
        passes += 1

    setup.run(Expecting(PredictionDrafter(), edited(reply, 40)), count)
    assert passes <= 120 / 16 + 3 * 5


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("grammar", [False, True])
def test_every_outcome_has_its_weight(rule: VerifyRule, grammar: bool) -> None:
    """Enumerated: expected texts that are right, wrong and differ in the middle."""
    setup = Setup(seed=0, rule=rule, grammar=grammar, draft_max=3)
    table = FakeTable(3, seed=2, sharpness=0.8)
    for expected in ([1, 2, 1, 2], [2, 2], [1]):
        assert setup.off_by(
            lambda target: PredictionDrafter(), table, [1, 2, 1, 2], 3, prediction=expected
        ) < 1e-9  # fmt: skip


def test_a_guess_says_whose_it_is() -> None:
    assert Guess("suffix", (1,), 1).kind == "copy"
    [guess] = expecting([5]).guesses([1], CHAIN, 4)
    assert (guess.source, guess.kind) == ("prediction", "prediction")
