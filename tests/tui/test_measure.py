import dataclasses
import math

import pytest
from fakes import Reply, ScriptedEngine

from specllama.bench.outcome import SpeedModel
from specllama.events import RoundDone
from specllama.settings.params import GenerateParams
from specllama.tui.record import Record
from specllama.tui.widgets.stats_strip import StripState
from specllama.verdict import ROUNDS_UNTIL_OFF


# Entries of the table of best speed-ups, by (α, c, β): speed-up and k.
@pytest.mark.parametrize(
    ("alpha", "c", "beta", "speedup", "k"),
    [
        (0.5, 0.0, 0.03, 1.73, 4),
        (0.6, 0.1, 0.12, 1.36, 2),
        (0.7, 0.05, 0.03, 2.10, 5),
        (0.8, 0.1, 0.03, 2.24, 5),
        (0.9, 0.1, 0.12, 2.25, 6),
        (0.95, 0.2, 0.12, 2.08, 7),
        (0.6, 0.1, 0.55, 1.00, 0),
    ],
)
def test_the_best_k_is_the_one_of_the_closed_form(
    alpha: float, c: float, beta: float, speedup: float, k: int
) -> None:
    best, top = SpeedModel(alpha, c, beta).best(32)
    assert best == k
    assert top == pytest.approx(speedup, abs=0.006)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("cost", [0.0, 0.05, 0.2, 0.5, 0.95])
def test_it_pays_if_and_only_if_alpha_exceeds_c_plus_beta(alpha: float, cost: float) -> None:
    model = SpeedModel(alpha, cost / 2, cost / 2)
    k, speedup = model.best(64)
    assert model.pays == (k > 0) == (speedup > 1.0)
    assert speedup <= max(1.0, model.bound)


def test_the_edges_of_the_model() -> None:
    assert SpeedModel(1.0, 0.0).speedups(4)[4] == 5
    assert SpeedModel(0.0, 0.1).speedups(4)[4] == pytest.approx(1 / SpeedModel(0.0, 0.1).cost(4))
    assert SpeedModel(0.5, 0.0).bound == math.inf
    assert SpeedModel(0.9, 0.1, 0.1).collapse() is not None
    assert SpeedModel(0.9, 0.01, 0.0).collapse(64) is None


def rounds(reply: Reply, **params: object) -> list[RoundDone]:
    request = GenerateParams(seed=1, **params)  # type: ignore[arg-type]
    events = ScriptedEngine([reply]).generate("x", request)
    return [e for e in events if isinstance(e, RoundDone)]


def passes(reply: Reply, **params: object) -> list[RoundDone]:
    """Of the rounds behind the first, whose row came with the prompt."""
    return [done for done in rounds(reply, **params) if done.index]


TEXT = " ".join(f"w{i}" for i in range(200))


def test_the_model_says_what_the_engine_did() -> None:
    assert SpeedModel.of([]) is None
    pair = SpeedModel.of(passes(Reply(TEXT, accept=(4, 2)), draft_max=4))
    assert pair.c == pytest.approx(3.0 / 4 / 12.25)
    # accept 4 of 4, then 2 of 3 judged: six accepted of seven tested
    assert pair.alpha == pytest.approx(6 / 7, abs=0.03)
    assert pair.beta == 0.0


def test_without_a_figure_of_the_engine_the_plain_steps_of_a_race_count() -> None:
    unknown = [
        dataclasses.replace(p, plain_ms=None)
        for p in passes(Reply(TEXT, accept=(4, 2)), draft_max=4)
    ]
    assert SpeedModel.of(unknown) is None
    assert SpeedModel.of(unknown, [24.5] * 8) is not None


def test_the_tail_behind_a_rejection_does_not_count_as_judged() -> None:
    assert SpeedModel.of(passes(Reply(TEXT, accept=(0,)), draft_max=8)).alpha == 0.0


def test_a_losing_pair_is_seen_to_lose() -> None:
    record = Record("t")
    record.add(dataclasses.replace(d, draft_ms=30.0) for d in rounds(Reply(TEXT, accept=(0,))))
    state = StripState(record)
    assert state.loses
    assert state.verdict.high is not None
    assert state.verdict.high < 0.5
    assert not StripState(record, speculate=False).loses


def test_a_wider_pass_is_never_measured_cheaper_than_a_plain_one() -> None:
    each = passes(Reply(TEXT, accept=(4,)), draft_max=4)
    pair = SpeedModel.of(
        [dataclasses.replace(one, plain_ms=1000.0) for one in each]
    )  # a busy machine
    assert pair.beta == 0.0


def round_of(tokens: int, ms: float, drafted: int) -> RoundDone:
    """A round that drafted ``drafted`` tokens, kept all but one of its own, and took ``ms``."""
    return dataclasses.replace(
        rounds(Reply(TEXT, accept=(1,)), draft_max=4)[1],
        index=1,
        draft_max=drafted,
        drafted=(1,) * drafted,
        parents=tuple(range(-1, drafted - 1)),
        accepted=min(drafted, tokens - 1),
        emitted=(1,) * tokens,
        draft_ms=0.0,
        verify_ms=ms,
        other_ms=0.0,
        plain_ms=20.0,
    )


def test_a_window_that_has_stopped_drafting_is_off_and_does_not_lose() -> None:
    record = Record("t")
    state = StripState(record)
    record.add([round_of(1, 30.0, 4)] * 64)
    assert state.loses
    record.add([round_of(1, 20.0, 0)] * ROUNDS_UNTIL_OFF)
    assert not state.loses
    assert state.verdict.answer == "off"
