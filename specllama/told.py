"""Events of a request, folded into its text, rounds and notices.

told = Told()
for event in engine.generate(prompt, params):
    new = told.take(event)
    print(new.text, end="")
print(told.end.timings.tok_per_s)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from specllama.errors import EngineError
from specllama.events import (
    Event,
    Finished,
    LoadProgress,
    Measuring,
    Notice,
    PrefillProgress,
    ReasoningDelta,
    RoundDone,
    Started,
    TextDelta,
)
from specllama.figures import Figures


@dataclass(slots=True, kw_only=True)
class News:
    """The new parts: text and thought, rounds and notices, and the newest of all others."""

    text: str = ""
    reasoning: str = ""
    rounds: Sequence[RoundDone] = ()
    notices: Sequence[Notice] = ()
    load: LoadProgress | None = None
    measuring: Measuring | None = None
    started: Started | None = None
    prefill: PrefillProgress | None = None
    finished: Finished | None = None


def news(event: Event) -> News:
    """Sort one event into its part."""
    match event:
        case RoundDone():
            return News(rounds=(event,))
        case TextDelta():
            return News(text=event.text)
        case ReasoningDelta():
            return News(reasoning=event.text)
        case Notice():
            return News(notices=(event,))
        case PrefillProgress():
            return News(prefill=event)
        case Started():
            return News(started=event)
        case LoadProgress():
            return News(load=event)
        case Measuring():
            return News(measuring=event)
        case Finished():
            return News(finished=event)
    return News()


@dataclass(slots=True, kw_only=True)
class Told(News):
    """All the parts so far."""

    rounds: list[RoundDone] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)

    @classmethod
    def of(cls, events: Iterable[Event]) -> Told:
        """Fold these events."""
        told = Told()
        for event in events:
            told.take(event)
        return told

    def take(self, event: Event) -> News:
        """Add an event; return its news."""
        new = news(event)
        self.add(new)
        return new

    def add(self, new: News) -> None:
        """Add the news."""
        self.text += new.text
        self.reasoning += new.reasoning
        self.rounds += new.rounds
        self.notices += new.notices
        self.load = new.load or self.load
        self.started = new.started or self.started
        self.prefill = new.prefill or self.prefill
        self.finished = new.finished or self.finished

    @property
    def figures(self) -> Figures | None:
        """The figures of the reply; None before its first token."""
        return Figures.of(self.started, self.rounds, self.finished)

    @property
    def undrafted(self) -> str:
        """The reason why nothing was drafted, as most rounds give it; "" where something was."""
        reasons = Counter(done.window_reason for done in self.rounds[1:] or self.rounds)
        drafted = any(done.drafted for done in self.rounds)
        return "" if drafted else max(reasons, key=reasons.__getitem__, default="")

    @property
    def whole(self) -> bool:
        """True if the reply came to its end; one that was cut short proves nothing."""
        return self.finished is not None and self.finished.reason not in ("cancelled", "error")

    @property
    def end(self) -> Finished:
        """The last event.

        Raises:
            EngineError: there was none.
        """
        if self.finished is None:
            raise EngineError("the engine ended without a result")
        return self.finished
