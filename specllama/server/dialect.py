"""Requests and replies, as every API family translates them to and from its own words.

A family reads its own JSON into ``Job`` and spells news of replies as frames; the way between
(``exchange``) is the same for all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

from specllama import __version__
from specllama.events import Chance, Chances, Event, RoundDone
from specllama.interface import Prompt
from specllama.replies.tool_calls import Call
from specllama.server.chat_turns import ChatTurns
from specllama.server.refusals import Refusal, spelled
from specllama.server.sampling_fields import Asked, params_of
from specllama.server.tools import ToolReader, ToolUse
from specllama.settings.params import GenerateParams
from specllama.told import News, Told

NEVER = -9999.0  # of probabilities: JSON has no minus infinity
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
        pending: the place of a call of a tool that ends the conversation, without a result.
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
    pending: str = ""

    @classmethod
    def of(
        cls,
        body: Asked,
        prompts: tuple[Prompt, ...] | ChatTurns,
        base: GenerateParams,
        names: Mapping[str, str] | None = None,
        *,
        limit: int | None = None,
        n: int = 1,
        tools: ToolUse | None = None,
        silent: bool = False,
        **more: Any,
    ) -> Job:
        """Make the job that a request asks for; see ``params_of`` for ``names`` and ``more``.

        Raises:
            Refusal: a value is wrong; names the field.
        """
        raw, pending = True, ""
        if isinstance(prompts, ChatTurns):
            raw, pending, prompts = False, prompts.pending, (prompts.messages(),)
        more["max_tokens"] = 1 if silent else limit
        params = params_of(body, base, names, raw=raw, **more)
        stream = bool(body.stream)
        return cls(prompts, params, n, stream, tools=tools, silent=silent, pending=pending)


class Ending(NamedTuple):
    """The end of a reply, in three families' words."""

    openai: str
    anthropic: str
    llama: str


_ENDINGS = {
    "stop_token": Ending("stop", "end_turn", "eos"),
    "stop_string": Ending("stop", "stop_sequence", "word"),
    "length": Ending("length", "max_tokens", "limit"),
    "context": Ending("length", "max_tokens", "limit"),
}
_ENDED = Ending("stop", "end_turn", "none")


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

    @property
    def ending(self) -> Ending:
        return _ENDED if self.finished is None else _ENDINGS.get(self.finished.reason, _ENDED)

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
            new.finished = new.finished and replace(  # without its only token
                new.finished, reason="length", text="", reasoning="", token_ids=(), rounds=0, cut=0
            )
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


@dataclass(slots=True)
class Piece(Told):
    """The news of a reply that arrive at once."""

    reply: Reply
    read: list[tuple[int, float]] = field(default_factory=list)

    def progress(self) -> Iterator[dict[str, Any]]:
        """Yield the number of prompt tokens that were read, step by step, as llama-server does."""
        started = self.reply.started
        for read, ms in self.read:
            assert started is not None
            said = {"total": started.prompt_n, "cache": started.cached_n}
            yield {"prompt_progress": {**said, "processed": read, "time_ms": int(ms)}}


@dataclass(frozen=True, slots=True)
class Frame:
    """One message of a stream; ``data`` is JSON, or a text as it is."""

    data: Mapping[str, Any] | str
    event: str = ""

    @classmethod
    def error(cls, told: Mapping[str, Any]) -> Frame:
        """Make the frame of an error; a family whose errors name a type names their event, too."""
        return cls(told, "error" if told.get("type") == "error" else "")


Wire = Literal["sse", "ndjson"]


class Dialect(Protocol):
    """The form of one family's answers; most frame a stream with no messages of their own."""

    wire: Wire = "sse"

    def begun(self, replies: list[Reply]) -> Iterable[Frame]:
        """Return the frames for a request that was accepted."""
        return ()

    def said(self, piece: Piece) -> Iterable[Frame]:
        """Return the frames for a new part of a reply."""

    def waiting(self) -> Iterable[Frame]:
        """Return a sign of life for a long silence; a family without one gets a comment."""
        return ()

    def news(self, replies: list[Reply]) -> Iterable[Frame]:
        """Return an event that adds nothing, for a silence of a minute."""
        return ()

    def finished(self, reply: Reply) -> Iterable[Frame]:
        """Return the frames for the end of one reply."""

    def ended(self, replies: list[Reply]) -> Iterable[Frame]:
        """Return the frames for the end of all replies."""
        return ()

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        """Return the answer to a client that does not want a stream."""

    def failed(self, path: str, refused: Refusal) -> Iterable[Frame]:
        """Return the frames for an error in the middle of a stream, as errors of this path are."""
        yield Frame.error(spelled(path, refused))


class OpenBlocks(Dialect, Protocol):
    """Blocks of one reply that are written one after another, each of a kind."""

    _open: str = ""  # the kind of the block that is being written

    def _block(self, kind: str) -> Iterable[Frame]:
        """Begin a block of a kind if it is not open yet; "" only ends the last one."""
        if kind != self._open:
            if self._open:
                yield from self._closed()
            self._open = kind
            if kind:
                yield from self._opened(kind)

    def _opened(self, kind: str) -> Iterable[Frame]:
        """Return the frames that begin a block."""

    def _closed(self) -> Iterable[Frame]:
        """Return the frames that end the open block."""


def chances_of(rounds: Iterable[RoundDone]) -> list[Chances]:
    """Return the chances of every token that was emitted, accepted drafts included."""
    return [chance for done in rounds for chance in done.chances]


def in_chat(chances: Sequence[Chances]) -> list[dict[str, Any]]:
    """Spell ``logprobs.content`` of a chat, also llama-server's ``completion_probabilities``."""
    return [
        {**_chance(chance), "top_logprobs": [_chance(other) for other in chance.top]}
        for chance in chances
    ]


def _chance(chance: Chance) -> dict[str, Any]:
    return {
        "id": chance.token,
        "token": spelling(chance),
        "bytes": list(chance.bytes),
        "logprob": max(chance.logprob, NEVER),
    }


def spelling(chance: Chance) -> str:
    return bytes(chance.bytes).decode("utf-8", "replace")


def now() -> int:
    """Return the seconds since 1970."""
    return int(time.time())
