"""The adaptive window: decisions, reasons, learning, and what it must never look at."""

from __future__ import annotations

import json
import math
import random

import msgspec
import pytest
from fakes import learn
from replay import Spot
from windows import Pair, booking, play

from specllama.speculative.policy.constants import BEHIND, EPSILON
from specllama.speculative.policy.draft_length import Weighing
from specllama.speculative.policy.learned import (
    Acceptance,
    Learned,
    draft_features,
    sigmoid,
)
from specllama.speculative.policy.ledger import Ledger
from specllama.speculative.policy.policy import POOR

FLAT = [0.0, *(1 + 0.12 * (n - 1) for n in range(1, 18))]


def steady(n: int, rate: float, seed: int = 1) -> list[Spot]:
    """A draft that is right at ``rate`` and says so, with scatter."""
    rng = random.Random(seed)
    spots = []
    for _ in range(n):
        p = sigmoid(math.log(rate / (1 - rate)) + rng.gauss(0, 1.5))
        spots.append(Spot(rng.random() < p, confidence=p, lead=max(0.0, 2 + 2 * p)))
    return spots


def test_it_says_what_it_may_lose() -> None:
    from specllama.speculative.policy.costs import Costs
    from specllama.speculative.policy.policy import Policy
    from specllama.speculative.window import Window

    ledger = Ledger()
    window = Policy(Learned(), Costs(), ledger, draft_max=4)
    window.drafts_with(booking("draft"))
    assert window.balance == pytest.approx(7.5)  # of 8; half a step is kept back
    ledger.book("draft", -3.0)
    assert window.balance == pytest.approx(4.5)
    assert Window(4).balance is None


def reader(reply: int) -> int:
    """How much of a prompt of 60 tokens is read, for a reply of so many."""
    pair = Pair()
    for rows in range(1, 10):
        pair.costs.target.set(rows, 20.0 * FLAT[rows])
    for tokens in (1, 16, 64):
        pair.costs.draft.set(tokens, 2.0 + 0.5 * tokens)
    state = pair.learned.source("draft", "draft")
    for i in range(200):
        features = draft_features(0.7 if i % 3 else 0.2, None)
        state.look(features)
        state.learn(features, i % 3 > 0)
    pair.ledger.own["draft"] = 0.0  # nothing to explore with
    control = pair.window(tokens=reply)
    control.drafts_with(booking("mixed"))
    judge = control.plan(8).judge
    assert judge is not None
    return judge.read("draft", 60)


def test_a_text_is_read_where_that_pays_over_the_rest_of_the_reply() -> None:
    assert reader(4) == 0
    assert reader(400) == 60


def test_off_and_last_token_and_room() -> None:
    assert Pair().window(draft_max=0).plan(10).reason == "off"
    w = Pair().window()
    assert w.plan(0).reason == "last token"
    assert w.plan(5).draft_max == 0  # a plain step is not measured yet
    for _ in range(4):
        assert w.plan(5).reason == "measuring a plain step"
        learn(w, 0, 0, (5,), 0.0, 10.0)
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
        answers.add((judge.take(0.55, lead, token), judge.so_far.reached[-1]))
    assert len(answers) == (2 if peek else 1)  # without a lead: as without a margin


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
            learn(w, n, accepted, (1,) * (accepted + 1), 0.0, ms)
        return drafted

    assert run(8) > 1000
    assert run(0) < 120


def test_what_was_refused_is_weighed_again_after_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    weighed = 0

    def gain(self: Weighing) -> float:
        nonlocal weighed
        weighed += 1
        return 0.0

    monkeypatch.setattr(Weighing, "model_gain", gain)
    w, looks, refused = Pair().window(), 0, 0
    w.drafts_with(booking("heads"))
    for _ in range(2000):
        plan = w.plan(8)
        looks, refused = looks + bool(plan.judge), refused + (plan.reason == POOR)
        learn(w, plan.draft_max, 0, (1,), 0.0, FLAT[plan.draft_max + 1])
    assert refused > 20 * weighed > 0
    assert weighed <= looks + 1


def test_calibration_learns_what_confidence_is_worth() -> None:
    """Reliability within 0.05 in every bin that matters, for an over-confident source."""
    rng = random.Random(2)
    state = Acceptance()
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


def test_state_survives_a_round_trip_and_damage_is_refused() -> None:
    pair = Pair()
    play(steady(500, 0.7), FLAT, 0.05, pair=pair)
    data = json.loads(json.dumps(msgspec.to_builtins(pair.learned, str_keys=True)))

    def read(data: object) -> Learned:
        return msgspec.convert(data, Learned, str_keys=True)

    again = read(data)
    state, restored = pair.learned.sources["draft"], again.sources["draft"]
    for features in ((0.0, 0.0), (1.0, 2.0), (4.0, -1.0)):
        assert restored.predict(features) == pytest.approx(state.predict(features))
    assert again.pace == pair.learned.pace
    source = data["sources"]["draft"]
    for damage in (
        {**source, "theta": [1, 2]},
        {**source, "p": [[1, 0, 0]]},
        {**source, "mean": "many"},
        {**source, "kind": "oracle"},
    ):
        with pytest.raises(msgspec.ValidationError):
            read({**data, "sources": {"draft": damage}})
    for asked in ({"value": None, "n": 1}, [-1.0, 1], {"value": 50.0, "n": "few"}, 7):
        with pytest.raises(msgspec.ValidationError):
            read({**data, "asked": {"ngram": asked}})


# 2 to 7 rows cost more than guesses save, 8 cost hardly more than 4: Q8_0 on a Zen 5
ZEN5 = [0.0, 1.0, 2.4, 3.2, 3.6, 4.3, 4.9, 5.4, 3.7, 5.0]


def test_a_cheap_wide_pass_is_found_behind_dear_narrow_ones() -> None:
    pair = Pair()
    pair.costs.target.guess(1.0)
    pair.costs.target.expect(dict(enumerate(ZEN5)))  # as measured at rest
    pair.costs.draft.set(1, 0.06)
    trace = [Spot(i % 16 > 0, confidence=0.96, lead=5.0) for i in range(1200)]
    done = play(trace, ZEN5, 0.06, pair=pair)
    assert done.speed > 1.7
    assert done.worst_loss(EPSILON) < BEHIND
    assert pair.costs.target.seen(8) > 100
