"""The gain that a head should bring on this machine: it is loaded, and its steps are timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specllama.bench.experiment import PLAIN, ask_all, plain_and
from specllama.bench.outcome import SpeedModel
from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.models.companions import HEADS, require_head
from specllama.models.gguf import read_header
from specllama.rates import fixed_speeds
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

LEAST = 1.02  # less is not worth a word
TOKENS = 48  # of each reply that is timed


@dataclass(frozen=True, slots=True)
class Payback:
    """Costs of a head in plain steps of its target, and what they make of its guesses.

    Attributes:
        step: of the head. row: a further row of a pass of the target.
        kept: the share of its guesses that were kept while this was timed.
        length: of drafts, the best. speed: with them, over plain decoding.
    """

    step: float
    row: float
    kept: float
    length: int
    speed: float

    @property
    def words(self) -> str:
        costs = (
            f"a step of the head takes {self.step:.2f} of a step of the target here, "
            f"a further row of a pass {self.row:.2f}"
        )
        if self.speed < LEAST:
            return (
                f"it does not pay on this machine: {costs}; at best {self.speed:.2f}× plain "
                "decoding is expected"
            )
        return f"{self.speed:.2f}× plain decoding is expected with drafts of {self.length}: {costs}"


def payback(
    target: Path,
    head: Path,
    prompts: Sequence[Sequence[int]],
    survival: Sequence[float],
    options: EngineOptions,
) -> Payback | None:
    """Load a head with its target and time both on a few prompts; None if these tell too little.

    Args:
        survival: the share of its drafts that are right up to each guess, in texts held out.

    Raises:
        SpecllamaError: the head cannot be loaded.
    """
    method = HEADS[require_head(read_header(head))].method
    base = GenerateParams(sampling=SamplingParams(temperature=0.0), max_tokens=TOKENS, seed=1)
    ways = [
        (f"{n}", base.replace(proposer=method, draft_max=n, window="fixed"))
        for n in (1, len(survival))
    ]
    with Engine.load(target, "none", replace(options, heads=(str(head),))) as engine:
        runs = [one for prompt in prompts for one in plain_and(tuple(prompt), base, ways)]
        ask_all(engine, runs, Cancel())
    plain = [one.pass_ms for run in runs if run.name == PLAIN for one in run.passes]
    drafted = [one for run in runs if run.name != PLAIN for one in run.passes]
    if (model := SpeedModel.of(drafted, plain)) is None:
        return None
    speeds = fixed_speeds(
        survival, model.c, [1 + model.beta * (n - 1) for n in range(len(survival) + 2)]
    )
    best = max(speeds, key=speeds.__getitem__)
    return Payback(model.c, model.beta, model.alpha, best, speeds[best])
