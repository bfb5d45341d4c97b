"""One model that requests may name: its engine, if it is loaded, and its parameters."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Literal

from specllama.engine.bounds import require_parts
from specllama.engine.host import LoadEngine
from specllama.engine.infilling import repeated
from specllama.engine.serving import OnEvent
from specllama.errors import SpecllamaError, UsageError
from specllama.interface import EngineInfo, Message, ModelInfo
from specllama.models.gguf import read_header
from specllama.models.judgement import pair_memory
from specllama.models.refs import resolve
from specllama.models.summaries import Summaries
from specllama.server.dialect import Job
from specllama.server.refusals import loading, not_offered
from specllama.server.request_queue import RequestQueue
from specllama.server.tools import equipped
from specllama.settings.params import EngineOptions, GenerateParams

State = Literal["loaded", "loading", "unloaded"]


@dataclass(eq=False, slots=True)
class ServedModel:
    """One model of a server.

    Attributes:
        queue: of its requests; it accepts them while the engine is loaded.
        params: of requests that set none.
        recipe: how it is loaded; None if only the queue's host knows.
        also: further names by which requests may call it.
        usual_s: seconds that it stays loaded unused, unless a request sets others;
            infinity: until room is needed.
        on_event: receives events of its loads, from another thread.
        keep_s: seconds that it stays loaded unused now.
        uses: requests that are being answered.
        idle_s: when the last of them ended, by ``monotonic``.
        leaving: it is unloaded as soon as it is unused.
        progress: how much of it is loaded, 0 to 1.
        holds: bytes of memory that its engine needs, 0 if unknown; ``maps``: those of them that the
            system reports as available.
        failed: why the last load failed; "" if it did not.
    """

    queue: RequestQueue
    params: GenerateParams = field(default_factory=GenerateParams)
    recipe: LoadEngine | None = None
    also: frozenset[str] = frozenset()
    usual_s: float = math.inf
    on_event: OnEvent | None = None
    keep_s: float = math.inf
    uses: int = 0
    idle_s: float = 0.0
    leaving: bool = False
    progress: float = 0.0
    holds: int = 0
    maps: int = 0
    failed: str = ""
    loading: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    _told: ModelInfo | None = None

    def __post_init__(self) -> None:
        self.unused.set()

    @property
    def name(self) -> str:
        return self.queue.name

    @property
    def state(self) -> State:
        if self.queue.loaded:
            return "loaded"
        return "unloaded" if self.loading is None else "loading"

    @property
    def idle_for_s(self) -> float:
        """The seconds since its last use ended; 0 while it is in use."""
        return 0.0 if self.uses else monotonic() - self.idle_s

    @property
    def left_s(self) -> float:
        """The seconds until it may be unloaded; infinity: until room is needed."""
        return self.keep_s - self.idle_for_s

    @property
    def known(self) -> bool:
        """True if ``target`` holds the model's properties; see ``look``."""
        return self.recipe is None or self._told is not None or self.queue.loaded

    def wake(self, keep_s: float | None) -> None:
        """Cancel the pending unload; ``keep_s`` sets the idle time for the next one."""
        if keep_s is not None:
            self.keep_s = keep_s
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    def is_called(self, name: str) -> bool:
        return name in (self.name, f"{self.name}:latest") or name in self.also

    @property
    def known_info(self) -> EngineInfo | None:
        """The engine's properties, also after it was unloaded; None if it was never loaded."""
        with contextlib.suppress(SpecllamaError):
            return self.queue.host.info
        return None

    @property
    def info(self) -> EngineInfo:
        """The engine's properties, also after it was unloaded.

        Raises:
            Refusal: it was never loaded.
        """
        if (info := self.known_info) is None:
            raise loading()
        return info

    @property
    def target(self) -> ModelInfo:
        """The model's properties for lists, loaded or not."""
        if (info := self.known_info) is not None:
            return info.target
        return self._told or ModelInfo.elsewhere(self.name, 0)

    def look(self) -> None:
        """Read the model's properties from its file, without loading it. Slow the first time."""
        if self.recipe is None:
            return
        self._told = ModelInfo.elsewhere(self.name, 0)  # where it cannot be read
        with contextlib.suppress(SpecllamaError, OSError):
            path, summaries = resolve(self.recipe.target), Summaries()
            found = summaries.get(path)
            summaries.save()
            self._told = replace(
                ModelInfo.elsewhere(found.name, 0),
                path=str(path),
                architecture=found.architecture,
                quantization=found.quantization,
                n_params=found.n_params,
                file_bytes=found.file_bytes,
                n_ctx_train=found.context_length,
                n_vocab=found.vocab_size,
            )

    def weigh(self) -> None:
        """Estimate the memory of the engine that was just loaded."""
        options = EngineOptions() if self.recipe is None else self.recipe.options
        self.holds, self.maps = holdings(self.info, options)

    @property
    def base(self) -> GenerateParams:
        """The parameters of requests that set none, as clients see them: the model's card is
        applied already, so that a request's own values win over it."""
        return self.params.on_card(self.info.target.card).replace(from_card=())

    def fitting(self, job: Job) -> Job:
        """Prepare a job for the engine.

        Raises:
            PromptTooLong: a prompt has too many parts even to be sent.
        """
        job = self.equipped(job)
        for prompt in job.prompts:
            require_parts(prompt, self.info.target.n_ctx)
        return job

    def equipped(self, job: Job) -> Job:
        """Add the description of the tools that the model may call."""
        if job.tools is None:
            return job
        messages = [turn for turn in job.prompts[0] if isinstance(turn, Message)]
        messages, params = equipped(messages, job.params, job.tools, self.queue.tool_syntax)
        return replace(job, prompts=(tuple(messages),), params=params)

    async def infilled(
        self, job: Job, before: str, after: str, others: Sequence[tuple[str, str]] = ()
    ) -> Job:
        """Prepare a job whose reply fills a gap; it ends before it repeats ``after``.

        Raises:
            Refusal: the model cannot fill gaps.
        """
        limit = job.params.max_tokens
        try:
            prompt = await self.queue.ask("infill", before, after, others, limit)
        except UsageError as error:
            raise not_offered("a gap", error.message, "suffix") from None
        again = repeated(after) if job.params.at_suffix else ()
        return replace(job, prompts=(tuple(prompt),), params=job.params.replace(repeats=again))


def holdings(info: EngineInfo, options: EngineOptions) -> tuple[int, int]:
    """Estimate the bytes that a loaded engine needs, and those that stay mapped from its files.

    An estimate from the headers; (0, 0) where they cannot be read.
    """
    try:
        target = read_header(info.target.path)
        draft = None if info.draft is None else read_header(info.draft.path)
        type_k, _, type_v = info.target.kv_types.partition("/")
        loaded = replace(
            options,
            parallel=info.lanes,
            kv_type_k=type_k,
            kv_type_v=type_v,
            flash_attn="on" if info.flash_attn else "off",
        )
        need = pair_memory(target, draft, loaded, info.target.n_ctx)
    except (SpecllamaError, OSError):
        return 0, 0
    mapped = sum(part.weights - part.repacked * info.target.repacked for part in need.parts)
    in_ram = 1 - info.target.gpu_layers / (target.block_count + 1)
    return need.required, int(mapped * in_ram) if options.use_mmap else 0
