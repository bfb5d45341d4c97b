"""OpenAI's ``/v1/chat/completions``."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import msgspec

from specllama.server.details import progress
from specllama.server.dialect import FINGERPRINT, Dialect, Frame, Job, Piece, Reply, now
from specllama.server.figures import (
    finish_reason,
    metrics,
    so_far,
    timings,
    usage,
    usage_so_far,
)
from specllama.server.likelihood import chances_of, in_chat
from specllama.server.refusals import wrong
from specllama.server.sampling import Sampling, most_chances, params_of, schema_text
from specllama.server.tools import Call
from specllama.server.turns import ToolChoice, ToolSpec, Turn, messages_of, tools_of
from specllama.settings.params import GenerateParams

MOST_REPLIES = 16
_ARGUMENTS = 256  # of a template


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # of vLLM: with every piece


class SchemaFormat(msgspec.Struct):
    schema: dict[str, Any] | None = None


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: SchemaFormat | None = None
    schema: dict[str, Any] | None = None  # llama-server's place for it


class ChatRequest(Sampling, kw_only=True):
    messages: list[Turn]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_predict: int | None = None  # llama-server's; 0 reads the prompt for a later request
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    verbose: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class Choices(Protocol):
    """The fields of a request that shape its answer."""

    n: int | None
    stream: bool | None
    stream_options: StreamOptions | None


def n_of(n: int | None, name: str) -> int:
    """Return the number of replies that each prompt gets.

    Raises:
        Refusal: too many, or none.
    """
    if n is not None and not 1 <= n <= MOST_REPLIES:
        raise wrong(name, f"{name} must be from 1 to {MOST_REPLIES}, got {n}")
    return n or 1


def replies_of(body: Choices) -> int:
    """Return the number of replies that each prompt gets.

    Raises:
        Refusal: too many or none, or stream options without a stream.
    """
    n = n_of(body.n, "n")
    if body.stream_options is not None and not body.stream:
        raise wrong("stream_options", "stream_options: they go with stream")
    return n


def schema_of(asked: ResponseFormat | None) -> str | None:
    """Return the JSON schema that a reply has to fit.

    Raises:
        Refusal, UsageError: its kind is unknown, or it cannot be enforced.
    """
    if asked is None or asked.type == "text":
        return None
    if asked.type not in ("json_object", "json_schema"):
        raise wrong("response_format.type", f"response_format: unknown type {asked.type!r}")
    schema = asked.schema if asked.json_schema is None else asked.json_schema.schema
    if schema is None and asked.type == "json_schema":
        raise wrong("response_format.json_schema", "response_format: json_schema has no schema")
    return schema_text(schema or {"type": "object"})


EFFORTS = {"none": "off", "minimal": "low", "xhigh": "high", "max": "high", "ultra": "high"}


def think_of(effort: str | None) -> str | None:
    return None if effort is None else EFFORTS.get(effort, effort)


def arguments(given: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    if len(given) > _ARGUMENTS:
        said = f"chat_template_kwargs: at most {_ARGUMENTS}, got {len(given)}"
        raise wrong("chat_template_kwargs", said)
    return tuple(f"{name}={msgspec.json.encode(value).decode()}" for name, value in given.items())


def parse(body: ChatRequest, base: GenerateParams) -> Job:
    """Read a request; raise Refusal or UsageError if a field is wrong."""
    n = replies_of(body)
    if body.add_generation_prompt and body.continue_final_message:
        raise wrong(
            "continue_final_message",
            "continue_final_message: a message is not continued where another begins",
        )
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    silent = body.n_predict == 0
    limit = limit_of(body.n_predict or None, body.max_completion_tokens, body.max_tokens)
    params = params_of(
        body,
        base,
        max_tokens=1 if silent else limit,
        json_schema=schema_of(body.response_format),
        think=think_of(body.reasoning_effort),
        template_args=arguments(body.chat_template_kwargs),
        chances=_chances(body),
    )
    messages = tuple(messages_of(body.messages))
    return Job((messages,), params, n=n, stream=bool(body.stream), tools=tools, silent=silent)


def _chances(body: ChatRequest) -> int | None:
    if not body.logprobs:
        if body.top_logprobs:
            raise wrong("top_logprobs", "top_logprobs needs logprobs to be true")
        return None
    return most_chances("top_logprobs", body.top_logprobs or 0)


def limit_of(*given: int | None) -> int | None:
    """Return the first limit that was given."""
    return next((one for one in given if one is not None), None)


def _spelled(call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


Verbose = Callable[[Reply], Mapping[str, Any]]


class ChoicesDialect(Dialect):
    """An answer with choices of any kind: OpenAI's envelope.

    Attributes:
        kind: the name of an answer, and ``chunk`` that of each part of a stream; ``mark``: the
            beginning of the ids of both.
    """

    kind: str
    chunk: str
    mark: str

    def __init__(self, body: Choices, model: str) -> None:
        options = body.stream_options or StreamOptions()
        self._model = model
        self._n = body.n or 1
        self._usage = bool(options.include_usage)
        self._continuous = self._usage and bool(options.continuous_usage_stats)
        self._id = f"{self.mark}-{secrets.token_hex(12)}"
        self._created = now()

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "system_fingerprint": FINGERPRINT,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            **more,
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> Frame:
        return Frame(self._object(self.chunk, choices, **more))

    def _spent(self, reply: Reply) -> dict[str, Any]:
        return {"usage": usage_so_far(reply)} if self._continuous else {}

    def _whole(self, choices: list[dict[str, Any]], replies: list[Reply]) -> dict[str, Any]:
        return self._object(self.kind, choices, **_figures(replies, self._n))

    def ended(self, replies: list[Reply]) -> Iterable[Frame]:
        if self._usage:
            yield self._chunk([], **_figures(replies, self._n))
        yield Frame("[DONE]")


def _figures(replies: list[Reply], n: int) -> dict[str, Any]:
    return {
        "usage": usage(replies, n=n),
        "timings": timings(replies),
        "metrics": metrics(replies),
    }


class ChatDialect(ChoicesDialect):
    """One answer in the words of OpenAI."""

    kind, chunk, mark = "chat.completion", "chat.completion.chunk", "chatcmpl"
    prompt = "messages"

    def __init__(self, body: ChatRequest, model: str, verbose: Verbose | None = None) -> None:
        super().__init__(body, model)
        self._verbose = verbose
        self._progress = bool(body.return_progress)
        self._timings = bool(body.timings_per_token)
        self._logprobs = bool(body.logprobs)

    def _delta(self, reply: Reply, delta: dict[str, Any], reason: str | None = None) -> Any:
        return {"index": reply.index, "delta": delta, "finish_reason": reason}

    def begun(self, replies: list[Reply]) -> Iterable[Frame]:
        for reply in replies:
            yield self._chunk([self._delta(reply, {"role": "assistant", "content": ""})])

    def news(self, replies: list[Reply]) -> Iterable[Frame]:
        yield self._chunk([self._delta(replies[0], {"content": ""})])

    def said(self, piece: Piece) -> Iterable[Frame]:
        spent = self._spent(piece.reply)
        if piece.reasoning:
            delta = self._delta(piece.reply, {"reasoning_content": piece.reasoning})
            yield self._chunk([delta], **spent)
        for told in progress(piece) if self._progress else ():
            yield self._chunk([self._delta(piece.reply, {})], **told)
        chances = chances_of(piece.rounds)
        if piece.text or chances:
            choice = self._delta(piece.reply, {"content": piece.text})
            if chances:
                choice["logprobs"] = {"content": in_chat(chances)}
            more = {"timings": so_far(piece.reply)} if self._timings else {}
            yield self._chunk([choice], **more, **spent)

    def finished(self, reply: Reply) -> Iterable[Frame]:
        for i, call in enumerate(reply.calls):
            # clients take the first part as a header, and drop arguments that stand in it
            header = {"index": i, **_spelled(replace(call, arguments=""))}
            rest = {"index": i, "function": {"arguments": call.arguments}}
            for part in (header, rest):
                yield self._chunk([self._delta(reply, {"tool_calls": [part]})])
        yield self._chunk(
            [self._delta(reply, {}, finish_reason(reply))],
            timings=timings([reply]),
            metrics=metrics([reply]),
        )

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        told = {} if self._verbose is None else {"__verbose": self._verbose(replies[0])}
        return {**told, **self._whole([self._choice(reply) for reply in replies], replies)}

    def _choice(self, reply: Reply) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [_spelled(call) for call in reply.calls]
            message["content"] = reply.text or None
        choice = {
            "index": reply.index,
            "message": message,
            "finish_reason": finish_reason(reply),
        }
        if self._logprobs:
            choice["logprobs"] = {"content": in_chat(chances_of(reply.rounds))}
        return choice
