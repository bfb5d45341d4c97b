"""Ollama's routes: what editors ask to find a model, chat and generate, in lines of JSON."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specllama import __version__
from specllama.errors import PromptTooLong, SpecllamaError
from specllama.events import RoundDone
from specllama.interface import Message, ModelInfo, Prompt
from specllama.models.gguf import read_header
from specllama.replies.tool_calls import RESPONSE
from specllama.server.chat_messages import ToolSpec, Turn, conversation_of, messages_of, tools_of
from specllama.server.chat_turns import ChatTurns
from specllama.server.dialect import Dialect, Frame, Job, Piece, Reply, Wire, chances_of, in_chat
from specllama.server.exchange import TYPES, Json, encode
from specllama.server.refusals import Refusal, not_offered, text_only, wrong
from specllama.server.sampling_fields import (
    FIELDS,
    Prediction,
    Sampling,
    Speculation,
    Thought,
    most_chances,
    params_of,
    schema_text,
)
from specllama.server.served import ServedModel
from specllama.server.service import KNOWN, Naming, Parse, Row, Service, refuses
from specllama.server.tools import ToolUse
from specllama.server.usage import costs, short
from specllama.settings.params import GenerateParams

VERSION = "0.14.0"  # clients take it for one with /v1/responses and /v1/messages
# the steps of a pull, in Ollama's words
_PULLED = (
    "pulling manifest",
    "pulling {:.12}",
    "verifying sha256 digest",
    "writing manifest",
    "success",
)
_NO_PULL = "no route brings models: specllama hub does"
_NAMES = {name: f"options.{field}" for name, field in FIELDS.items() if "." not in field}
_NAMES |= {"max-tokens": "options.num_predict", "think": "think", "chances": "top_logprobs"}


class Options(Sampling, kw_only=True):
    num_predict: int | None = None
    num_ctx: int | None = None


class OllamaTurn(Turn):
    tool_name: str | None = None
    images: list[str | None] | None = None
    thinking: str | None = None


class _Asked(Thought, kw_only=True):
    """The fields of both requests; Ollama's own client writes null for those that are not set."""

    model: str | None = None
    stream: bool | None = None
    options: Options | None = None
    format: str | dict[str, Any] | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prediction: Prediction | None = None
    specllama: Speculation | None = None


class OllamaChat(_Asked, kw_only=True):
    messages: list[OllamaTurn] | None = None
    tools: list[ToolSpec] | None = None
    truncate: bool | None = None


