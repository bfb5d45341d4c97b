"""The estimator of the speed-up on simulated rounds of a machine that hesitates, and its words."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
from fakes import DRAFT_MS, OTHER_MS, VERIFY_MS, Reply, ScriptedEngine
from timed_rounds import timed

from specllama import verdict
from specllama.events import NO_GUESS, Finished, RoundDone
from specllama.rates import Answer, Payoff
from specllama.settings.params import GenerateParams
from specllama.speculative.policy.costs import CostTable
from specllama.verdict import (
    FORECASTS,
    MIN_ROUNDS,
    ROUNDS_UNTIL_OFF,
    SINGLES,
    WIDE,
    brief,
    by_source,
    details,
    judge,
    lead,
    words,
)

PLAIN_MS, ROW, ALPHA = 30.0, 0.06, 0.7
LENGTHS = (2, 4, 7)
DRAFTING = 0.25  # of the time of a round
TRUE = (0.7, 0.85, 1.0, 1.3, 2.0)

SINGLE = timed(declined=True, pass_ms=PLAIN_MS)


@dataclass
class Machine:
    """15 % of what it does takes six times as long."""

    rng: random.Random
    often: float = 0.15
    hiccup: float = 6.0

    def slowed(self) -> float:
        return self.hiccup if self.rng.random() < self.often else 1.0

    def took(self, ms: float) -> float:
        return ms * (1.0 + self.rng.gauss(0.0, 0.04)) * self.slowed()


def simulated(
    machine: Machine, true: float, rounds: int, *, apart: bool, table: CostTable | None = None
) -> tuple[Payoff, float]:
    """The verdict, and how much faster the same tokens came on a machine that never hesitates.

    Every ninth round is a plain step. Hiccups hit each pass ``apart``, or whole rounds. ``table``
    is the engine's, which sees the same plain steps.
    """
    rng = machine.rng
    mean = len(LENGTHS)
    tokens = sum((1 - ALPHA ** (k + 1)) / (1 - ALPHA) for k in LENGTHS) / mean
    k_mean = sum(LENGTHS) / mean
    base = tokens / true * (1 - DRAFTING) / (1 + ROW * k_mean)  # plain steps of a pass
    step = tokens / true * DRAFTING / k_mean  # and of a draft step
    passes: list[RoundDone] = []
    truth = 0.0
    for i in range(rounds):
        if i % 9 < 1 or i < SINGLES:
            ms = machine.took(PLAIN_MS)
            passes.append(timed(SINGLE, pass_ms=ms, declined=False))
            if table is not None:
                table.observe(1, ms)
            truth += 1.0
            continue
        k = rng.choice(LENGTHS)
        kept = 0
        while kept < k and rng.random() < ALPHA:
            kept += 1
        verify = PLAIN_MS * base * (1 + ROW * k)
        if apart:
            draft_ms = sum(machine.took(PLAIN_MS * step) for _ in range(k))
            pass_ms = machine.took(verify)
        else:
            slow = machine.took(1.0)
            draft_ms, pass_ms = PLAIN_MS * step * k * slow, verify * slow
        plain_ms = table.ms(1) if table is not None else None
        done = timed(
            source="draft", tokens=kept + 1, drafted=k, accepted=kept, rejected=kept < k,
            read=1, draft_ms=draft_ms, pass_ms=pass_ms, plain_ms=plain_ms,
        )  # fmt: skip
        passes.append(done)
        truth += base * (1 + ROW * k) + step * k
    return judge(passes), sum(len(one.emitted) for one in passes) / truth


def interval(found: Payoff) -> tuple[float, float]:
    assert found.low is not None
    assert found.high is not None
    assert found.low < (found.ratio or 0.0) < found.high
    return found.low, found.high


def engine_table(machine: Machine) -> CostTable:
    table = CostTable()
    for _ in range(60):
        table.observe(1, machine.took(PLAIN_MS))
    return table


@pytest.mark.parametrize("known", [True, False], ids=["engine", "own"])
@pytest.mark.parametrize("apart", [True, False], ids=["passes", "rounds"])
def test_the_interval_holds_the_truth(known: bool, apart: bool) -> None:
    """At least 93 % of the time, for each true speed-up, with six-fold hiccups of 15 %."""
    for true in TRUE:
        machine = Machine(random.Random(f"{known} {apart} {true}"))
        held, widths = 0, []
        for _ in range(160):
            table = engine_table(machine) if known else None
            found, truth = simulated(machine, true, 60, apart=apart, table=table)
            low, high = interval(found)
            held += low <= truth <= high
            widths.append((high - low) / 2 / truth)
        assert held >= 0.93 * 160, (true, held / 160)
        # an interval that holds everything would say nothing
        assert sorted(widths)[80] < 0.18, (true, sorted(widths)[80])


@pytest.mark.parametrize("rounds", [16, 60, 160])
def test_hiccups_give_no_wrong_answer_and_hide_no_clear_case(rounds: int) -> None:
    machine = Machine(random.Random(rounds))
    found = [simulated(machine, 1.0, rounds, apart=False) for _ in range(300)]
    wrong = [truth for one, truth in found if one.answer == ("slower" if truth > 1 else "faster")]
    assert len(wrong) <= 0.03 * 300
    for true, right in ((0.6, "slower"), (1.7, "faster")):
        answers = Counter(
            simulated(machine, true, rounds, apart=False)[0].answer for _ in range(150)
        )
        assert answers[right] >= (0.95 if rounds >= 60 else 0.3) * 150


def test_a_quiet_machine_is_sure_soon() -> None:
    machine = Machine(random.Random(3), often=0.0)
    for _ in range(50):
        found, truth = simulated(machine, 1.0, 24, apart=True)
        assert found.ratio == pytest.approx(truth, rel=0.08)
        assert found.answer == "faster" or truth < 1.15
        assert found.answer == "slower" or truth > 0.85


def rounds_of(
    tokens: int, ms: float, *, n: int = 20, drafted: int = 4, **more: float
) -> list[RoundDone]:
    one = timed(
        source="draft", tokens=tokens, drafted=drafted, accepted=tokens - 1,
        rejected=tokens <= drafted, read=1, pass_ms=ms, plain_ms=20.0,
    )  # fmt: skip
    return [timed(one, **more)] * n


def test_what_drafting_took_counts_even_where_nothing_came_of_it() -> None:
    plain = timed(SINGLE, pass_ms=20.0, declined=False)
    quiet = judge([*rounds_of(2, 20.0), *[plain] * 20])
    looked = judge([*rounds_of(2, 20.0), *[timed(plain, draft_ms=10.0)] * 20])
    assert quiet.ratio == pytest.approx(60 / 40)
    assert looked.ratio == pytest.approx(60 / 50)


def test_reading_the_text_is_a_cost_and_no_hiccup() -> None:
    passes = [one for ms in (29.0, 31.0) * 10 for one in rounds_of(3, ms, n=1, draft_ms=5.0)]
    read = [timed(passes[0], draft_ms=65.0, read=200), *passes[1:]]
    before, after = judge(passes), judge(read)
    assert before.ratio == pytest.approx(60 / 35)
    assert after.ratio == pytest.approx(60 / 38)
    (low, high), (low_read, high_read) = interval(before), interval(after)
    assert high_read - low_read <= high - low


def test_a_wide_pass_is_dear_and_no_hiccup() -> None:
    narrow, wide = rounds_of(2, 25.0, n=30), rounds_of(4, 100.0, n=30, drafted=40)
    mixed = [one for pair in zip(narrow, wide, strict=True) for one in pair]
    assert judge(mixed).ratio == pytest.approx(6 * 20 / 125)


def test_a_race_counts_its_own_plain_steps() -> None:
    passes = rounds_of(2, 20.0)
    assert judge(passes).ratio == pytest.approx(2.0)
    assert judge(passes, [30.0] * 8).ratio == pytest.approx(3.0)


@pytest.mark.parametrize(
    "passes",
    [
        [],
        rounds_of(2, 20.0, n=MIN_ROUNDS - 1),
        [timed(one, plain_ms=None) for one in rounds_of(2, 20.0)],
        [
            *[timed(one, plain_ms=None) for one in rounds_of(2, 20.0)],
            *[timed(SINGLE, declined=False)] * (SINGLES - 1),
        ],
    ],
)
def test_too_little_is_not_known_yet(passes: Sequence[RoundDone]) -> None:
    found = judge(passes)
    assert (found.answer, found.ratio, found.lost_ms) == ("unknown", None, None)
    why = "too few passes to tell a gain"
    if not passes:
        why = "nothing was guessed in this text"
    assert lead(found, "press B to measure") == f"Not known yet: {why}; press B to measure"


def test_it_is_off_once_no_guess_was_worth_it_for_a_while() -> None:
    tried = rounds_of(1, 30.0, drafted=4)
    assert judge([*tried, *[SINGLE] * (ROUNDS_UNTIL_OFF - 1)]).answer == "slower"
    found = judge([*tried, *[SINGLE] * ROUNDS_UNTIL_OFF])
    assert found.answer == "off"
    assert found.lost_ms == pytest.approx(10.0)
    off = "Drafting is off: it would be slower here"
    assert words(found, "?") == f"{off} (it lost 10.0 ms a token)"
    assert words(judge([SINGLE] * ROUNDS_UNTIL_OFF), "?") == off
    # that nobody had a guess says nothing of what one costs
    assert judge([timed(SINGLE, declined=False)] * 64).answer == "unknown"


def test_an_interval_that_says_nothing_is_not_known_yet() -> None:
    noisy = [
        timed(one, pass_ms=(5.0, 60.0)[i % 2], drafted=1 + i // 4)
        for i, one in enumerate(rounds_of(2, 20.0)[:MIN_ROUNDS])
    ]
    found = judge(noisy)
    assert found.low is not None
    assert found.high is not None
    assert found.low < 1.0 < found.high
    assert found.high > WIDE * found.low
    assert found.answer == "unknown"
    assert lead(found, "F4 measures").startswith("Not known yet: times too uneven to tell")


def test_what_paid_paid_whatever_the_last_rounds_did() -> None:
    assert judge([*rounds_of(4, 30.0), *[SINGLE] * ROUNDS_UNTIL_OFF]).answer == "faster"


def verdict_of(ratio: float, half: float) -> Payoff:
    low, high = ratio - half, ratio + half
    answer = "faster" if low > 1 else "slower" if high < 1 else "unsure"
    return Payoff(answer, ratio, low, high, 310, 100, 400, 236, 300)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ratio", "half", "said"),
    [
        (1.29, 0.08, "1.29× faster (1.21–1.37)"),
        (0.81, 0.05, "1.23× slower (1.16–1.32)"),
        (1.04, 0.12, "Unsure: 1.04× (0.92–1.16)"),
    ],
)
def test_the_words(ratio: float, half: float, said: str) -> None:
    found = verdict_of(ratio, half)
    assert words(found, "?") == f"{said} · 3.1 tokens a pass · 59% of guesses kept"
    assert details(found, both=True)[1] == "59% of guesses kept, 79% of those checked"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("faster", "PAYS 1.04× (0.92–1.16)"),
        ("slower", "LOSES 1.04× (0.92–1.16)"),
        ("unsure", "UNSURE 1.04× (0.92–1.16)"),
        ("off", "Drafting off: it would be slower here"),
        ("unknown", "Not known yet: if drafting pays (F4 measures)"),
    ],
)
def test_the_strip_says_it_in_a_word(answer: Answer, said: str) -> None:
    assert brief(replace(verdict_of(1.04, 0.12), answer=answer), "F4 measures") == said


def test_an_interval_is_positive_and_no_figure_is_zero() -> None:
    """Typical of a machine that is busy while drafted, and of next to nothing seen."""
    tiny = Payoff("slower", 0.0002, 0.00001, 0.004, 310, 100, 400, 236, 300)
    assert lead(tiny, "?") == "99× slower (99–99)"
    wide = Payoff("unsure", 0.02, 0.0001, 130.0, 310, 100, 400, 236, 300)
    assert lead(wide, "?") == "Unsure: 0.02× (0.01–99)"


def test_old_plain_steps_give_no_sure_answer() -> None:
    fresh = [
        timed(one, plain_age_s=3.0, plain_n=8, plain_spread=0.05) for one in rounds_of(4, 30.0)
    ]
    found = judge(fresh)
    assert (found.answer, found.plain_age_s) == ("faster", 3.0)
    assert words(found, "?", both=True).endswith("plain measured within 3 s")
    old = judge([timed(one, plain_age_s=240.0) for one in fresh])
    assert old.answer == "unsure"
    assert old.ratio == found.ratio
    assert lead(old, "?").startswith("Plain was measured 4 min earlier: 2.67× (")
    assert brief(old, "?").endswith("), plain was measured 4 min earlier")
    few = judge([timed(one, plain_n=FORECASTS - 1) for one in fresh])
    assert (few.answer, few.ratio) == ("unknown", None)
    none = judge([timed(one, plain_n=1, plain_spread=None) for one in fresh])
    assert (none.answer, none.ratio) == ("unknown", None)
    wide = judge([timed(one, plain_spread=0.6) for one in fresh])
    assert (wide.answer, wide.ratio) == ("unknown", found.ratio)


def test_each_source_is_judged_alone() -> None:
    copies = [timed(one, source="ngram") for one in rounds_of(4, 20.0)]
    found = by_source([*rounds_of(1, 30.0), *copies, SINGLE])
    assert list(found) == ["draft", "ngram"]
    assert found["draft"].answer == "slower"
    assert found["ngram"].ratio == pytest.approx(4.0)


def passes_of(reply: Reply, **changes: object) -> tuple[list[RoundDone], Finished]:
    params = GenerateParams(seed=1, draft_max=4).replace(**changes)  # type: ignore[arg-type]
    events = list(ScriptedEngine([reply]).generate("x", params))
    done = [e for e in events if isinstance(e, RoundDone)]
    end = events[-1]
    assert isinstance(end, Finished)
    return verdict.passes_of(done), end


def test_a_reply_says_it_itself() -> None:
    text = " ".join(f"w{i}" for i in range(200))
    passes, end = passes_of(Reply(text, accept=(2,)))
    assert end.verdict == judge(passes)
    one = VERIFY_MS + OTHER_MS
    assert end.verdict.ratio == pytest.approx(3 * one / (one + DRAFT_MS), rel=0.03)
    assert passes_of(Reply(text), speculate=False)[1].verdict is None


def test_guesses_behind_a_rejection_were_not_judged() -> None:
    passes, _ = passes_of(Reply(accept=(0,)))
    assert [(len(one.drafted), one.accepted, one.judged) for one in passes[:2]] == [(4, 0, 1)] * 2
    passes, _ = passes_of(Reply(accept=(4,)))
    assert [(len(one.drafted), one.accepted, one.judged) for one in passes[:2]] == [(4, 4, 4)] * 2


def test_without_a_guess_nothing_was_declined() -> None:
    done = next(
        e
        for e in ScriptedEngine().generate("x", GenerateParams(speculate=False))
        if isinstance(e, RoundDone)
    )
    idle: Callable[[str], RoundDone] = lambda reason: replace(  # noqa: E731
        done, draft_max=0, window_reason=reason
    )
    assert idle("drafting would not pay").declined
    assert not idle(NO_GUESS).declined
