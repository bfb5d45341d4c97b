"""The service that all routes share: the models, the server's settings, and ways to answer."""

from __future__ import annotations

import hashlib
import re
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from importlib.resources import files
from operator import getitem
from typing import Any, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specllama.errors import UsageError
from specllama.interface import Message
from specllama.server.chat_messages import steadied
from specllama.server.dialect import Dialect, Job, now
from specllama.server.exchange import Aside, Json, answer
from specllama.server.guard import Access, Traffic, read_body
from specllama.server.loaded_models import Models
from specllama.server.prometheus import Metrics
from specllama.server.refusals import Refusal, malformed, not_offered, unreadable, wrong
from specllama.server.sampling_fields import Sampling, numbered, words_of
from specllama.server.served import ServedModel
from specllama.settings import duration
from specllama.settings.params import GenerateParams


class Refused(msgspec.Struct, frozen=True):
    """A field that is not offered, and why; see ``fields.toml``."""

    why: str
    idle: list[Any] | None = None
    most: float | None = None
    objects: bool = False

    def asks(self, value: Any) -> bool:
        """True if the value requests something."""
        if self.most is not None:
            return not (isinstance(value, (int, float)) and value <= self.most)
        if self.objects:
            return isinstance(value, dict)
        return value not in self.idle if self.idle is not None else bool(value)


class Known(msgspec.Struct, frozen=True):
    """Wishes of other servers' clients that no route carries out, by name: fields that are refused
    or, for a reason, passed over; routes, with a reason; samplers that are off."""

    refused: dict[str, Refused]
    passed: dict[str, str]
    openai: dict[str, str]
    ollama: dict[str, str]
    off: dict[str, Any]


_TABLE = files("specllama.server").joinpath("fields.toml").read_bytes()
KNOWN = msgspec.toml.decode(_TABLE, type=Known)
REFUSED: Mapping[str, Refused] = KNOWN.refused

_Fields = dict[str, msgspec.Raw]


def refuse_known(body: bytes, kind: type) -> Mapping[str, msgspec.Raw]:
    """Return the fields of a body.

    Args:
        kind: the struct that a request of this route is; its fields are honoured.

    Raises:
        Refusal: a field that is known, and not offered here, asks for something.
    """
    honoured = getattr(kind, "__struct_fields__", ())
    fields = msgspec.json.decode(body, type=_Fields)
    known = [*fields.items()]
    if "options" in fields and "options" in honoured:  # of Ollama
        known += (msgspec.json.decode(fields["options"], type=_Fields | None) or {}).items()
    for name, raw in known:
        if name in REFUSED and name not in honoured:
            value = msgspec.json.decode(raw)
            if value is not None and REFUSED[name].asks(value):
                raise not_offered(name, REFUSED[name].why, name)
    return fields


NAMING = frozenset({"model", "keep_alive", "ttl", "draft_model", "stream"})
_OFF = ("none", "")  # no draft model


@dataclass(frozen=True, slots=True)
class Naming:
    """The wishes of a request about its model.

    Attributes:
        model: None if it names none.
        keep_s: seconds that the model may stay loaded unused after this request, which is Ollama's
            ``keep_alive`` and LM Studio's ``ttl``; None if it sets none.
        undrafted: it wants no draft model.
        stream: it wants the text as it comes.
    """

    model: str | None = None
    keep_s: float | None = None
    undrafted: bool = False
    stream: bool = False


def naming_of(fields: Mapping[str, msgspec.Raw]) -> Naming:
    """Read these fields; raise Refusal if a value is wrong."""
    given = {name: msgspec.json.decode(fields[name]) for name in NAMING & fields.keys()}
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise wrong("model", "model: a name is wanted")
    keep_s = _seconds("keep_alive", given.get("keep_alive"))
    if keep_s is None:
        keep_s = _seconds("ttl", given.get("ttl"))
    draft = given.get("draft_model")
    undrafted = isinstance(draft, str) and draft.lower() in _OFF
    return Naming(model, keep_s, undrafted, given.get("stream") is True)


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise wrong(name, f'{name}: a duration is wanted, such as "5m" or 300')
    try:
        return duration.seconds(value)
    except UsageError as error:
        raise wrong(name, f"{name}: {error.message}") from None


