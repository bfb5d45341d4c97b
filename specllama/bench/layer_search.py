"""Which layers of a target make its best draft: a search by measured agreement.

The draft is the target without some layers. Over texts that the target wrote itself, every choice
of layers is asked for its likeliest token at every position (one wide pass, ``backend.layer_skip``)
and the rounds that greedy speculation would have had are counted. Together with the draft's share
of a step's bytes and the cost of wider passes, this gives the expected speed without a clock: the
same texts and costs give the same choice.

The search takes the best of some usual choices and improves it by dropping, restoring and swapping
single layers. Then it starts from the whole model and drops one layer after another, the best one
each time; the best choice on the way is improved, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specllama.speculative.lengths import expected_tokens, plans

LONGEST = 8  # tokens of a draft
WIDTH = 8  # layers that are tried at each step down; the first step tries them all
LOST = 0.1  # of first drafts accepted: below it, smaller drafts are not tried

Drop = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trial:
    """What one choice of layers gives.

    Attributes:
        drop: the layers left out, sorted.
        cost: a draft step in target steps.
        survival: P(drafts 1..i+1 are all accepted), by position.
        length: the best fixed draft length, at least 1.
        speed: expected speed over plain decoding at that length.
    """

    drop: Drop
    cost: float
    survival: tuple[float, ...]
    length: int
    speed: float

    @property
    def pays(self) -> bool:
        return self.speed > 1.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "drop": list(self.drop),
            "cost": round(self.cost, 4),
            "survival": [round(share, 4) for share in self.survival],
            "draft_max": self.length,
            "tokens_per_round": round(expected_tokens(self.survival, self.length), 4),
            "speed": round(self.speed, 4),
        }


class Scorer:
    """From agreement to expected speed.

    Args:
        cost: a draft step without these layers, in target steps.
        passes: cost of a target pass by rows, ``passes[1]`` a plain step (any unit).
    """

    def __init__(self, cost: Callable[[Drop], float], passes: Sequence[float]) -> None:
        self._cost = cost
        self._passes = [rows / passes[1] for rows in passes]

    def trial(self, drop: Drop, agreement: Iterable[Sequence[bool]]) -> Trial:
        """The outlook of a choice.

        Args:
            agreement: for each text, whether draft and target agree, by position.
        """
        return self._best(drop, survival(agreement, len(self._passes) - 2))

    def ceiling(self, drop: Drop) -> float:
        """The speed if every draft were accepted."""
        return self._best(drop, (1.0,) * (len(self._passes) - 2)).speed

    def _best(self, drop: Drop, shares: tuple[float, ...]) -> Trial:
        cost = self._cost(drop)
        # after a fully accepted round the draft reads two tokens
        late = cost * max(self._passes[2] - 1.0, 0.0)
        best = max(plans(shares or (0.0,), cost, self._passes, late), key=lambda plan: plan.speed)
        return Trial(drop, cost, shares, best.length, best.speed)


def survival(agreement: Iterable[Sequence[bool]], longest: int) -> tuple[float, ...]:
    """Share of the rounds of greedy speculation whose first 1, 2, … drafts are all accepted.

    A round begins where the last one ended: after the target's own token. A text's end cuts the
    last drafts short; a position counts in the rounds that reach it.
    """
    reached, survived = [0] * longest, [0] * longest
    for agrees in agreement:
        at = 0
        while at < len(agrees):
            room = min(longest, len(agrees) - at)
            run = next((i for i in range(room) if not agrees[at + i]), room)
            for i in range(room):
                reached[i] += 1
                survived[i] += i < run
            at += run + 1
    shares: list[float] = []
    for share in (s / r for s, r in zip(survived, reached, strict=True) if r):
        shares.append(min(share, shares[-1] if shares else 1.0))
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class Found:
    """The outcome of a search.

    Attributes:
        tried: every choice tried, the fastest first.
        complete: whether the search finished before its time ran out.
    """

    tried: tuple[Trial, ...]
    complete: bool

    @property
    def best(self) -> Trial:
        return self.tried[0]


class _SpentError(Exception):
    pass


def search(
    n_layers: int,
    look: Callable[[Drop], Trial],
    *,
    ceiling: Callable[[Drop], float] = lambda drop: float("inf"),
    starts: Iterable[Drop] = (),
    spent: Callable[[], bool] = lambda: False,
    progress: Callable[[int, Trial], None] | None = None,
) -> Found:
    """The fastest choice of layers to drop.

    Args:
        look: measures a choice.
        ceiling: an upper bound of a choice's speed; what cannot win is not measured at the end.
        starts: choices to try first.
        spent: whether the time is over; at least one choice is tried anyway.
        progress: called after each choice with how many were tried and the fastest so far.

    Raises:
        ValueError: there is nothing to choose from.
    """
    if n_layers < 2:
        raise ValueError(f"no layer can be dropped of {n_layers}")
    tried: dict[Drop, Trial] = {}

    def at(drop: Drop) -> Trial:
        if drop not in tried:
            if tried and spent():
                raise _SpentError
            tried[drop] = look(drop)
            if progress is not None:
                progress(len(tried), _fastest(tried.values()))
        return tried[drop]

    complete = True
    try:
        for drop in starts:
            at(drop)
        if tried:  # the way down takes long to get anywhere, so try quick wins first
            _improve(n_layers, at, ceiling, _fastest(tried.values()))
        _step_down(n_layers, at)
        _improve(n_layers, at, ceiling, _fastest(tried.values()))
    except _SpentError:
        complete = False
    return Found(tuple(sorted(tried.values(), key=_rank, reverse=True)), complete)


def _rank(trial: Trial) -> tuple[float, float, tuple[int, ...]]:
    """Faster is better, then longer agreement; ties go to later layers, to repeat the choice."""
    return trial.speed, sum(trial.survival), trial.drop


def _fastest(trials: Iterable[Trial]) -> Trial:
    return max(trials, key=_rank)


def _step_down(n_layers: int, at: Callable[[Drop], Trial]) -> None:
    """Drop layer after layer, the best one each time, until one is left or nothing agrees."""
    drop: Drop = ()
    pool = list(range(n_layers))
    while len(drop) < n_layers - 1:
        steps = {layer: at(_with(drop, layer)) for layer in pool[: WIDTH if drop else None]}
        best = max(steps, key=lambda layer: _rank(steps[layer]))
        if not steps[best].survival or steps[best].survival[0] < LOST:
            return
        drop = steps[best].drop
        # layers that did well when last tried come first; untried ones keep their place
        ranked = sorted(steps, key=lambda layer: _rank(steps[layer]), reverse=True)
        pool = [layer for layer in [*ranked, *pool[len(steps) :]] if layer != best]


def _improve(
    n_layers: int, at: Callable[[Drop], Trial], ceiling: Callable[[Drop], float], best: Trial
) -> None:
    """Move to the best neighbour as long as there is a better one."""
    while True:
        for group in (_one_off(best.drop, n_layers), _exchanged(best.drop, n_layers)):
            hopeful = [drop for drop in group if ceiling(drop) > best.speed]
            better = max((at(drop) for drop in hopeful), key=_rank, default=best)
            if better.speed > best.speed:
                best = better
                break
        else:
            return


def _one_off(drop: Drop, n_layers: int) -> Iterator[Drop]:
    if len(drop) > 1:
        yield from (tuple(layer for layer in drop if layer != back) for back in drop)
    if len(drop) < n_layers - 1:
        yield from (_with(drop, layer) for layer in range(n_layers) if layer not in drop)


def _exchanged(drop: Drop, n_layers: int) -> Iterator[Drop]:
    for back in drop:
        rest = tuple(layer for layer in drop if layer != back)
        yield from (_with(rest, layer) for layer in range(n_layers) if layer not in drop)


def _with(drop: Drop, layer: int) -> Drop:
    return tuple(sorted((*drop, layer)))
