"""The adaptive window: decisions, reasons, learning, and what it must never look at."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence

import pytest

from specllama.bench.replay import Replay, Spot, VirtualClock, replay
from specllama.params import GenerateParams
from specllama.speculative.adaptive import AdaptiveWindow
from specllama.speculative.calibrate import SourceState, draft_features, match_features, sigmoid
from specllama.speculative.learned import (
    CREDIT_ASIDE,
    CREDIT_FIRST,
    CREDIT_LEAST,
    CREDIT_MOST,
    LOOKS_SHARE,
    Account,
    Balance,
    Costs,
    Learned,
    Looking,
)
from specllama.speculative.offers import compare, weigh
from specllama.speculative.types import Guess
from specllama.speculative.window import Outcome

FLAT = [0.0, *(1 + 0.12 * (n - 1) for n in range(1, 18))]
STEEP = [0.0, *(1 + 0.9 * (n - 1) for n in range(1, 18))]


def window(
    learned: Learned, clock: VirtualClock, *, draft_max: int = 8, peek: bool = True
) -> AdaptiveWindow:
    return AdaptiveWindow(learned, draft_max=draft_max, peek=peek, clock=clock)


def play(
    trace: Sequence[Spot],
    verify: Sequence[float],
    step: float,
    *,
    learned: Learned | None = None,
    peek: bool = True,
    prompt: int = 0,
    draft_max: int = 8,
    use_model: bool = True,
) -> Replay:
    clock = VirtualClock()
    return replay(
        trace,
        window(learned or Learned(Costs()), clock, draft_max=draft_max, peek=peek),
        clock,
        verify=verify,
        draft=step,
        prompt=prompt,
        peek=peek,
        use_model=use_model,
    )


def steady(n: int, rate: float, seed: int = 1) -> list[Spot]:
    """A draft that is right at ``rate`` and says so, with scatter."""
    rng = random.Random(seed)
    spots = []
    for _ in range(n):
        p = sigmoid(math.log(rate / (1 - rate)) + rng.gauss(0, 1.5))
        spots.append(Spot(rng.random() < p, confidence=p, lead=max(0.0, 2 + 2 * p)))
    return spots


@pytest.mark.parametrize("peek", [True, False])
def test_a_good_draft_is_used_and_a_useless_one_is_not(peek: bool) -> None:
    good = play(steady(1500, 0.85), FLAT, 0.05, peek=peek)
    assert good.speed > 1.6
    bad = play(steady(1500, 0.02), FLAT, 0.05, peek=peek)
    assert bad.drafted < 150
    assert bad.speed > 0.98


@pytest.mark.parametrize("peek", [True, False])
def test_nothing_is_drafted_for_long_where_rows_are_dear(peek: bool) -> None:
    result = play(steady(1500, 0.6), STEEP, 0.3, peek=peek)
    assert result.speed > 0.98
    assert result.drafted < 0.05 * result.tokens


def test_it_beats_every_fixed_length_on_mixed_text() -> None:
    """Confidence is worth something: no single length does as well."""
    from specllama.speculative.window import FixedWindow

    trace = steady(1000, 0.9, 1) + steady(1000, 0.3, 2) + steady(1000, 0.8, 3)
    adaptive = play(trace, FLAT, 0.08).speed
    for k in range(9):
        clock = VirtualClock()
        fixed = replay(trace, FixedWindow(k), clock, verify=FLAT, draft=0.08).speed
        assert adaptive > fixed


def test_it_steps_over_a_dear_middle_to_a_cheap_group() -> None:
    """Four rows cheaper than two: lengths 1 and 2 lose, 3 wins, and the window finds it."""
    groups = [0.0, 1.0, 1.75, 2.5, 1.3, 2.2, 2.9, 3.6, 2.4, 3.3, 4.0, 4.7, 3.5, 4.4, 5.1, 5.8, 4.6]
    result = play(steady(3000, 0.85), groups, 0.05, draft_max=7)
    assert result.speed > 1.5


def test_look_ahead_prices_a_look_before_the_step() -> None:
    """Average acceptance does not pay here, but the confident third of the guesses does."""
    rng = random.Random(4)
    trace = []
    for _ in range(3000):
        sure = rng.random() < 0.35
        trace.append(
            Spot(rng.random() < (0.97 if sure else 0.05), 0.98 if sure else 0.2, 4.0 * sure)
        )
    dear = [0.0, *(1 + 0.55 * (n - 1) for n in range(1, 18))]
    result = play(trace, dear, 0.05)
    assert sum(s.hit for s in trace) / len(trace) < 0.55 + 0.05  # fact: alpha below c + beta
    assert result.speed > 1.03
    assert result.accepted / result.drafted > 0.85


def test_a_copy_is_taken_by_its_own_merit() -> None:
    copies = [Spot(True, 0.3, 0.1, copy=(20, 8, 8)) for _ in range(800)]
    result = play(copies, FLAT, 0.2, use_model=False)
    assert result.speed > 2.5
    wrong = [Spot(True, 0.3, 0.1, copy=(3, 8, 0)) for _ in range(800)]
    assert play(wrong, FLAT, 0.2, use_model=False).speed > 0.99


def test_the_better_source_wins_the_round() -> None:
    """A copy that fails is passed over for a model that is right, and the other way round."""
    rng = random.Random(1)
    trace = [Spot(rng.random() < 0.95, 0.95, 6.0, copy=(4, 6, 0)) for _ in range(1500)]
    learned = Learned(Costs())
    assert play(trace, FLAT, 0.05, learned=learned).speed > 1.8
    assert learned.sources["ngram"].mean < 0.1
    trace = [Spot(rng.random() < 0.05, 0.4, 0.2, copy=(30, 6, 6)) for _ in range(1500)]
    learned = Learned(Costs())
    assert play(trace, FLAT, 0.05, learned=learned).speed > 2.5
    assert learned.sources["ngram"].mean > 0.9


def test_a_long_prompt_is_read_in_part_when_reading_it_all_is_too_dear() -> None:
    clock = VirtualClock()
    learned = Learned(Costs())
    result = replay(
        steady(600, 0.9), window(learned, clock), clock, verify=FLAT, draft=0.1, prompt=4000
    )
    assert result.speed > 1.3
    # never more than the credit: the first tokens cost at most that much over plain decoding
    assert result.worst_loss(0.01) < CREDIT_FIRST


def test_a_short_reply_is_not_read_anew_by_a_draft_that_did_not_pay() -> None:
    def reply(n: int, known: bool) -> Replay:
        learned = Learned(Costs())
        if known:
            state = learned.source("draft", "draft")
            for i in range(60):
                state.learn(draft_features(0.4, None), i % 3 == 0)
                state.look(draft_features(0.4, None))
                learned.costs.target.observe(i % 9 + 1, STEEP[i % 9 + 1])
                learned.costs.draft.observe(1, 0.1)
        clock = VirtualClock()
        control = AdaptiveWindow(learned, draft_max=8, tokens=n, clock=clock)
        trace = steady(n, 0.35)
        return replay(trace, control, clock, verify=STEEP, draft=0.1, prompt=600)

    short = reply(48, known=True)
    assert short.steps == 0
    assert any("too little left" in reason for reason in short.reasons)
    assert reply(2000, known=True).steps > 0
    assert reply(48, known=False).steps > 0


@pytest.mark.parametrize(("copied", "a_round", "reads"), [(0.0, 3.0, 60), (0.9, 9.0, 0)])
def test_a_text_that_copies_will_write_is_not_read(
    copied: float, a_round: float, reads: int
) -> None:
    learned = Learned(Costs())
    for rows in range(1, 10):
        learned.costs.target.set(rows, 20.0 * FLAT[rows])
    for tokens in (1, 16, 64):
        learned.costs.draft.set(tokens, 2.0 + 0.5 * tokens)
    state = learned.source("draft", "draft")
    for i in range(200):
        features = draft_features(0.7 if i % 3 else 0.2, None)
        state.look(features)
        state.learn(features, i % 3 > 0)
    learned.reply = 30.0
    account = learned.account("mixed")
    account.copied, account.a_round = copied, a_round
    control = window(learned, VirtualClock())
    control.drafts_with("mixed", "draft", copies=True)
    room = control.plan(8).room
    assert room is not None
    state.patience = 0
    state.wait = 5
    assert room.begin("draft", 60) == reads
    again = Account.from_dict(json.loads(json.dumps(account.to_dict())), Balance())
    assert (again.copied, again.a_round) == (copied, a_round)


def test_reasons_are_words_for_people() -> None:
    reasons = " | ".join(
        [
            *play(steady(400, 0.9), FLAT, 0.05).reasons,
            *play(steady(900, 0.02), FLAT, 0.2).reasons,
        ]
    )
    for phrase in (
        "measuring a plain step",
        "tokens expected in the time of",
        "draft too slow here",
        "probing",
    ):
        assert phrase in reasons
    assert "nan" not in reasons


def test_off_and_last_token_and_room() -> None:
    clock = VirtualClock()
    assert window(Learned(Costs()), clock, draft_max=0).plan(10).reason == "off"
    w = window(Learned(Costs()), clock)
    assert w.plan(0).reason == "last token"
    assert w.plan(5).draft_max == 0  # a plain step is not measured yet
    for _ in range(4):
        assert w.plan(5).reason == "measuring a plain step"
        w.observe(Outcome("none", 0, 0, 1, (), 0.0, 10.0, 10.0, (5,)))
    assert 0 < w.plan(3).draft_max <= 3


@pytest.mark.parametrize("peek", [True, False])
def test_what_depends_on_the_drawn_token(peek: bool) -> None:
    """Under rejection and block no decision may look at a drawn token or its lead."""
    learned = Learned(Costs())
    play(steady(600, 0.8), FLAT, 0.05, learned=learned, peek=peek)
    state = json.dumps(learned.to_dict())
    answers = set()
    for lead, token in ((0.0, 3), (8.0, 9), (None, None)):
        again = Learned(Costs())
        again.costs.restore(learned.costs.to_dict())
        again.restore(json.loads(state))
        w = window(again, VirtualClock(), peek=peek)
        room = w.plan(8).room
        assert room is not None
        assert room.begin("draft", 1) == 1
        answers.add((room.include(0.55, lead, token), w._bets.survival))
    assert len(answers) == (2 if peek else 1)  # without a lead: as without a margin


def test_a_timing_outlier_does_not_silence_the_draft() -> None:
    class Hiccup(VirtualClock):
        def steps(self, n: float) -> None:
            super().steps(n * 10 if 0.1 < self.now < 0.101 else n)

    clock = Hiccup()
    result = replay(
        steady(1200, 0.9), window(Learned(Costs()), clock), clock, verify=FLAT, draft=0.05
    )
    calm = play(steady(1200, 0.9), FLAT, 0.05)
    assert result.drafted > 0.8 * calm.drafted


def test_proposers_that_never_ask_are_held_to_their_record() -> None:
    """A source that ignores the questions still gets a length from its acceptance."""

    def run(right: int) -> int:
        clock = VirtualClock()
        w = window(Learned(Costs()), clock)
        drafted = 0
        for _ in range(300):
            plan = w.plan(8)
            n = plan.draft_max
            drafted += n
            accepted = min(right, n)
            ms = FLAT[n + 1]
            w.observe(
                Outcome(
                    "heads" if n else "none", n, accepted, accepted + 1, (0.5,) * n, 0.0, ms, ms,
                    (1,) * (accepted + 1),
                )
            )  # fmt: skip
        return drafted

    assert run(8) > 1000
    assert run(0) < 120


def test_calibration_learns_what_confidence_is_worth() -> None:
    """Reliability within 0.05 in every bin that matters, for an over-confident source."""
    rng = random.Random(2)
    state = SourceState()
    bins: dict[int, list[tuple[float, bool]]] = {}
    for n in range(6000):
        says = rng.uniform(0.05, 0.98)
        really = sigmoid(0.6 * math.log(says / (1 - says)) - 0.5)
        hit = rng.random() < really
        features = draft_features(says, None)
        if n > 1000:
            bins.setdefault(int(state.predict(features) * 5), []).append(
                (state.predict(features), hit)
            )
        state.learn(features, hit)
    for cell in bins.values():
        if len(cell) > 200:
            predicted = sum(p for p, _ in cell) / len(cell)
            seen = sum(h for _, h in cell) / len(cell)
            assert abs(predicted - seen) < 0.05


def test_confidence_never_counts_against_a_guess() -> None:
    state = SourceState()
    for _ in range(500):
        state.learn(draft_features(0.99, 8.0), False)
        state.learn(draft_features(0.01, 0.0), True)
    assert state.predict(draft_features(0.99, 8.0)) >= state.predict(draft_features(0.01, 0.0))


def test_a_new_text_may_be_like_any_of_the_earlier_ones() -> None:
    sure, unsure = draft_features(0.99, 6.0), draft_features(0.1, 0.1)

    def promise(state: SourceState) -> float:
        return sum(a * weight for a, weight in state.spread())

    state = SourceState()
    for looks in (sure, sure, sure, unsure):
        state.fresh()
        for _ in range(30):
            state.look(looks)
    state.fresh()
    assert promise(state) > 0.6  # the last text alone would say 0.3
    restored = SourceState.from_dict(json.loads(json.dumps(state.to_dict())))
    assert promise(restored) == pytest.approx(promise(state))
    for _ in range(24):
        state.look(unsure)
    state.learn(unsure, False)
    assert promise(state) < 0.4


def test_what_sets_a_text_apart_is_forgotten_with_it() -> None:
    guess = draft_features(0.9, 3.0)
    state = SourceState()
    for n in range(200):
        if n % 10 == 0:
            state.fresh()
        state.learn(guess, n % 10 > 0)
    usual = state.predict(guess)
    state.fresh()
    for _ in range(6):
        state.learn(guess, False)
    here = state.predict(guess)
    state.fresh()
    assert here < usual - 0.25
    assert state.predict(guess) > (usual + here) / 2


def test_credit_is_saved_up_for_a_draft_model_that_pays() -> None:
    """Too little for a draft of the right length is not spent on shorter ones, which lose."""
    verify = [0.0, 1.0, 1.8, 2.55, 2.4, 3.25, 3.9, 4.8, 4.75, *(5.4 + 0.3 * n for n in range(9))]
    learned = Learned(Costs())
    play(steady(1500, 0.97), verify, 0.17, learned=learned)
    learned.account("").own.credit = 2.0
    trace = steady(1500, 0.97, seed=2)
    result = play(trace, verify, 0.17, learned=learned, prompt=40)
    assert any("saving up" in reason for reason in result.reasons)
    assert result.speed > 1.1
    assert learned.account("").credit > 4.0


def test_longer_matches_copy_better_by_default() -> None:
    state = SourceState("copy")
    odds = [state.predict(match_features(n, 0)) for n in (1, 2, 4, 8, 32)]
    assert odds == sorted(odds)


def test_copies_recover_first_from_what_the_paying_source_lost() -> None:
    balance = Balance(least=CREDIT_LEAST)
    balance.share()
    assert balance.purse == CREDIT_FIRST
    balance.book(-50.0)  # a disturbed look at the draft model
    assert balance.credit == CREDIT_LEAST
    assert balance.reserve > 0.0
    for _ in range(400):
        balance.earn(0.01)
    assert balance.reserve == pytest.approx(CREDIT_ASIDE)
    balance.book(-3.0, copy=True)  # the copies' own losses come out of it
    assert balance.reserve == pytest.approx(CREDIT_ASIDE - 3.0)
    balance.book(100.0, copy=True)
    assert balance.purse <= CREDIT_MOST + 1.0
    assert Balance.from_list(json.loads(json.dumps(balance.to_list())), CREDIT_LEAST) == balance


def test_what_one_method_loses_no_other_may_lose_again() -> None:
    learned = Learned(Costs())
    first, second = learned.account("draft"), learned.account("lookahead")
    first.book(-6.0)
    assert second.own.credit == CREDIT_FIRST
    assert second.credit == second.purse == CREDIT_FIRST - 6.0
    first.book(100.0)  # and what it gains, the other cannot spend beyond its own
    second.book(-CREDIT_FIRST)
    assert second.credit == 0.0
    assert first.credit == pytest.approx(CREDIT_MOST - CREDIT_FIRST)
    second.book(-30.0)  # a debt is paid back whole
    for _ in range(100):
        first.earn(0.01)
    assert first.credit == pytest.approx(CREDIT_MOST - CREDIT_FIRST - 30.0 + 1.0)
    assert first.purse == 0.0


@pytest.mark.parametrize(
    ("look", "asked"), [(0.002, (790, 800)), (0.012, (250, 450)), (0.1, (20, 80))]
)
def test_looking_for_copies_in_vain_does_not_keep_a_method_down(
    look: float, asked: tuple[int, int]
) -> None:
    """Measured: a look costs 0.2 % of a 1 B step, up to a tenth of one of the bundled target."""
    learned = Learned(Costs())
    for rows in range(1, 10):
        learned.costs.target.set(rows, 20.0 * FLAT[rows])
    account = learned.account("")
    account.own.credit = 1.0
    control = window(learned, VirtualClock())
    looks = 0
    for _ in range(800):
        room = control.plan(8).room
        looks += room is not None
        draft_ms = 20.0 * look if room is not None else 0.0
        control.observe(Outcome("none", 0, 0, 1, (), draft_ms, 20.0, 20.0 + draft_ms, (1,)))
    assert asked[0] <= looks <= asked[1]
    assert account.credit > 2.5
    again = Account.from_dict(json.loads(json.dumps(account.to_dict())), Balance())
    assert again.looking == account.looking


def test_looking_goes_on_where_what_is_found_pays_for_it() -> None:
    looking = Looking()
    for _ in range(100):
        looking.missed(0.1)
    assert looking.wait == pytest.approx(0.1 / LOOKS_SHARE, abs=1)
    for _ in range(100):
        looking.found(1.5)
        for _ in range(5):
            looking.wait = 0
            looking.missed(0.1)
    assert looking.wait == 0


def test_plain_steps_decided_together_count_like_single_ones() -> None:
    def run(wait: int) -> tuple[Learned, float]:
        learned = Learned(Costs())
        for rows in range(1, 10):
            learned.costs.target.set(rows, 20.0 * FLAT[rows])
        account = learned.account("")
        account.own.credit = 1.0
        account.looking.wait = wait
        control = window(learned, VirtualClock())
        for _ in range(50):
            control.plan(8)
            control.observe(Outcome("none", 0, 0, 1, (), 0.0, 20.0, 20.0, (1,)))
        control.finish()
        return learned, account.credit

    learned, credit = run(400)
    single, expected = run(0)
    assert learned.account("").looking.wait == 350
    assert credit == pytest.approx(expected)
    assert learned.reply == single.reply
    mine, other = learned.account(""), single.account("")
    assert (mine.pace.tokens, mine.pace.ms) == pytest.approx((other.pace.tokens, other.pace.ms))


def test_a_copy_goes_less_far_the_less_may_be_lost() -> None:
    def length(purse: float) -> int:
        copy = weigh(Guess("suffix", tuple(range(15)), 20), SourceState("copy"), 15)
        compare([copy], [0.0, *(1 + 0.35 * n for n in range(17))], 1.0, purse)
        return copy.length

    lengths = [length(purse) for purse in (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 100.0)]
    assert lengths == sorted(lengths)
    assert lengths[0] == 0
    assert lengths[-1] > lengths[3]


def test_a_copy_is_learnt_to_end_where_passages_do() -> None:
    state = SourceState("copy")
    within, behind = match_features(20, 0), match_features(20, 0, 1.0, 1.0)
    assert state.predict(behind) < state.predict(within)
    for _ in range(60):
        state.learn(within, True)
        state.learn(behind, False)
    assert state.predict(within) > 0.8
    assert state.predict(behind) < 0.3


def test_state_survives_a_round_trip_and_damage_is_refused() -> None:
    learned = Learned(Costs())
    play(steady(500, 0.7), FLAT, 0.05, learned=learned)
    data = json.loads(json.dumps(learned.to_dict()))
    again = Learned(Costs())
    again.restore(data)
    state, restored = learned.sources["draft"], again.sources["draft"]
    for features in ((0.0, 0.0, 0.0), (1.0, 2.0, 1.0), (4.0, -1.0, 0.5)):
        assert restored.predict(features) == pytest.approx(state.predict(features))
    assert again.account("").own == learned.account("").own
    source = data["sources"]["draft"]
    for damage in (
        {**source, "theta": [1, 2]},
        {**source, "p": [[1, 0, 0]]},
        {**source, "mean": "many"},
        {**source, "recent": [[1]]},
    ):
        with pytest.raises((ValueError, TypeError, KeyError)):
            Learned(Costs()).restore({**data, "sources": {"draft": damage}})
    for account in (
        {**data["accounts"][""], "own": [float("nan"), 0.0, 0.0]},
        {**data["accounts"][""], "own": [1.0]},
        {**data["accounts"][""], "blind": [0, 0.0]},
        {"own": [1.0, 0.0, 0.0]},
    ):
        with pytest.raises((ValueError, TypeError, KeyError)):
            Learned(Costs()).restore({**data, "accounts": {"mixed": account}})
    for reply in ([float("nan"), 1], [-1.0, 1], [50.0, -1], 7):
        with pytest.raises((ValueError, TypeError)):
            Learned(Costs()).restore({**data, "reply": reply})


def test_params_know_the_window() -> None:
    from specllama.errors import UsageError

    assert GenerateParams().window == "auto"
    with pytest.raises(UsageError, match="window"):
        GenerateParams(window="sometimes")  # type: ignore[arg-type]
