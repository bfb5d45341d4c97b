"""llama-server's own routes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from specllama import __version__
from specllama.params import GenerateParams
from specllama.server.completions import Given, prompts_of
from specllama.server.dialect import Frame, Piece, Reply, Wanted, Wire, openai_error
from specllama.server.exchange import Json
from specllama.server.figures import metrics, timings
from specllama.server.likelihood import chances_of, in_chat
from specllama.server.refusals import Refusal, not_offered, wrong
from specllama.server.sampling import SAMPLERS, Sampling, params_of
from specllama.server.service import Service, guarded
from specllama.server.turns import ToolSpec, Turn, messages_of, tools_of

_STOP_TYPES = {"stop_token": "eos", "stop_string": "word", "length": "limit", "context": "limit"}


class CompletionRequest(Sampling, kw_only=True):
    prompt: Given
    n_predict: int | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    n_probs: int | None = None
    return_tokens: bool | None = None
    post_sampling_probs: bool | None = None


class TokenizeRequest(msgspec.Struct):
    content: str = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int] = []


class TemplateRequest(msgspec.Struct):
    messages: list[Turn]
    tools: list[ToolSpec] | None = None


def wanted(body: CompletionRequest, base: GenerateParams) -> Wanted:
    """Raises Refusal: a field is wrong."""
    if body.post_sampling_probs:
        raise not_offered(
            "post_sampling_probs", "probabilities are told before samplers", "post_sampling_probs"
        )
    if body.n_predict == 0:
        raise not_offered("n_predict: 0", "a prompt is read together with its reply", "n_predict")
    prompts = prompts_of(body.prompt)
    if len(prompts) > 1 and body.stream:
        raise wrong("prompt", "prompt: one prompt is streamed at a time")
    limit = body.n_predict if body.n_predict is not None else body.max_tokens
    params = params_of(body, base, chances=body.n_probs or None)
    if limit is not None:
        params = params.replace(max_tokens=None if limit < 0 else limit)
    return Wanted(prompts, params, stream=bool(body.stream))


class NativeDialect:
    """One answer in the words of llama-server."""

    wire: Wire = "sse"

    def __init__(self, body: CompletionRequest, model: str, params: GenerateParams) -> None:
        self._model = model
        self._params = params
        self._prompt = body.prompt
        self._tokens = bool(body.return_tokens)

    def begun(self, replies: list[Reply]) -> Iterable[Frame]:
        return ()

    def said(self, piece: Piece) -> Iterable[Frame]:
        tokens = [token for done in piece.rounds for token in done.emitted]
        chances = chances_of(piece.rounds)
        text = piece.reasoning + piece.text
        if not text and not chances:
            return
        frame = {
            "index": piece.reply.index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": sum(len(done.emitted) for done in piece.reply.rounds),
            "tokens_evaluated": 0 if (s := piece.reply.started) is None else s.prompt_n,
        }
        if chances:
            frame["completion_probabilities"] = in_chat(chances)
        yield Frame(frame)

    def finished(self, reply: Reply) -> Iterable[Frame]:
        yield Frame({**self._end(reply), "content": "", "tokens": []})

    def ended(self, replies: list[Reply]) -> Iterable[Frame]:
        return ()

    def whole(self, replies: list[Reply]) -> Any:
        wholes = []
        for reply in replies:
            end = self._end(reply)
            if chances := chances_of(reply.rounds):
                end["completion_probabilities"] = in_chat(chances)
            wholes.append(end)
        return wholes if len(wholes) > 1 else wholes[0]

    def failed(self, refusal: Refusal) -> Iterable[Frame]:
        yield Frame(openai_error(refusal))

    def _end(self, reply: Reply) -> dict[str, Any]:
        finished = reply.finished
        assert finished is not None
        return {
            "index": reply.index,
            "content": reply.reasoning + reply.text,
            "tokens": list(finished.token_ids) if self._tokens else [],
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": len(finished.token_ids),
            "tokens_evaluated": finished.prompt_n,
            "generation_settings": settings(self._params),
            "prompt": self._prompt,
            "has_new_line": "\n" in finished.text,
            "truncated": finished.reason == "context",
            "stop_type": _STOP_TYPES.get(finished.reason, "none"),
            "stopping_word": "",
            "tokens_cached": finished.prompt_n + len(finished.token_ids),
            "timings": timings([reply]),
            "metrics": metrics([reply]),
        }


def settings(params: GenerateParams) -> dict[str, Any]:
    """The parameters of requests, under llama-server's names."""
    sampling = params.sampling
    return {
        **{name: getattr(sampling, name) for name in SAMPLERS},
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "seed": -1 if params.seed is None else params.seed,
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "grammar": params.grammar or "",
        "speculative.type": params.proposer if params.speculate else "none",
        "speculative.n_max": params.draft_max,
    }


