"""Races: an experiment in a thread of its own, shown on the screen, and its advice.

Times are the engine's own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from textual.message import Message

from specllama.bench.experiment import (
    DRAFTED,
    LAPS,
    PLAIN,
    TOKENS,
    Run,
    ask_all,
    drafted,
    plain_and,
)
from specllama.bench.outcome import RaceBoard, is_idle
from specllama.bench.prompts import load_prompts
from specllama.cancel import Cancel
from specllama.errors import EngineError, SpecllamaError
from specllama.interface import EngineLike, MethodInfo, Prompt
from specllama.interface import Message as Turn
from specllama.rates import Payoff
from specllama.settings.params import GenerateParams
from specllama.tui.messages import Latest


class RaceMoved(Latest):
    """A run has new rounds."""


@dataclass
class RaceEnded(Message):
    """All runs are over, or ``error`` gives the reason."""

    error: SpecllamaError | None = None


class Racing:
    """The thread of the races, and its reports to the screen."""

    def __init__(self, engine: EngineLike, post: Callable[[Message], object]) -> None:
        self._engine, self._post = engine, post
        self._cancel = Cancel()
        self.thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self.thread is not None and self.thread.is_alive()

    def start(self, runs: Iterable[Run]) -> None:
        self._cancel = Cancel()
        self.thread = threading.Thread(
            target=self._all, args=(runs, self._cancel), name="specllama-race", daemon=True
        )
        self.thread.start()

    def stop(self) -> None:
        self._cancel.set()

    def _all(self, runs: Iterable[Run], cancel: Cancel) -> None:
        error: SpecllamaError | None = None
        try:
            ask_all(self._engine, runs, cancel, lambda run: self._post(RaceMoved()))
        except SpecllamaError as caught:
            error = caught
        except Exception as caught:
            error = EngineError(f"{type(caught).__name__}: {caught}")
        self._post(RaceEnded(error))


class RaceSetup:
    """The setup of a race: a prompt, and the length of its replies.

    Args:
        params: of today. prompt: None takes one of ours.

    Attributes:
        tokens: most of a reply.
        to_the_end: even where the model would end earlier.
    """

    def __init__(self, params: GenerateParams, prompt: Prompt | None) -> None:
        self.params, self.prompt = params, prompt
        self.tokens = params.max_tokens or TOKENS
        self.to_the_end = params.ignore_eos
        self._samples = 0  # prompts of ours that were taken

    def ask(self, typed: str) -> None:
        """Race this prompt; "" takes another one of ours."""
        if typed:
            head = [m for m in self.prompt or () if isinstance(m, Turn) and m.role == "system"]
            self.prompt = [*head, Turn("user", typed)]
        else:
            ours = load_prompts()
            self._samples += 1
            self.prompt = ours[self._samples % len(ours)].content

    def lap(self, n: int, methods: Sequence[MethodInfo] | None = None) -> list[Run]:
        """Return lap ``n`` of the race, or of ``methods``."""
        params = drafted(self.params).replace(max_tokens=self.tokens, ignore_eos=self.to_the_end)
        ways = [(DRAFTED, params)]
        if methods is not None:
            ways = [(m.label, params.replace(proposer=m.name)) for m in methods]
        return plain_and(self.prompt or load_prompts()[0].content, params, ways, n)

    def fits(self, board: RaceBoard) -> bool:
        """True if what was raced was raced with today's settings, methods and lengths apart."""
        apart = {"proposer": "auto", "max_tokens": 1, "ignore_eos": False}
        now = next(run.params for run in self.lap(0) if run.name != PLAIN).replace(**apart)
        runs = [run for tab in board.runs.values() for run in tab if run.name != PLAIN]
        return all(run.params.replace(**apart) == now for run in runs)

    def table(self, board: RaceBoard, methods: Sequence[MethodInfo]) -> list[Run]:
        """Put the next laps of these methods on the board."""
        first = board.free_lap("methods")
        runs = [run for n in range(first, first + LAPS) for run in self.lap(n, methods)]
        board.runs.setdefault("methods", []).extend(runs)
        return runs


@dataclass(frozen=True, slots=True)
class Advice:
    """An action and the reason for it; ``params`` None leaves everything as it is."""

    words: str
    params: GenerateParams | None = None

    @property
    def said(self) -> str:
        """The text on the page, with the key that does it."""
        if self.params is not None:
            return f"Press A to {self.words}"
        return self.words[:1].upper() + self.words[1:]


def advise(now: GenerateParams, mine: Payoff | None) -> Advice:
    """Judge today's settings, raced against plain decoding, and return advice."""
    answer = "unknown" if mine is None else mine.answer
    if mine is not None and mine.low is not None and is_idle(mine):
        return Advice("P races another prompt: hardly anything was guessed in this one")
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
            return Advice("too close to call: Enter runs more pairs, L races a longer reply")
    if mine is not None and mine.ratio is not None:
        return Advice("Enter runs more pairs, best with nothing else running")
    return Advice("the reply is too short to tell: L races a longer one, P another prompt")


def advise_among(
    now: GenerateParams, mine: Payoff | None, judged: Sequence[tuple[Run, Payoff]]
) -> Advice:
    """Choose the fastest of several methods that was surely faster, unless today's is as good.

    Args:
        mine: of today's settings, where they were raced.
    """
    faster = [
        (one.low or 0.0, run) for run, one in judged if one.answer == "faster" and not is_idle(one)
    ]
    today = mine.ratio if mine is not None and mine.answer == "faster" and now.speculate else None
    if faster:
        low, best = max(faster, key=lambda item: item[0])
        if low <= (today or 1.0):
            return Advice("leave it as it is: no method is surely faster than today's settings")
        params = best.params.replace(
            max_tokens=now.max_tokens, seed=now.seed, ignore_eos=now.ignore_eos
        )
        return Advice(f"draft with {best.name}: at least {low:.2f}× as fast here", params)
    if any(one.answer in ("unsure", "unknown") for _, one in judged):
        return Advice("no method is surely faster than plain yet: Enter runs all of them again")
    kept = "; today's settings do" if today is not None else ""
    return Advice(f"no method beats plain decoding here{kept}")
