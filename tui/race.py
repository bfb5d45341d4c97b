"""Races: one prompt answered in several ways, and what came of it.

Runs go one after the other, or side by side with others like them. Each begins with an empty cache,
and all have one seed and one length, so they differ in nothing but how they draft and in what
company. Laps alternate the order (plain, drafted, drafted, plain, ...), so that a machine that gets
slower or faster meanwhile favours none. Times are the engine's own: a race is replayed from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from time import perf_counter

from textual.message import Message

from specllama.cancel import Cancel
from specllama.errors import EngineError, SpecllamaError
from specllama.events import Finished, RoundDone, Verdict
from specllama.interface import EngineLike, Prompt
from specllama.settings.params import GenerateParams
from specllama.store.rounds import RoundLog, logged
from specllama.verdict import Pass

PLAIN, DRAFTED = "plain", "drafted"
TOKENS = 128  # of a race, unless the settings say fewer
LENGTHS = range(2, 9)
LAPS = 2  # of a table: each way once in either order
TOGETHER = (1, 2, 4)  # conversations at once
TOGETHER_TOKENS = 64  # of each of them


@dataclass(slots=True)
class Run:
    """One answer to a prompt. Runs of one ``group`` and ``lap`` are compared with each other.

    Attributes:
        lanes: runs that go on at once: this one and its neighbours.
        began_s: ``perf_counter`` when it was asked for.
    """

    name: str
    prompt: Prompt
    params: GenerateParams
    group: str = ""
    lap: int = 0
    lanes: int = 1
    began_s: float = 0.0
    rounds: list[RoundDone] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for done in self.rounds for token in done.emitted]

    @property
    def ttft_s(self) -> float:
        return self.rounds[0].t_s if self.rounds else 0.0

    @property
    def end_s(self) -> float:
        return self.rounds[-1].t_s if self.rounds else 0.0

    def until(self, seconds: float) -> list[RoundDone]:
        """The rounds that had ended by then."""
        return [done for done in self.rounds if done.t_s <= seconds]

    @property
    def whole(self) -> bool:
        """Whether it came to its end; one that was stopped proves nothing."""
        return self.finished is not None and self.finished.reason not in ("cancelled", "error")

    @property
    def passes(self) -> list[Pass]:
        return [Pass.of(done) for done in self.rounds if done.index]

    @property
    def singles(self) -> list[float]:
        return [one.pass_ms for one in self.passes if not one.drafted]

    def same(self, plain: Run) -> tuple[int, int]:
        """How many tokens are those of plain decoding from the start on, and of how many."""
        mine, theirs = self.tokens, plain.tokens
        pairs = zip(mine, theirs, strict=False)
        length = min(len(mine), len(theirs))
        return next((i for i, (a, b) in enumerate(pairs) if a != b), length), max(
            len(mine), len(theirs)
        )


def plain_and(
    prompt: Prompt,
    params: GenerateParams,
    ways: Iterable[tuple[str, GenerateParams]],
    group: str = "",
    lap: int = 0,
) -> list[Run]:
    """Plain decoding and each way to draft: same prompt, seed and length. Every second lap goes
    the other way round."""
    tokens = params.max_tokens or TOKENS
    base = params.replace(max_tokens=tokens, seed=params.seed if params.seed is not None else 1)
    same = {"max_tokens": tokens, "seed": base.seed, "ignore_eos": base.ignore_eos}
    plain = base.replace(speculate=False, proposer="none")
    runs = [
        Run(PLAIN, prompt, plain, group, lap),
        *(Run(name, prompt, way.replace(**same), group, lap) for name, way in ways),
    ]
    return runs[::-1] if lap % 2 else runs


def side_by_side(
    prompts: Sequence[Prompt], params: GenerateParams, lanes: Iterable[int], lap: int = 0
) -> list[Run]:
    """The same prompts, answered by so many conversations at once, plainly and drafted in turn; all
    of one length, so that each has company to its end.

    Args:
        lap: the number of the first of these laps; each wave is one.
    """
    seed = params.seed if params.seed is not None else 1
    base = params.replace(max_tokens=TOGETHER_TOKENS, ignore_eos=True, seed=seed)
    ways = {PLAIN: base.replace(speculate=False, proposer="none"), DRAFTED: drafted(base)}
    return [
        Run(name, prompt, ways[name], str(n), wave, n)
        for n in lanes
        for wave, first in enumerate(range(0, len(prompts), n), lap)
        for name in sorted(ways, reverse=wave % 2 == 0)  # plain first where it is even
        for prompt in prompts[first : first + n]
    ]


def drafted(params: GenerateParams) -> GenerateParams:
    """Today's settings, with drafting on."""
    proposer = "auto" if params.proposer == "none" else params.proposer
    reach = None if params.draft_max == 0 else params.draft_max
    return params.replace(speculate=True, proposer=proposer, draft_max=reach)


