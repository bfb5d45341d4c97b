"""What every route needs: the queue, what the server was started with, and how to answer."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from specllama.errors import PromptTooLong, UsageError
from specllama.interface import EngineInfo, Message
from specllama.server.aside import Aside
from specllama.server.dialect import Dialect, Job, now
from specllama.server.exchange import Json, answer, scribe
from specllama.server.guard import Access, read_body
from specllama.server.known import refuse_known
from specllama.server.prometheus import Metrics
from specllama.server.refusals import Refusal, loading, malformed, not_offered
from specllama.server.request_queue import RequestQueue
from specllama.server.sampling import Sampling, numbered, words_of
from specllama.server.tools import equipped
from specllama.server.traffic import Traffic
from specllama.settings.params import GenerateParams

# values of a body beside one for each token that can be read: no thread runs while they are made
_VALUES = 50_000
_LARGE = 16 << 10  # bytes of a body that is not worked on in the event loop
_BEGINNING = 4096  # characters of a prompt, or of a message, by which an arm is chosen
Body = TypeVar("Body")
P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
Row = tuple[str, Handler]  # methods and path, such as "GET|POST /ping", and what answers them


@dataclass(slots=True)
class Service:
    """One server.

    Attributes:
        model: what the model is called in answers.
        params: of requests that say nothing else.
        experiment: (arm, share) of requests, by conversation; shares add up to 100.
        slots: clients are told what is being written, their own and others'.
        slot_folder: where clients have slots written to; None lets them not.
        log: takes a line for each request.
    """

    queue: RequestQueue
    model: str
    access: Access = field(default_factory=Access)
    params: GenerateParams = field(default_factory=GenerateParams)
    experiment: tuple[tuple[str, int], ...] = ()
    expose_text: bool = False
    slots: bool = True
    slot_folder: Path | None = None
    log: Callable[[str], object] | None = None
    started: int = field(default_factory=now)
    metrics: Metrics = field(init=False)
    traffic: Traffic = field(init=False)
    _aside: Aside = field(default_factory=Aside)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.queue, self.model)
        self.traffic = Traffic(self.access.bodies)

    @property
    def info(self) -> EngineInfo:
        """Raises Refusal while the model is loading."""
        if not self.queue.loaded:
            raise loading()
        return self.queue.host.info

    @property
    def base(self) -> GenerateParams:
        """Of requests that say nothing else, as clients are shown them: nothing is left to the
        model's card, so that what a request says wins over it."""
        return self.params.on_card(self.info.target.card).replace(from_card=())

    def require_slots(self) -> None:
        """Raises Refusal: what is being written is not told."""
        if not self.slots:
            raise not_offered("what is being written", "this server was started with --no-slots")

    async def read(self, request: Request, kind: type[Body]) -> Body:
        """The body of a request, of this type.

        Raises:
            Refusal: it is not, or too large.
        """
        body = await read_body(request, self.access.body)
        most = _VALUES + (self.info.target.n_ctx if self.queue.loaded else 0)
        path = request.url.path.encode()
        read, request.state.asked = await self.aside(request, _decoded, body, kind, most, path)
        if isinstance(read, Sampling) and read.logit_bias:
            bias, n_vocab, client = read.logit_bias, self.info.target.n_vocab, request.state.client
            words = await self.aside(request, words_of, bias, n_vocab)
            ids = await self.queue.ask("tokens_of", words, client=client) if words else []
            spelled = dict(zip(words, ids, strict=True))
            read.logit_bias = await self.aside(request, numbered, bias, spelled)
        return read

    async def aside(
        self, request: Request, call: Callable[P, T], *args: P.args, **more: P.kwargs
    ) -> T:
        """What a call returns that works on a request: for a large one, on another thread."""
        if request.state.load.bytes <= _LARGE:
            return call(*args, **more)
        return await self._aside.run(request.state.client, call, *args, **more)

    async def job(
        self, request: Request, kind: type[Body], parse: Callable[[Body, GenerateParams], Job]
    ) -> tuple[Body, Job]:
        """A request of this kind, and what it asks for.

        Raises:
            Refusal: it is none, or asks for what there is not.
        """
        body = await self.read(request, kind)
        return body, await self.aside(request, parse, body, self.base)

    def writes(
        self,
        kind: type[Body],
        parse: Callable[[Body, GenerateParams], Job],
        dialect: Callable[[Body, Job], Dialect],
    ) -> Handler:
        """Answers a request of this kind by what the model writes."""

        async def handle(request: Request) -> Response:
            body, job = await self.job(request, kind, parse)
            return await self.answer(request, job, dialect(body, job))

        return handle

    def counts(
        self,
        kind: type[Body],
        parse: Callable[[Body, GenerateParams], Job],
        **more: Any,
    ) -> Handler:
        """Answers it by how many tokens its prompt has; ``more`` goes with that."""

        async def handle(request: Request) -> Response:
            _, job = await self.job(request, kind, parse)
            job = await self.aside(request, self._fitting, job)
            client = request.state.client
            n = await self.queue.ask("count_tokens", job.prompts[0], job.params, client=client)
            return Json({**more, "input_tokens": n})

        return handle

    async def infilled(
        self, job: Job, before: str, after: str, others: Sequence[tuple[str, str]] = ()
    ) -> Job:
        """The same for a prompt whose reply fills a gap.

        Raises:
            Refusal: the model fills in none.
        """
        limit = job.params.max_tokens
        try:
            prompt = await self.queue.ask("infill", before, after, others, limit)
        except UsageError as error:
            raise not_offered("a gap", error.message, "suffix") from None
        return replace(job, prompts=(tuple(prompt),))

    async def answer(self, request: Request, job: Job, dialect: Dialect) -> Response:
        """See ``exchange.answer``; books the request under its client, slice and arm."""
        label = self.metrics.slice(request.headers.get("x-specllama-slice", "")[:64])
        client, asked = request.state.client, request.state.asked
        job = replace(job, client=client, asked=asked, label=label)
        job = await self.aside(request, self._prepared, job)
        return await answer(request, self.queue, job, dialect, scribe(self._aside, client))

    def _prepared(self, job: Job) -> Job:
        arm, params = self._assigned(job)
        return self._fitting(replace(job, params=params, arm=arm))

    def _fitting(self, job: Job) -> Job:
        """What the engine is sent.

        Raises:
            PromptTooLong: a prompt of so many parts is not even sent there.
        """
        job = self.equipped(job)
        n_ctx = self.info.target.n_ctx
        parts = (len(prompt) for prompt in job.prompts if not isinstance(prompt, str))
        most = max(parts, default=0)
        if most > n_ctx:
            raise PromptTooLong(
                f"the prompt of {most} parts exceeds the available context size of {n_ctx}",
                n_prompt=most,
                n_ctx=n_ctx,
            )
        return job

    def equipped(self, job: Job) -> Job:
        """With what the model has to know of the tools that it may call."""
        if job.tools is None:
            return job
        messages = [turn for turn in job.prompts[0] if isinstance(turn, Message)]
        messages, params = equipped(messages, job.params, job.tools, self.queue.tool_syntax)
        return replace(job, prompts=(tuple(messages),), params=params)

    def _assigned(self, job: Job) -> tuple[str, GenerateParams]:
        """The arm of the experiment, by a hash of the conversation's beginning."""
        if not self.experiment:
            return "", job.params
        prompt = job.prompts[0]
        parts = [prompt] if isinstance(prompt, str) else prompt[:2]
        first = [_beginning(part) for part in parts]
        at = int.from_bytes(hashlib.sha256(repr(first).encode()).digest()[:8], "big") % 100
        for arm, share in self.experiment:
            at -= share
            if at < 0:
                return arm, job.params.replace(proposer=arm)
        return "", job.params


