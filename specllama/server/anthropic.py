"""Anthropic's ``/v1/messages``."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from specllama.replies.tool_calls import Call
from specllama.server.chat_messages import log_left_out, parts_of
from specllama.server.chat_turns import ChatTurns
from specllama.server.dialect import Frame, Job, OpenBlocks, Piece, Reply
from specllama.server.refusals import Refusal, text_only, wrong
from specllama.server.sampling_fields import Asked, Format, schema_of
from specllama.server.served import ServedModel
from specllama.server.service import Row, Service
from specllama.server.tools import Tool, ToolChoice, ToolUse, tool_use
from specllama.server.usage import costs
from specllama.settings.params import GenerateParams

# of blocks; others, which only another service can read, are left out
_READ = ("text", "thinking", "tool_use", "tool_result", "tool_reference", "search_result",
         "compaction", "image", "document", "container_upload")  # fmt: skip
_NAMES = {"stop": "stop_sequences", "think": "output_config.effort"}


class MediaSource(msgspec.Struct):
    type: str
    data: str | None = None


class ContentBlock(msgspec.Struct):
    type: str
    text: str | None = None
    source: MediaSource | str | msgspec.UnsetType | None = msgspec.UNSET
    title: str | None = None
    thinking: str | None = None
    content: str | list[dict[str, Any]] | None = None
    id: str | None = None
    name: str | None = None
    tool_name: str | None = None
    tool_use_id: str | None = None
    input: dict[str, Any] | None = None


class AnthropicTool(msgspec.Struct):
    """A tool of the client; others, which Anthropic runs or knows, are left out."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class AnthropicTurn(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: Format | None = None


class Thread(msgspec.Struct):
    """A conversation kept by the server: beginning one has no effect, continuing one is refused."""

    type: str


class MessagesRequest(Asked, kw_only=True):
    messages: list[AnthropicTurn]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None  # as it was named before ``output_config``
    thread: Thread | None = None


def _read(content: str | list[dict[str, Any]], where: str, out: ChatTurns) -> None:
    """Add a content to the turn of a conversation."""
    if isinstance(content, str):
        out.write(content)
        return
    at = where if where == "system" else f"{where}.content"
    for i, block in enumerate(parts_of(content, ContentBlock, _READ, at)):
        source, inner, place = block.source, block.content or "", f"{at}[{i}]"
        if block.type == "text":
            out.write(block.text or "")
        elif block.type == "document" and isinstance(source, MediaSource) and source.type == "text":
            out.write(source.data or "")
        elif block.type == "thinking":
            out.think(block.thinking or "")
        elif block.type == "tool_use":
            if not (block.id and block.name):
                raise wrong(place, f"{place}: a tool_use has an id and a name")
            arguments = msgspec.json.encode(block.input or {}).decode()
            out.call(Call(block.name, arguments), place, block.id)
        elif block.type == "tool_result":
            out.result(_text(inner, place), place, block.tool_use_id)
        elif block.type == "tool_reference":
            out.write(block.tool_name or "")
        elif block.type in ("search_result", "compaction"):  # a text, whoever found it
            for named in (block.title, source):
                if named and isinstance(named, str):
                    out.write(named)
            out.write(_text(inner, place))
        elif block.type not in _READ:
            log_left_out(where, block.type)
        elif source is not None:
            raise text_only(place, block.type)


def _text(content: str | list[dict[str, Any]], where: str) -> str:
    """Return the text of a content that stands alone."""
    out = ChatTurns("tool_use_id")
    out.begin("user")
    _read(content, where, out)
    return out.messages()[0].content


def conversation_of(body: MessagesRequest) -> ChatTurns:
    """Read the messages.

    Raises:
        Refusal: a role or a content cannot be read, or a result belongs to no call.
    """
    if not body.messages:
        raise wrong("messages", "messages: the conversation is empty")
    out = ChatTurns("tool_use_id")
    if body.system:
        out.begin("system", _text(body.system, "system"))
    for i, turn in enumerate(body.messages):
        if turn.role not in ("user", "assistant", "system"):
            raise wrong(f"messages[{i}].role", f"messages[{i}]: unknown role {turn.role!r}")
        out.begin(turn.role)
        _read(turn.content, f"messages[{i}]", out)
    return out


def parse(body: MessagesRequest, base: GenerateParams) -> Job:
    """Read a request; raise Refusal if a field is wrong."""
    if body.max_tokens is None:
        raise wrong("max_tokens", "max_tokens is needed")
    if body.thread is not None and body.thread.type == "continue":
        # clients send the whole conversation then
        raise Refusal(404, "thread: nothing is kept", code="thread_not_found", param="thread")
    body.stop = body.stop_sequences
    output = body.output_config or OutputConfig()
    if body.thinking is not None:
        body.reasoning_effort = output.effort
    form, place = output.format, "output_config.format"
    if form is None:
        form, place = body.output_format, "output_format"
    return Job.of(
        body,
        conversation_of(body),
        base,
        _NAMES,
        limit=body.max_tokens,
        tools=tools_of(body),
        silent=body.max_tokens == 0,  # it fills the cache
        json_schema=schema_of(form, place),
    )


