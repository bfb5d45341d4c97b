"""OpenAI's ``/v1/chat/completions``, and ``/v1/completions``, which needs no chat template."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from specllama.events import Chances
from specllama.interface import Prompt
from specllama.replies.tool_calls import Call
from specllama.server.chat_messages import ToolSpec, Turn, conversation_of, tools_of
from specllama.server.dialect import (
    FINGERPRINT,
    NEVER,
    Dialect,
    Frame,
    Job,
    Piece,
    Reply,
    chances_of,
    in_chat,
    now,
    spelling,
)
from specllama.server.refusals import not_offered, text_only, wrong
from specllama.server.sampling_fields import Asked, Format, most_chances, schema_of
from specllama.server.tools import ToolChoice
from specllama.server.usage import costs, finish_reason, so_far, usage, usage_so_far
from specllama.settings.params import GenerateParams

MOST_REPLIES = 16
MOST_PROMPTS = 64
_ARGUMENTS = 256  # of a template


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # of vLLM: with every piece


class SchemaFormat(msgspec.Struct):
    schema: dict[str, Any] | None = None


class ResponseFormat(Format):
    """A format whose schema stands one level deeper, or where llama-server has it."""

    json_schema: SchemaFormat | None = None


class ChoicesRequest(Asked, kw_only=True):
    n: int | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # its newer name
    n_predict: int | None = None  # llama-server's name for it
    timings_per_token: bool | None = None
    return_progress: bool | None = None


class ChatRequest(ChoicesRequest, kw_only=True):
    messages: list[Turn]
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    verbose: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None


def n_of(n: int | None, name: str) -> int:
    """Return the number of replies that each prompt gets.

    Raises:
        Refusal: too many, or none.
    """
    if n is not None and not 1 <= n <= MOST_REPLIES:
        raise wrong(name, f"{name} must be from 1 to {MOST_REPLIES}, got {n}")
    return n or 1


def replies_of(body: ChoicesRequest) -> int:
    """Return the number of replies that each prompt gets.

    Raises:
        Refusal: too many or none, or stream options without a stream.
    """
    n = n_of(body.n, "n")
    if body.stream_options is not None and not body.stream:
        raise wrong("stream_options", "stream_options: they go with stream")
    return n


def arguments(given: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    if len(given) > _ARGUMENTS:
        said = f"chat_template_kwargs: at most {_ARGUMENTS}, got {len(given)}"
        raise wrong("chat_template_kwargs", said)
    return tuple(f"{name}={msgspec.json.encode(value).decode()}" for name, value in given.items())


def parse_chat(body: ChatRequest, base: GenerateParams) -> Job:
    """Read a request; raise Refusal or UsageError if a field is wrong."""
    n = replies_of(body)
    if body.add_generation_prompt and body.continue_final_message:
        raise wrong(
            "continue_final_message",
            "continue_final_message: a message is not continued where another begins",
        )
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    goes_on = bool(body.messages) and body.messages[-1].role == "assistant"
    for name, never in (
        ("add_generation_prompt", goes_on),
        ("continue_final_message", not goes_on),
    ):
        if getattr(body, name) is never:
            why = "a last message of the assistant is continued, any other is answered"
            raise not_offered(name, why, name)
    form = body.response_format
    if form is not None and form.json_schema is not None:
        form.schema = form.json_schema.schema
    return Job.of(
        body,
        conversation_of(body.messages),
        base,
        limit=limit_of(body.n_predict or None, body.max_completion_tokens, body.max_tokens),
        n=n,
        tools=tools,
        silent=body.n_predict == 0,
        json_schema=schema_of(form, "response_format"),
        template_args=arguments(body.chat_template_kwargs),
        chances=_chances(body),
    )


def _chances(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise wrong("top_logprobs", "top_logprobs needs logprobs to be true")
    return most_chances("top_logprobs", body.top_logprobs or 0) if body.logprobs else None


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

    def __init__(self, body: ChoicesRequest, model: str) -> None:
        options = body.stream_options or StreamOptions()
        self._body, self._model = body, model
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
        used = {"usage": usage_so_far(reply)} if self._continuous else {}
        return {**used, "timings": so_far(reply)} if self._body.timings_per_token else used

    def _whole(self, choices: list[dict[str, Any]], replies: list[Reply]) -> dict[str, Any]:
        return self._object(self.kind, choices, **self._figures(replies))

    def _figures(self, replies: list[Reply]) -> dict[str, Any]:
        return {"usage": usage(replies, n=self._n), **costs(replies)}

    def ended(self, replies: list[Reply]) -> Iterable[Frame]:
        if self._usage:
            yield self._chunk([], **self._figures(replies))
        yield Frame("[DONE]")


class ChatDialect(ChoicesDialect):
    """One answer in the words of OpenAI."""

    kind, chunk, mark = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, body: ChatRequest, model: str, verbose: Verbose | None = None) -> None:
        super().__init__(body, model)
        self._verbose, self._logprobs = verbose, body.logprobs

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
        for told in piece.progress() if self._body.return_progress else ():
            yield self._chunk([self._delta(piece.reply, {})], **told)
        chances = chances_of(piece.rounds)
        if piece.text or chances:
            choice = self._delta(piece.reply, {"content": piece.text})
            if chances:
                choice["logprobs"] = {"content": in_chat(chances)}
            yield self._chunk([choice], **spent)

    def finished(self, reply: Reply) -> Iterable[Frame]:
        for i, call in enumerate(reply.calls):
            # clients take the first part as a header, and drop arguments that stand in it
            header = {"index": i, **_spelled(replace(call, arguments=""))}
            rest = {"index": i, "function": {"arguments": call.arguments}}
            for part in (header, rest):
                yield self._chunk([self._delta(reply, {"tool_calls": [part]})])
        yield self._chunk([self._delta(reply, {}, finish_reason(reply))], **costs([reply]))

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
        choice = {"index": reply.index, "message": message, "finish_reason": finish_reason(reply)}
        if self._logprobs:
            choice["logprobs"] = {"content": in_chat(chances_of(reply.rounds))}
        return choice


class Spoken(msgspec.Struct):
    """A prompt in llama-server's third way."""

    prompt_string: str
    multimodal_data: Any = None