def _beginning(part: str | int | Message) -> str | int:
    """Of a prompt or a part of it."""
    if isinstance(part, int):
        return part
    return (
        part[:_BEGINNING] if isinstance(part, str) else f"{part.role} {part.content[:_BEGINNING]}"
    )


def _decoded(body: bytes, kind: type[Body], most: int, path: bytes) -> tuple[Body, str]:
    """A body as what it is, and by what it is known when it comes again.

    Raises:
        Refusal: it is no such body, or has more than ``most`` values.
    """
    if _marks(body) > most and _values(body, most) > most:
        raise Refusal(413, f"a request has at most {most} values", code="too_large")
    try:
        read = msgspec.json.decode(body, type=kind)
        refuse_known(body, kind)
    except msgspec.DecodeError as error:
        raise malformed(str(error)) from None
    except (RecursionError, UnicodeDecodeError):
        raise Refusal(400, "the body cannot be read") from None
    return read, hashlib.sha256(path + b"\0" + body).hexdigest()


def _marks(body: bytes) -> int:
    """What stands before or between values, also in texts."""
    return sum(map(body.count, (b",", b"[", b"{")))


def _values(body: bytes, most: int) -> int:
    """An upper bound on the values in a JSON text; an estimate where it exceeds ``most``."""
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")
    quotes = plain.count(b'"')
    if quotes > 4 * most:  # two texts, a name and its value, for each mark
        return quotes
    return _marks(b"".join(plain.split(b'"')[::2]))


def refuses(what: str, reason: str) -> Handler:
    """Answers that it is not offered."""

    async def handle(request: Request) -> Response:
        raise not_offered(what, reason)

    return handle
