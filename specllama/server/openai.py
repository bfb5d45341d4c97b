"""OpenAI's routes."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specllama.server.chat_completions import ChatDialect, ChatRequest
from specllama.server.chat_completions import parse as parse_chat
from specllama.server.completions import CompletionDialect, CompletionRequest
from specllama.server.completions import parse as parse_completion
from specllama.server.details import ending
from specllama.server.dialect import Job
from specllama.server.exchange import Json
from specllama.server.refusals import Refusal, not_offered
from specllama.server.responses import ResponsesDialect, ResponsesRequest
from specllama.server.responses import parse as parse_responses
from specllama.server.service import Handler, Service, guarded

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


def model_card(service: Service) -> dict[str, Any]:
    """The model, in OpenAI's words and in Anthropic's."""
    target = service.info.target
    return {
        "id": service.model,
        "object": "model",
        "created": service.started,
        "owned_by": "specllama",
        "type": "model",
        "display_name": service.model,
        "created_at": datetime.fromtimestamp(service.started, UTC).isoformat(),
        "max_input_tokens": target.n_ctx,
        "max_model_len": target.n_ctx,
        "context_length": target.n_ctx,
        "meta": {
            "vocab_type": None,
            "n_vocab": target.n_vocab,
            "n_ctx": target.n_ctx,
            "n_ctx_train": target.n_ctx_train,
            "n_params": target.n_params,
            "size": target.file_bytes,
        },
    }


def routes(service: Service) -> list[Route]:
    async def models(request: Request) -> Response:
        more = {"has_more": False, "first_id": service.model, "last_id": service.model}
        return Json({"object": "list", "data": [model_card(service)], **more})

    async def model(request: Request) -> Response:
        wanted = request.path_params["id"]
        if wanted != service.model:
            raise Refusal(
                404, f"there is no model {wanted!r} here, only {service.model!r}",
                code="model_not_found", param="model",
            )  # fmt: skip
        return Json(model_card(service))

    async def chat(request: Request) -> Response:
        body = await service.read(request, ChatRequest)
        job = await service.aside(request, parse_chat, body, service.base)
        verbose = None
        if body.verbose:
            equipped = await service.aside(request, service.equipped, job)
            prompt = await service.queue.ask(
                "render", equipped.prompts[0], equipped.params, client=request.state.client
            )
            verbose = partial(ending, model=service.model, params=equipped.params, prompt=prompt)
        return await service.answer(request, job, ChatDialect(body, service.model, verbose))

    async def count_chat(request: Request) -> Response:
        body = await service.read(request, ChatRequest)
        job = await service.aside(request, parse_chat, body, service.base)
        return await counted(request, job)

    async def completions(request: Request) -> Response:
        body = await service.read(request, CompletionRequest)
        job = await service.aside(request, parse_completion, body, service.base)
        if body.suffix:
            job = await service.infilled(job, str(body.prompt), body.suffix)
        return await service.answer(request, job, CompletionDialect(body, service.model))

    async def responses(request: Request) -> Response:
        body = await service.read(request, ResponsesRequest)
        job = await service.aside(request, parse_responses, body, service.base)
        return await service.answer(request, job, ResponsesDialect(body, service.model, job.params))

    async def count_input(request: Request) -> Response:
        body = await service.read(request, ResponsesRequest)
        job = await service.aside(request, parse_responses, body, service.base)
        return await counted(request, job)

    async def counted(request: Request, job: Job) -> Response:
        n = await service.count(request, job)
        return Json({"object": "response.input_tokens", "input_tokens": n})

    def refuse(what: str, reason: str) -> Handler:
        async def refused(request: Request) -> Response:
            raise not_offered(what, reason)

        return refused

    return [
        Route(f"{prefix}{path}", guarded(handler), methods=methods)
        for prefix in ("/v1", "")
        for path, handler, methods in (
            ("/chat/completions", chat, ["POST"]),
            ("/completions", completions, ["POST"]),
            ("/responses", responses, ["POST"]),
            ("/chat/completions/input_tokens", count_chat, ["POST"]),
            ("/responses/input_tokens", count_input, ["POST"]),
            ("/models", models, ["GET"]),
            ("/models/{id:path}", model, ["GET"]),
            *(
                (f"/{what}", refuse(what, reason), ["GET", "POST"])
                for what, reason in NOT_OFFERED.items()
            ),
        )
        if (prefix, path) != ("", "/completions")  # that is llama-server's own
    ]
