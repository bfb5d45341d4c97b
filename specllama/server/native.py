"""llama-server's own routes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specllama import __version__
from specllama.events import Chances
from specllama.server.chat_completions import Given, limit_of, n_of, prompts_of
from specllama.server.chat_messages import ToolSpec, Turn, messages_of, steadied, tools_of
from specllama.server.dialect import Dialect, Frame, Job, Piece, Reply, chances_of, in_chat
from specllama.server.exchange import Json
from specllama.server.refusals import not_offered, wrong
from specllama.server.sampling_fields import ORDER, SAMPLERS, Asked, most_chances
from specllama.server.served import ServedModel
from specllama.server.service import KNOWN, Row, Service
from specllama.server.usage import costs, so_far
from specllama.settings.params import GenerateParams

# what a client wrote into its request, or could repeat it by: no other client is shown these
_OWN = ("stop", "grammar", "logit_bias", "dry_sequence_breakers", "seed")


class NativeCompletion(Asked, kw_only=True):
    prompt: Given
    model: Any = None  # of any type here: ``service.naming_of`` judges it
    n_predict: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n_cmpl: int | None = None
    n: int | None = None
    n_probs: int | None = None
    logprobs: int | None = None
    return_tokens: bool | None = None
    post_sampling_probs: bool | None = None
    response_fields: list[str] | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None


class Extra(msgspec.Struct):
    text: str
    filename: str | None = None


class InfillRequest(NativeCompletion, kw_only=True):
    """A text with a gap; ``prompt`` is the beginning of the text that fills it."""

    input_prefix: str
    input_suffix: str
    input_extra: list[Extra] | None = None
    prompt: str | None = None  # type: ignore[assignment]


class TokenizeRequest(msgspec.Struct):
    """A text to tokenize: llama-server's ``content``, or vLLM's ``prompt`` or ``messages``."""

    content: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None
    prompt: str | None = None
    messages: list[Turn] | None = None
    tools: list[ToolSpec] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct):
    tokens: list[int] | None = None


class TemplateRequest(msgspec.Struct):
    messages: list[Turn]
    tools: list[ToolSpec] | None = None


def parse(body: NativeCompletion, base: GenerateParams) -> Job:
    """Read a request; raise Refusal if a field is wrong."""
    if body.post_sampling_probs:
        raise not_offered(
            "post_sampling_probs", "probabilities are told before samplers", "post_sampling_probs"
        )
    prompts = prompts_of(body.prompt)
    if len(prompts) > 1 and body.stream:
        raise wrong("prompt", "prompt: one prompt is streamed at a time")
    limit = limit_of(body.n_predict, body.max_completion_tokens, body.max_tokens)
    silent, limit = limit == 0, None if limit is None else max(limit, -1)
    chances = most_chances("n_probs", body.n_probs or body.logprobs or None)
    n = n_of(body.n if body.n_cmpl is None else body.n_cmpl, "n_cmpl")
    return Job.of(body, prompts, base, limit=limit, n=n, silent=silent, chances=chances)


def settings(params: GenerateParams) -> dict[str, Any]:
    """Return the parameters of a request under llama-server's names."""
    sampling = params.sampling
    limit = -1 if params.max_tokens is None else params.max_tokens
    bias = sampling.logit_bias.items()
    return {
        **KNOWN.off,
        **{name: getattr(sampling, name) for name in SAMPLERS},
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "logit_bias": [{"token": t, "bias": b if b > float("-inf") else None} for t, b in bias],
        "samplers": [name for name in ORDER if name != "infill"],
        "seed": -1 if params.seed is None else params.seed,
        "n_predict": limit,
        "max_tokens": limit,
        "n_probs": params.chances or 0,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "grammar": params.grammar or "",
        "speculative.types": params.proposer if params.speculate else "none",
        "speculative.n_max": params.draft_max,
    }


def ending(reply: Reply, model: str, params: GenerateParams, prompt: Any) -> dict[str, Any]:
    """Return a whole reply, as ``/completion`` answers it."""
    finished = reply.finished
    assert finished is not None
    out = {
        "index": reply.index,
        "content": reply.reasoning + reply.text,
        "tokens": list(finished.token_ids),
        "id_slot": -1 if reply.started is None else reply.started.slot,
        "stop": True,
        "model": model,
        "tokens_predicted": len(finished.token_ids),
        "tokens_evaluated": finished.prompt_n,
        "generation_settings": settings(params),
        "prompt": prompt,
        "has_new_line": "\n" in finished.text,
        "truncated": finished.reason == "context",
        "stop_type": reply.ending.llama,
        "stopping_word": finished.stop or "",
        "tokens_cached": finished.prompt_n + len(finished.token_ids),
        **costs([reply]),
    }
    if chances := chances_of(reply.rounds):
        out["completion_probabilities"] = in_chat(chances)
    return out


