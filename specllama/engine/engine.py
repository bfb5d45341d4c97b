"""The engine: a target, its proposers and their caches; ``generate`` yields events.

One request at a time. Everything a request decides is visible in its events; nothing is printed.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from specllama.backend.base import Lane, Vocab
from specllama.cancel import Cancel, StopFlag
from specllama.chat import render
from specllama.engine.conversation import RequestRun
from specllama.engine.encoding import encode_segments
from specllama.errors import EngineError, PairIncompatible, UsageError
from specllama.events import (
    Event,
)
from specllama.interface import EngineInfo, Message
from specllama.params import EngineOptions, GenerateParams
from specllama.speculative.drafting.draft_model import DraftModelProposer
from specllama.speculative.drafting.drafter import NoProposer, Proposer, Remembering
from specllama.speculative.drafting.method import NO_DRAFT, NO_HEAD
from specllama.speculative.history import History
from specllama.speculative.sampling import Constraint, SamplerChain
from specllama.speculative.window import FixedWindow, Window
from specllama.thoughts import Reader, reader

_TAIL = 16  # tokens at the end of a prompt, where a tag may be open

ConstraintMaker = Callable[[GenerateParams], Constraint | None]


class Engine:
    """Generates text from one loaded target, drafting with what is available.

    ``Engine.load`` opens model files; the constructor takes ready parts (tests, other backends).

    Args:
        target: a lane in the target's pool.
        vocab: the target's vocabulary.
        proposers: drafting methods by name; "none" is always there.
        info: what to show people.
        template: Jinja chat template, or None for raw prompts.
        bos, eos: special token texts for the template.
        make_constraint: builds the grammar of a request.
        make_window: the draft window of a request.
        on_close: frees the models.
        stop: what the contexts look at; a request's cancel sets it.
    """

    def __init__(
        self,
        *,
        target: Lane,
        vocab: Vocab,
        info: EngineInfo,
        proposers: dict[str, Proposer] | None = None,
        template: str | None = None,
        bos: str = "",
        eos: str = "",
        make_constraint: ConstraintMaker | None = None,
        make_window: Callable[[GenerateParams], Window] | None = None,
        on_close: Callable[[], None] | None = None,
        stop: StopFlag | None = None,
    ) -> None:
        self._target = target
        self._vocab = vocab
        self._info = info
        self._proposers: dict[str, Proposer] = {"none": NoProposer(), **(proposers or {})}
        self._template = template
        self._bos = bos
        self._eos = eos
        self._make_constraint = make_constraint
        self._make_window = make_window or _fixed_window
        self._on_close = on_close
        self._stop = stop or StopFlag()
        self.history = History()  # the text of the present request, and of the last one until then
        self._busy = threading.Lock()
        self._eog_bias: dict[int, float] | None = None
        self._breakers: dict[tuple[str, ...], frozenset[int]] = {}
        self._closed = False
        self._rounded: int | None = None

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
            Cancelled: ``cancel`` was set.
        """
        from specllama.engine.loading import load_parts

        stop = StopFlag()
        with stop.obeying(cancel or Cancel()):
            parts = load_parts(target, draft, options or EngineOptions(), on_progress, stop)
        return cls(
            target=parts.target,
            vocab=parts.vocab,
            info=parts.info,
            proposers=dict(parts.proposers),
            template=parts.template,
            bos=parts.bos,
            eos=parts.eos,
            make_constraint=parts.make_constraint,
            make_window=parts.make_window,
            on_close=parts.on_close,
            stop=stop,
        )

    # -- facts --

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def vocab(self) -> Vocab:
        return self._vocab

    @property
    def target(self) -> Lane:
        return self._target

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def proposers(self) -> tuple[str, ...]:
        return tuple(self._proposers)

    def proposer(self, name: str) -> Proposer:
        return self._proposers[name]

    @property
    def windows(self) -> Callable[[GenerateParams], Window]:
        """What makes the draft window of a request."""
        return self._make_window

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for proposer in self._proposers.values():
            proposer.close()
        self._target.close()
        if self._on_close is not None:
            self._on_close()

    def abort(self) -> None:
        """Stop whatever pass is running, from any thread; a request ends as cancelled."""
        self._stop.set()

    def reset(self) -> None:
        """Forget every cached prompt, so that the next request reads its prompt afresh."""
        self._target.rollback(0)
        self.kept(0)
        for proposer in self._proposers.values():
            if isinstance(proposer, DraftModelProposer):
                proposer.context.rollback(0)
            elif isinstance(proposer, Remembering):
                proposer.forget()

    # -- cells that a pass of another width wrote --

    def rounded(self, at: int) -> None:
        """From position ``at`` on, the cache may differ from that of single steps by rounding."""
        self._rounded = min(at, at if self._rounded is None else self._rounded)

    def kept(self, n: int) -> None:
        """The cache was cut to its first ``n`` tokens."""
        if self._rounded is not None and n <= self._rounded:
            self._rounded = None

    @property
    def may_round(self) -> bool:
        """Whether a row can differ from that of plain decoding by rounding."""
        return self._rounded is not None

    # -- prompts --

    def encode(self, prompt: str | Sequence[int] | Sequence[Message]) -> tuple[list[int], str]:
        """Token ids of a prompt, and a notice about the template ('' if none).

        Chat prompts are what llama.cpp makes of the same text, except that contents of messages
        cannot forge turns.

        Raises:
            UsageError: the prompt is empty or an id is outside the vocabulary.
        """
        notice = ""
        if isinstance(prompt, str):
            ids = self._vocab.tokenize(prompt, add_special=True, parse_special=True)
        elif prompt and isinstance(prompt[0], Message):
            messages = [m for m in prompt if isinstance(m, Message)]
            rendered = render(
                self._template,
                messages,
                bos=self._bos,
                eos=self._eos,
                continue_last=messages[-1].role == "assistant",
            )
            notice = rendered.notice or ""
            ids = encode_segments(
                self._vocab, rendered.segments, bos=self._bos, template=self._template or ""
            )
        else:
            ids = [int(t) for t in prompt if not isinstance(t, Message)]
            bad = next((t for t in ids if not 0 <= t < self._vocab.n_tokens), None)
            if bad is not None:
                raise UsageError(f"token {bad} is outside the vocabulary")
        if not ids:
            raise UsageError("the prompt is empty", "give some text to continue or to answer")
        return ids, notice

    def reader(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        ids: Sequence[int],
        params: GenerateParams,
    ) -> Reader | None:
        """How to read the reply to a chat prompt of these tokens; None if it is shown as it is."""
        last = prompt[-1] if prompt else None
        constrained = params.grammar is not None or params.json_schema is not None
        if not isinstance(last, Message) or constrained:
            return None
        end = b"".join(self._vocab.piece(t, special=True) for t in ids[-_TAIL:])
        return reader(
            self._template,
            end.decode("utf-8", "replace"),
            last.content if last.role == "assistant" else "",
        )

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        return len(self.encode(prompt)[0])

    # -- generation --

    def generate(
        self,
        prompt: str | Sequence[int] | Sequence[Message],
        params: GenerateParams | None = None,
        *,
        cancel: Cancel | None = None,
    ) -> Iterator[Event]:
        """See ``EngineLike.generate``."""
        if self._closed:
            raise EngineError("the engine is closed")
        if not self._busy.acquire(blocking=False):
            raise EngineError("the engine is busy with another request")
        try:
            cancel = cancel or Cancel()
            run = RequestRun(self, params or GenerateParams(), cancel)
            try:
                with self._stop.obeying(cancel):
                    yield from run.events(prompt)
            finally:
                run.settle()  # may have to read tokens again, which is not to be stopped
        finally:
            self._busy.release()

    # -- parts of a request (used by RequestRun) --

    def choose_proposer(self, params: GenerateParams) -> tuple[Proposer, str]:
        """The proposer of a request and, when it is not drafting, why not.

        Raises:
            UsageError: a proposer was named that this engine does not have.
            PairIncompatible: NextN layers were asked of a target that has none to run.
        """
        none = self._proposers["none"]
        if not params.speculate or params.proposer == "none":
            return none, ""
        if params.draft_max == 0:
            return none, ""
        if params.max_tokens is not None and params.max_tokens < params.min_speculative_tokens:
            return none, (
                f"speculation skipped: {params.max_tokens} tokens asked for, "
                f"it starts to pay at {params.min_speculative_tokens}"
            )
        name = params.proposer
        if name == "auto":
            name = next(n for n in ("mixed", "ngram", "none") if n in self._proposers)
        if name not in self._proposers:
            have = ", ".join(sorted(self._proposers))
            reason = next((m.reason for m in self._info.methods if m.name == name), "")
            hint = f"here: {have}"
            if name in ("draft", "mixed") or reason == NO_DRAFT:
                hint = "give a draft model with -d"
            elif reason == NO_HEAD:
                hint = "give a head that was trained for this target with --head FILE"
            why = f": {reason}" if reason else ""
            if name == "mtp":  # the file decides, not the command line
                raise PairIncompatible(f"the proposer 'mtp' cannot draft{why}", hint)
            raise UsageError(f"the proposer {name!r} is not available for this pair{why}", hint)
        return self._proposers[name], ""

    def chain(self, params: GenerateParams, seed: int, tokens: Sequence[int]) -> SamplerChain:
        sampling = params.sampling
        if params.ignore_eos:
            bias = {**self._all_eog(), **sampling.logit_bias}
            sampling = dataclasses.replace(sampling, logit_bias=bias)
        breakers: frozenset[int] = frozenset()
        if sampling.dry_multiplier > 0:
            strings = sampling.dry_sequence_breakers
            if strings not in self._breakers:
                wanted = [s.encode() for s in strings]
                self._breakers[strings] = frozenset(
                    t
                    for t in range(self._vocab.n_tokens)
                    if any(w in self._vocab.piece(t) for w in wanted)
                )
            breakers = self._breakers[strings]
        constraint = None
        if params.constrained:
            if self._make_constraint is None:
                raise UsageError("this engine has no grammar support")
            constraint = self._make_constraint(params)
        return SamplerChain(
            sampling,
            seed=seed,
            tokens=tokens,
            breakers=breakers,
            constraint=constraint,
            is_end=self._vocab.is_eog,
        )

    def _all_eog(self) -> dict[int, float]:
        if self._eog_bias is None:
            self._eog_bias = {
                t: float("-inf") for t in range(self._vocab.n_tokens) if self._vocab.is_eog(t)
            }
        return self._eog_bias


def _fixed_window(params: GenerateParams) -> Window:
    return FixedWindow(params.reach(1), params.draft_min)
