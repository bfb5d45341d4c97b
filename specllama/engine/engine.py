"""The engine: a target, its slots and their drafters; ``generate`` yields events.

``submit`` begins a conversation, ``step`` goes on with all that are running, ``cancel`` ends one;
``generate`` is these for one. Everything a request decides is visible in its events; nothing is
printed.

An engine is for one thread at a time: a call during that of another is refused. ``cancel``,
``abort`` and ``close`` may come from any.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from specllama.backend.base import Lane, Vocab
from specllama.cancel import Cancel
from specllama.engine.bounds import require_room, require_size, require_text
from specllama.engine.conversation import Clock, Conversation, Ready
from specllama.engine.infilling import infilled
from specllama.engine.opening import OpeningPair
from specllama.engine.pair_loading import Loaded
from specllama.engine.profiles import Windows
from specllama.engine.pulse import patience
from specllama.engine.scheduler import Running, Scheduler
from specllama.engine.seating import Seats
from specllama.errors import EngineError, UsageError
from specllama.events import Event, Report
from specllama.interface import Closes, EngineFigures, EngineInfo, Message, Prompt, ToolSyntax
from specllama.settings.params import SEED_DRAWN, EngineOptions, GenerateParams
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.sampling import SamplerChain

_TWO_THREADS = (
    "the engine is at work for another thread",
    "one thread at a time uses an Engine: wait for its reply, or let one thread submit and step",
)


class _Ahead(NamedTuple):
    """A request that is only read."""

    id: int
    ids: list[int]
    cancel: Cancel
    begun: float


class Engine(Closes):
    """The engine: it generates text from one loaded target and drafts with the available methods.

    Not for two threads at once: the second one's call raises EngineError. Threads that want replies
    side by side ask a server, or let one thread ``submit`` and ``step`` for all.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._slots = loaded.slots
        self._seats = Seats(loaded)
        self._scheduler = Scheduler(self.target.pool, self._seats)
        self._ids = itertools.count()
        self.closed = self._drafts = False
        self._using = threading.RLock()
        self._generating: int | None = None  # the thread of a ``generate`` that goes on
        self._ahead: _Ahead | None = None  # what is read ahead now, or was last

    @classmethod
    def load(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        options: EngineOptions | None = None,
        *,
        on_progress: Callable[[Event], None] | None = None,
        cancel: Cancel | None = None,
    ) -> Engine:
        """Load a pair from references: a path, ``user/repo[:quant]``, or a catalogue name.

        With no draft given, the draft that the reference brings (the bundled family) is used.

        Raises:
            ModelUnavailable, BadGguf, UnsupportedModel, PairIncompatible, DoesNotFit, CannotLoad.
            ConfigError: the settings, which name more folders of models, cannot be read.
            Cancelled: ``cancel`` was set.
        """
        with OpeningPair(target, draft, options, on_progress=on_progress, cancel=cancel) as opening:
            return cls.of(opening)

    @classmethod
    def of(cls, opening: OpeningPair) -> Engine:
        """Load as ``load`` does, for callers that opened the files before this import."""
        from specllama.engine.pair_loading import load

        return cls(load(opening))

    @property
    def info(self) -> EngineInfo:
        return self._loaded.info

    @property
    def vocab(self) -> Vocab:
        return self._loaded.prompting.vocab

    @property
    def target(self) -> Lane:
        """The lane of the first slot."""
        return self._slots[0].target

    @property
    def free(self) -> bool:
        """True if it has fewer requests than lanes; reading ahead gives way to any."""
        reading = self._ahead is not None and self._ahead.id in self._scheduler
        return len(self._scheduler) - reading < len(self._slots)

    @property
    def drafters(self) -> Mapping[str, Drafter]:
        """The drafters of the first slot, by method."""
        return self._slots[0].drafters

    @property
    def windows(self) -> Windows:
        """The maker of a request's draft window."""
        return self._loaded.windows

    @property
    def patience_s(self) -> float:
        pace, n_bytes = self._seats.pace, self.info.target.file_bytes
        return patience(pace.longest_s, pace.step_s, self.target.n_batch, n_bytes)

    def watched(self, beat: Callable[[], object]) -> None:
        """See ``Stepped``."""
        self._loaded.stop.on_pass = beat

    @property
    def inexact(self) -> bool:
        """True if a row of the first slot can differ from that of plain decoding by rounding."""
        return self._slots[0].inexact

    def close(self) -> None:
        """Free the models, from any thread: running conversations end first, as in ``abort``."""
        self.abort()
        with self._using:
            if not self.closed:
                self.closed = True
                self._seats.close()
                self._loaded.close()

    def abort(self) -> None:
        """Stop any running pass, from any thread; all requests end as cancelled."""
        self._loaded.stop.set()
        self._scheduler.cancel(range(next(self._ids)))

    @property
    def unmeasured(self) -> bool:
        """True if a drafting or shared pass may come, and none were compared here yet; or if there
        is something to make for the next time."""
        loaded = self._loaded
        unknown = not self.info.exact_rows
        makes = loaded.maker is not None and loaded.maker.wanted
        return (unknown and self.info.lanes > 1) or ((unknown or makes) and self._drafts)

    def measure(
        self, report: Report = None, *, cancel: Cancel | None = None, times: bool = True
    ) -> bool:
        """Compare passes of several rows with single steps, and with ``times`` make what the next
        opening may use; see ``Stepped``."""
        loaded, cancel = self._loaded, cancel or Cancel()
        with self._alone():
            known = bool(self.info.exact_rows) or loaded.measure(report, cancel)
            return known and (not times or loaded.at_rest(report, cancel))

    def keep(self) -> None:
        """Hand idle conversations to the thread that writes them to disk; return at once."""
        with self._alone():
            self._seats.keep()

    def reset(self) -> None:
        """Forget every text, so that the next request reads its prompt afresh."""
        with self._alone():
            self._seats.reset()

    # -- prompts --

    def encode(self, prompt: Prompt) -> tuple[list[int], str]:
        """See ``Prompting.encode``."""
        return self._loaded.prompting.encode(prompt)

    def count_tokens(self, prompt: Prompt, params: GenerateParams | None = None) -> int:
        n_ctx = self.target.n_ctx
        require_size(prompt, n_ctx, self.vocab)
        prompting = self._loaded.prompting
        return len(prompting.prepare(prompt, params or GenerateParams(), n_ctx=n_ctx).ids)

    # -- what a server is asked, from any thread --

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        require_text(len(text.encode("utf-8", "replace")), self.target.n_ctx, self.vocab)
        return self.vocab.tokenize(text, add_special=add_special, parse_special=parse_special)

    def tokens_of(self, words: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each word by itself."""
        size = sum(len(word.encode("utf-8", "replace")) for word in words)
        require_text(size, self.target.n_ctx, self.vocab)
        return [self.vocab.tokenize(w, add_special=False, parse_special=True) for w in words]

    def pieces(self, tokens: Sequence[int]) -> list[bytes]:
        """Return the bytes of every token; those of control tokens are their names.

        Raises:
            UsageError: one is outside the vocabulary.
        """
        require_text(len(tokens), self.target.n_ctx, self.vocab)
        bad = next((t for t in tokens if not 0 <= t < self.vocab.n_tokens), None)
        if bad is not None:
            raise UsageError(f"token {bad} is outside the vocabulary")
        return [self.vocab.piece(token, special=True) for token in tokens]

    def infill(
        self, before: str, after: str, others: Sequence[tuple[str, str]], limit: int | None
    ) -> list[int]:
        """See ``infilled``; ``limit``: tokens that the reply needs, half of the context if None.
        Short replies have as much room as none: an editor has what it shows later read ahead."""
        n_ctx = self.target.n_ctx
        room = n_ctx - max(min(limit or n_ctx, n_ctx // 2), n_ctx // 8)
        return infilled(self.vocab, before, after, others, room=room, near=room // 2)

    def render(self, messages: Sequence[Message], params: GenerateParams) -> str:
        """Render a conversation as the text of a prompt."""
        require_size(messages, self.target.n_ctx, self.vocab)
        return self._loaded.prompting.render(messages, params)[0].text

    def tool_syntax(self) -> ToolSyntax:
        return self._loaded.prompting.tool_syntax()

    def thinks(self) -> bool:
        return self._loaded.prompting.thinks()

    def template(self) -> tuple[str, str, str]:
        """Return the chat template ("" if none) and the texts of its begin and end tokens."""
        prompting = self._loaded.prompting
        return prompting.template or "", prompting.bos, prompting.eos

    def figures(self) -> EngineFigures:
        pool, pace = self.target.pool, self._seats.pace
        return EngineFigures(
            live=pool.held, dead=pool.ghosts, free=pool.room - pool.ghosts,
            compactions=pool.compactions, preemptions=self._scheduler.preemptions,
            parked_bytes=self._seats.n_bytes, pass_rows=pace.rows, pass_seconds=pace.seconds,
        )  # fmt: skip

    def chain(
        self, params: GenerateParams, seed: int, tokens: Sequence[int], position: int
    ) -> SamplerChain:
        """See ``SamplerChains.chain``."""
        return self._loaded.chains.chain(self._carded(params), seed, tokens, position)

    def _carded(self, params: GenerateParams) -> GenerateParams:
        """Fill in the values of the model's card, where a request leaves them to it."""
        return params.on_card(self.info.target.card)

    # -- generation --

    def submit(
        self, prompt: Prompt, params: GenerateParams | None = None, *, cancel: Cancel | None = None
    ) -> int:
        """Begin a conversation in a free slot; its events come from ``step`` under this id.

        Raises:
            EngineError: the engine is closed, or every slot is taken.
            UsageError: the prompt is empty, or cannot be read; or nothing drafts as was asked for.
            PairIncompatible: the files lack what that needs.
            PromptTooLong: it exceeds the context. No lane was touched.
        """
        with self._alone():
            self._require_free()
            return self.begin(self.prepare(prompt, params), cancel=cancel)

    def prepare(
        self, prompt: Prompt, params: GenerateParams | None = None, *, cancel: Cancel | None = None
    ) -> Ready:
        """Prepare a request as far as that needs no pass; ``begin`` takes it. Any thread may call
        this, also while another one uses the engine.

        Raises:
            UsageError: the prompt is empty, or cannot be read; a token of logit_bias is none.
            PromptTooLong: it exceeds the context.
            Cancelled: ``cancel`` was set.
        """
        loaded, clock, cancel = self._loaded, Clock(), cancel or Cancel()
        params = self._carded(params or GenerateParams())
        n_ctx = self.target.n_ctx
        require_size(prompt, n_ctx, loaded.prompting.vocab)
        cancel.check()
        prompting = loaded.prompting
        prepared = prompting.prepare(prompt, params, n_ctx=n_ctx, cancel=cancel)
        require_room(len(prepared.ids), n_ctx)
        cancel.check()
        stable = prompting.stable(prompt, params, prepared.ids) if params.ahead else None
        if (ahead := self._ahead) is not None:
            n, read = len(prepared.ids), len(ahead.ids)
            another = prepared.ids[:read] != ahead.ids
            seconds = perf_counter() - ahead.begun
            if another or (stable is None and self._seats.in_vain(read, seconds, n)):
                ahead.cancel.set()
        n = self.vocab.n_tokens
        if any(not 0 <= (bad := id) < n for id in params.sampling.logit_bias):
            raise UsageError(f"logit_bias: token {bad} is outside the vocabulary of {n}")
        seed = params.seed if params.seed is not None else secrets.randbelow(SEED_DRAWN)
        ids, position, limit = prepared.ids, prepared.position, prepared.limit
        chain = loaded.chains.chain(params, seed, ids, position, limit, prepared.reader)
        clock.tokenized = perf_counter()
        return Ready(params, seed, prepared, chain, clock, stable)

    def begin(self, ready: Ready, *, cancel: Cancel | None = None) -> int:
        """Begin a prepared request as ``submit`` does.

        One whose message is still being typed (``GenerateParams.ahead``) is only read, as far as it
        stands, until another begins: that goes on from there, with the same text as ever.

        Raises:
            EngineError: the engine is closed, or every slot is taken.
            UsageError, PairIncompatible: nothing drafts as was asked for.
        """
        cancel = cancel or Cancel()
        with self._alone():
            self._require_free()
            ids, id, stable = ready.prepared.ids, next(self._ids), ready.stable
            if self._ahead is not None:
                self._scheduler.end(self._ahead.id)
                self._ahead = None

            def seated() -> Running:
                if stable is None:
                    seat = self._seats.seat(id, ids, ready.params, cancel)
                else:
                    seat = self._seats.seat_ahead(id, ids, stable, ready.params, cancel)
                    self._ahead = _Ahead(id, ids[: seat.until], cancel, perf_counter())
                self._drafts = self._drafts or seat.drafter.name != "none"
                one = Conversation(self._loaded, self._seats, seat, ready, cancel)
                lane, unread = seat.slot.target, len(ids) - seat.cached
                return Running(id, one.run(), one.settle, lane, cancel, unread)

            self._scheduler.enter(id, cancel, seated)
            return id

    def _require_free(self) -> None:
        if not self.free:
            raise EngineError("the engine is busy with another request")

    def step(self) -> list[tuple[int, Event | Exception]]:
        """Run until a conversation has events; return its id with each event, or with the error
        that ended it; [] if none is left.

        A cancel stops the pass that is running where no other conversation shares it.
        """
        with self._alone():
            return self._scheduler.step()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the engine for a block.

        Raises:
            EngineError: another thread is in a call or a ``generate``, or the engine is closed.
        """
        if not self._using.acquire(blocking=False):
            raise EngineError(*_TWO_THREADS)
        try:
            if self.closed:
                raise EngineError("the engine is closed")
            if self._generating not in (None, threading.get_ident()):
                raise EngineError(*_TWO_THREADS)
            yield
        finally:
            self._using.release()

    def cancel(self, id: int) -> None:
        """End a conversation; unless it is over already, its last event comes with a ``step``."""
        self._scheduler.cancel([id])

    def drop(self, id: int) -> None:
        """End a conversation whose client has left, without further events."""
        self._scheduler.end(id)

    def generate(
        self, prompt: Prompt, params: GenerateParams | None = None, *, cancel: Cancel | None = None
    ) -> Iterator[Event]:
        """See ``EngineLike.generate``."""
        with self._alone():
            id = self.submit(prompt, params, cancel=cancel)
            before, self._generating = self._generating, threading.get_ident()
        try:
            while id in self._scheduler:
                for whose, said in self.step():
                    if whose != id:
                        continue
                    if isinstance(said, Exception):
                        raise said
                    yield said
        finally:
            self._generating = before
            self.drop(id)
            with self._using:
                if not (self.closed or len(self._scheduler)):
                    self._seats.keep()
