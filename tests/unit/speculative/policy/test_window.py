"""The adaptive window: decisions, reasons, learning, and what it must never look at."""

from __future__ import annotations

import json
import math
import random

import msgspec
import pytest
from replay import Spot, VirtualClock, replay
from windows import Pair, booking, play

from specllama.settings.params import GenerateParams
from specllama.speculative.policy.acceptance import (
    Acceptance,
    InText,
    draft_features,
    match_features,
    sigmoid,
)
from specllama.speculative.policy.learned import Learned
from specllama.speculative.policy.ledger import Ledger
from specllama.speculative.policy.weighing import Weighing
from specllama.speculative.types import DraftJudge
from specllama.speculative.window import Outcome

FLAT = [0.0, *(1 + 0.12 * (n - 1) for n in range(1, 18))]
STEEP = [0.0, *(1 + 0.9 * (n - 1) for n in range(1, 18))]


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


def test_it_says_what_it_may_lose() -> None:
    from specllama.speculative.policy.costs import Costs
    from specllama.speculative.policy.policy import Policy
    from specllama.speculative.window import FixedWindow

    ledger = Ledger()
    window = Policy(Learned(), Costs(), ledger, draft_max=4)
    window.drafts_with(booking("draft"))
    assert window.balance == pytest.approx(7.5)  # of 8; half a step is kept back
    ledger.book("draft", -3.0)
    assert window.balance == pytest.approx(4.5)
    assert FixedWindow(4).balance is None


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


def test_a_node_is_read_beside_others_where_that_pays_its_row() -> None:
    """A row beside others is cheaper than a pass of its own; all of them are timed as one pass."""
    clock = VirtualClock()

    def judge(step: float) -> DraftJudge:
        pair = Pair().tuned([0.0, 1.0, *[1.02] * 12], step)
        pair.ledger.earn(100_000, "draft")
        window = pair.window(clock)
        window.drafts_with(booking("draft"))
        asked = window.plan(8).judge
        assert asked is not None
        assert asked.read("draft", 1)
        clock.steps(step)
        assert asked.take(0.9, 3.0, 5)
        assert asked.further()
        return asked

    def least(step: float, rows: int) -> int:
        return next(i for i in range(1, 101) if judge(step).further(i / 100, rows))

    assert 1 < least(0.1, 1) < least(0.1, 0)
    assert least(0.1, 1) < least(0.3, 1)


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
    pair = Pair()
    assert play(trace, FLAT, 0.05, pair=pair).speed > 1.8
    copy = match_features(4, 0)
    assert pair.learned.sources["ngram"].predict(copy) < 0.1
    trace = [Spot(rng.random() < 0.05, 0.4, 0.2, copy=(30, 6, 6)) for _ in range(1500)]
    pair = Pair()
    assert play(trace, FLAT, 0.05, pair=pair).speed > 2.5
    assert pair.learned.sources["ngram"].predict(match_features(30, 0)) > 0.9


def test_of_a_long_prompt_only_what_a_full_balance_pays_for_is_read() -> None:
    result = play(steady(600, 0.9), FLAT, 0.1, prompt=4000)
    assert result.speed > 1.3
    # never more than the ledger: the first tokens cost at most that much over plain decoding
    assert result.worst_loss(0.01) < Ledger().total


def reader(reply: float) -> tuple[Pair, int]:
    """How much of a prompt of 60 tokens is read, for a reply of a usual length."""
    pair = Pair()
    for rows in range(1, 10):
        pair.costs.target.set(rows, 20.0 * FLAT[rows])
    for tokens in (1, 16, 64):
        pair.costs.draft.set(tokens, 2.0 + 0.5 * tokens)
    state = InText(pair.learned.source("draft", "draft"))
    for i in range(200):
        features = draft_features(0.7 if i % 3 else 0.2, None)
        state.look(features)
        state.learn(features, i % 3 > 0)
    pair.learned.reply.value = reply
    pair.ledger.own["draft"] = 0.0  # nothing to explore with
    control = pair.window()
    control.drafts_with(booking("mixed"))
    judge = control.plan(8).judge
    assert judge is not None
    return pair, judge.read("draft", 60)


def test_a_text_is_read_where_that_pays_over_the_rest_of_the_reply() -> None:
    assert reader(4.0)[1] == 0
    assert reader(400.0)[1] == 60


def test_what_is_read_before_its_cost_is_known_is_afforded_at_three_times_the_guess() -> None:
    pair = Pair()
    for rows in range(1, 10):
        pair.costs.target.set(rows, 20.0 * FLAT[rows])
    read = {}
    for share in (0.05, 0.3, 3.0):
        pair.costs.draft_share = share
        pair.costs.draft.level = None
        control = pair.window()
        control.drafts_with(booking("draft"))
        judge = control.plan(8).judge
        assert judge is not None
        read[share] = judge.read("draft", 200)
        assert 3 * pair.costs.draft.ms(read[share]) <= 20.0 * Ledger().total
    assert read[0.05] >= read[0.3] >= read[3.0] == 0


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
        "drafting would not pay",
        "probing",
    ):
        assert phrase in reasons
    assert "nan" not in reasons