class GenerateRequest(_Asked, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    images: list[str | None] | None = None


class ShowRequest(msgspec.Struct):
    model: str | None = None
    name: str | None = None
    stream: bool | None = None


def _parse(body: _Asked, prompt: Prompt, base: GenerateParams, tools: ToolUse | None = None) -> Job:
    """Read the common fields; raise Refusal if one is wrong."""
    options = body.options or Options()
    options.specllama = body.specllama
    options.prediction = body.prediction or options.prediction
    limit = options.num_predict
    form = {"type": "object"} if body.format == "json" else body.format
    for name in Thought.__struct_fields__:
        if (given := getattr(body, name)) is not None:
            setattr(options, name, given)
    if body.think is not None:
        options.reasoning_effort = {True: "on", False: "off"}.get(body.think, body.think)  # type: ignore[arg-type]
    more = most_chances("top_logprobs", body.top_logprobs or 0) if body.logprobs else None
    params = params_of(
        options,
        base,
        _NAMES,
        raw=isinstance(prompt, str),
        json_schema=schema_text(form) if form else None,
        chances=more,
        max_tokens=-1 if limit is not None and limit <= 0 else limit,
    )
    return Job((prompt,), params, stream=body.stream is not False, tools=tools)


def parse_chat(body: OllamaChat, base: GenerateParams) -> Job:
    """Read a chat; raise Refusal if a field is wrong."""
    turns = body.messages or []
    for i, turn in enumerate(turns):
        if any(turn.images or ()):
            raise text_only(f"messages[{i}]", "images")
        turn.reasoning_content = turn.reasoning_content or turn.thinking
        turn.name = turn.tool_name or turn.name
    read = ChatTurns("tool_call_id", "tool_name", ordered=True)
    conversation = conversation_of(turns, read)
    job = _parse(body, conversation.messages(), base, tools_of(body.tools))
    return replace(job, pending=conversation.pending)


def parse_generate(body: GenerateRequest, base: GenerateParams) -> Job:
    """Read a prompt; raise Refusal if a field is wrong."""
    prompt: Prompt = body.prompt or ""
    if not body.raw:
        head = [Turn("system", body.system)] if body.system else []
        prompt = messages_of([*head, Turn("user", body.prompt)])
    return _parse(body, prompt, base)


class OllamaDialect(Dialect):
    """One answer in the words of Ollama; ``chat`` or ``generate``."""

    wire: Wire = "ndjson"

    def __init__(self, model: str, *, chat: bool) -> None:
        self._model = model
        self._chat = chat

    def _line(self, text: str, thought: str, **more: Any) -> dict[str, Any]:
        thinking = {"thinking": thought} if thought else {}
        said: dict[str, Any] = {"response": text, **thinking}
        if self._chat:
            said = {"message": {"role": "assistant", "content": text, **thinking}}
        return {"model": self._model, "created_at": _time(), **said, "done": False, **more}

    def said(self, piece: Piece) -> Iterable[Frame]:
        told = _logprobs(piece.rounds)
        if piece.text or piece.reasoning or told:
            yield Frame(self._line(piece.text, piece.reasoning, **told))

    def waiting(self) -> Iterable[Frame]:
        yield Frame(self._line("", ""))  # its readers take every line for JSON, also an empty one

    def finished(self, reply: Reply) -> Iterable[Frame]:
        yield Frame(self._ending(reply, "", ""))

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        [reply] = replies
        return {**self._ending(reply, reply.text, reply.reasoning), **_logprobs(reply.rounds)}

    def _ending(self, reply: Reply, text: str, thought: str) -> dict[str, Any]:
        line = self._line(text, thought, **self._end(reply))
        if reply.calls:
            line["message"]["tool_calls"] = [
                {"id": c.id, "function": {"index": i, "name": c.name, "arguments": given}}
                for i, c in enumerate(reply.calls)
                for given in [msgspec.json.decode(c.arguments)]
            ]
        return line

    def _end(self, reply: Reply) -> dict[str, Any]:
        finished = reply.finished
        assert finished is not None
        took = finished.timings
        return {
            "done": True,
            "done_reason": reply.ending.openai,
            "total_duration": int((reply.queue_ms + took.ttft_ms + took.decode_ms) * 1e6),
            "load_duration": int(reply.queue_ms * 1e6),  # until the model was there for it
            "prompt_eval_count": finished.prompt_n,
            "prompt_eval_duration": int(took.prefill_ms * 1e6),
            "eval_count": len(finished.token_ids),
            "eval_duration": int((took.decode_ms + took.first_decode_ms) * 1e6),
            **costs([reply]),
        }

    def idle(self, reason: str) -> dict[str, Any]:
        """Answer an empty request, which only loads or unloads a model."""
        return self._line("", "", done=True, done_reason=reason)


def _logprobs(rounds: Iterable[RoundDone]) -> dict[str, Any]:
    """Return the tokens' log probabilities, if they were requested."""
    found = chances_of(rounds)
    return {"logprobs": in_chat(found)} if found else {}


def _digest(target: ModelInfo) -> str:
    """Return a substitute for the hash of a file that was never hashed; equal for equal files."""
    return hashlib.sha256(f"{target.name} {target.file_bytes}".encode()).hexdigest()


def _about(target: ModelInfo) -> dict[str, Any]:
    """Return the metadata of a model's file; arrays are null, as in Ollama's short form."""
    about: dict[str, Any] = {}
    with contextlib.suppress(SpecllamaError, OSError):  # not every engine has a file
        header = read_header(target.path)
        about = {**header.metadata, **dict.fromkeys(header.arrays)}
        about.pop("tokenizer.chat_template", None)
    return {
        **about,
        "general.architecture": target.architecture,
        "general.parameter_count": target.n_params,
        f"{target.architecture}.context_length": target.n_ctx,
    }


def _parameters(params: GenerateParams, n_ctx: int) -> list[str]:
    """Return the server's default parameters as lines in Ollama's form."""
    names = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
    values = {"num_ctx": n_ctx, **{name: getattr(params.sampling, name) for name in names}}
    told = [f"{name:<30} {value}" for name, value in values.items()]
    return told + [f"{'stop':<30} {msgspec.json.encode(text).decode()}" for text in params.stop]


def _modelfile(model: str, template: str, parameters: Iterable[str]) -> str:
    lines = [f"PARAMETER {' '.join(line.split(maxsplit=1))}" for line in parameters]
    return "\n".join([f"FROM {model}", f'TEMPLATE """{template}"""', *lines, ""])


def _time(seconds: float | None = None) -> str:
    now = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return now.isoformat().replace("+00:00", "Z")


def rows(service: Service) -> list[Row]:
    refused = [
        (f"POST|DELETE {path}", refuses(path[5:], why)) for path, why in KNOWN.ollama.items()
    ]
    return [*_about_model(service), *_replies(service), *refused]


def _details(target: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": target.architecture,
        "families": [target.architecture],
        "parameter_size": short(target.n_params),
        "quantization_level": target.quantization,
    }


def _card(model: ServedModel) -> dict[str, Any]:
    target = model.target
    return {
        "name": model.name,
        "model": model.name,
        "size": target.file_bytes,
        "digest": target.sha256 or _digest(target),
        "details": _details(target),
    }


def _running(model: ServedModel) -> dict[str, Any]:
    """Describe a loaded model; fields that Ollama does not have stand at the end."""
    info, left_s = model.info, model.left_s
    until = _time(time.time() + left_s) if left_s < math.inf else _time(2**31)
    more = {
        "expires_at": until,
        "size": (model.holds or info.target.file_bytes) + info.idle_bytes,
        "size_vram": 0,
        "context_length": info.target.n_ctx,
        "idle_bytes": info.idle_bytes,
        "draft_model": None if info.draft is None else info.draft.name,
        "running": len(model.queue.running),
        "idle_seconds": round(model.idle_for_s, 1),
        "keep_alive_seconds": None if model.keep_s == math.inf else model.keep_s,
    }
    return {**_card(model), **more}


def _about_model(service: Service) -> list[Row]:
    """Return the routes that describe models."""
    since = _time(service.started)

    async def version(request: Request) -> Response:
        return Json({"version": VERSION, "specllama": __version__})

    async def tags(request: Request) -> Response:
        cards = [{**_card(one), "modified_at": since} for one in await service.models.look()]
        return Json({"models": cards})

    async def running(request: Request) -> Response:
        return Json({"models": [_running(one) for one in service.models.loaded]})

    async def show(request: Request) -> Response:
        body = await service.read(request, ShowRequest)
        model = await service.models.listed(body.model or body.name or "")
        target = model.target
        template, _, _ = await model.queue.template()
        about = await asyncio.to_thread(_about, target)
        parameters = _parameters(model.base, target.n_ctx) if model.state == "loaded" else []
        return Json(
            {
                "license": str(about.get("general.license") or ""),
                "modelfile": _modelfile(model.name, template, parameters),
                "parameters": "\n".join(parameters),
                "template": template,
                "details": _details(target),
                "model_info": about,
                "capabilities": ["completion", "tools", *["thinking"] * model.queue.thinks],
                "modified_at": since,
            }
        )

    async def pull(request: Request) -> Response:
        """Answer as Ollama does for a model that is here already."""
        body = await service.read(request, ShowRequest)
        try:
            card = _card(await service.models.listed(body.model or body.name or ""))
        except Refusal:
            raise not_offered("pull", _NO_PULL, "model") from None
        digest, size = card["digest"], card["size"]
        told: list[dict[str, Any]] = [{"status": step.format(digest)} for step in _PULLED]
        told[1] |= {"digest": f"sha256:{digest}", "total": size, "completed": size}
        if body.stream is False:
            return Json(told[-1])
        return Response(encode("ndjson", map(Frame, told)), media_type=TYPES["ndjson"])

    return [
        ("POST /api/pull", pull),
        ("GET /api/version", version),
        ("GET /api/tags", tags),
        ("GET /api/ps", running),
        ("POST /api/show", show),
    ]


async def _shortened(client: str, model: ServedModel, job: Job, room: float) -> Job:
    """Drop as few of the oldest messages of a chat as make it fit, but no system message, nor
    the last one, nor a call whose result stays."""
    turns = [turn for turn in job.prompts[0] if isinstance(turn, Message)]
    starts = [i for i, turn in enumerate(turns) if not (i and turn.content.startswith(RESPONSE))]
    low, high = 0, len(starts) - 1
    while True:
        at = starts[(low + high) // 2]
        system = (turn for turn in turns[:at] if turn.role == "system")
        cut = replace(job, prompts=((*system, *turns[at:]),))
        if low == high:
            return cut
        n = math.inf
        with contextlib.suppress(PromptTooLong):
            asked = model.fitting(cut)
            n = await model.queue.ask("count_tokens", asked.prompts[0], asked.params, client=client)
        low, high = (low, (low + high) // 2) if n <= room else ((low + high) // 2 + 1, high)


def _replies(service: Service) -> list[Row]:
    """Return the routes that the model writes for."""

    async def nothing(request: Request, chat: bool) -> Response:
        """Load the model, or unload it if it should not stay: no text is requested."""
        asked: Naming = request.state.naming
        model = await service.models.named(asked.model)
        if asked.keep_s == 0:
            service.models.unload_later(model)
        else:
            await service.model(request)
        reason = "unload" if asked.keep_s == 0 else "load"
        return Json(OllamaDialect(model.name, chat=chat).idle(reason))

    async def written(request: Request, body: Any, asked: Any, parse: Parse) -> Response:
        chat = parse is parse_chat
        if not asked:
            return await nothing(request, chat)
        model = await service.model(request)
        if body.think not in (None, False) and not model.queue.thinks:
            raise wrong("think", f"{model.name!r} does not support thinking")
        job = await service.parsed(request, model, body, parse)
        if chat and body.truncate:
            room = min((body.options or Options()).num_ctx or math.inf, model.info.target.n_ctx)
            job = await _shortened(request.state.client, model, job, room)
        elif not chat and body.suffix:
            job = await model.infilled(job, asked, body.suffix)
        return await service.answer(request, model, job, OllamaDialect(model.name, chat=chat))

    async def chat(request: Request) -> Response:
        body = await service.read(request, OllamaChat)
        return await written(request, body, body.messages, parse_chat)

    async def generate(request: Request) -> Response:
        body = await service.read(request, GenerateRequest)
        if any(body.images or ()):
            raise text_only("images", "images")
        return await written(request, body, body.prompt, parse_generate)

    return [("POST /api/chat", chat), ("POST /api/generate", generate)]
