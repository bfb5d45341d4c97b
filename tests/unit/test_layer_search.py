"""The search for the layers of a target's own draft, on made-up agreements."""

from __future__ import annotations

import itertools
import random

import pytest

from specllama.bench.layer_search import Drop, Scorer, Trial, search, survival

PASSES = [0.0, *(1.0 + 0.05 * n for n in range(9))]


def share(drop: Drop, n_layers: int = 8) -> float:
    return (n_layers - len(drop) + 0.5) / (n_layers + 0.5)


def scorer(n_layers: int = 8) -> Scorer:
    return Scorer(lambda drop: share(drop, n_layers), PASSES)


class Planted(Scorer):
    """A model that agrees always while only ``useless`` layers are gone, and counts its looks."""

    def __init__(self, useless: set[int], n_layers: int = 8, seed: int = 1) -> None:
        super().__init__(lambda drop: share(drop, n_layers), PASSES)
        rng = random.Random(seed)
        self.useless = useless
        self.weight = {layer: rng.uniform(0.5, 0.7) for layer in range(n_layers)}
        self.asked: dict[Drop, int] = {}

    def look(self, drop: Drop) -> Trial:
        self.asked[drop] = self.asked.get(drop, 0) + 1
        missed = sum(self.weight[layer] for layer in drop if layer not in self.useless)
        luck = random.Random(str(drop))
        return self.trial(drop, [[luck.random() >= missed for _ in range(400)]])


@pytest.mark.parametrize("useless", [{1}, {2, 5}, {0, 3, 4, 7}, {1, 2, 3, 4, 5, 6}])
def test_the_planted_layers_are_found(useless: set[int]) -> None:
    model = Planted(useless)
    found = search(8, model.look, ceiling=model.ceiling)
    assert set(found.best.drop) == useless
    assert found.complete
    assert found.best.survival[:4] == (1.0,) * 4
    assert set(model.asked.values()) == {1}, "nothing is measured twice"


def test_the_best_of_all_choices_is_found_where_layers_add_up() -> None:
    for seed in range(5):
        model = Planted({1, 4}, n_layers=6, seed=seed)
        everything = [
            model.look(drop) for n in range(1, 6) for drop in itertools.combinations(range(6), n)
        ]
        found = search(6, model.look, ceiling=model.ceiling)
        assert found.best.speed == max(trial.speed for trial in everything)
        assert len(found.tried) < len(everything)


def test_a_pair_that_the_way_down_misses_is_reached_by_exchange() -> None:
    misses = {(1,): 0.1, (2,): 0.15, (5,): 0.15, (1, 2): 0.2, (1, 5): 0.2, (2, 5): 0.0}

    def look(drop: Drop) -> Trial:
        luck = random.Random(str(drop))
        missed = misses.get(drop, 0.7)
        return scorer(6).trial(drop, [[luck.random() >= missed for _ in range(400)]])

    assert search(6, look).best.drop == (2, 5)


def test_time_is_kept_and_one_choice_is_always_looked_at() -> None:
    model = Planted({2, 5})
    found = search(8, model.look, spent=lambda: len(model.asked) >= 5)
    assert len(model.asked) == len(found.tried) == 5
    assert not found.complete
    assert search(8, model.look, starts=[(3, 4)], spent=lambda: True).best.drop == (3, 4)


def test_little_time_goes_into_the_usual_choices_first() -> None:
    model = Planted({2, 3, 4, 6})
    found = search(8, model.look, starts=[(2, 3)], spent=lambda: len(model.asked) >= 20)
    assert set(found.best.drop) == {2, 3, 4, 6}
    assert not found.complete


def test_the_same_answer_every_time() -> None:
    model = Planted({1, 6}, seed=3)
    first, second = (search(8, model.look, ceiling=model.ceiling) for _ in range(2))
    assert first == second


def test_progress_never_gets_slower() -> None:
    model = Planted({2, 5})
    seen: list[tuple[int, float]] = []
    search(8, model.look, progress=lambda n, best: seen.append((n, best.speed)))
    assert [n for n, _ in seen] == list(range(1, len(seen) + 1))
    assert [speed for _, speed in seen] == sorted(speed for _, speed in seen)


def test_one_layer_leaves_no_choice() -> None:
    with pytest.raises(ValueError, match="of 1"):
        search(1, lambda drop: scorer().trial(drop, []))


def test_rounds_begin_behind_the_targets_own_token() -> None:
    # drafts of three: [1 1 0] [1 1 1]; behind the bonus token, which counts for nothing, [0 1] [1]
    text = [True, True, False, True, True, True, False, False, True]
    assert survival([text], 3) == pytest.approx((3 / 4, 2 / 3, 1 / 2))
    assert survival([[]], 3) == ()
    assert survival([[True] * 30], 4) == (1.0,) * 4
    assert survival([[False] * 30], 4)[0] == 0.0


def test_speed_is_tokens_over_time() -> None:
    trial = Scorer(lambda drop: 0.25, [0.0, 2.0, 2.0, 2.0]).trial((1,), [[True] * 99])
    # two drafts: three tokens for two quarter steps and one pass that costs what one row costs
    assert trial.length == 2
    assert trial.speed == pytest.approx(3 / 1.5)
    assert trial.pays
    nothing = scorer().trial((1,), [[False] * 20])
    assert nothing.length == 1
    assert nothing.speed < 1
    assert not nothing.pays
    assert scorer().ceiling((1,)) > scorer().trial((1,), [[True, False] * 20]).speed