def tools_of(body: MessagesRequest) -> ToolUse | None:
    """Read the tools; raise Refusal if a name is wrong or the chosen tool is missing."""
    tools = [
        Tool(spec.name or "", spec.description or "", spec.input_schema or {"type": "object"},
             f"tools[{i}]")
        for i, spec in enumerate(body.tools or ())
        if spec.type in (None, "custom")
    ]  # fmt: skip
    choice = body.tool_choice
    several = None if choice is None else not choice.disable_parallel_tool_use
    return tool_use(tools, choice, parallel=several)


class MessagesDialect(OpenBlocks):
    """One answer in the words of Anthropic."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"msg_{secrets.token_hex(12)}"
        self._index = -1

    def _message(self, content: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            **more,
        }

    def begun(self, replies: list[Reply]) -> Iterable[Frame]:
        started = replies[0].started
        used = (0, 0) if started is None else (started.prompt_n, started.cached_n)
        message = self._message([], stop_reason=None, stop_sequence=None, usage=_used(*used, 0))
        yield Frame({"type": "message_start", "message": message}, "message_start")
        yield from self.waiting()

    def waiting(self) -> Iterable[Frame]:
        yield _frame("ping")

    def news(self, replies: list[Reply]) -> Iterable[Frame]:
        empty = {"stop_reason": None, "stop_sequence": None}
        yield _frame("message_delta", delta=empty, usage={"output_tokens": 0})

    def _opened(self, kind: str) -> Iterable[Frame]:
        self._index += 1
        empty = {"type": kind, "signature" if kind == "thinking" else "text": ""}
        empty.setdefault(kind, "")
        yield _frame("content_block_start", index=self._index, content_block=empty)

    def _closed(self) -> Iterable[Frame]:
        yield _frame("content_block_stop", index=self._index)

    def said(self, piece: Piece) -> Iterable[Frame]:
        for kind, text in (("thinking", piece.reasoning), ("text", piece.text)):
            if text:
                yield from self._block(kind)
                delta = {"type": f"{kind}_delta", kind: text}
                yield _frame("content_block_delta", index=self._index, delta=delta)

    def finished(self, reply: Reply) -> Iterable[Frame]:
        if self._index < 0 and not (reply.calls or reply.silent):
            yield from self._block("text")
        yield from self._block("")
        for call in reply.calls:
            self._index += 1
            yield _frame("content_block_start", index=self._index, content_block=_called(call, {}))
            delta = {"type": "input_json_delta", "partial_json": call.arguments}
            yield _frame("content_block_delta", index=self._index, delta=delta)
            yield _frame("content_block_stop", index=self._index)
        yield _frame("message_delta", delta=self._end(reply), usage=_usage(reply), **costs([reply]))

    def ended(self, replies: list[Reply]) -> Iterable[Frame]:
        yield _frame("message_stop")

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        [reply] = replies
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.text or not (reply.calls or reply.silent):
            content.append({"type": "text", "text": reply.text})
        content += [_called(call, msgspec.json.decode(call.arguments)) for call in reply.calls]
        return self._message(content, **self._end(reply), usage=_usage(reply), **costs(replies))

    def _end(self, reply: Reply) -> dict[str, Any]:
        reason, finished = reply.ending.anthropic, reply.finished
        if reply.calls and reason != "max_tokens":
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": reason, "stop_sequence": finished and finished.stop}


def _called(call: Call, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _frame(name: str, **fields: Any) -> Frame:
    return Frame({"type": name, **fields}, name)


def _usage(reply: Reply) -> dict[str, int]:
    if (end := reply.finished) is None:
        return _used(0, 0, 0)
    return _used(end.prompt_n, end.cached_n, len(end.token_ids))


def _used(prompt: int, cached: int, written: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": written,
    }


def rows(service: Service) -> list[Row]:
    def counted(body: MessagesRequest, base: GenerateParams) -> Job:
        body.max_tokens = 1  # it may be left out here
        return parse(body, base)

    def spelled(body: MessagesRequest, job: Job, model: ServedModel) -> MessagesDialect:
        return MessagesDialect(model.name)

    return [
        ("POST /v1/messages", service.writes(MessagesRequest, parse, spelled)),
        ("POST /v1/messages/count_tokens", service.counts(MessagesRequest, counted)),
    ]
