"""The estimator of the speed-up, on simulated rounds of a machine that hesitates."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from specllama.tui.speedup import Speedup, speedup

PLAIN_MS = 30.0
ALPHA, K = 0.7, 4
TOKENS = (1 - ALPHA ** (K + 1)) / (1 - ALPHA)


def simulated(
    rng: random.Random, n_plain: int, n_rounds: int, true: float, hiccup: float = 5.0
) -> Speedup | None:
    """Every pass takes ``hiccup`` times as long in 15 % of the cases; drafts gain ``true``."""

    def took(ms: float) -> float:
        return ms * (1 + rng.gauss(0, 0.03)) * (hiccup if rng.random() < 0.15 else 1.0)

    def kept() -> int:
        n = 0
        while n < K and rng.random() < ALPHA:
            n += 1
        return n

    plain = [took(PLAIN_MS) for _ in range(n_plain)]
    return speedup(plain, [(1 + kept(), took(PLAIN_MS * TOKENS / true)) for _ in range(n_rounds)])


def verdicts(n_plain: int, n_rounds: int, true: float, tries: int = 300) -> Counter[str]:
    rng = random.Random(n_plain + n_rounds)
    found = (simulated(rng, n_plain, n_rounds, true) for _ in range(tries))
    return Counter(one.verdict for one in found if one is not None)


@pytest.mark.parametrize(("n_plain", "n_rounds"), [(4, 8), (8, 32), (64, 64), (256, 128)])
@pytest.mark.parametrize("true", [0.8, 1.0, 1.25])
def test_hiccups_give_no_wrong_verdict(n_plain: int, n_rounds: int, true: float) -> None:
    found = verdicts(n_plain, n_rounds, true)
    wrong = (found["faster"] if true <= 1 else 0) + (found["slower"] if true >= 1 else 0)
    assert wrong <= 0.03 * found.total()


@pytest.mark.parametrize(("true", "word"), [(0.65, "slower"), (1.8, "faster")])
def test_a_clear_case_is_told_apart_from_its_hiccups(true: float, word: str) -> None:
    assert verdicts(256, 128, true)[word] >= 0.9 * 300


@pytest.mark.parametrize("true", [0.65, 1.0, 1.8])
def test_it_is_right_in_the_mean_and_the_truth_lies_in_its_interval(true: float) -> None:
    rng = random.Random(1)
    found = [one for _ in range(400) if (one := simulated(rng, 64, 64, true)) is not None]
    assert sum(one.ratio for one in found) / 400 == pytest.approx(true, rel=0.05)
    assert sum(one.low <= true <= one.high for one in found) >= 0.97 * 400
    assert all(one.low < one.ratio < one.high for one in found)


def test_free_drafts_of_one_token_are_as_fast_as_plain() -> None:
    """A mean over a median says 0.6 here."""
    times = [20.0] * 85 + [100.0] * 15
    found = speedup(times, [(1, ms) for ms in times])
    assert found is not None
    assert found.ratio == pytest.approx(1.0)
    assert found.verdict == "unsure"


def test_a_quiet_machine_is_sure_soon() -> None:
    for true, word in ((0.9, "slower"), (1.1, "faster")):
        found = speedup([20.0, 20.2, 19.9, 20.1], [(2, 40.0 / true)] * 8)
        assert found is not None
        assert found.verdict == word
        assert found.ratio == pytest.approx(true, rel=0.01)


def test_a_side_that_was_spared_hiccups_is_no_surer_for_it() -> None:
    noisy = [20.0, 20.0, 20.0, 100.0] * 8
    found = speedup([20.0] * 6, [(1, ms) for ms in noisy])
    assert found is not None
    assert found.verdict == "unsure"


@pytest.mark.parametrize(
    "make",
    [
        lambda: speedup([20.0] * 3, [(1, 20.0)] * 50),
        lambda: speedup([20.0] * 50, [(1, 20.0)] * 7),
        lambda: speedup([0.0] * 50, [(1, 20.0)] * 50),
        lambda: speedup([20.0] * 50, [(1, 0.0)] * 50),
        lambda: speedup([20.0] * 50, [(0, 20.0)] * 50),
        lambda: speedup([], []),
    ],
)
def test_too_little_is_no_figure(make: Callable[[], Speedup | None]) -> None:
    assert make() is None
