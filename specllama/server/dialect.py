"""What every API family translates to and from: a request as the engine takes it, and a reply.

A family reads its own JSON into ``Wanted`` and spells what comes as frames; the way between
(``exchange``) is the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from specllama import __version__
from specllama.events import Event, Finished, PrefillProgress, RoundDone, Started, TextDelta
from specllama.events import ReasoningDelta as ReasoningDelta
from specllama.interface import Prompt
from specllama.server.refusals import Refusal
from specllama.server.tools import Call, ToolReader, ToolUse
from specllama.settings.params import GenerateParams

FINGERPRINT = f"specllama-{__version__}"  # of what computes, in OpenAI's words


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a client asks for.

    Attributes:
        prompts: answered one by one, each ``n`` times.
        n: replies to each prompt; the first has the seed of ``params``.
        stream: send text as it comes.
        client: who asks, for fairness.
        asked: the request as it was received, hashed.
        label: of the workload; arm: of an experiment.
        tools: what the model may call.
        silent: the prompts are only read, for whoever comes with them next.
        progress: tell how far a prompt is read.
    """

    prompts: tuple[Prompt, ...]
    params: GenerateParams
    n: int = 1
    stream: bool = False
    client: str = ""
    asked: str = ""
    label: str = ""
    arm: str = ""
    tools: ToolUse | None = None
    silent: bool = False
    progress: bool = False


@dataclass(slots=True)
class Reply:
    """One reply, as far as it came.

    Attributes:
        calls: of tools, once the reply is over; ``text`` is without them.
        written: tokens so far.
        reasoning_n: tokens of the thought.
        silent: of a request that wants no text: the first token, which costs no pass, is dropped.
        read: (tokens of the prompt that are read or need not be, milliseconds since it was begun).
        predicted_ms: from the first token to the last.
    """

    index: int
    reader: ToolReader | None = None
    silent: bool = False
    text: str = ""
    reasoning: str = ""
    started: Started | None = None
    finished: Finished | None = None
    rounds: list[RoundDone] = field(default_factory=list)
    written: int = 0
    queue_ms: float = 0.0
    calls: list[Call] = field(default_factory=list)
    reasoning_n: int = 0
    read: list[tuple[int, float]] = field(default_factory=list)
    predicted_ms: float = 0.0
    _begun_s: float = 0.0
    _first_ms: float = 0.0
    _said: int = 0  # characters of the answer
    _answering: bool = False

    def take(self, events: Iterable[Event]) -> Piece:
        """Add what came; what of it is to be said."""
        piece = Piece(self)
        for event in events:
            if isinstance(event, Started):
                self.started = event
                self._begun_s = time.perf_counter()
                piece.read.append((event.cached_n, 0.0))
            elif isinstance(event, PrefillProgress):
                piece.read.append((event.done, self._ms))
            elif isinstance(event, Finished):
                self.finished = silenced(event) if self.silent else event
                if self.reader is not None:
                    piece.text += self.reader.finish(event.reason, event.stop)
                    self.calls = self.reader.calls
            elif self.silent:
                continue
            elif isinstance(event, TextDelta):
                self._said += len(event.text)
                piece.text += self.reader.feed(event.text) if self.reader else event.text
            elif isinstance(event, ReasoningDelta):
                piece.reasoning += event.text
            elif isinstance(event, RoundDone):
                piece.rounds.append(event)
                self.written += len(event.emitted)
                if self.reasoning or piece.reasoning:
                    self._think(event)
                self._first_ms = self._first_ms or self._ms
                self.predicted_ms = self._ms - self._first_ms
        self.text += piece.text
        self.reasoning += piece.reasoning
        self.rounds += piece.rounds
        self.read += piece.read
        return piece

    @property
    def _ms(self) -> float:
        return (time.perf_counter() - self._begun_s) * 1e3

    def _think(self, done: RoundDone) -> None:
        """Count the tokens of a round that belong to the thought: all but those of an answer."""
        tokens = list(done.emitted_text)
        if self._answering:
            return
        self._answering = self._said > 0
        while tokens and self._said > 0:
            self._said -= len(tokens.pop())
        self.reasoning_n += len(tokens)


def silenced(end: Finished) -> Finished:
    """The end of a reply without its only token."""
    return replace(end, reason="length", text="", reasoning="", token_ids=(), rounds=0, cut=0)


@dataclass(slots=True)
class Piece:
    """What came of a reply at once."""

    reply: Reply
    text: str = ""
    reasoning: str = ""
    rounds: list[RoundDone] = field(default_factory=list)
    read: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a stream; ``data`` is JSON, or a text as it is."""

    data: Mapping[str, Any] | str
    event: str = ""


Wire = Literal["sse", "ndjson"]


class Dialect(Protocol):
    """How one family spells one answer."""

    wire: Wire

    def begun(self, replies: list[Reply]) -> Iterable[Frame]:
        """The request was taken."""
        ...

    def said(self, piece: Piece) -> Iterable[Frame]:
        """Some of a reply came."""
        ...

    def finished(self, reply: Reply) -> Iterable[Frame]:
        """One reply is over."""
        ...

    def ended(self, replies: list[Reply]) -> Iterable[Frame]:
        """All are."""
        ...

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        """The answer to a client that does not want a stream."""
        ...

    def failed(self, refusal: Refusal) -> Iterable[Frame]:
        """An error in the middle of a stream."""
        ...


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def openai_error(refusal: Refusal) -> dict[str, Any]:
    return {
        "error": {
            "message": refusal.message,
            "type": refusal.kind,
            "code": refusal.code,
            "param": refusal.param,
            **refusal.details,
        }
    }
