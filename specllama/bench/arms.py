"""An arm of a comparison, which answers prompts in one way, and the figures of its runs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import numpy as np

from specllama.bench.experiment import Run, ask
from specllama.bench.prompts import BenchPrompt
from specllama.engine.engine import Engine
from specllama.engine.profiles import Profile
from specllama.interface import EngineLike
from specllama.settings.params import GenerateParams
from specllama.store.rounds import Logged
from specllama.verdict import TimedRound

Timeline = tuple[tuple[int, float], ...]
"""(tokens so far, seconds so far) after every round."""


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt in the form that every arm gets: the same tokens, the same limits."""

    prompt: BenchPrompt
    temperature: float
    max_tokens: int
    seed: int
    ignore_eos: bool = False


def tasks_of(
    prompts: Sequence[BenchPrompt],
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int = 1,
    *,
    ignore_eos: bool = False,
) -> list[Task]:
    """List each prompt at each temperature; ``seed`` is the first prompt's, the next adds 1."""
    return [
        Task(prompt, temperature, max_tokens, seed + n, ignore_eos)
        for n, prompt in enumerate(prompts)
        for temperature in temperatures
    ]


@dataclass(slots=True)
class RunFigures:
    """The figures of one answer. Seconds; ``decode_s`` is from the first token to the last."""

    arm: str
    prompt: str
    slice: str
    temperature: float
    repetition: int
    tokens: int
    decode_s: float
    total_s: float
    ttft_s: float
    rounds: int = 0
    drafted: int | None = 0  # None where a server does not say
    accepted: int | None = 0
    near_ties: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0  # of the rounds, whatever neither model took
    deliver_s: float = 0.0  # of other_s, handing on and logging the events
    token_ids: tuple[int, ...] = ()
    text: str = ""
    window: dict[str, int] = field(default_factory=dict)  # drafted tokens per round -> rounds
    timeline: Timeline = ()
    passes: Sequence[TimedRound] = ()

    @staticmethod
    def of(run: Run, task: Task, repetition: int, total_s: float) -> RunFigures:
        """Return the figures of a whole answer of ours."""
        end, rounds = run.end, run.rounds
        t = end.timings
        written = accumulate(len(done.emitted) for done in rounds)
        return RunFigures.told(
            run.name,
            task,
            repetition,
            tokens=len(end.token_ids),
            decode_s=t.decode_ms / 1e3,
            total_s=total_s,
            ttft_s=t.ttft_ms / 1e3,
            rounds=end.rounds,
            drafted=end.draft_n,
            accepted=end.draft_n_accepted,
            near_ties=end.near_ties,
            draft_s=t.draft_ms / 1e3,
            verify_s=t.verify_ms / 1e3,
            other_s=t.other_ms / 1e3,
            deliver_s=t.deliver_ms / 1e3,
            token_ids=end.token_ids,
            text=end.text,
            window=dict(Counter(str(len(done.drafted)) for done in rounds)),
            timeline=tuple(zip(written, (done.t_s for done in rounds), strict=True)),
            passes=run.passes,
        )

    @staticmethod
    def told(arm: str, task: Task, repetition: int, **figures: Any) -> RunFigures:
        """Return the figures of a task's answer; without rounds if another program wrote it."""
        prompt = task.prompt
        return RunFigures(arm, prompt.id, prompt.slice, task.temperature, repetition, **figures)

    @property
    def decoded(self) -> int:
        """Tokens written in ``decode_s``: all but the first."""
        return max(self.tokens - 1, 0)

    @property
    def speed(self) -> float | None:
        """Tokens a second."""
        return self.decoded / self.decode_s if self.decode_s > 0 else None

    def same(self, other: RunFigures) -> bool | None:
        """True if both wrote the same, by tokens if both report them; None if that is not promised:
        other engines draw with other noise. They trim the ends of texts."""
        if self.token_ids and other.token_ids:
            return self.token_ids == other.token_ids
        if self.text and other.text and not self.temperature and not other.temperature:
            return self.text.strip() == other.text.strip()
        return None

    @property
    def task(self) -> tuple[str, float, int]:
        """The key of the runs that answered the same task in the same repetition."""
        return self.prompt, self.temperature, self.repetition

    def to_dict(self, *, texts: bool = False) -> dict[str, Any]:
        hidden = {"timeline", "passes", *(() if texts else ("token_ids", "text"))}
        data = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return {name: value for name, value in data.items() if name not in hidden}


