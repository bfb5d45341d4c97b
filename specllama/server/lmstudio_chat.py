"""LM Studio's ``/api/v1/chat``: one message, answered as events with names. Nothing is kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specllama.interface import Message
from specllama.server.dialect import Dialect, Frame, Job, Piece, Reply, openai_error
from specllama.server.refusals import Refusal, not_offered, wrong
from specllama.server.sampling import Sampling, params_of
from specllama.server.served import ServedModel
from specllama.server.service import Row, Service
from specllama.settings.params import GenerateParams

PATH = "/api/v1/chat"


class InputItem(msgspec.Struct):
    type: str
    content: str | None = None
    text: str | None = None


class LmStudioChatRequest(Sampling, kw_only=True):
    input: str | list[InputItem]
    model: str | None = None
    system_prompt: str | None = None
    integrations: list[Any] | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    reasoning: str | None = None
    context_length: int | None = None
    previous_response_id: str | None = None


def parse(body: LmStudioChatRequest, base: GenerateParams) -> Job:
    """Raises Refusal: a field is wrong, or asks for what there is not."""
    if body.previous_response_id:
        raise not_offered(
            "previous_response_id", "nothing is kept; /v1/responses takes the whole conversation",
            "previous_response_id",
        )  # fmt: skip
    if body.integrations:
        raise not_offered("integrations", "tools are run by the client", "integrations")
    texts = [body.input] if isinstance(body.input, str) else [*map(_text, body.input)]
    turns = [Message("system", body.system_prompt)] if body.system_prompt else []
    params = params_of(body, base, max_tokens=body.max_output_tokens, think=body.reasoning)
    asked = Message("user", "\n".join(texts))
    return Job(((*turns, asked),), params, stream=bool(body.stream), progress=True)


def _text(item: InputItem) -> str:
    if item.type not in ("message", "text"):
        raise not_offered(f"input: {item.type}", "models here read text only", "input")
    return item.content or item.text or ""


def frame(kind: str, **fields: Any) -> Frame:
    return Frame({"type": kind, **fields}, kind)


class LmStudioChatDialect(Dialect):
    """One answer as such events; ``begun``: the stream has told of a load already."""

    def __init__(self, model: str, *, begun: bool) -> None:
        self._model = model
        self._told = begun
        self._open = ""  # what is being written

    def begun(self, replies: list[Reply]) -> Iterable[Frame]:
        if not self._told:
            yield frame("chat.start", model_instance_id=self._model)
        yield from self._turn("prompt_processing")

    def _turn(self, kind: str) -> Iterable[Frame]:
        """End what is being written, and begin something else, if it is."""
        if kind != self._open:
            if self._open:
                yield frame(f"{self._open}.end")
            self._open = kind
            if kind:
                yield frame(f"{kind}.start")

    def said(self, piece: Piece) -> Iterable[Frame]:
        started = piece.reply.started
        whole = 0 if started is None else started.prompt_n
        for read, _ in piece.read if whole else ():
            yield frame("prompt_processing.progress", progress=min(read / whole, 1.0))
        for kind, text in (("reasoning", piece.reasoning), ("message", piece.text)):
            if text:
                yield from self._turn(kind)
                yield frame(f"{kind}.delta", content=text)

    def finished(self, reply: Reply) -> Iterable[Frame]:
        yield from self._turn("")

    def ended(self, replies: list[Reply]) -> Iterable[Frame]:
        yield frame("chat.end", result=self.whole(replies))

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        [reply] = replies
        finished = reply.finished
        assert finished is not None
        output = [{"type": "reasoning", "content": reply.reasoning}] if reply.reasoning else []
        took = finished.timings
        stats = {
            "input_tokens": finished.prompt_n,
            "total_output_tokens": len(finished.token_ids),
            "reasoning_output_tokens": reply.reasoning_n,
            "tokens_per_second": took.tok_per_s,
            "time_to_first_token_seconds": (reply.queue_ms + took.ttft_ms) / 1e3,
        }
        output.append({"type": "message", "content": reply.text})
        return {"model_instance_id": self._model, "output": output, "stats": stats}

    def failed(self, refusal: Refusal) -> Iterable[Frame]:
        yield frame("error", **openai_error(refusal))


def require_room(tokens: int | None, model: ServedModel) -> None:
    """Raises Refusal: the model is loaded with a shorter context."""
    there = model.info.target.n_ctx
    if (tokens or 0) > there:
        said = f"context_length: {tokens} tokens; this server gives {there} (-c)"
        raise wrong("context_length", said)


def rows(service: Service) -> list[Row]:
    async def chat(request: Request) -> Response:
        body, job, model = await service.job(request, LmStudioChatRequest, parse)
        require_room(body.context_length, model)
        begun = getattr(request.state, "told_of_load", False)
        return await service.answer(
            request, model, job, LmStudioChatDialect(model.name, begun=begun)
        )

    return [(f"POST {PATH}", chat)]
