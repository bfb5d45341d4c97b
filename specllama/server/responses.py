"""OpenAI's ``/v1/responses``, which keeps nothing: every request brings its conversation."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from specllama.replies.tool_calls import Call
from specllama.server.chat_messages import Content, log_left_out, parts_of, text_of
from specllama.server.chat_turns import ChatTurns
from specllama.server.dialect import Frame, Job, OpenBlocks, Piece, Reply, now
from specllama.server.refusals import Refusal, not_offered, wrong
from specllama.server.sampling_fields import Asked, Format, schema_of
from specllama.server.served import ServedModel
from specllama.server.tools import Tool, ToolChoice, ToolUse, full_name, tool_use
from specllama.server.usage import costs, so_far
from specllama.settings.params import GenerateParams

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


_CALLS = ("function_call", "custom_tool_call")
_RESULTS = ("function_call_output", "custom_tool_call_output")
_KINDS = (None, "message", "reasoning", "additional_tools", "compaction", *_CALLS, *_RESULTS)
_SUMMARIZE = """Summarize this conversation for somebody who goes on with it and sees nothing else:
what was asked for, what was found, changed and decided, and what is left to do."""
_SUMMARY = "Summary of the conversation so far:\n"  # begins a compaction of our own


class InputFormat(msgspec.Struct, omit_defaults=True):
    syntax: str | None = None
    definition: str | None = None


class ResponsesTool(msgspec.Struct, omit_defaults=True):
    """A function, a custom tool, whose input is a text, or a namespace of both.

    Tools of kinds that we do not know are left out.
    """

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: InputFormat | None = None
    tools: list[ResponsesTool] | None = None


class Item(msgspec.Struct, omit_defaults=True):
    type: str | None = None
    role: str | None = None
    content: Content = None
    summary: list[dict[str, Any]] | None = None
    name: str | None = None
    namespace: str | None = None
    call_id: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: Content = None
    encrypted_content: str | None = None
    tools: list[ResponsesTool] | None = None


class TextOptions(msgspec.Struct, omit_defaults=True):
    format: Format | None = None
    verbosity: str | None = None


class ResponsesRequest(Asked, kw_only=True):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    text: TextOptions | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    timings_per_token: bool | None = None
    return_progress: bool | None = None

    @property
    def known(self) -> Iterator[tuple[str, str, ResponsesTool]]:
        """The tools, see ``_known``; the conversation may bring further ones."""
        yield from _known(self.tools)
        for item in items_of(self):
            yield from _known(item.tools)


def items_of(body: ResponsesRequest) -> list[Item]:
    """Read the items of a request; of an unknown kind, only its name is kept.

    Raises:
        Refusal: an item has another shape than its kind.
    """
    given = body.input or []
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return parts_of(given, Item, _KINDS, "input")


def conversation_of(body: ResponsesRequest) -> ChatTurns:
    """Read the items.

    Raises:
        Refusal: an item cannot be read, or a result belongs to no call.
    """
    out = ChatTurns("call_id")
    if body.instructions:
        out.begin("system", body.instructions)
    thought = ""
    for i, item in enumerate(items_of(body)):
        where = f"input[{i}]"
        if item.type in ("message", None):
            if item.role not in _ROLES:
                raise wrong(f"{where}.role", f"{where}: unknown role {item.role!r}")
            out.begin(_ROLES[item.role], text_of(item.content, f"{where}.content"), thought)
            thought = ""
        elif item.type == "reasoning":
            thought = text_of(item.content, f"{where}.content")
        elif item.type in _CALLS:
            arguments = item.arguments or "{}"
            if item.input is not None:
                arguments = msgspec.json.encode({"input": item.input}).decode()
            out.reply(thought)  # a reply's parts come one by one
            name = full_name(item.namespace, item.name or "")
            out.call(Call(name, arguments), where, item.call_id)
            thought = ""
        elif item.type in _RESULTS:
            out.result(text_of(item.output, f"{where}.output"), where, item.call_id, apart=True)
        elif (item.encrypted_content or "").startswith(_SUMMARY):
            out.begin("user", item.encrypted_content or "")
        elif item.tools is None:
            log_left_out(where, item.type)
    if len(out) == bool(body.instructions):
        out.begin("user")
    return out


def parse(body: ResponsesRequest, base: GenerateParams) -> Job:
    """Read a request; raise Refusal or UsageError if a field is wrong."""
    if body.previous_response_id:
        raise wrong(
            "previous_response_id", "previous_response_id: nothing is kept; send the conversation"
        )
    if body.background:
        raise not_offered("background", "nothing is kept", "background")
    return Job.of(
        body,
        conversation_of(body),
        base,
        {"think": "reasoning.effort"},
        limit=body.max_output_tokens,
        tools=tools_of(body),
        json_schema=schema_of((body.text or TextOptions()).format, "text.format"),
    )


def compact(body: ResponsesRequest, base: GenerateParams) -> Job:
    """Ask the model to summarize a conversation.

    Raises:
        Refusal, UsageError: a field is wrong.
    """
    body.input = [*msgspec.to_builtins(items_of(body)), {"role": "user", "content": _SUMMARIZE}]
    body.stream = body.tools = body.tool_choice = None
    return parse(body, base)


def _known(
    specs: Sequence[ResponsesTool] | None, namespace: str = ""
) -> Iterator[tuple[str, str, ResponsesTool]]:
    """Yield the tools that can be called: the model's name for it, its namespace, the tool."""
    for spec in specs or ():
        if spec.type == "namespace" and not namespace:
            yield from _known(spec.tools, spec.name or "")
        elif spec.type in ("function", "custom") and spec.name:
            yield full_name(namespace, spec.name), namespace, spec


