"""Experiments: prompts that are answered in several ways, by turns, and the runs of each.

Runs go one after the other. Each begins with an empty cache, and all have one seed and one length,
so they differ in nothing but how they draft. The order alternates, so that a machine that gets
slower or faster meanwhile favours none. Times are the engine's own. Light to import.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import count, product, takewhile
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from uuid import uuid4

from specllama.bench.prompts import BenchPrompt
from specllama.cancel import Cancel
from specllama.events import RoundDone
from specllama.interface import EngineLike, Message, Prompt
from specllama.rates import speed
from specllama.settings.params import GenerateParams
from specllama.store.rounds import Logged
from specllama.text_history import common_prefix
from specllama.told import Told
from specllama.verdict import passes_of

if TYPE_CHECKING:
    from specllama.engine.engine import Engine
    from specllama.engine.profiles import Profile

PLAIN, DRAFTED = "plain", "drafted"
TOKENS = 128  # of a race, unless the settings say fewer
LAPS = 2  # of a table: each way once in either order

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int], object]
"""Called with what is done, and of how much."""


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt in the form that every arm gets: the same tokens, the same limits."""

    prompt: BenchPrompt
    temperature: float
    max_tokens: int
    seed: int
    ignore_eos: bool = False

    def wish(self, base: GenerateParams, **more: Any) -> GenerateParams:
        """Return the parameters of a request for it."""
        same = {"max_tokens": self.max_tokens, "seed": self.seed, "ignore_eos": self.ignore_eos}
        return self.prompt.bound(base).replace(**same, **more)


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
class Run(Told):
    """One answer to a prompt. Runs of one ``lap`` are compared with each other."""

    name: str
    prompt: Prompt
    params: GenerateParams
    lap: int = 0
    began_s: float = 0.0  # by ``perf_counter``

    @property
    def tokens(self) -> list[int]:
        return [token for done in self.rounds for token in done.emitted]

    @property
    def ttft_s(self) -> float:
        return self.rounds[0].t_s if self.rounds else 0.0

    @property
    def end_s(self) -> float:
        return self.rounds[-1].t_s if self.rounds else 0.0

    @property
    def speed(self) -> float | None:
        """Tokens a second after the first one."""
        return speed(len(self.tokens), self.end_s - self.ttft_s)

    @property
    def passes(self) -> list[RoundDone]:
        return passes_of(self.rounds)

    def same(self, plain: Run) -> tuple[int, int]:
        """Count the first tokens that equal plain decoding, and those of the longer run."""
        mine, theirs = self.tokens, plain.tokens
        return common_prefix(mine, theirs), max(len(mine), len(theirs))


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
    passes: Sequence[RoundDone] = ()

    @staticmethod
    def of(run: Run, task: Task, repetition: int, total_s: float) -> RunFigures:
        """Return the figures of a whole answer of ours."""
        end, rounds = run.end, run.rounds
        parts = ("decode", "ttft", "draft", "verify", "other", "deliver")
        return RunFigures.told(
            run.name,
            task,
            repetition,
            tokens=len(end.token_ids),
            total_s=total_s,
            rounds=end.rounds,
            drafted=end.draft_n,
            accepted=end.draft_n_accepted,
            near_ties=end.near_ties,
            token_ids=end.token_ids,
            text=end.text,
            window=dict(Counter(str(len(done.drafted)) for done in rounds)),
            passes=run.passes,
            **{f"{part}_s": getattr(end.timings, f"{part}_ms") / 1e3 for part in parts},
        )

    @staticmethod
    def told(arm: str, task: Task, repetition: int, **figures: Any) -> RunFigures:
        """Return the figures of a task's answer; without rounds if another program wrote it."""
        prompt = task.prompt
        return RunFigures(arm, prompt.id, prompt.slice, task.temperature, repetition, **figures)

    @property
    def speed(self) -> float | None:
        """Tokens a second after the first one."""
        return speed(self.tokens, self.decode_s)

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
        hidden = {"passes", *(() if texts else ("token_ids", "text"))}
        data = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in data.items() if name not in hidden}