def routes(service: Service) -> list[Route]:
    desk = service.desk

    async def completion(request: Request) -> Response:
        body = await service.read(request, CompletionRequest)
        asked = wanted(body, service.base)
        return await service.answer(
            request, asked, NativeDialect(body, service.model, asked.params)
        )

    async def props(request: Request) -> Response:
        info = service.info
        template, bos, eos = await desk.ask("template")
        params = settings(service.base)
        return Json(
            {
                "default_generation_settings": {"n_ctx": info.target.n_ctx, "params": params},
                "total_slots": desk.lanes,
                "model_path": info.target.path,
                "model_alias": service.model,
                "chat_template": template,
                "chat_template_caps": {},
                "bos_token": bos,
                "eos_token": eos,
                "modalities": {"vision": False, "audio": False},
                "build_info": f"specllama-{__version__}",
                "exactness": info.exactness,
                "methods": [{"name": m.name, "available": m.available} for m in info.methods],
            }
        )

    async def slots(request: Request) -> Response:
        n_ctx = service.info.target.n_ctx
        running = [
            {"id": i, "n_ctx": n_ctx, "is_processing": True, "params": settings(ticket.params)}
            for i, ticket in enumerate(desk.running)
        ]
        idle: list[Mapping[str, Any]] = [
            {"id": i, "n_ctx": n_ctx, "is_processing": False}
            for i in range(len(running), desk.lanes)
        ]
        return Json([*running, *idle])

    async def tokenize(request: Request) -> Response:
        body = await service.read(request, TokenizeRequest)
        ids = await desk.ask("tokenize", body.content, body.add_special, body.parse_special)
        if not body.with_pieces:
            return Json({"tokens": ids})
        pieces = await desk.ask("pieces", ids)
        told = [{"id": id, "piece": _piece(piece)} for id, piece in zip(ids, pieces, strict=True)]
        return Json({"tokens": told})

    async def detokenize(request: Request) -> Response:
        body = await service.read(request, DetokenizeRequest)
        pieces = await desk.ask("pieces", body.tokens)
        return Json({"content": b"".join(pieces).decode("utf-8", "replace")})

    async def template(request: Request) -> Response:
        body = await service.read(request, TemplateRequest)
        messages, tools = tuple(messages_of(body.messages)), tools_of(body.tools, None)
        asked = service.equipped(Wanted((messages,), service.base, tools=tools))
        prompt = await desk.ask("render", asked.prompts[0], asked.params)
        return Json({"prompt": prompt})

    return [
        Route(path, guarded(handler), methods=methods)
        for path, handler, methods in (
            ("/completion", completion, ["POST"]),
            ("/completions", completion, ["POST"]),
            ("/props", props, ["GET"]),
            ("/slots", slots, ["GET"]),
            ("/tokenize", tokenize, ["POST"]),
            ("/detokenize", detokenize, ["POST"]),
            ("/apply-template", template, ["POST"]),
        )
    ]


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
