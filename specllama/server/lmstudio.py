"""LM Studio's ``/api/v0``: OpenAI's chat with figures of its own, and models with their state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specllama.server.chat_completions import ChatDialect, ChatRequest
from specllama.server.chat_completions import parse as parse_chat
from specllama.server.dialect import Frame, Job, Reply
from specllama.server.exchange import Json
from specllama.server.refusals import Refusal
from specllama.server.service import Row, Service

_STOPS = {"stop_token": "eosFound", "stop_string": "stopStringFound",
          "length": "maxPredictedTokensReached", "context": "contextLengthReached"}  # fmt: skip


def stats(reply: Reply, draft: str | None) -> dict[str, Any]:
    """LM Studio's ``stats`` of a reply."""
    finished = reply.finished
    assert finished is not None
    took = finished.timings
    accepted = finished.draft_n_accepted
    return {
        "tokens_per_second": took.tok_per_s,
        "time_to_first_token": (reply.queue_ms + took.ttft_ms) / 1e3,
        "generation_time": took.decode_ms / 1e3,
        "stop_reason": _STOPS.get(finished.reason, "userStopped"),
        "draft_model": draft,
        "total_draft_tokens_count": finished.draft_n,
        "accepted_draft_tokens_count": accepted,
        "rejected_draft_tokens_count": finished.draft_n - accepted,
        "ignored_draft_tokens_count": 0,
    }


class LmStudioDialect(ChatDialect):
    """OpenAI's answer, with ``stats``."""

    def __init__(self, body: ChatRequest, service: Service) -> None:
        super().__init__(body, service.model)
        draft = service.info.draft
        self._draft = None if draft is None else draft.name

    def finished(self, reply: Reply) -> Iterable[Frame]:
        for frame in super().finished(reply):
            assert not isinstance(frame.data, str)
            yield Frame({**frame.data, "stats": stats(reply, self._draft)})

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        return {**super().whole(replies), "stats": stats(replies[0], self._draft)}


def rows(service: Service) -> list[Row]:
    def card() -> dict[str, Any]:
        target = service.info.target
        return {
            "id": service.model,
            "object": "model",
            "type": "llm",
            "publisher": "specllama",
            "arch": target.architecture,
            "compatibility_type": "gguf",
            "quantization": target.quantization,
            "state": "loaded",
            "max_context_length": target.n_ctx_train,
            "loaded_context_length": target.n_ctx,
            "capabilities": ["tool_use"],
        }

    async def models(request: Request) -> Response:
        return Json({"object": "list", "data": [card()]})

    async def model(request: Request) -> Response:
        if request.path_params["id"] != service.model:
            raise Refusal(404, f"only {service.model!r} is here", code="model_not_found")
        return Json(card())

    def spelled(body: ChatRequest, job: Job) -> LmStudioDialect:
        return LmStudioDialect(body, service)

    return [
        ("GET /api/v0/models", models),
        ("GET /api/v0/models/{id:path}", model),
        ("POST /api/v0/chat/completions", service.writes(ChatRequest, parse_chat, spelled)),
    ]
