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

import re
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specllama.errors import EngineError, PromptTooLong, SpecllamaError
from specllama.events import (
    Event,
    Finished,
    FinishReason,
    Notice,
    PrefillProgress,
    RoundDone,
    Started,
    TargetKind,
    TextDelta,
    Timings,
)
from specllama.interface import EngineInfo, Message, MethodInfo, ModelInfo
from specllama.params import GenerateParams
from specllama.stats import SpecStats

N_VOCAB = 4096
STOP_TOKEN = 2
DRAFT_MS, VERIFY_MS, OTHER_MS = 3.0, 12.0, 0.25


def pieces(text: str) -> list[str]:
    """Cut a text into token-like pieces of up to six characters that join to the text again."""
    return re.findall(r"\s*\w{1,6}|\s*[^\w\s]|\s+", text)


def token_id(piece: str) -> int:
    """A stable id above the special ones."""
    return 3 + zlib.crc32(piece.encode("utf-8", "replace")) % (N_VOCAB - 3)


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
        "exact_rows": 7,
        "device": "CPU (scripted)",
        "threads": 2,
        "flash_attn": False,
        "load_ms": 42.0,
        "has_chat_template": True,
        "methods": (
            MethodInfo("draft", "Draft model", "A smaller model guesses.", True),
            MethodInfo("ngram", "N-gram lookup", "Repeats what the context said before.", True),
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
class ScriptedEngine:
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

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        if isinstance(prompt, str):
            return len(pieces(prompt))
        return sum(len(pieces(m.content)) + 4 for m in prompt) + 1

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: GenerateParams,
        *,
        cancel: threading.Event | None = None,
    ) -> Iterator[Event]:
        scripted = self.replies[min(len(self.requests), len(self.replies) - 1)]
        reply = Reply(scripted) if isinstance(scripted, str) else scripted
        request = Request(prompt, params)
        self.requests.append(request)
        if self.closed:
            raise EngineError("the engine is closed")
        if self._busy:
            raise EngineError("the engine is busy with another request")
        if reply.raise_first is not None:
            raise reply.raise_first
        prompt_n = self._prompt_n(prompt)
        if prompt_n >= self.info.target.n_ctx:
            raise PromptTooLong(
                f"the prompt has {prompt_n} tokens, the context {self.info.target.n_ctx}",
                "use a larger --ctx-size or a shorter prompt",
            )
        self._busy = True
        try:
            yield from self._run(reply, request, prompt_n, cancel or threading.Event())
        except GeneratorExit:
            request.closed_early = True
            raise
        finally:
            self._busy = False

    def _prompt_n(self, prompt: str | Sequence[int] | Sequence[Message]) -> int:
        if isinstance(prompt, str):
            return self.count_tokens(prompt)
        messages = [m for m in prompt if isinstance(m, Message)]
        return self.count_tokens(messages) if messages else len(prompt)

    def _run(
        self, reply: Reply, request: Request, prompt_n: int, cancel: threading.Event
    ) -> Iterator[Event]:
        params = request.params
        seed = params.seed if params.seed is not None else 20261121
        drafting = params.speculate and params.draft_max > 0 and params.proposer != "none"
        proposer = "none" if not drafting else params.proposer.replace("auto", "mixed")
        n_ctx = self.info.target.n_ctx
        yield Started(
            prompt_n=prompt_n,
            cached_n=0,
            n_ctx=n_ctx,
            seed=seed,
            proposer=proposer,
            verify=params.verify,
            draft_max=params.draft_max if drafting else 0,
            exactness=self.info.exactness,
        )
        yield from reply.notices
        for step in range(1, 5):
            if reply.prefill_delay_s:
                time.sleep(reply.prefill_delay_s)
            yield PrefillProgress(done=prompt_n * step // 4, total=prompt_n, cached=0)

        text, reason = reply.text, reply.reason
        for stop in params.stop:
            if (at := text.find(stop)) >= 0:
                text, reason = text[:at], "stop_string"
        todo = [*pieces(text)]
        if reason == "stop_token":
            todo.append("")  # the stop token itself: emitted, never shown
        limit = n_ctx - prompt_n
        if params.max_tokens is not None and params.max_tokens < min(len(todo), limit):
            todo, reason = todo[: params.max_tokens], "length"
        elif limit < len(todo):
            todo, reason = todo[:limit], "context"

        stats = SpecStats()
        ids: list[int] = []
        shown = ""
        clock_s = 0.0
        while todo and not cancel.is_set():
            if reply.raise_at_round == stats.rounds:
                raise EngineError("the scripted engine failed", "start it again")
            if reply.delay_s:
                time.sleep(reply.delay_s)
            clock_s += (DRAFT_MS * drafting + VERIFY_MS + OTHER_MS) / 1000
            done = self._round(reply, params, stats.rounds, prompt_n + len(ids) - 1, todo, clock_s)
            stats.observe(done)
            request.rounds_done = stats.rounds
            ids.extend(done.emitted)
            todo = todo[len(done.emitted) :]
            yield done
            if new := "".join(done.emitted_text):
                shown += new
                yield TextDelta(new)
        if todo:
            reason = "cancelled"
        decode_ms = stats.draft_ms + stats.verify_ms + stats.other_ms
        yield Finished(
            reason=reason,
            text=shown,
            token_ids=tuple(ids),
            seed=seed,
            rounds=stats.rounds,
            draft_n=stats.drafted,
            draft_n_accepted=stats.accepted,
            cut=stats.cut,
            prompt_n=prompt_n,
            cached_n=0,
            n_ctx=n_ctx,
            proposer=proposer,
            verify=params.verify,
            exactness=self.info.exactness,
            acceptance_rate=stats.acceptance_rate,
            mean_acceptance_length=stats.mean_acceptance_length,
            accepted_per_position=tuple(stats.accepted_at),
            drafted_per_position=tuple(stats.drafted_at),
            near_ties=stats.near_ties,
            timings=Timings(
                load_ms=self.info.load_ms,
                tokenize_ms=0.5,
                prefill_ms=prompt_n * 0.4,
                first_decode_ms=VERIFY_MS,
                ttft_ms=0.5 + prompt_n * 0.4 + VERIFY_MS,
                decode_ms=decode_ms,
                draft_ms=stats.draft_ms,
                verify_ms=stats.verify_ms,
                other_ms=stats.other_ms,
                tok_per_s=1000 * len(ids) / decode_ms if decode_ms else None,
            ),
        )

    def _round(
        self,
        reply: Reply,
        params: GenerateParams,
        index: int,
        n_past: int,
        todo: Sequence[str],
        t_s: float,
    ) -> RoundDone:
        """One round over the pieces still to say; round 0 is plain."""
        room = min(params.draft_max, len(todo))
        plain = index == 0 or not params.speculate or params.proposer == "none" or room == 0
        accepted = 0 if plain else min(reply.accept[(index - 1) % len(reply.accept)], room)
        ids = [token_id(p) if p else STOP_TOKEN for p in todo]
        drafted: list[int] = []
        parents: list[int] = []
        texts: list[str] = []
        path: list[int] = []
        if not plain:
            for depth in range(room):
                right = depth < accepted
                parents.append(path[-1] if depth <= accepted and path else len(parents) - 1)
                drafted.append(ids[depth] if right else 3 + (ids[depth] + 1) % (N_VOCAB - 3))
                texts.append(todo[depth] if right else " wrong")
                if right:
                    path.append(len(drafted) - 1)
                if reply.tree:
                    parents.append(parents[-1])
                    drafted.append(3 + (ids[depth] + 2) % (N_VOCAB - 3))
                    texts.append(" other")
        cut = int(not plain and accepted == len(todo))
        n = accepted + 1 - cut
        kind: TargetKind = "plain" if plain else "bonus" if accepted == room else "recovered"
        source = "none" if plain else reply.sources[(index - 1) % len(reply.sources)]
        # After a cut the target's token is judged but unused: any id will do.
        target_id, target_text = (STOP_TOKEN, "") if cut else (ids[accepted], todo[accepted])
        unknown = (None,) * len(drafted)
        return RoundDone(
            index=index,
            t_s=t_s,
            n_past=n_past,
            source=source,
            draft_max=params.draft_max,
            window_reason="plain step" if plain else "fixed",
            drafted=tuple(drafted),
            parents=tuple(parents),
            drafted_text=tuple(texts),
            confidence=tuple(0.9 if i in path else 0.4 for i in range(len(drafted))),
            p=unknown,
            q=unknown,
            accepted=accepted,
            accepted_path=tuple(path),
            target_token=target_id,
            target_text=target_text,
            target_kind=kind,
            emitted=tuple(ids[:n]),
            emitted_text=tuple(todo[:n]),
            cut=cut,
            draft_ms=0.0 if plain else DRAFT_MS,
            verify_ms=VERIFY_MS,
            other_ms=OTHER_MS,
            near_tie=index in reply.near_tie_rounds,
            sources=(source,) * len(drafted),
        )
