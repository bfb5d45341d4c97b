"""The window beside the best one: it knows what passes cost and how good guesses are, and the
window has to find out. Simulated pairs, whose guesses are as likely as they look."""

from __future__ import annotations

import random

import pytest
from best_window import Known, Stopping, Taken, Text, best, replayed
from replay import Spot, VirtualClock
from traces import BF16, CPU, GPU
from windows import Pair, play

from specllama.speculative.window import Window

COLD, WARM = 0.87, 0.89  # of the best; six replies do not teach all there is to know
MACHINES = {"q4_0": (CPU, 0.12), "bf16": (BF16, 0.06), "gpu": (GPU, 0.1)}


def replies(seed: str, sure: float, n: int = 6) -> list[Text]:
    """A share of the guesses is all but certain, the others are anything."""
    rng = random.Random(seed)
    texts = []
    for _ in range(n):
        here = min(max(rng.gauss(sure, 0.1), 0.0), 1.0)
        shown = [0.985 if rng.random() < here else rng.uniform(0.1, 0.9) for _ in range(160)]
        spots = [Spot(rng.random() < p, p, 6.0 * p - 1.0) for p in shown]
        texts.append(Text(30, spots))
    return texts


def auto(texts: list[Text], pair: Pair, machine: str) -> Taken:
    v, step = MACHINES[machine]
    taken = Taken()
    for text in texts:
        assert isinstance(text.prompt, int)
        taken.add(play(text.spots, v, step, pair=pair, prompt=text.prompt, draft_max=15))
    return taken


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("sure", [0.6, 0.9])
def test_the_window_is_near_the_best(machine: str, sure: float) -> None:
    v, step = MACHINES[machine]
    told = replies(f"told {machine} {sure}", sure)
    known = Known.of(told, peek=True)
    top = best(told, known, v, step).speed
    cold = Pair()
    cold.costs.draft_share = step
    warm = Pair().tuned(v, step)
    auto(replies(f"lessons {machine} {sure}", sure), warm, machine)

    assert auto(told, cold, machine).speed >= COLD * top
    assert auto(told, warm, machine).speed >= WARM * top


@pytest.mark.parametrize("machine", MACHINES)
def test_no_fixed_length_is_better_than_the_best(machine: str) -> None:
    v, step = MACHINES[machine]
    told = replies(f"fixed {machine}", 0.8)
    top = best(told, Known.of(told, peek=True), v, step).speed
    for length in (1, 3, 5, 7, 11, 15):
        taken = Taken()
        for text in told:
            window = Window(length)
            taken.add(replayed(text, window, VirtualClock(), v, step, True, []))
        assert taken.speed < top


def test_the_best_goes_on_as_long_as_guesses_are_sure() -> None:
    """Where a step of the costs is far, nothing goes for the mean, and all for the sure."""
    told = replies("sure", 0.9)
    known = Known.of(told, peek=True)
    table = Stopping(known, CPU, 0.1, 1.4, 15)
    assert table.goes_on(4, 0.95, 0.985)
    assert not table.goes_on(4, 0.2, 0.4)