def test_off_and_last_token_and_room() -> None:
    assert Pair().window(draft_max=0).plan(10).reason == "off"
    w = Pair().window()
    assert w.plan(0).reason == "last token"
    assert w.plan(5).draft_max == 0  # a plain step is not measured yet
    for _ in range(4):
        assert w.plan(5).reason == "measuring a plain step"
        w.observe(Outcome(0, 0, (5,), 0.0, 10.0))
    assert 0 < w.plan(3).draft_max <= 3


@pytest.mark.parametrize("peek", [True, False])
def test_what_depends_on_the_drawn_token(peek: bool) -> None:
    """Under rejection and block no decision may look at a drawn token or its lead."""
    pair = Pair()
    play(steady(600, 0.8), FLAT, 0.05, pair=pair, peek=peek)
    state = json.dumps(msgspec.to_builtins([pair.costs, pair.learned], str_keys=True))
    answers = set()
    for lead, token in ((0.0, 3), (8.0, 9), (None, None)):
        costs, learned = json.loads(state)
        again = Pair(
            costs=msgspec.convert(costs, type(pair.costs), str_keys=True),
            learned=msgspec.convert(learned, Learned, str_keys=True),
        )
        w = again.window(peek=peek)
        w.drafts_with(booking("draft"))
        judge = w.plan(8).judge
        assert isinstance(judge, Weighing)
        assert judge.read("draft", 1) == 1
        answers.add((judge.take(0.55, lead, token), judge._reached[-1]))
    assert len(answers) == (2 if peek else 1)  # without a lead: as without a margin


def test_a_timing_outlier_does_not_silence_the_draft() -> None:
    class Hiccup(VirtualClock):
        def steps(self, n: float) -> None:
            super().steps(n * 10 if 0.1 < self.now < 0.101 else n)

    result = play(steady(1200, 0.9), FLAT, 0.05, clock=Hiccup())
    calm = play(steady(1200, 0.9), FLAT, 0.05)
    assert result.drafted > 0.8 * calm.drafted


def test_proposers_that_never_ask_are_held_to_their_record() -> None:
    """A source that ignores the questions still gets a length from its acceptance."""

    def run(right: int) -> int:
        w = Pair().window()
        w.drafts_with(booking("heads"))
        drafted = 0
        for _ in range(300):
            plan = w.plan(8)
            n = plan.draft_max
            drafted += n
            accepted = min(right, n)
            ms = FLAT[n + 1]
            w.observe(Outcome(n, accepted, (1,) * (accepted + 1), 0.0, ms))
        return drafted

    assert run(8) > 1000
    assert run(0) < 120


def test_calibration_learns_what_confidence_is_worth() -> None:
    """Reliability within 0.05 in every bin that matters, for an over-confident source."""
    rng = random.Random(2)
    state = InText(Acceptance())
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
    state = InText(Acceptance())
    for _ in range(500):
        state.learn(draft_features(0.99, 8.0), False)
        state.learn(draft_features(0.01, 0.0), True)
    assert state.predict(draft_features(0.99, 8.0)) >= state.predict(draft_features(0.01, 0.0))


def test_a_new_text_may_be_like_any_of_the_earlier_ones() -> None:
    sure, unsure = draft_features(0.99, 6.0), draft_features(0.1, 0.1)

    def promise(state: InText) -> float:
        acceptance, weights = state.spread()
        return float(acceptance @ weights)

    source = Acceptance()
    for looks in (sure, sure, sure, unsure):
        state = InText(source)
        for _ in range(20):
            state.look(looks)
    assert promise(state) < 0.45
    state = InText(source)
    assert promise(state) > 0.55  # the last text alone would say 0.3
    restored = msgspec.convert(msgspec.to_builtins(source), Acceptance)
    assert promise(InText(restored)) == pytest.approx(promise(state))
    for _ in range(24):
        state.look(unsure)
    state.learn(unsure, False)
    assert promise(state) < 0.4


def test_what_sets_a_text_apart_is_forgotten_with_it() -> None:
    guess = draft_features(0.9, 3.0)
    source = Acceptance()
    for n in range(200):
        if n % 10 == 0:
            state = InText(source)
        state.learn(guess, n % 10 > 0)
    usual = state.predict(guess)
    state = InText(source)
    for _ in range(6):
        state.learn(guess, False)
    here = state.predict(guess)
    assert here < usual - 0.25
    assert InText(source).predict(guess) > (usual + here) / 2


