"""LM Studio's routes: OpenAI's chat with figures of its own, and models loaded and unloaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from time import monotonic
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specllama.server import lmstudio_chat
from specllama.server.chat_completions import ChatDialect, ChatRequest
from specllama.server.chat_completions import parse as parse_chat
from specllama.server.dialect import Frame, Job, Reply
from specllama.server.exchange import Json
from specllama.server.figures import short
from specllama.server.lmstudio_chat import require_room
from specllama.server.refusals import Refusal
from specllama.server.served import ServedModel
from specllama.server.service import Row, Service, refuses

_STOPS = {"stop_token": "eosFound", "stop_string": "stopStringFound",
          "length": "maxPredictedTokensReached", "context": "contextLengthReached"}  # fmt: skip
_STATES = {"loaded": "loaded", "loading": "loading", "unloaded": "not-loaded"}
_DOWNLOAD = "no route brings models; on the machine of the server: specllama hub pull"


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

    def __init__(self, body: ChatRequest, model: ServedModel) -> None:
        super().__init__(body, model.name)
        self._draft = model.draft

    def finished(self, reply: Reply) -> Iterable[Frame]:
        for frame in super().finished(reply):
            assert not isinstance(frame.data, str)
            yield Frame({**frame.data, "stats": stats(reply, self._draft)})

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        return {**super().whole(replies), "stats": stats(replies[0], self._draft)}


class LoadRequest(msgspec.Struct):
    model: str
    context_length: int | None = None
    echo_load_config: bool | None = None


class UnloadRequest(msgspec.Struct):
    instance_id: str


def card(model: ServedModel) -> dict[str, Any]:
    """A model in the words of ``/api/v0``."""
    target = model.target
    told = {
        "id": model.name,
        "object": "model",
        "type": "llm",
        "publisher": "specllama",
        "arch": target.architecture,
        "compatibility_type": "gguf",
        "quantization": target.quantization,
        "state": _STATES[model.state],
        "max_context_length": target.n_ctx_train,
    }
    if model.state == "loaded":
        told["loaded_context_length"] = target.n_ctx
    return {**told, "capabilities": ["tool_use"]}


def _config(model: ServedModel) -> dict[str, Any]:
    """How it is loaded, in the words of ``/api/v1``."""
    info = model.info
    return {
        "context_length": info.target.n_ctx,
        "parallel": model.queue.lanes,
        "flash_attention": info.flash_attn,
        "offload_kv_cache_to_gpu": info.target.gpu_layers > 0,
    }


def card_v1(model: ServedModel) -> dict[str, Any]:
    """A model in the words of ``/api/v1``."""
    target = model.target
    instances = [{"id": model.name, "config": _config(model)}] if model.state == "loaded" else []
    bits = 8 * target.file_bytes / target.n_params if target.n_params else None
    return {
        "type": "llm",
        "publisher": "specllama",
        "key": model.name,
        "display_name": target.name,
        "architecture": target.architecture,
        "quantization": {
            "name": target.quantization,
            "bits_per_weight": bits and round(bits, 2),
        },
        "size_bytes": target.file_bytes,
        "params_string": short(target.n_params) if target.n_params else None,
        "loaded_instances": instances,
        "max_context_length": target.n_ctx_train,
        "format": "gguf",
        "capabilities": {"vision": False, "trained_for_tool_use": True},
        "description": None,
    }


def rows(service: Service) -> list[Row]:
    models = service.models

    async def listed(request: Request) -> Response:
        return Json({"object": "list", "data": [card(one) for one in await models.look()]})

    async def one(request: Request) -> Response:
        return Json(card(await models.listed(request.path_params["id"])))

    async def listed_v1(request: Request) -> Response:
        return Json({"models": [card_v1(one) for one in await models.look()]})

    async def load(request: Request) -> Response:
        body = await service.read(request, LoadRequest)
        begun = monotonic()
        found = await models.listed(body.model)
        free = await models.use(found, request.state.naming.keep_s)
        free()
        require_room(body.context_length, found)
        told = {"load_config": _config(found)} if body.echo_load_config else {}
        took = round(monotonic() - begun, 3)
        loaded = {"type": "llm", "instance_id": found.name, "load_time_seconds": took}
        return Json({**loaded, "status": "loaded", **told})

    async def unload(request: Request) -> Response:
        body = await service.read(request, UnloadRequest)
        found = await models.listed(body.instance_id)
        if found.state == "unloaded":
            raise Refusal(404, f"{found.name!r} is not loaded", code="model_not_loaded")
        await models.unload(found)
        return Json({"instance_id": found.name})

    def spelled(body: ChatRequest, job: Job, model: ServedModel) -> LmStudioDialect:
        return LmStudioDialect(body, model)

    return [
        ("GET /api/v0/models", listed),
        ("GET /api/v0/models/{id:path}", one),
        ("POST /api/v0/chat/completions", service.writes(ChatRequest, parse_chat, spelled)),
        ("GET /api/v1/models", listed_v1),
        ("POST /api/v1/models/load", load),
        ("POST /api/v1/models/unload", unload),
        *lmstudio_chat.rows(service),
        ("POST /api/v1/models/download", refuses("a download", _DOWNLOAD)),
    ]
