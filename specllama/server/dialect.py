"""Requests and replies, as every API family translates them to and from its own words.

A family reads its own JSON into ``Job`` and spells news of replies as frames; the way between
(``exchange``) is the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from specllama import __version__
from specllama.events import Event, Finished, RoundDone
from specllama.interface import Prompt
from specllama.server.refusals import Refusal
from specllama.server.tools import Call, ToolReader, ToolUse
from specllama.settings.params import GenerateParams
from specllama.told import News, Told

FINGERPRINT = f"specllama-{__version__}"  # of what computes, in OpenAI's words


@dataclass(frozen=True, slots=True)
class Job:
    """A request of a client, ready for the engine.

    Attributes:
        prompts: answered one by one, each ``n`` times.
        n: replies to each prompt; the first has the seed of ``params``.
        stream: send text as it comes.
        client: the name of the client, for fairness.
        asked: the request as it was received, hashed.
        label: of the workload; arm: of an experiment.
        tools: those that the model may call.
        silent: the prompts are only read, for a later request.
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


@dataclass
class Reply(Told):
    """One reply, as it is received.

    Attributes:
        written: number of tokens that were received.
        calls: of tools, once the reply is over; ``text`` is without them.
        reasoning_n: tokens of the thought.
        silent: of a request that wants no text: the first token, which costs no pass, is dropped.
        read: (tokens of the prompt that are read or cached, milliseconds since reading began).
        predicted_ms: from the first token to the last.
    """

    index: int
    reader: ToolReader | None = None
    silent: bool = False
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

    def receive(self, events: Iterable[Event]) -> Piece:
        """Add new events; return the part to send to the client."""
        piece, read = Piece(self), len(self.read)
        for event in events:
            piece.add(self.take(event))
        piece.read = self.read[read:]
        return piece

    def add(self, new: News) -> None:
        """Add news of the reply, and leave in it only the part to send to the client."""
        if new.started is not None:
            self._begun_s = time.perf_counter()
            self.read.append((new.started.cached_n, 0.0))
        if new.prefill is not None and new.prefill.done > new.prefill.cached:
            self.read.append((new.prefill.done, self._ms))
        if self.silent:
            new.text, new.reasoning, new.rounds = "", "", ()
            new.finished = new.finished and silenced(new.finished)
        self._said += len(new.text)
        if self.reader is not None:
            new.text = self.reader.feed(new.text) if new.text else ""
            if new.finished is not None:
                new.text += self.reader.finish(new.finished.reason, new.finished.stop)
                self.calls = self.reader.calls
        super().add(new)
        for done in new.rounds:
            self.written += len(done.emitted)
            if self.reasoning:
                self._think(done)
            self._first_ms = self._first_ms or self._ms
            self.predicted_ms = self._ms - self._first_ms

    @property
    def _ms(self) -> float:
        return (time.perf_counter() - self._begun_s) * 1e3

    def _think(self, done: RoundDone) -> None:
        """Count the tokens of a round that belong to the thought, not to the answer."""
        tokens = list(done.emitted_text)
        if self._answering:
            return
        self._answering = self._said > 0
        while tokens and self._said > 0:
            self._said -= len(tokens.pop())
        self.reasoning_n += len(tokens)


def silenced(end: Finished) -> Finished:
    """Return the end of a reply without its only token."""
    return replace(end, reason="length", text="", reasoning="", token_ids=(), rounds=0, cut=0)


@dataclass(slots=True)
class Piece(Told):
    """The news of a reply that arrive at once."""

    reply: Reply
    read: list[tuple[int, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a stream; ``data`` is JSON, or a text as it is."""

    data: Mapping[str, Any] | str
    event: str = ""


Wire = Literal["sse", "ndjson"]


class Dialect(Protocol):
    """The form of one family's answers; most frame a stream with no messages of their own."""

    wire: Wire = "sse"
    prompt: str = "prompt"  # the field of requests that holds it

    def begun(self, replies: list[Reply]) -> Iterable[Frame]:
        """Return the frames for a request that was accepted."""
        return ()

    def said(self, piece: Piece) -> Iterable[Frame]:
        """Return the frames for a new part of a reply."""
        ...

    def waiting(self) -> Iterable[Frame]:
        """Return a sign of life for a long silence; a family without one gets a comment."""
        return ()

    def news(self, replies: list[Reply]) -> Iterable[Frame]:
        """Return an event that adds nothing, for a silence of a minute."""
        return ()

    def finished(self, reply: Reply) -> Iterable[Frame]:
        """Return the frames for the end of one reply."""
        ...

    def ended(self, replies: list[Reply]) -> Iterable[Frame]:
        """Return the frames for the end of all replies."""
        return ()

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        """Return the answer to a client that does not want a stream."""
        ...

    def failed(self, refusal: Refusal) -> Iterable[Frame]:
        """Return the frames for an error in the middle of a stream."""
        yield Frame(openai_error(refusal, self.prompt))


def now() -> int:
    """Return the seconds since 1970."""
    return int(time.time())


def openai_error(refusal: Refusal, prompt: str = "prompt") -> dict[str, Any]:
    """Spell an error for a route whose requests hold the prompt in this field."""
    return {
        "error": {
            "message": refusal.message,
            "type": refusal.kind,
            "code": refusal.code,
            "param": prompt if refusal.param == "prompt" else refusal.param,
            **refusal.details,
        }
    }