def _tool(name: str, spec: ResponsesTool) -> Tool:
    about = spec.description or ""
    if spec.type == "function":
        return Tool(name, about, spec.parameters or {"type": "object"})
    if spec.format is not None and spec.format.definition:
        about += f"\nThe input fits this grammar ({spec.format.syntax}):\n{spec.format.definition}"
    return Tool(name, about, _TEXT)


def tools_of(body: ResponsesRequest) -> ToolUse | None:
    """Read the tools; raise Refusal if a name is wrong or the chosen tool is missing."""
    for i, one in enumerate(body.tools or ()):
        if one.type == "function" and not one.name:
            raise wrong(f"tools[{i}]", f"tools[{i}]: it has no name")
    tools = [_tool(name, spec) for name, _, spec in body.known]
    return tool_use(tools, body.tool_choice, parallel=body.parallel_tool_calls)


def _asked(body: ResponsesRequest, params: GenerateParams) -> dict[str, Any]:
    """Return the request's fields as the answer repeats them."""
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort},
        "store": False,
        "temperature": params.sampling.temperature,
        "text": {"format": {"type": "text"}, **msgspec.to_builtins(body.text or TextOptions())},
        "tool_choice": msgspec.to_builtins(body.tool_choice) or "auto",
        "tools": msgspec.to_builtins(body.tools or []),
        "top_p": params.sampling.top_p,
        "truncation": "disabled",
    }