def picked(whole: Mapping[str, Any], fields: Sequence[str] | None) -> Mapping[str, Any]:
    """Return only these fields of an answer, such as ``content`` or ``timings/prompt_n``."""
    if not fields:
        return whole
    out: dict[str, Any] = {}
    for field in fields:
        value: Any = whole
        for name in field.split("/"):
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None:
            out[field] = value
    return out


def pieces(piece: Piece) -> Iterator[tuple[str, list[int], list[Chances]]]:
    """Yield a piece as text, tokens and chances: token by token if chances are requested, as
    llama-server does. Text that was held back comes with the last token of those that follow it."""
    text = piece.reasoning + piece.text
    tokens = [token for done in piece.rounds for token in done.emitted]
    chances = chances_of(piece.rounds)
    if not chances:
        if text:
            yield text, tokens, []
        return
    spelled = [part for done in piece.rounds for part in done.emitted_text]
    if "".join(spelled) != text:
        spelled = [*[""] * (len(chances) - 1), text]
    for part, token, chance in zip(spelled, tokens, chances, strict=True):
        yield part, [token], [chance]


class NativeDialect(Dialect):
    """One answer in the words of llama-server."""

    def __init__(self, body: NativeCompletion, model: str, params: GenerateParams) -> None:
        self._model = model
        self._params = params
        self._body = body

    def said(self, piece: Piece) -> Iterable[Frame]:
        for text, tokens, chances in pieces(piece):
            frame = self._frame(piece, text, tokens)
            if chances:
                frame["completion_probabilities"] = in_chat(chances)
            yield Frame(frame)
        for told in piece.progress() if self._body.return_progress else ():
            yield Frame({**self._frame(piece, "", []), **told})

    def _frame(self, piece: Piece, text: str, tokens: list[int]) -> dict[str, Any]:
        reply = piece.reply
        frame = {
            "index": reply.index,
            "content": text,
            "tokens": tokens,
            "stop": False,
            "id_slot": -1 if reply.started is None else reply.started.slot,
            "tokens_predicted": reply.written,
            "tokens_evaluated": 0 if reply.started is None else reply.started.prompt_n,
        }
        return {**frame, "timings": so_far(reply)} if self._body.timings_per_token else frame

    def finished(self, reply: Reply) -> Iterable[Frame]:
        end = {**self._end(reply), "content": "", "tokens": []}
        end.pop("completion_probabilities", None)
        yield Frame(picked(end, self._body.response_fields))

    def whole(self, replies: list[Reply]) -> Any:
        wholes = [picked(self._end(reply), self._body.response_fields) for reply in replies]
        return wholes if len(wholes) > 1 else wholes[0]

    def _end(self, reply: Reply) -> dict[str, Any]:
        end = ending(reply, self._model, self._params, self._body.prompt)
        return end if self._body.return_tokens else {**end, "tokens": []}


def rows(service: Service) -> list[Row]:
    return [*_replies(service), *_texts(service), *_about(service)]


def _replies(service: Service) -> list[Row]:
    """Return the routes that the model writes for."""

    def spelled(body: NativeCompletion, job: Job, model: ServedModel) -> NativeDialect:
        return NativeDialect(body, model.name, job.params)

    completion = service.writes(NativeCompletion, parse, spelled)

    async def infill(request: Request) -> Response:
        body = await service.read(request, InfillRequest)
        others = [(extra.filename or "tmp", extra.text) for extra in body.input_extra or ()]
        body.prompt = body.prompt or ""
        before = body.input_prefix + body.prompt
        model = await service.model(request)
        job = await service.parsed(request, model, body, parse)
        job = await model.infilled(job, before, body.input_suffix, others)
        return await service.answer(request, model, job, spelled(body, job, model))

    return [
        ("POST /completion", completion),
        ("POST /completions", completion),
        ("POST /infill", infill),
    ]