@dataclass
class RaceMoved(Message):
    """A run has new rounds."""

    run: Run

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, RaceMoved) and message.run is self.run


@dataclass
class RaceEnded(Message):
    """All runs are over, or ``error`` says why not."""

    error: SpecllamaError | None = None


class Racing:
    """Runs them in a thread of its own, and tells what happens.

    Args:
        log: keep the rounds, so that the track record of each method counts them.
    """

    def __init__(
        self, engine: EngineLike, tell: Callable[[Message], object], *, log: bool = True
    ) -> None:
        self._engine, self._tell, self.log = engine, tell, log
        self._cancel = Cancel()
        self.thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def start(self, runs: Sequence[Run]) -> None:
        self._cancel = Cancel()
        self.thread = threading.Thread(
            target=self._all, args=(list(runs), self._cancel), name="specllama-race", daemon=True
        )
        self.thread.start()

    def stop(self) -> None:
        self._cancel.set()

    def _all(self, runs: list[Run], cancel: Cancel) -> None:
        error: SpecllamaError | None = None
        try:
            while runs and not cancel.is_set():
                beside, runs = runs[: runs[0].lanes], runs[runs[0].lanes :]
                self._together(beside, cancel)
        except SpecllamaError as caught:
            error = caught
        except Exception as caught:
            error = EngineError(f"{type(caught).__name__}: {caught}")
        self._tell(RaceEnded(error))

    def _together(self, runs: list[Run], cancel: Cancel) -> None:
        empty = GenerateParams(max_tokens=1, speculate=False, proposer="none", seed=1)
        for _ in self._engine.generate(".", empty, cancel=cancel):
            pass  # nothing of the prompt is left in the cache
        with ThreadPoolExecutor(len(runs)) as pool:
            going = [pool.submit(self._one, run, cancel) for run in runs]
            for one in as_completed(going):
                if one.exception() is not None:
                    cancel.set()  # the others prove nothing without it
        for one in going:
            one.result()

    def _one(self, run: Run, cancel: Cancel) -> None:
        params = run.params.on_card(self._engine.info.target.card)
        log = None
        if self.log and run.lanes == 1:  # company says nothing of a method
            log = RoundLog.open(self._engine.info, params, command="race")
        run.began_s = perf_counter()
        try:
            events = self._engine.generate(run.prompt, params, cancel=cancel)
            for event in logged(events, log, params):
                if isinstance(event, RoundDone):
                    run.rounds.append(event)
                    self._tell(RaceMoved(run))
                elif isinstance(event, Finished):
                    run.finished = event
        finally:
            if log is not None:
                log.close()


Laps = dict[int, dict[str, list[Run]]]
"""By number of the lap, and in it by way: what is compared."""