class ResponsesDialect(OpenBlocks):
    """One answer as items of output."""

    def __init__(self, body: ResponsesRequest, job: Job, model: ServedModel) -> None:
        self._body = body
        self._asked = _asked(body, job.params)
        self._model = model.name
        self._id = f"resp_{secrets.token_hex(12)}"
        self._created = now()
        self._number = -1
        self._items: list[dict[str, Any]] = []
        self._written = ""
        self._tools = {name: (space, spec) for name, space, spec in body.known}

    def _response(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **self._asked,
            "model": self._model,
            "output": output,
            "usage": None,
            **more,
        }

    def _frame(self, kind: str, **fields: Any) -> Frame:
        self._number += 1
        return Frame({"type": kind, "sequence_number": self._number, **fields}, kind)

    def begun(self, replies: list[Reply]) -> Iterable[Frame]:
        yield self._frame("response.created", response=self._response("in_progress", []))
        yield from self.news(replies)

    def news(self, replies: list[Reply]) -> Iterable[Frame]:
        yield self._frame("response.in_progress", response=self._response("in_progress", []))

    def said(self, piece: Piece) -> Iterable[Frame]:
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.text)):
            if text:
                yield from self._block(kind)
                self._written += text
                more = {"timings": so_far(piece.reply)} if self._body.timings_per_token else {}
                yield self._frame(
                    f"response.{_PARTS[kind]}.delta", delta=text, **self._place(), **more
                )
        for told in piece.progress() if self._body.return_progress else ():
            response = self._response("in_progress", [])
            yield self._frame("response.in_progress", response=response, **told)

    def _place(self) -> dict[str, Any]:
        return {
            "item_id": self._items[-1]["id"],
            "output_index": len(self._items) - 1,
            "content_index": 0,
        }

    def _opened(self, kind: str) -> Iterable[Frame]:
        item = _item(kind, "", _id(kind))
        item.update(status="in_progress", content=[])
        self._items.append(item)
        self._written = ""
        yield self._frame(
            "response.output_item.added", output_index=len(self._items) - 1, item=dict(item)
        )
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": []}
            yield self._frame("response.content_part.added", part=part, **self._place())

    def _closed(self) -> Iterable[Frame]:
        item, name = self._items[-1], _PARTS[self._open]
        item.update(_item(self._open, self._written, item["id"]))
        yield self._frame(f"response.{name}.done", text=self._written, **self._place())
        if self._open == "message":
            part = {"type": name, "text": self._written}
            yield self._frame("response.content_part.done", part=part, **self._place())
        yield self._frame("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def finished(self, reply: Reply) -> Iterable[Frame]:
        yield from self._block("")
        for call in reply.calls:
            item = self._called(call)
            self._items.append(item)
            at = len(self._items) - 1
            field = "input" if "input" in item else "arguments"
            begun = {**item, field: "", "status": "in_progress"}
            yield self._frame("response.output_item.added", output_index=at, item=begun)
            place = {"item_id": item["id"], "output_index": at}
            name = f"response.{item['type']}_{field}"
            yield self._frame(f"{name}.delta", delta=item[field], **place)
            yield self._frame(f"{name}.done", **{field: item[field]}, **place)
            yield self._frame("response.output_item.done", output_index=at, item=item)

    def _called(self, call: Call) -> dict[str, Any]:
        namespace, spec = self._tools[call.name]
        item: dict[str, Any] = {"id": f"fc_{call.id}", "status": "completed", "call_id": call.id}
        item["name"] = spec.name
        if namespace:
            item["namespace"] = namespace
        if spec.type == "function":
            return {**item, "type": "function_call", "arguments": call.arguments}
        said = msgspec.json.decode(call.arguments).get("input", "")
        return {**item, "type": "custom_tool_call", "input": said}

    def ended(self, replies: list[Reply]) -> Iterable[Frame]:
        response = self._end(replies, self._items)
        timed = response["timings"]  # there for llama-server's clients
        yield self._frame(f"response.{response['status']}", response=response, timings=timed)

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        [reply] = replies
        items = [
            _item(kind, text, _id(kind))
            for kind, text in (("reasoning", reply.reasoning), ("message", reply.text))
            if text
        ]
        return self._end(replies, [*items, *map(self._called, reply.calls)])

    def _end(self, replies: list[Reply], items: list[dict[str, Any]]) -> dict[str, Any]:
        finished = replies[0].finished
        assert finished is not None
        cut = replies[0].ending.openai == "length"
        written = len(finished.token_ids)
        return self._response(
            "incomplete" if cut else "completed",
            items,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage={
                "input_tokens": finished.prompt_n,
                "input_tokens_details": {"cached_tokens": finished.cached_n},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": replies[0].reasoning_n},
                "total_tokens": finished.prompt_n + written,
            },
            **costs(replies),
        )

    def failed(self, path: str, refused: Refusal) -> Iterable[Frame]:
        error = {"code": refused.code or "server_error", "message": refused.message}
        yield self._frame("error", **error)
        response = self._response("failed", self._items, error=error)
        yield self._frame("response.failed", response=response)


class CompactDialect(ResponsesDialect):
    """A conversation, shortened to its user's messages and the model's summary."""

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        said = [item for item in items_of(self._body)[:-1] if item.role == "user"]
        summary = {"id": f"cmp_{secrets.token_hex(12)}", "type": "compaction"}
        summary["encrypted_content"] = _SUMMARY + replies[0].text
        output = [*msgspec.to_builtins(said), summary]
        return {**self._end(replies, output), "object": "response.compaction"}


_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}


def _id(kind: str) -> str:
    return f"{'msg' if kind == 'message' else 'rs'}_{secrets.token_hex(12)}"


def _item(kind: str, text: str, id: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
    item: dict[str, Any] = {"id": id, "type": kind, "status": "completed", "content": [part]}
    if kind == "reasoning":
        return {**item, "summary": []}
    part["annotations"] = []
    return {**item, "role": "assistant"}