def _texts(service: Service) -> list[Row]:
    """Return the routes that work on texts without decoding: tokens, and filled templates."""

    async def tokenize(request: Request) -> Response:
        body = await service.read(request, TokenizeRequest)
        model = await service.model(request)
        if body.prompt is not None or body.messages is not None:
            return await counted(model, body, request)
        special = bool(body.add_special), body.parse_special is not False
        ids = await service.ask(request, model, "tokenize", body.content or "", *special)
        if not body.with_pieces:
            return Json({"tokens": ids})
        pieces = await service.ask(request, model, "pieces", ids)
        told = zip(ids, pieces, strict=True)
        return await service.aside(
            request, lambda: Json({"tokens": [{"id": id, "piece": _piece(p)} for id, p in told]})
        )

    async def counted(model: ServedModel, body: TokenizeRequest, request: Request) -> Response:
        """Answer as vLLM does."""
        if body.messages is not None:
            text = await rendered(model, body.messages, body.tools, request)
            special = bool(body.add_special_tokens)
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
        ids = await service.ask(request, model, "tokenize", text, special, True)
        strings = None
        if body.return_token_strs:
            pieces = await service.ask(request, model, "pieces", ids)
            strings = [piece.decode("utf-8", "replace") for piece in pieces]
        n_ctx = model.info.target.n_ctx
        told = {"count": len(ids), "max_model_len": n_ctx, "tokens": ids, "token_strs": strings}
        return Json(told)

    async def rendered(
        model: ServedModel, turns: list[Turn], specs: list[ToolSpec] | None, request: Request
    ) -> str:
        def whole() -> Job:
            messages, tools = messages_of(turns), tools_of(specs)
            return model.equipped(steadied(Job((messages,), model.base, tools=tools)))

        job = await service.aside(request, whole)
        prompt: str = await service.ask(request, model, "render", job.prompts[0], job.params)
        return prompt

    async def detokenize(request: Request) -> Response:
        body = await service.read(request, DetokenizeRequest)
        model = await service.model(request)
        pieces = await service.ask(request, model, "pieces", body.tokens or [])
        text = b"".join(pieces).decode("utf-8", "replace")
        return Json({"content": text, "prompt": text})  # llama-server's name for it, and vLLM's

    async def template(request: Request) -> Response:
        body = await service.read(request, TemplateRequest)
        model = await service.model(request)
        return Json({"prompt": await rendered(model, body.messages, body.tools, request)})

    return [
        ("POST /tokenize", tokenize),
        ("POST /detokenize", detokenize),
        ("POST /apply-template", template),
    ]


def _about(service: Service) -> list[Row]:
    """Return the routes that describe the server and its load."""

    async def props(request: Request) -> Response:
        model = await service.named(request)
        info, queue = model.info, model.queue
        template, bos, eos = await queue.template()
        params = settings(model.base)
        return Json(
            {
                "default_generation_settings": {"n_ctx": info.target.n_ctx, "params": params},
                "total_slots": queue.lanes,
                "model_path": info.target.path,
                "model_alias": model.name,
                "model_ftype": info.target.quantization,
                "chat_template": template,
                "chat_template_caps": {},
                "bos_token": bos,
                "eos_token": eos,
                "modalities": {"vision": False, "video": False, "audio": False},
                "build_info": f"specllama-{__version__}",
                "endpoint_slots": service.slots,
                "endpoint_metrics": True,
                "endpoint_props": False,
                "ui": False,
                "is_sleeping": not queue.loaded,
                "exactness": info.exactness,
                "undrafted": queue.undrafted or None,
                "methods": [{"name": m.name, "available": m.available} for m in info.methods],
            }
        )

    async def slots(request: Request) -> Response:
        service.require_slots()
        model = await service.named(request)
        queue = model.queue
        common = {"n_ctx": model.info.target.n_ctx, "speculative": True}

        def shown(params: GenerateParams) -> dict[str, Any]:
            told = settings(params)
            return told if service.expose_text else {n: told[n] for n in told if n not in _OWN}

        running = [
            {"id": i, "is_processing": True, "params": shown(queued.params), **common}
            for i, queued in enumerate(queue.running)
        ]
        idle = [
            {"id": i, "is_processing": False, **common} for i in range(len(running), queue.lanes)
        ]
        return Json([*running, *idle])

    async def version(request: Request) -> Response:
        return Json({"version": __version__})

    async def load(request: Request) -> Response:
        queues = [model.queue for model in service.models.all.values()]
        return Json({"server_load": sum(len(one.running) + one.n_waiting for one in queues)})

    return [
        ("GET /props", props),
        ("GET /slots", slots),
        ("GET /version", version),
        ("GET /load", load),
    ]


def _piece(piece: bytes) -> str | list[int]:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