class Arm(Protocol):
    """A participant that answers prompts."""

    name: str

    def run(self, task: Task, repetition: int) -> RunFigures: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class EngineArm:
    """An arm of specllama itself under some parameters.

    Every run reads its prompt afresh, in the target and in the draft model, so that the time to
    the first token counts.

    Args:
        name: label in reports.
        params: sampling and what differs between arms; temperature, seed and length come from the
            task.
        begin: the profile that each repetition starts from; what is learnt lasts for that
            repetition only. None learns into the engine's own profile.
        logs: a folder for round logs like those of a user's replies; None writes none.
    """

    name: str
    engine: Engine
    params: GenerateParams
    begin: Callable[[], Profile] | None = None
    logs: Path | None = None
    _logged: Logged | None = None
    _lessons: tuple[int, Profile] | None = None  # of the repetition

    def __post_init__(self) -> None:
        if self.logs is not None:
            self._logged = Logged(self.engine, command="bench", folder=self.logs)

    def run(self, task: Task, repetition: int) -> RunFigures:
        self.engine.reset()
        if self.begin is not None:  # the windows know this arm's lessons so far
            if self._lessons is None or repetition != self._lessons[0]:
                self._lessons = repetition, self.begin()
            self.engine.windows.use(self._lessons[1])
        run = self.answer(task)
        return RunFigures.of(run, task, repetition, perf_counter() - run.began_s)

    def answer(self, task: Task) -> Run:
        """Answer with the cache and the lessons as they are."""
        params = self.params.choose("temperature", task.temperature)
        params = task.wish(params, min_speculative_tokens=0)
        run = Run(self.name, task.prompt.content, params)
        ask(self._logged or self.engine, run)
        return run

    def close(self) -> None:
        if self._logged is not None:
            self._logged.close()


def plain_and(
    prompt: Prompt, params: GenerateParams, ways: Iterable[tuple[str, GenerateParams]], lap: int = 0
) -> list[Run]:
    """List plain decoding and each way to draft: same prompt, seed and length. Every second lap
    goes the other way round."""
    tokens = params.max_tokens or TOKENS
    base = params.replace(max_tokens=tokens, seed=params.seed if params.seed is not None else 1)
    same = {"max_tokens": tokens, "seed": base.seed, "ignore_eos": base.ignore_eos}
    plain = base.replace(speculate=False, proposer="none")
    runs = [
        Run(PLAIN, prompt, plain, lap),
        *(Run(name, prompt, way.replace(**same), lap) for name, way in ways),
    ]
    return runs[::-1] if lap % 2 else runs


def drafted(params: GenerateParams) -> GenerateParams:
    """Return today's settings, with drafting on."""
    proposer = "auto" if params.proposer == "none" else params.proposer
    reach = None if params.draft_max == 0 else params.draft_max
    return params.replace(speculate=True, proposer=proposer, draft_max=reach)


def ask(
    engine: EngineLike,
    run: Run,
    *,
    cancel: Cancel | None = None,
    moved: Callable[[Run], object] | None = None,
) -> None:
    """Run one answer; ``moved`` is called with every round, and as the prompt is read. Nothing is
    copied from other runs: they wrote the same."""
    params = run.params.replace(scope=uuid4().hex)
    run.began_s = perf_counter()
    for event in engine.generate(run.prompt, params, cancel=cancel):
        new = run.take(event)
        if moved is not None and (new.rounds or new.prefill):
            moved(run)


def ask_all(
    engine: EngineLike,
    runs: Iterable[Run],
    cancel: Cancel,
    moved: Callable[[Run], object] = lambda run: None,
) -> None:
    """Run answers one after the other."""
    empty = GenerateParams(max_tokens=1, speculate=False, proposer="none", seed=1)
    for run in takewhile(lambda run: not cancel.is_set(), runs):
        for _ in engine.generate(".", empty, cancel=cancel):
            pass  # nothing of the prompt is left in the cache
        ask(engine, run, cancel=cancel, moved=moved)
        if cancel.is_set():
            return


def question(prompt: Prompt | None) -> str:
    """Return the question of a prompt, in its own words."""
    if isinstance(prompt, str):
        return prompt
    said = [one.content for one in prompt or () if isinstance(one, Message) and one.role == "user"]
    return said[-1] if said else ""


def compare(
    ways: Sequence[Callable[[T, int], R]],
    tasks: Iterable[T],
    *,
    repetitions: int = 1,
    warm_up: int = 0,
    in_turn: bool = True,
    progress: Progress = lambda done, total: None,
) -> Iterator[list[R]]:
    """Answer every task in all ways, called with it and the repetition; yield a task's answers.

    Args:
        warm_up: tasks that are answered in every way once before anything counts.
        in_turn: begin with another way each time, so that none always runs after the same one.
    """
    work, done = list(tasks), count(1)
    total = (repetitions * len(work) + min(warm_up, len(work))) * len(ways)

    def answer(at: int, task: T, repetition: int) -> R:
        found = ways[at](task, repetition)
        progress(next(done), total)
        return found

    places = range(len(ways))
    for task, at in product(work[:warm_up], places):
        answer(at, task, -1)
    for repetition in range(repetitions):
        for i, task in enumerate(work):
            first = (i + repetition) % len(ways) if in_turn else 0
            order = (*places[first:], *places[:first])
            found = {at: answer(at, task, repetition) for at in order}
            yield [found[at] for at in places]


def edited(text: str, every: int = 16) -> str:
    """Replace one of every ``every`` words in a text, at least one."""
    words = text.split(" ")
    for at in range(min(every, len(words)) // 2, len(words), every):
        words[at] = "otherwise"
    return " ".join(words)