Given = str | list[int | str | list[int | str] | Spoken] | Spoken


class CompletionRequest(ChoicesRequest, kw_only=True):
    prompt: Given
    best_of: int | None = None
    logprobs: int | bool | None = None
    echo: bool | None = None
    suffix: str | None = None


def prompts_of(given: Given) -> tuple[Prompt, ...]:
    """Read the prompts: a list with token ids in it is a single prompt.

    Raises:
        Refusal: there are none or too many, or they hold something other than text.
    """
    if not isinstance(given, list) or any(isinstance(part, int) for part in given):
        return (_prompt(given),)
    if not 0 < len(given) <= MOST_PROMPTS:
        raise wrong("prompt", f"prompt: token ids, or from 1 to {MOST_PROMPTS} prompts")
    return tuple(map(_prompt, given))


def _prompt(one: Any) -> Prompt:
    if isinstance(one, Spoken):
        if one.multimodal_data:
            raise text_only("prompt", "multimodal_data")
        return one.prompt_string
    if isinstance(one, list):
        if not all(isinstance(part, int | str) for part in one):
            raise wrong("prompt", "prompt: token ids and texts only stand beside each other")
        return tuple(one)
    return str(one)


def logprobs_of(body: CompletionRequest) -> int | None:
    """Return the number of alternatives that are requested; true counts as 1."""
    return None if body.logprobs is None or body.logprobs is False else int(body.logprobs)


def parse_completion(body: CompletionRequest, base: GenerateParams) -> Job:
    """Read a request; raise Refusal or UsageError if a field is wrong."""
    n = replies_of(body)
    if body.best_of not in (None, n):
        raise not_offered("best_of", "every reply that is written is returned", "best_of")
    if body.suffix and not isinstance(body.prompt, str):
        raise wrong("suffix", "suffix: it goes with one prompt, which is a text")
    if body.echo and body.logprobs:
        raise not_offered("echo with logprobs", "prompts are read without their rows", "echo")
    prompts = prompts_of(body.prompt)
    if body.echo and not all(isinstance(one, str) for one in prompts):
        raise not_offered("echo of token ids", "their text is what was sent", "echo")
    limit = limit_of(body.max_completion_tokens, body.max_tokens, body.n_predict, 16)
    chances = most_chances("logprobs", logprobs_of(body))
    return Job.of(body, prompts, base, limit=limit, n=n, silent=limit == 0, chances=chances)


class CompletionDialect(ChoicesDialect):
    """One answer in the words of OpenAI."""

    kind = chunk = "text_completion"
    mark = "cmpl"

    def __init__(self, body: CompletionRequest, model: str) -> None:
        super().__init__(body, model)
        self._logprobs = logprobs_of(body) is not None
        self._prompts = prompts_of(body.prompt) if body.echo else ()
        self._written: dict[int, int] = {}

    def _echo(self, reply: Reply) -> str:
        return str(self._prompts[reply.index // self._n]) if self._prompts else ""

    def begun(self, replies: list[Reply]) -> Iterable[Frame]:
        for reply in replies if self._prompts else ():
            choice = {"index": reply.index, "text": self._echo(reply), "finish_reason": None}
            yield self._chunk([choice])

    def news(self, replies: list[Reply]) -> Iterable[Frame]:
        yield self._chunk([{"index": 0, "text": "", "finish_reason": None}])

    def said(self, piece: Piece) -> Iterable[Frame]:
        index, text = piece.reply.index, piece.reasoning + piece.text
        for told in piece.progress() if self._body.return_progress else ():
            yield self._chunk([{"index": index, "text": "", "finish_reason": None}], **told)
        chances = chances_of(piece.rounds)
        if not text and not chances:
            return
        choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": None}
        if self._logprobs:
            choice["logprobs"] = in_completions(chances, self._written.get(index, 0))
        self._written[index] = self._written.get(index, 0) + len(text)
        yield self._chunk([choice], **self._spent(piece.reply))

    def finished(self, reply: Reply) -> Iterable[Frame]:
        choice = {"index": reply.index, "text": "", "finish_reason": finish_reason(reply)}
        yield self._chunk([choice], **costs([reply]))

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        choices = []
        for reply in replies:
            echo = self._echo(reply)
            choice: dict[str, Any] = {
                "index": reply.index,
                "text": echo + reply.reasoning + reply.text,
                "logprobs": None,
                "finish_reason": finish_reason(reply),
            }
            if self._logprobs:
                choice["logprobs"] = in_completions(chances_of(reply.rounds), len(echo))
            choices.append(choice)
        return self._whole(choices, replies)


def in_completions(chances: Sequence[Chances], offset: int) -> dict[str, Any]:
    """Spell ``logprobs`` of completions; ``offset``: characters of the text before the first token.
    The token itself stands among the likeliest, as OpenAI and vLLM write it."""
    texts = [spelling(chance) for chance in chances]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(chance.logprob, NEVER) for chance in chances],
        "top_logprobs": [
            {spelling(other): max(other.logprob, NEVER) for other in (*chance.top, chance)}
            for chance in chances
        ],
        "text_offset": offsets,
    }