@dataclass(slots=True)
class Board:
    """What was raced with the loaded pair, by tab; it outlives the page."""

    runs: dict[str, list[Run]] = field(default_factory=dict)

    def laps(self, tab: str, group: str = "") -> Laps:
        """The laps in which every run came to its end."""
        found: Laps = {}
        for run in self.runs.get(tab, ()):
            if run.group == group:
                found.setdefault(run.lap, {}).setdefault(run.name, []).append(run)
        return {
            lap: ways
            for lap, ways in found.items()
            if all(run.whole for runs in ways.values() for run in runs)
        }

    def free_lap(self, tab: str, group: str = "") -> int:
        """The number of the next lap."""
        laps = [run.lap for run in self.runs.get(tab, ()) if run.group == group]
        return max(laps, default=-1) + 1

    def drop_halves(self, tab: str) -> None:
        """Forget the laps that did not come to their end."""
        groups = dict.fromkeys(run.group for run in self.runs.get(tab, ()))
        kept = [
            run
            for group in groups
            for ways in self.laps(tab, group).values()
            for runs in ways.values()
            for run in runs
        ]
        if kept:
            self.runs[tab] = kept
        else:
            self.runs.pop(tab, None)

    def plain(self, tab: str, group: str = "") -> Run | None:
        """The newest plain run, which may still go on."""
        runs = [r for r in self.runs.get(tab, ()) if r.name == PLAIN and r.group == group]
        begun = [run for run in runs if run.rounds]
        return (begun or runs)[-1] if runs else None

    def ways(self, tab: str, group: str = "") -> list[Run]:
        """What was run against plain decoding: the newest run of each that came to its end."""
        found = {
            run.name: run
            for run in self.runs.get(tab, ())
            if run.name != PLAIN and run.group == group and run.whole
        }
        return list(found.values())


@dataclass(frozen=True, slots=True)
class Advice:
    """What to do, and why; ``params`` None leaves everything as it is."""

    words: str
    params: GenerateParams | None = None

    @property
    def said(self) -> str:
        """On the page, where a key does it."""
        if self.params is not None:
            return f"Press A to {self.words}"
        return self.words[:1].upper() + self.words[1:]


def advise(now: GenerateParams, mine: Verdict | None) -> Advice:
    """Of today's settings, raced against plain decoding."""
    answer = "unknown" if mine is None else mine.answer
    match answer, now.speculate:
        case "faster", True:
            return Advice("leave it as it is: drafting pays here")
        case "faster", False:
            low = (mine.low if mine is not None else None) or 1.0
            return Advice(f"draft: at least {low:.2f}× as fast here", drafted(now))
        case "slower" | "off", False:
            return Advice("leave drafting off: it does not pay here")
        case "slower", True:
            return Advice("turn drafting off: it loses time here", now.replace(speculate=False))
        case "off", True:
            return Advice("leave it as it is: drafting does not pay here and stays off by itself")
        case "unsure", _:
            return Advice("no clear winner yet: Enter runs more pairs, L races a longer reply")
    return Advice("the reply is too short to tell: L races a longer one, P another prompt")


def advise_among(
    now: GenerateParams,
    mine: Verdict | None,
    judged: Sequence[tuple[Run, Verdict]],
    what: str,
) -> Advice:
    """The fastest of several ways that was surely faster, unless today's is as good.

    Args:
        mine: of today's settings, where they were raced.
        what: how one of the ways is called: "length", "method".
    """
    faster = [(one.low or 0.0, run) for run, one in judged if one.answer == "faster"]
    today = mine.ratio if mine is not None and mine.answer == "faster" and now.speculate else None
    if faster:
        low, best = max(faster, key=lambda item: item[0])
        if low <= (today or 1.0):
            return Advice(f"leave it as it is: no {what} is surely faster than today's settings")
        params = best.params.replace(
            max_tokens=now.max_tokens, seed=now.seed, ignore_eos=now.ignore_eos
        )
        return Advice(f"draft with {best.name}: at least {low:.2f}× as fast here", params)
    if any(one.answer in ("unsure", "unknown") for _, one in judged):
        return Advice(f"no {what} is surely faster than plain yet: Enter runs all of them again")
    kept = "; today's settings do" if today is not None else ""
    return Advice(f"no {what} beats plain decoding here{kept}")
