"""The interface of an engine for front ends, wherever it runs.

``Engine`` (in process) and ``EngineHost`` (child process) both satisfy ``EngineLike``; the session,
the terminal app and the tests depend on this protocol alone. Light to import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from specllama.cancel import Cancel
from specllama.events import Event, Report
from specllama.figures import Histogram
from specllama.settings.params import GenerateParams


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; role is "system", "user" or "assistant".

    Attributes:
        reasoning: the thought that came before a reply.
        seams: what the model wrote before and behind the thought, see ``thoughts``; None where
            it is unknown.
    """

    role: str
    content: str
    reasoning: str = ""
    seams: tuple[str, str] | None = None

    def to_dict(self) -> dict[str, str]:
        out = {"role": self.role, "content": self.content}
        return {**out, "reasoning": self.reasoning} if self.reasoning else out


class Closes:
    """A resource that is closed at the end of a ``with`` block."""

    def close(self) -> None:
        """Free it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# a raw text, token ids with texts between them, or a conversation
Prompt = str | Sequence[int | str] | Sequence[Message]


def layout_words(repacked: bool, kernels: str = "") -> str:
    if kernels:
        return f"packed for specllama's kernels ({kernels})"
    return "repacked where llama.cpp can" if repacked else "as stored"


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """One loaded file, for display and for the log.

    Attributes:
        card: the sampling fields that the file recommends (see ``card``).
        draft_tokens: the tokens that it guesses, where these are not all (see ``trimmed``).
    """

    path: str
    name: str
    architecture: str
    quantization: str
    n_params: int
    file_bytes: int
    n_ctx: int
    n_ctx_train: int
    n_vocab: int
    kv_bytes: int
    gpu_layers: int
    sha256: str | None = None
    kv_types: str = "auto/auto"  # of K and V
    repacked: bool = True  # llama.cpp may rearrange the weights for this processor
    kernels: str = ""  # that compute its products on the CPU, by instruction set; "": llama.cpp's
    card: Mapping[str, float] = field(default_factory=dict)
    draft_tokens: int | None = None

    @classmethod
    def elsewhere(cls, name: str, n_ctx: int) -> ModelInfo:
        """Describe a model of another engine: its file is unknown; ``n_ctx`` is 0 if unknown."""
        return cls("", name, "", "", 0, 0, n_ctx, 0, 0, 0, 0, kv_types="")

    @property
    def label(self) -> str:
        """The name, which mostly includes the quantization."""
        told = self.quantization.lower() in self.name.lower()
        name = self.name if told else f"{self.name} {self.quantization}"
        return f"{name}, {self.draft_tokens:,} words" if self.draft_tokens else name

    @property
    def layout(self) -> str:
        """The layout of the weights in memory, in words."""
        return layout_words(self.repacked, self.kernels)

    def to_dict(self) -> dict[str, Any]:
        told = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return told if self.path else {name: value or None for name, value in told.items()}


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """One drafting method: if the loaded target can use it, and if not, why.

    ``short`` names it in a sentence and ``letter`` marks the tokens that it guessed.
    """

    name: str
    label: str
    description: str
    available: bool
    reason: str = ""
    short: str = ""
    letter: str = ""


# how calls look in a chat template that is given tools: "" where it has no place for them, "json"
# as Hermes and Qwen 3 write them, or a name in ``replies.tool_calls.SYNTAXES``
ToolSyntax = str


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The loaded pair.

    Attributes:
        exactness: for people, such as "bitwise up to 65 rows"; measured: what that rests on.
        exact_rows: widest pass whose rows equal single steps bit for bit; 0 if not measured yet.
        exact_trees: whether the rows of branches do, too.
        widths: rows of the passes that return any, where they are kept to some; see ``--exact``.
        here: names the build and the machine, on which costs depend.
        lanes: conversations that it writes at once.
        reads_ahead: whether it reads a message that is still being typed.
        idle_bytes: the most that texts of idle conversations may take beside its contexts.
    """

    target: ModelInfo
    draft: ModelInfo | None
    exactness: str
    exact_rows: int
    device: str
    threads: int
    flash_attn: bool
    load_ms: float
    has_chat_template: bool
    exact_trees: bool = False
    widths: tuple[int, ...] = ()
    measured: str = ""
    methods: tuple[MethodInfo, ...] = ()
    lanes: int = 1
    reads_ahead: bool = False
    idle_bytes: int = 0
    here: str = ""

    @property
    def n_bytes(self) -> int:
        """The bytes that the pair's files and contexts take."""
        pair = (self.target, self.draft)
        return sum(one.file_bytes + one.kv_bytes for one in pair if one is not None)

    def is_exact(self, rows: int, *, line: bool) -> bool:
        """True if each row of a pass equals a single step; ``line``: the pass has no branches."""
        return rows <= self.exact_rows and (line or self.exact_trees)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Counts of an engine since it was loaded.

    Attributes:
        live, dead, free: cells of the target's cache: held, ghosts, the others.
        compactions: of the cache.
        preemptions: conversations that had to wait for cells.
        parked_bytes: memory of idle texts outside the cache.
        pass_rows, pass_seconds: of the target's passes.
    """

    live: int
    dead: int
    free: int
    compactions: int
    preemptions: int
    parked_bytes: int
    pass_rows: Histogram
    pass_seconds: Histogram


class EngineLike(Protocol):
    """An engine serves one request at a time; ``generate`` is a synchronous generator.

    Closing the generator early rolls both caches back and leaves the engine ready.
    """

    @property
    def info(self) -> EngineInfo: ...

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: Cancel | None = None
    ) -> Iterator[Event]:
        """Generate from a raw text, from token ids, or from a conversation.

        A conversation whose last message is from the assistant is continued in place. The events
        are Started, PrefillProgress*, (TextDelta | ReasoningDelta | RoundDone | Notice)*,
        Finished. Setting ``cancel`` ends it with reason "cancelled", on a CPU in the middle of a
        pass, elsewhere before the next one; what was written is kept.

        Raises:
            SpecllamaError: before the first event when the request cannot be served.
        """

    def count_tokens(self, prompt: str | Sequence[Message]) -> int: ...

    def close(self) -> None: ...


class Stepped(EngineLike, Protocol):
    """An engine that its host process drives: several requests advance step by step."""

    @property
    def free(self) -> bool:
        """True if it has fewer requests than lanes; a further one may still wait for cells."""

    def prepare(
        self, prompt: Prompt, params: GenerateParams, *, cancel: Cancel | None = None
    ) -> Any:
        """Prepare a request without a pass; ``begin`` takes the result. Any thread may call
        this."""

    def begin(self, ready: Any, *, cancel: Cancel | None = None) -> int:
        """Begin a request that is prepared; its events come from ``step`` under this id."""

    def tool_syntax(self) -> ToolSyntax: ...

    def thinks(self) -> bool:
        """True if the chat template knows thoughts."""

    @property
    def patience_s(self) -> float:
        """The time that a pass may take before the watchdog gives the engine up."""

    def watched(self, beat: Callable[[], object]) -> None:
        """Call ``beat`` before every pass from now on."""

    def keep(self) -> None:
        """Write the states of ended requests to disk, if they want that; nothing runs now."""

    @property
    def unmeasured(self) -> bool:
        """True if something of the files that its requests rest on was not measured here yet."""

    def measure(
        self, report: Report = None, *, cancel: Cancel | None = None, times: bool = True
    ) -> bool:
        """Measure that, and keep it; False if ``cancel`` ended it. Without ``times``, only which
        passes compute alike: others may run while ``report`` is called."""

    def step(self) -> list[tuple[int, Event | Exception]]:
        """Run until a request has events; an exception ended its request. [] when none is left."""
