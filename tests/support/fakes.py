"""A scripted engine for tests of everything that listens to events (CLI, session, store, TUI).

    from fakes import Reply, ScriptedEngine

    engine = ScriptedEngine(["Hello there.", Reply("Two.", accept=(2, 0), delay_s=0.01)])
    events = list(engine.generate([Message("user", "Hi")], GenerateParams(seed=1)))

``tests/`` has no ``__init__.py``: pytest puts the folder of ``conftest.py`` on the path, so the
import above works from every test, and the installed package is never shadowed by the checkout.
Give test files names that are unique across folders.

The same script always gives the same events: times come from a virtual clock unless ``delay_s`` is
set, which really sleeps. The events obey the laws of the real engine: round 0 is a plain step,
``len(token_ids) == draft_n_accepted + rounds - cut``, positions grow by what was emitted.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from script import (
    N_VOCAB,
    Move,
    OneAtATime,
    ScriptedGuess,
    ScriptedReading,
    count_tokens,
    is_drafting,
    play,
)

from specllama.backend.base import Shared
from specllama.errors import EngineError, PromptTooLong, SpecllamaError
from specllama.events import Event, FinishReason, LoadProgress, Notice, RoundDone
from specllama.interface import EngineInfo, Message, MethodInfo, ModelInfo
from specllama.settings.params import GenerateParams
from specllama.speculative.window import Window

DRAFT_MS, VERIFY_MS, OTHER_MS = 3.0, 12.0, 0.25
SEED = 20261121
EXACT_ROWS = 7


def pieces(text: str) -> list[str]:
    """Cut a text into token-like pieces of up to six characters that join to the text again."""
    return re.findall(r"\s*\w{1,6}|\s*[^\w\s]|\s+", text)


@dataclass(frozen=True, slots=True)
class Reply:
    """What the engine says to one request, and how the rounds go.

    Attributes:
        text: the whole reply; a request with fewer ``max_tokens`` gets its beginning.
        accept: accepted drafts per drafting round, repeated; clamped to what can be drafted.
        delay_s: real seconds per round (0 for tests that want no waiting).
        prefill_delay_s: real seconds per prefill step; there are four.
        tree: draft two branches per round instead of a chain.
        sources: the draft's source per round, repeated.
        reason: why the reply ends when the text is used up.
        raise_first: raised before the first event (the request cannot be served).
        raise_at_round: an EngineError is raised instead of this round.
        notices: given out after Started.
        near_tie_rounds: rounds that carry the near-tie flag.
        plain_ms: what the engine knows of a single pass.
    """

    text: str = "Speculative decoding drafts a few tokens and checks them in one pass."
    accept: Sequence[int] = (3, 1, 4, 0, 2)
    delay_s: float = 0.0
    prefill_delay_s: float = 0.0
    tree: bool = False
    sources: Sequence[str] = ("draft",)
    reason: FinishReason = "stop_token"
    raise_first: SpecllamaError | None = None
    raise_at_round: int | None = None
    notices: Sequence[Notice] = ()
    near_tie_rounds: frozenset[int] = frozenset()
    plain_ms: float | None = VERIFY_MS + OTHER_MS


def model_info(role: str = "target", **changes: object) -> ModelInfo:
    values: dict[str, object] = {
        "path": f"/models/scripted-{role}.gguf",
        "name": f"scripted {role}",
        "architecture": "llama",
        "quantization": "Q4_0" if role == "target" else "Q8_0",
        "n_params": 8_000_000 if role == "target" else 900_000,
        "file_bytes": 5_000_000 if role == "target" else 1_000_000,
        "n_ctx": 2048,
        "n_ctx_train": 2048,
        "n_vocab": N_VOCAB,
        "kv_bytes": 6_291_456,
        "gpu_layers": 0,
    }
    values.update(changes)
    return ModelInfo(**values)  # type: ignore[arg-type]


def engine_info(**changes: object) -> EngineInfo:
    values: dict[str, object] = {
        "target": model_info("target"),
        "draft": model_info("draft"),
        "exactness": "bitwise up to 7 rows",
        "exact_rows": EXACT_ROWS,
        "device": "CPU (scripted)",
        "threads": 2,
        "flash_attn": False,
        "load_ms": 42.0,
        "has_chat_template": True,
        "methods": (
            MethodInfo(
                "draft", "Draft model", "A smaller model guesses.", True, "", "draft model", "d"
            ),
            MethodInfo("ngram", "N-gram lookup", "Repeats what was said.", True, "", "n-gram", "n"),
            MethodInfo("mixed", "Mixed", "N-gram first, then the draft model.", True),
            MethodInfo("none", "Plain", "No speculation.", True),
        ),
    }
    values.update(changes)
    return EngineInfo(**values)  # type: ignore[arg-type]


@dataclass(slots=True)
class Request:
    """One call of ``generate`` as the engine saw it."""

    prompt: str | Sequence[int] | Sequence[Message]
    params: GenerateParams
    rounds_done: int = 0
    closed_early: bool = False


@dataclass(slots=True)
class ScriptedEngine(OneAtATime):
    """Satisfies ``specllama.interface.EngineLike``.

    Replies are used in order; when they run out the last one repeats. ``requests`` keeps what was
    asked. ``generate`` refuses a second request while one is running, as the real engine does.
    """

    replies: Sequence[Reply | str] = (Reply(),)
    info: EngineInfo = field(default_factory=engine_info)
    requests: list[Request] = field(default_factory=list)
    closed: bool = False
    _busy: bool = False

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True

    def count_tokens(
        self, prompt: str | Sequence[Message], params: GenerateParams | None = None
    ) -> int:
        return count_tokens(prompt, pieces)

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: GenerateParams,
        *,
        cancel: threading.Event | None = None,
    ) -> Iterator[Event]:
        scripted = self.replies[min(len(self.requests), len(self.replies) - 1)]
        reply = Reply(scripted) if isinstance(scripted, str) else scripted
        params = params.on_card(self.info.target.card)
        request = Request(prompt, params)
        self.requests.append(request)
        if self.closed:
            raise EngineError("the engine is closed")
        if self._busy:
            raise EngineError("the engine is busy with another request")
        if reply.raise_first is not None:
            raise reply.raise_first
        prompt_n = count_tokens(prompt, pieces)
        if prompt_n >= self.info.target.n_ctx:
            raise PromptTooLong(
                f"the prompt has {prompt_n} tokens, the context {self.info.target.n_ctx}",
                "use a larger --ctx-size or a shorter prompt",
            )
        self._busy = True
        try:
            for event in play(
                reply.text,
                lambda index, todo: _move(reply, params, index, todo),
                info=self.info,
                params=params,
                cut=pieces,
                prompt_n=prompt_n,
                seed=SEED if params.seed is None else params.seed,
                reading=ScriptedReading(
                    0.5, 0.4, before_step=lambda ms: _sleep(reply.prefill_delay_s)
                ),
                reason=reply.reason,
                notices=reply.notices,
                cancel=cancel,
            ):
                request.rounds_done += isinstance(event, RoundDone)
                yield event
        except GeneratorExit:
            request.closed_early = True
            raise
        finally:
            self._busy = False


def _sleep(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


def _move(reply: Reply, params: GenerateParams, index: int, todo: Sequence[str]) -> Move:
    """Round 0 is plain; of the others, the script says how many drafts are right."""
    most = params.draft_limit(EXACT_ROWS)
    if reply.raise_at_round == index:
        raise EngineError("the scripted engine failed", "start it again")
    _sleep(reply.delay_s)
    near_tie = index in reply.near_tie_rounds
    if index == 0 or not is_drafting(params):
        return Move(draft_max=most, verify_ms=VERIFY_MS, other_ms=OTHER_MS, near_tie=near_tie)
    room = min(most, len(todo))
    accepted = min(reply.accept[(index - 1) % len(reply.accept)], room)
    guesses: list[ScriptedGuess] = []
    at = -1
    for depth in range(room):
        right = depth < accepted
        guesses.append(
            ScriptedGuess(todo[depth] if right else " wrong", at, right, 0.9 if right else 0.4)
        )
        if reply.tree:
            guesses.append(ScriptedGuess(" other", at, False, 0.4))
        at = len(guesses) - 1 - reply.tree
    return Move(
        guesses,
        source=reply.sources[(index - 1) % len(reply.sources)],
        draft_max=most,
        reason="fixed",
        draft_ms=DRAFT_MS,
        verify_ms=VERIFY_MS,
        other_ms=OTHER_MS,
        near_tie=near_tie,
        plain_ms=reply.plain_ms,
    )


@dataclass(frozen=True)
class ScriptedRecipe:
    """A recipe for EngineHost that crosses into the child: the engine answers from ``replies``."""

    replies: tuple[Reply | str, ...] = ("Hello there.",)
    name: str = "scripted target"

    def __call__(self, progress: Callable[[Event], None], /) -> ScriptedEngine:
        progress(LoadProgress("target", "scripted.gguf", 1.0))
        return ScriptedEngine(
            list(self.replies), engine_info(target=model_info("target", name=self.name))
        )


@dataclass(frozen=True)
class AbortingRecipe:
    """Ends its process as a failed ``GGML_ASSERT`` does: words on standard error, then SIGABRT.

    With ``fuse`` it does so only while that file exists, and is ``after`` when it is gone.
    """

    words: str = "ggml.c:123: GGML_ASSERT(n > 0) failed"
    fuse: Path | None = None
    after: ScriptedRecipe = ScriptedRecipe()

    def __call__(self, progress: Callable[[Event], None], /) -> ScriptedEngine:
        progress(LoadProgress("target", "aborting.gguf", 0.4))
        if self.fuse is not None and not self.fuse.exists():
            return self.after(progress)
        sys.stderr.write(f"llama_model_load: reading\n{self.words}\n")
        sys.stderr.flush()
        os.abort()


def learn(
    window: Window,
    drafted: int,
    accepted: int,
    tokens: tuple[int, ...],
    draft_ms: float,
    round_ms: float,
    shared: Shared | None = None,
) -> None:
    """Show a window a round."""
    done = replace(round_done(drafted, accepted), emitted=tokens, draft_ms=draft_ms)
    window.observe(done, round_ms - draft_ms, shared)


def round_done(
    drafted: int = 0, accepted: int = 0, *, cut: int = 0, parents: tuple[int, ...] | None = None
) -> RoundDone:
    parents = tuple(range(-1, drafted - 1)) if parents is None else parents
    n = len(parents)
    return RoundDone(
        index=0,
        t_s=0.0,
        n_past=1,
        source="draft",
        draft_max=4,
        window_reason="fixed",
        drafted=tuple(range(n)),
        parents=parents,
        drafted_text=("x",) * n,
        confidence=(None,) * n,
        p=(None,) * n,
        q=(None,) * n,
        accepted=accepted,
        accepted_path=tuple(range(accepted)),
        target_token=9,
        target_text="y",
        target_kind="bonus",
        emitted=(1,) * (accepted + 1 - cut),
        emitted_text=("x",) * (accepted + 1 - cut),
        cut=cut,
        draft_ms=1.0,
        verify_ms=2.0,
        other_ms=0.5,
        near_tie=accepted == 2,
        sources=("draft",) * n,
    )
