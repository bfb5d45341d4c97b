"""Another engine as an ``EngineLike``: its text and its reports, and no invented figures.

It reports texts, not rounds: a reply has no ``RoundDone``, its tokens are counted by the server
alone, and a figure that the server does not give is None.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, suppress
from time import perf_counter, sleep
from typing import Any

from specllama.cancel import Cancel
from specllama.errors import EngineError, UsageError
from specllama.events import (
    Event,
    Finished,
    FinishReason,
    Notice,
    ReasoningDelta,
    Started,
    TextDelta,
    Timings,
)
from specllama.interface import Closes, EngineInfo, Message, ModelInfo, Prompt
from specllama.rates import share, speed
from specllama.remote.address import SILENCE_S, Address, Look, posted
from specllama.remote.answers import Counters, Drafted
from specllama.remote.board import EVERY_S, Gauges, ServerWatch, event_of
from specllama.remote.kinds.kind import Found, Heard, Kind, Question, Served
from specllama.settings.params import GenerateParams

SETTLES_S = (0.0, 0.02, 0.1, 0.3)  # waits for counters that lag behind the reply they count
UNPROVEN = "text not proven"


class ForeignEngine(Closes):
    """Another engine as ours, see ``EngineLike``. Several threads may ask at once.

    Attributes:
        kind: which engine it is. version: its version, "" where it does not report it.
        flags: how it was started, as far as it reports that.
        speculates: whether it drafts, None where that is not known.

    Raises:
        UsageError: the server has several models, and none was named.
    """

    def __init__(self, address: Address, kind: Kind, found: Found) -> None:
        self.address, self.kind = address, kind
        self.version, self.flags = found.version, found.flags
        self.speculates = found.speculates
        self.model = _model(address, kind, found.models)
        self._tells = False  # of the drafting behind each reply
        self._warned: set[str] = set()
        self._http = address.client(SILENCE_S, keep=False)

    def close(self) -> None:
        self._http.close()

    @property
    def name(self) -> str:
        """The engine with its version."""
        return f"{self.kind.title} {self.version}".rstrip()

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            target=ModelInfo.elsewhere(self.model.id or self.address.name, self.model.n_ctx),
            draft=None, exactness=UNPROVEN, exact_rows=0,
            device=f"{self.name} at {self.address.name}", threads=0, flash_attn=False,
            load_ms=0.0, has_chat_template=True,
        )  # fmt: skip

    def counters(self) -> Counters | None:
        """Read the server's counts so far; return None if it reports none."""
        if self.kind.counters is None:
            return None
        with closing(Look(self.address)) as look:
            found = self.kind.counters(look)
        if found is not None and found.drafted is not None:
            self.speculates = True
        return found

    def watch(self) -> tuple[ServerWatch, Iterator[dict[str, Any]]]:
        """Return a view of this server, and its events from now on: these come over connections of
        their own, so that the engine may be closed meanwhile."""
        return Gauges(f"{self.name} at {self.address.name}"), self._looks()

    def _looks(self) -> Iterator[dict[str, Any]]:
        """Yield its counters, every second.

        Raises:
            EngineError: it reports none.
        """
        while (told := self.counters()) is not None:
            yield event_of(self.name, self.model.id, told)
            sleep(EVERY_S)
        raise EngineError(
            f"{self.name} at {self.address.name} tells no figures of its drafting or its queue",
            self.kind.figures_hint or "in chat, what a reply tells stands below it",
        )

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        raise EngineError(f"{self.kind.title} is not asked to count tokens")

    def ask(
        self,
        prompt: str | Sequence[Message],
        params: GenerateParams,
        *,
        stream: bool = False,
        speculation: bool | None = None,
        counted: bool = False,
        cancel: Cancel | None = None,
    ) -> Heard:
        """Ask one plain question, with all sampling fields of ``params`` that no card may decide.

        Args:
            stream: have it streamed, for its times.
            speculation: on or off, where ``kind.switches``; None leaves it to the server.
            counted: where the answer does not report its drafting, compare the counters before
                and after it.

        Raises:
            SpecllamaError: it cannot be asked so, or did not answer to the end.
        """
        asked = self._asked(prompt, params, stream=stream, speculate=speculation)
        before = self._counted() if counted and not self._tells else None
        heard, begin = Heard(), perf_counter()
        for thought, said in self._heard(asked, heard, cancel or Cancel()):
            if stream and heard.first_s is None and (thought or said):
                heard.first_s = perf_counter() - begin
        heard.seconds = perf_counter() - begin
        heard.draft = self._drafted(heard, before)
        if params.chances is None:
            heard.logprobs = []
        return heard

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: Cancel | None = None
    ) -> Iterator[Event]:
        """See ``EngineLike.generate``."""
        speculate = None if params.speculate else False
        asked = self._asked(prompt, params, speculate=speculate if self.kind.switches else None)
        before = None if self._tells else self._counted()
        self.kind.check(asked, self.speculates)
        heard, cancel = Heard(), cancel or Cancel()
        begin = perf_counter()
        first = last = 0.0
        with closing(self._heard(asked, heard, cancel)) as pieces:
            for number, (thought, said) in enumerate(pieces):
                if not number:
                    yield self._started(params)
                    yield from self._notices(params, speculate)
                    continue
                if thought or said:
                    last = perf_counter() - begin
                    first = first or last
                if thought:
                    yield ReasoningDelta(thought)
                if said:
                    yield TextDelta(said)
        reason: FinishReason = "cancelled" if cancel.is_set() else heard.reason
        if reason == "length" and asked.params.max_tokens is None:
            reason = "context"
        draft = None if cancel.is_set() else self._drafted(heard, before)
        yield self._finished(params, heard, reason, first, last, draft)

    # ---- inside

    def _asked(
        self,
        prompt: Prompt,
        params: GenerateParams,
        *,
        stream: bool = True,
        speculate: bool | None = None,
    ) -> Question:
        messages: list[dict[str, str]] | None = None
        words = prompt if isinstance(prompt, str) else ""
        if not isinstance(prompt, str):
            turns = [turn for turn in prompt if isinstance(turn, Message)]
            if len(turns) != len(prompt):
                raise UsageError(f"{self.kind.title} is asked with texts, not with token ids")
            messages = [{"role": turn.role, "content": turn.content} for turn in turns]
            if turns and turns[-1].role == "assistant" and not turns[-1].content:
                raise UsageError(
                    f"{self.kind.title} cannot continue a thought", "ask again: /retry, or Ctrl+R"
                )
        asked = Question(params, self.model.id, messages, words, stream, speculate)
        self.kind.check(asked, self.speculates)
        return asked

    def _heard(self, asked: Question, heard: Heard, cancel: Cancel) -> Generator[tuple[str, str]]:
        """Yield new (thought, text); the first are empty, when the server took the request.

        Raises:
            EngineError: the answer ended before the reply did.
        """
        path = self.kind.raw if asked.messages is None else self.kind.chat
        body = self.kind.body(self.kind, asked)
        pieces = posted(self._http, self.address, self.name, path, body, cancel)
        with closing(pieces):
            for piece in pieces:
                thought, said = self.kind.read(piece, heard)
                heard.reasoning += thought
                heard.text += said
                yield thought, said
        if self.kind.pieces and asked.stream and asked.speculate:
            heard.tokens = None
        self.version = self.version or self.kind.version_of(heard.fingerprint)
        if not heard.finish and not cancel.is_set():
            raise EngineError(
                f"the stream of {self.name} at {self.address.name} ended before its reply did",
                "see its log; what was written is kept",
            )

    def _drafted(self, heard: Heard, before: Counters | None) -> Drafted | None:
        """Return the reply's own report, else the counters' if no other request was served."""
        if heard.draft is not None:
            self._tells = True
            return heard.draft
        if before is None or before.running is None:
            return None
        for wait_s in SETTLES_S:
            sleep(wait_s)
            now = self._counted()
            if now is None or not before.idle:
                return None
            if (found := now.since(before, heard.tokens)) is not None:
                return found
        return None

    def _counted(self) -> Counters | None:
        """Return the counters; return None if they fail, so that no reply fails with them."""
        with suppress(EngineError):
            return self.counters()
        return None

    def _notices(self, params: GenerateParams, speculate: bool | None) -> Iterator[Notice]:
        """Yield a notice, once each, for settings that the server does not get."""
        left = self.kind.unknown(params)
        if speculate is False and not self.kind.switches:
            left.append("no-spec")
        new = [name for name in left if name not in self._warned]
        self._warned.update(new)
        if new:
            flags = ", ".join(f"--{name}" for name in new)
            yield Notice(f"{self.kind.title} cannot be told {flags}: it goes on without", "warning")

    def _started(self, params: GenerateParams) -> Started:
        return Started(
            prompt_n=0, cached_n=0, n_ctx=self.model.n_ctx, seed=params.seed or 0,
            proposer=self.kind.name, verify="", draft_max=0, exactness=UNPROVEN,
            unknown=frozenset({"prompt_n", "cached_n", "draft_max"} | self._unknown(params)),
        )  # fmt: skip

    def _unknown(self, params: GenerateParams) -> set[str]:
        """Return the settings of a request that the server decides."""
        told = {"seed": params.seed, "n_ctx": self.model.n_ctx or None}
        return {name for name, value in told.items() if value is None}

    def _finished(
        self,
        params: GenerateParams,
        heard: Heard,
        reason: FinishReason,
        first_s: float,
        last_s: float,
        draft: Drafted | None,
    ) -> Finished:
        n, decode_s = heard.tokens, last_s - first_s
        draft = draft or Drafted(None, None)
        counts = {
            "draft_n": draft.drafted, "draft_n_accepted": draft.accepted,
            "prompt_n": heard.prompt_n, "cached_n": heard.cached_n, "rounds": None, "cut": None,
        }  # fmt: skip
        unknown = {name for name, count in counts.items() if count is None}
        counted: dict[str, Any] = {name: count or 0 for name, count in counts.items()}
        return Finished(
            reason=reason,
            text=heard.text,
            token_ids=(),
            seed=params.seed or 0,
            **counted,
            n_ctx=self.model.n_ctx,
            proposer=self.kind.name,
            verify="",
            exactness=UNPROVEN,
            acceptance_rate=None if draft.at_most else share(draft.accepted, draft.drafted),
            mean_acceptance_length=draft.per_round,
            accepted_per_position=draft.accepted_at,
            drafted_per_position=draft.drafted_at,
            timings=Timings(
                ttft_ms=first_s * 1e3, decode_ms=decode_s * 1e3, tok_per_s=speed(n, decode_s)
            ),
            reasoning=heard.reasoning,
            stop=heard.stop,
            engine=self.name,
            counted=n,
            draft_at_most=draft.at_most,
            unknown=frozenset(unknown | self._unknown(params)),
        )


def _model(address: Address, kind: Kind, models: Sequence[Served]) -> Served:
    """Choose the model to ask: the named one, the only one, or the only one that is loaded.

    Raises:
        UsageError: there are several.
    """
    if address.model:
        return next((one for one in models if one.id == address.model), Served(address.model))
    loaded = [one for one in models if one.loaded]
    if len(models) > 1 and len(loaded) != 1:
        shown = ", ".join(one.id for one in models[:8])
        more = f" and {len(models) - 8} more" if len(models) > 8 else ""
        raise UsageError(
            f"{kind.title} at {address.name} has several models: {shown}{more}",
            f"name one: --remote {address.url} --remote-model {models[0].id}",
        )
    return (loaded or list(models) or [Served("")])[0]