class Arm(Protocol):
    """A participant that answers prompts."""

    name: str

    def run(self, task: Task, repetition: int) -> RunFigures: ...

    def close(self) -> None: ...


class EngineArm:
    """An arm of specllama itself under some parameters.

    Every run reads its prompt afresh, in the target and in the draft model, so that the time to
    the first token counts. What a server holds is not ours to forget: there it does not.

    Args:
        name: label in reports.
        params: sampling and what differs between arms; temperature, seed and length come from the
            task.
        begin: the profile that each repetition starts from; what is learnt lasts for that
            repetition only. None learns into the engine's own profile.
        logs: a folder for round logs like those of a user's replies; None writes none.
        expects: what each task's reply is predicted to be.
    """

    def __init__(
        self,
        name: str,
        engine: EngineLike,
        params: GenerateParams,
        *,
        begin: Callable[[], Profile] | None = None,
        logs: Path | None = None,
        expects: Callable[[Task], str] | None = None,
    ) -> None:
        self._expects, self._prediction = expects, ""
        self._logged = None if logs is None else Logged(engine, command="bench", folder=logs)
        self._begin = begin
        self._repetition: int | None = None
        self._profile: Profile | None = None
        self.name = name
        self._engine = engine
        self._params = params

    def _know(self, repetition: int) -> None:
        """Give the engine's windows this arm's lessons so far."""
        if self._begin is None:
            return
        if self._profile is None or repetition != self._repetition:
            self._profile, self._repetition = self._begin(), repetition
        assert isinstance(self._engine, Engine), "a server learns for all its clients"
        self._engine.windows.use(self._profile)

    def run(self, task: Task, repetition: int) -> RunFigures:
        engine = self._engine
        self._prediction = self._expects(task) if self._expects else ""
        if isinstance(engine, Engine):
            engine.reset()
        self._know(repetition)
        run = self.answer(task)
        return RunFigures.of(run, task, repetition, perf_counter() - run.began_s)

    def answer(self, task: Task) -> Run:
        """Answer with the cache and the lessons as they are."""
        params = (
            task.prompt.bound(self._params)
            .choose("temperature", task.temperature)
            .replace(
                max_tokens=task.max_tokens,
                seed=task.seed,
                ignore_eos=task.ignore_eos,
                min_speculative_tokens=0,
                prediction=self._prediction,
            )
        )
        run = Run(self.name, task.prompt.content, params)
        ask(self._logged or self._engine, run)
        return run

    def close(self) -> None:
        if self._logged is not None:
            self._logged.close()


def slowest_stretch(points: Timeline, tokens: int) -> float | None:
    """Return the lowest tokens per second over ``tokens`` or more; None for a shorter run."""
    slowest: float | None = None
    start = 0
    for n, seconds in points:
        while start + 1 < len(points) and n - points[start + 1][0] >= tokens:
            start += 1
        count, elapsed = n - points[start][0], seconds - points[start][1]
        if count >= tokens and elapsed > 0:
            slowest = count / elapsed if slowest is None else min(slowest, count / elapsed)
    return slowest


def make_useless(engine: Engine) -> None:
    """Turn every guess of the draft model into a wrong one at unchanged cost and confidence.

    The worst case of a comparison: the scores of each pass are shifted by one token id.
    """
    from specllama.speculative.drafting.draft_model import ChainDrafter

    for name in engine.drafters:
        drafter = engine.drafter(name)
        if isinstance(drafter, ChainDrafter) and drafter.lanes:  # own layers may not be open yet
            lane: Any = drafter.lane
            forward = lane.forward

            def shifted(tokens: Sequence[int], *, forward: Any = forward, **kwargs: Any) -> Any:
                return np.roll(forward(tokens, **kwargs), 1, axis=1)

            lane.forward = shifted


def percentile(values: Sequence[float], share: float) -> float | None:
    """Interpolate linearly between closest ranks; return None without values."""
    if not values:
        return None
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)
