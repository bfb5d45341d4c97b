"""OpenAI's routes."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specllama.server.chat_completions import ChatDialect, ChatRequest
from specllama.server.chat_completions import parse as parse_chat
from specllama.server.completions import CompletionDialect, CompletionRequest
from specllama.server.completions import parse as parse_completion
from specllama.server.details import ending
from specllama.server.exchange import Json
from specllama.server.responses import (
    CompactDialect,
    ResponsesDialect,
    ResponsesRequest,
    compact,
)
from specllama.server.responses import parse as parse_responses
from specllama.server.router import status
from specllama.server.served import ServedModel
from specllama.server.service import Row, Service, refuses

NOT_OFFERED = {
    "embeddings": "models are loaded to write, not to embed",
    "images/generations": "models here write text",
    "audio/transcriptions": "models here read text",
    "audio/translations": "models here read text",
    "audio/speech": "models here write text",
    "moderations": "there is no model for it",
    "fine_tuning/jobs": "no route changes a model",
    "files": "no route writes files",
    "batches": "send the requests beside each other: they share passes",
    "rerank": "models are loaded to write, not to rank",
}


def model_card(model: ServedModel, started: int) -> dict[str, Any]:
    """Describe a model in OpenAI's words, Anthropic's and llama-server's."""
    target = model.target
    n_ctx = target.n_ctx or target.n_ctx_train  # of one that was not loaded yet
    return {
        "id": model.name,
        "object": "model",
        "created": started,
        "owned_by": "specllama",
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(started, UTC).isoformat(),
        "path": target.path,
        "status": status(model),
        "max_input_tokens": n_ctx,
        "max_model_len": n_ctx,
        "context_length": n_ctx,
        "meta": {
            "vocab_type": None,
            "n_vocab": target.n_vocab,
            "n_ctx": n_ctx,
            "n_ctx_train": target.n_ctx_train,
            "n_params": target.n_params,
            "size": target.file_bytes,
        },
    }


def rows(service: Service) -> list[Row]:
    async def models(request: Request) -> Response:
        cards = [model_card(one, service.started) for one in await service.models.look()]
        more = {"has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
        return Json({"object": "list", "data": cards, **more})

    async def model(request: Request) -> Response:
        found = await service.models.listed(request.path_params["id"])
        return Json(model_card(found, service.started))

    async def chat(request: Request) -> Response:
        body, job, model = await service.job(request, ChatRequest, parse_chat)
        verbose = None
        if body.verbose:
            equipped = await service.aside(request, model.equipped, job)
            prompt = await model.queue.ask(
                "render", equipped.prompts[0], equipped.params, client=request.state.client
            )
            verbose = partial(ending, model=model.name, params=equipped.params, prompt=prompt)
        return await service.answer(request, model, job, ChatDialect(body, model.name, verbose))

    async def completions(request: Request) -> Response:
        body, job, model = await service.job(request, CompletionRequest, parse_completion)
        if body.suffix:
            job = await model.infilled(job, str(body.prompt), body.suffix)
        return await service.answer(request, model, job, CompletionDialect(body, model.name))

    told = {"object": "response.input_tokens"}
    found: list[Row] = [
        ("POST /chat/completions", chat),
        ("POST /completions", completions),
        ("POST /responses", service.writes(ResponsesRequest, parse_responses, ResponsesDialect)),
        (
            "POST /responses/compact",
            service.writes(ResponsesRequest, compact, CompactDialect),
        ),
        ("POST /chat/completions/input_tokens", service.counts(ChatRequest, parse_chat, **told)),
        ("POST /responses/input_tokens", service.counts(ResponsesRequest, parse_responses, **told)),
        ("GET /models", models),
        ("GET /models/{id:path}", model),
        *((f"GET|POST /{what}", refuses(what, reason)) for what, reason in NOT_OFFERED.items()),
    ]
    return [
        (where.replace(" ", f" {prefix}"), handler)
        for prefix in ("/v1", "")
        for where, handler in found
        if (prefix, handler) != ("", completions)  # that is llama-server's own
    ]