# values of a body beside one for each token that can be read: no thread runs while they are made
_VALUES = 50_000
_LARGE = 16 << 10  # bytes of a body that is not worked on in the event loop
_FLOAT = re.compile(r"got `float` - at `\$\.([\w.-]+)")  # the field that holds it
_BEGINNING = 4096  # characters of a prompt, or of a message, by which an arm is chosen
Body = TypeVar("Body")
P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
Parse = Callable[[Any, GenerateParams], Job]
Row = tuple[str, Handler]  # methods and path, such as "GET|POST /ping", and what answers them


@dataclass(slots=True)
class Service:
    """One server.

    Attributes:
        experiment: (arm, share) of requests, by conversation; shares add up to 100.
        slots: clients can see what is being written, their own and others'.
        log: takes a line for each request.
    """

    models: Models
    access: Access = field(default_factory=Access)
    experiment: tuple[tuple[str, int], ...] = ()
    expose_text: bool = False
    slots: bool = True
    log: Callable[[str], object] | None = None
    started: int = field(default_factory=now)
    metrics: Metrics = field(init=False)
    traffic: Traffic = field(init=False)
    _aside: Aside = field(default_factory=Aside)

    def __post_init__(self) -> None:
        self.metrics = Metrics()
        self.models.watch(self.metrics)
        self.traffic = Traffic(self.access.bodies)

    def require_slots(self) -> None:
        """Raise Refusal if clients may not see what is being written."""
        if not self.slots:
            raise not_offered("what is being written", "this server was started with --no-slots")

    async def named(self, request: Request) -> ServedModel:
        """Return the model that the query of a request names, loaded or not.

        Raises:
            Refusal: there is none of this name.
        """
        return await self.models.named(request.query_params.get("model"))

    async def model(self, request: Request) -> ServedModel:
        """Return the model that a request's body names, in use until the request is answered.

        Raises:
            Refusal, SpecllamaError: there is none of this name, or it cannot be loaded.
        """
        asked: Naming = request.state.naming
        model = await self.models.named(asked.model)
        request.state.waits_for = model
        request.state.until_over.callback(await self.models.use(model, asked.keep_s))
        request.state.waits_for = None
        return model

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """Read the body of a request as this type.

        Raises:
            Refusal: it is of another type, or too large.
        """
        body = await read_body(request, self.access.body)
        most, path = _VALUES + self.models.longest, request.url.path.encode()
        read, request.state.naming, request.state.asked = await self.aside(
            request, _decoded, body, kind, most, path
        )
        return read

    async def aside(
        self, request: Request, call: Callable[P, T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Run a call that works on a request: for a large one, on another thread."""
        if request.state.load.bytes <= _LARGE:
            return call(*args, **more)
        return await self._aside.run(request.state.client, call, *args, **more)

    async def job(
        self, request: Request, kind: type[Body], parse: Parse
    ) -> tuple[Body, Job, ServedModel]:
        """Read a request of this kind; return it, its job and its model.

        Raises:
            Refusal, SpecllamaError: it cannot be read, or requests something that is not there.
        """
        body = await self.read(request, kind)
        model = await self.model(request)
        return body, await self.parsed(request, model, body, parse), model

    async def parsed(self, request: Request, model: ServedModel, body: Body, parse: Parse) -> Job:
        """Return the job that a body requests from a model.

        Raises:
            Refusal, SpecllamaError: it requests something that is not there.
        """
        sampling = getattr(body, "options", body)
        if isinstance(sampling, Sampling) and sampling.logit_bias:
            bias = sampling.logit_bias
            words = await self.aside(request, words_of, bias, model.target.n_vocab)
            ids = await self.ask(request, model, "tokens_of", words) if words else []
            spelled = dict(zip(words, ids, strict=True))
            sampling.logit_bias = await self.aside(request, numbered, bias, spelled)
        job = await self.aside(request, lambda: steadied(parse(body, model.base)))
        if request.state.naming.undrafted:
            job = replace(job, params=job.params.replace(speculate=False))
        return job

    async def ask(self, request: Request, model: ServedModel, method: str, *args: Any) -> Any:
        """Call a method of a model's engine for a request; see ``RequestQueue.ask``."""
        return await model.queue.ask(method, *args, client=request.state.client)

    def writes(
        self, kind: type[Body], parse: Parse, dialect: Callable[[Body, Job, ServedModel], Dialect]
    ) -> Handler:
        """Make a handler that answers such a request with a text of the model."""

        async def handle(request: Request) -> Response:
            body, job, model = await self.job(request, kind, parse)
            return await self.answer(request, model, job, dialect(body, job, model))

        return handle

    def counts(self, kind: type[Body], parse: Parse, **more: Any) -> Handler:
        """Make a handler that answers with the prompt's number of tokens; ``more`` goes with it."""

        async def handle(request: Request) -> Response:
            _, job, model = await self.job(request, kind, parse)
            job = await self.aside(request, model.fitting, job)
            n = await self.ask(request, model, "count_tokens", job.prompts[0], job.params)
            return Json({**more, "input_tokens": n})

        return handle

    async def answer(
        self, request: Request, model: ServedModel, job: Job, dialect: Dialect
    ) -> Response:
        """Answer as ``exchange.answer`` does; count the request under its client, slice and arm."""
        if job.pending and not job.silent:
            said = "nothing follows this call of a tool; send its result, or what the user says"
            raise wrong(job.pending, f"{job.pending}: {said}")
        label = self.metrics.slice(request.headers.get("x-specllama-slice", "")[:64])
        client, asked = request.state.client, request.state.asked
        job = replace(job, client=client, asked=asked, label=label)
        job = await self.aside(request, lambda: model.fitting(self._assigned(job)))
        return await answer(request, model.queue, job, dialect, partial(self._aside.write, client))

    def _assigned(self, job: Job) -> Job:
        """Choose the arm of the experiment, by a hash of the conversation's beginning."""
        if not self.experiment:
            return job
        prompt = job.prompts[0]
        parts = [prompt] if isinstance(prompt, str) else prompt[:2]
        first = [_beginning(part) for part in parts]
        at = int.from_bytes(hashlib.sha256(repr(first).encode()).digest()[:8], "big") % 100
        for arm, share in self.experiment:
            at -= share
            if at < 0:
                return replace(job, arm=arm, params=job.params.replace(proposer=arm))
        return job


def _beginning(part: str | int | Message) -> str | int:
    """Return the beginning of a prompt or of a part of it."""
    if isinstance(part, Message):
        return f"{part.role} {part.content[:_BEGINNING]}"
    return part[:_BEGINNING] if isinstance(part, str) else part


def _decoded(body: bytes, kind: type[Body], most: int, path: bytes) -> tuple[Body, Naming, str]:
    """Decode a body; return it, the model that it names, and a hash that recognizes it later.

    Raises:
        Refusal: it is no such body, or has more than ``most`` values.
    """
    body = body.removeprefix(BOM_UTF8)
    if _marks(body) > most and _values(body, most) > most:
        raise Refusal(413, f"a request has at most {most} values", code="too_large")
    try:
        read = _read(body, kind)
        fields = refuse_known(body, kind)
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        typed = isinstance(error, msgspec.ValidationError)
        raise (None if typed else unreadable(body)) or malformed(str(error)) from None
    return read, naming_of(fields), hashlib.sha256(path + b"\0" + body).hexdigest()


def _read(body: bytes, kind: type[Body]) -> Body:
    """Decode a body. A whole number may be written as JavaScript does not, as 10.0.

    Raises:
        DecodeError, UnicodeDecodeError: it is no such body.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        wrong_at = _FLOAT.search(str(error))
        if wrong_at is None:
            raise
    value, seen = msgspec.json.decode(body), set[str]()
    while wrong_at is not None and wrong_at[1] not in seen:
        seen.add(wrong_at[1])
        *names, last = wrong_at[1].split(".")
        holder = reduce(getitem, names, value)
        holder[last] = _whole(holder[last])
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as error:
            wrong_at, told = _FLOAT.search(str(error)), error
    raise told


def _whole(value: Any) -> Any:
    """Return a number, or those of a list, as an integer where it is one."""
    if isinstance(value, list):
        return [*map(_whole, value)]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _marks(body: bytes) -> int:
    """Count the marks before and between values, also those in texts."""
    return sum(map(body.count, (b",", b"[", b"{")))


def _values(body: bytes, most: int) -> int:
    """Return an upper bound on the values in a JSON text; an estimate if it exceeds ``most``."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    quotes = plain.count(b'"')
    if quotes > 4 * most:  # two texts, a name and its value, for each mark
        return quotes
    return _marks(b"".join(plain.split(b'"')[::2]))


def refuses(what: str, reason: str) -> Handler:
    """Make a handler that answers that something is not offered."""

    async def handle(request: Request) -> Response:
        raise not_offered(what, reason)

    return handle
