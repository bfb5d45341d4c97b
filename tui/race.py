"""Races: an experiment in a thread of its own, told to the screen, and what it advises.

Times are the engine's own: a race is replayed from them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from textual.message import Message

from specllama.bench.experiment import Run, ask_all, drafted
from specllama.cancel import Cancel
from specllama.errors import EngineError, SpecllamaError
from specllama.events import Payoff
from specllama.interface import EngineLike
from specllama.settings.params import GenerateParams


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
        self, engine: EngineLike, post: Callable[[Message], object], *, log: bool = True
    ) -> None:
        self._engine, self._post, self.log = engine, post, log
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

    def _moved(self, run: Run) -> None:
        self._post(RaceMoved(run))

    def _all(self, runs: list[Run], cancel: Cancel) -> None:
        error: SpecllamaError | None = None
        try:
            ask_all(
                self._engine, runs, cancel, lambda run: self._post(RaceMoved(run)), log=self.log
            )
        except SpecllamaError as caught:
            error = caught
        except Exception as caught:
            error = EngineError(f"{type(caught).__name__}: {caught}")
        self._post(RaceEnded(error))


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


def advise(now: GenerateParams, mine: Payoff | None) -> Advice:
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
    mine: Payoff | None,
    judged: Sequence[tuple[Run, Payoff]],
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