def test_a_balance_is_saved_up_for_a_draft_model_that_pays() -> None:
    """Too little for a draft of the right length is not spent on shorter ones, which lose."""
    verify = [0.0, 1.0, 1.8, 2.55, 2.4, 3.25, 3.9, 4.8, 4.75, *(5.4 + 0.3 * n for n in range(9))]
    pair = Pair()
    play(steady(1500, 0.97), verify, 0.17, pair=pair)
    pair.ledger.spare, pair.ledger.own = 1.5, {"draft": 0.5, "mixed": 0.5}
    result = play(steady(1500, 0.97, seed=2), verify, 0.17, pair=pair, prompt=40)
    assert any("waiting" in reason for reason in result.reasons)
    # meanwhile the text has outgrown what can be read whole: what a part is good for is explored
    assert any("probing" in reason for reason in result.reasons)
    assert result.speed > 1.02
    assert pair.ledger.total > 4.0


def test_longer_matches_copy_better_by_default() -> None:
    state = Acceptance("copy")
    odds = [state.predict(match_features(n, 0)) for n in (1, 2, 4, 8, 32)]
    assert odds == sorted(odds)


@pytest.mark.parametrize(
    ("look", "asked"), [(0.002, (780, 800)), (0.012, (200, 450)), (0.1, (16, 80))]
)
def test_looking_for_copies_in_vain_does_not_keep_a_method_down(
    look: float, asked: tuple[int, int]
) -> None:
    """Measured: a look costs 0.2 % of a 1 B step, up to a tenth of one of the bundled target."""
    pair = Pair()
    for rows in range(1, 10):
        pair.costs.target.set(rows, 20.0 * FLAT[rows])
    pair.ledger.spare = 1.0
    control = pair.window()
    control.drafts_with(booking("ngram"))
    looks = 0
    for _ in range(800):
        judge = control.plan(8).judge
        looks += judge is not None
        draft_ms = 20.0 * look if judge is not None else 0.0
        control.observe(Outcome(0, 0, (1,), draft_ms, 20.0 + draft_ms))
    assert asked[0] <= looks <= asked[1]
    assert pair.ledger.total > 2.5


def test_looking_goes_on_where_what_is_found_pays_for_it() -> None:
    pair = Pair()
    for rows in range(1, 10):
        pair.costs.target.set(rows, 20.0 * FLAT[rows])
    control = pair.window()
    control.drafts_with(booking("ngram"))
    for i in range(600):
        judge = control.plan(8).judge
        assert judge is not None or i % 65 == 64, i
        if i % 6 or judge is None:
            control.observe(Outcome(0, 0, (1,), 2.0, 22.0))
        else:
            ms = 20.0 * FLAT[4]
            control.observe(Outcome(3, 3, (1,) * 4, 2.0, ms + 2.0))


def test_a_copy_is_learnt_to_end_where_passages_do() -> None:
    state = InText(Acceptance("copy"))
    within, behind = match_features(20, 0), match_features(20, 0, 1.0, 1.0)
    assert state.predict(behind) < state.predict(within)
    for _ in range(60):
        state.learn(within, True)
        state.learn(behind, False)
    assert state.predict(within) > 0.8
    assert state.predict(behind) < 0.3


def test_state_survives_a_round_trip_and_damage_is_refused() -> None:
    pair = Pair()
    play(steady(500, 0.7), FLAT, 0.05, pair=pair)
    data = json.loads(json.dumps(msgspec.to_builtins(pair.learned, str_keys=True)))

    def read(data: object) -> Learned:
        return msgspec.convert(data, Learned, str_keys=True)

    again = read(data)
    state, restored = pair.learned.sources["draft"], again.sources["draft"]
    for features in ((0.0, 0.0, 0.0), (1.0, 2.0, 1.0), (4.0, -1.0, 0.5)):
        assert restored.predict(features) == pytest.approx(state.predict(features))
    assert again.pace == pair.learned.pace
    source = data["sources"]["draft"]
    for damage in (
        {**source, "theta": [1, 2]},
        {**source, "p": [[1, 0, 0]]},
        {**source, "mean": "many"},
        {**source, "looks": [[1]]},
        {**source, "kind": "oracle"},
    ):
        with pytest.raises(msgspec.ValidationError):
            read({**data, "sources": {"draft": damage}})
    for reply in ({"value": None, "n": 1}, [-1.0, 1], {"value": 50.0, "n": "few"}, 7):
        with pytest.raises(msgspec.ValidationError):
            read({**data, "reply": reply})


def test_params_know_the_window() -> None:
    from specllama.errors import UsageError

    assert GenerateParams().window == "auto"
    with pytest.raises(UsageError, match="window"):
        GenerateParams(window="sometimes")  # type: ignore[arg-type]
