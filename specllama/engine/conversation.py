"""One request, from its prompt to ``Finished``: reuse, prefill, rounds, stops, a full context."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING

from specllama.cancel import Cancel
from specllama.engine.profiles import Windows
from specllama.engine.reply import Reply
from specllama.errors import Cancelled, ContextFull, PromptTooLong
from specllama.events import (
    Event,
    Finished,
    FinishReason,
    Notice,
    PrefillProgress,
    RoundDone,
    Started,
    TextDelta,
    Timings,
)
from specllama.interface import Message
from specllama.params import SEED_DRAWN, GenerateParams
from specllama.speculative.adaptive import AdaptiveWindow
from specllama.speculative.drafting.drafter import Advising, PromptReader, Proposer, Request
from specllama.speculative.drafting.merged import MergedProposer
from specllama.speculative.drafting.mixed import MixedProposer
from specllama.speculative.history import History, common_prefix
from specllama.speculative.round import Round, SpeculativeLoop
from specllama.speculative.rules import RandomCoins
from specllama.speculative.types import Row
from specllama.speculative.window import FixedWindow, Window
from specllama.stats import SpecStats
from specllama.text import passage_ending

if TYPE_CHECKING:
    from specllama.engine.engine import Engine

# A lead below this, in logits before the temperature, can flip when a pass of another width rounds
# differently (measured: up to 0.1 on CPUs).
NEAR_TIE = 0.1

PREFILL_CHUNK = 512
_SAID_AGAIN = 8  # reading fewer tokens again than this is not worth a word
_FREE = ("ngram", "suffix", "lookahead")  # proposers without a draft model


class RequestRun:
    """One request from prompt to Finished."""

    def __init__(self, engine: Engine, params: GenerateParams, cancel: Cancel) -> None:
        self._engine = engine
        self._target = engine.target
        self._vocab = engine.vocab
        self._params = params
        self._cancel = cancel
        self._seed = params.seed if params.seed is not None else secrets.randbelow(SEED_DRAWN)
        self._stats = SpecStats()
        self._reply = Reply(params, engine.vocab)  # until the prompt says how to read it
        self._tokens = History()
        self._prompt_n = self._cached_n = 0
        self._rounds_s = self._deliver_s = 0.0  # in rounds, and of that until events were taken
        self._proposer: Proposer = engine.proposer("none")
        self._window: Window | None = None
        self._first: Row | None = None  # behind the prompt, until its token is drawn

    def events(self, prompt: str | Sequence[int] | Sequence[Message]) -> Iterator[Event]:
        begin = perf_counter()
        engine, params = self._engine, self._params
        ids, notice = engine.encode(prompt)
        self._reply = Reply(params, engine.vocab, engine.reader(prompt, ids, params))
        n_ctx = self._target.n_ctx
        if len(ids) > n_ctx:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, the context {n_ctx}",
                "shorten it, or raise --ctx-size",
            )
        proposer, skipped = engine.choose_proposer(params)
        chain = engine.chain(params, self._seed, ids)
        tokenized = perf_counter()

        self._target.capture(proposer.needs)
        self._proposer = proposer
        reason: FinishReason | None = None
        try:
            cached, again = self._reuse(ids)
        except Cancelled:  # a model that cannot roll back reads again
            cached, again, reason = 0, 0, "cancelled"
        self._tokens = engine.history
        self._tokens.replace(ids)
        self._prompt_n = len(ids)
        self._cached_n = cached
        yield Started(
            prompt_n=len(ids),
            cached_n=cached,
            n_ctx=n_ctx,
            seed=self._seed,
            proposer=proposer.name,
            verify=params.verify,
            draft_max=params.reach(engine.info.exact_rows) if proposer.name != "none" else 0,
            exactness=engine.info.exactness,
        )
        if notice:
            yield Notice(message=notice, level="warning", topic="template")
        if skipped:
            yield Notice(message=skipped, topic="routing")
        if again > _SAID_AGAIN:
            yield Notice(
                message=f"reading {again} tokens again: {proposer.name} draws on what the target "
                "makes of them",
                topic="routing",
            )

        started = perf_counter()
        try:
            for done in self._prefill(ids if reason is None else [], cached, row=True):
                yield PrefillProgress(done=done, total=len(ids), cached=cached)
                if self._cancel.is_set():
                    reason = "cancelled"
                    break
        except Cancelled:
            reason = "cancelled"
        prefilled = perf_counter()

        proposer.start(
            Request(
                seed=self._seed,
                rule=params.verify,
                coins=RandomCoins((self._seed, 2)),
                is_eog=self._reply.is_stop,
                p_min=params.draft_p_min,
                # a tree is one pass: it cannot be cut into groups that are bit-identical
                leaves=1 if params.exact else self._target.max_leaves,
                pass_rows=self._target.max_rows,
                n_ctx=n_ctx,
                ending=self._ending,
            )
        )
        if isinstance(proposer, Advising) and (advice := proposer.advice()):
            yield Notice(message=advice, topic="routing")
        window = FixedWindow(0) if proposer.name == "none" else engine.windows(params)
        self._window = window
        if isinstance(engine.windows, Windows) and (trouble := engine.windows.trouble()):
            yield Notice(message=trouble, level="warning", topic="profile")
        read_ms = (prefilled - started) * 1e3
        if isinstance(window, AdaptiveWindow):
            paid = _paid(proposer)
            window.drafts_with(proposer.name, paid, copies=_copies(proposer))
            if reason is None:  # else it would take a part for the whole
                window.prefilled(len(ids) - cached, read_ms)
            if paid and (why := window.cannot_gain()):
                yield Notice(message=why, topic="routing")
        loop = SpeculativeLoop(
            target=self._target,
            proposer=proposer,
            tokens=self._tokens,
            chain=chain,
            window=window,
            rule=params.verify,
            seed=self._seed,
            coins=RandomCoins((self._seed, 1)),
            is_stop=self._reply.is_stop,
            exact_rows=engine.info.exact_rows if params.exact else 0,
        )
        first_s: float | None = None
        first_at = prefilled
        message: str | None = None
        while reason is None:
            if self._cancel.is_set():
                reason = "cancelled"
                break
            if len(self._tokens) > n_ctx:
                if params.on_full == "stop":
                    reason = "context"
                    message = f"the context of {n_ctx} tokens is full"
                    break
                try:
                    shifted = self._shift(loop)
                except Cancelled:
                    reason = "cancelled"
                    break
                yield Notice(message=shifted, level="warning", topic="context")
            begun = perf_counter()
            try:
                done_round = loop.round(self._reply.remaining, first=self._first)
            except ContextFull as full:
                reason, message = "context", full.message
                break
            except Cancelled:
                reason = "cancelled"
                break
            now = perf_counter()
            if first_s is None:
                first_s, first_at = now - prefilled, now
                self._first = None
            text, event, reason = self._commit(loop, done_round, now - begin)
            handed = perf_counter()
            if text:
                yield TextDelta(text=text)
            yield event
            resumed = perf_counter()
            self._deliver_s += resumed - handed
            self._rounds_s += resumed - begun
        rest = self._reply.finish()
        if rest:
            yield TextDelta(text=rest)
        yield self._finished(
            reason,
            message,
            begin,
            tokenize_s=tokenized - begin,
            prefill_s=prefilled - started,
            first_s=first_s,
            first_at=first_at,
        )

    # -- steps --

    def _reuse(self, ids: list[int]) -> tuple[int, int]:
        """Keep the cached prefix of the prompt; its last token is always evaluated, for its row.

        Returns the tokens kept, and how many more are in the cache but have to be read again
        because the proposer needs the hidden states that such a pass gives away.
        """
        cached = keep = min(common_prefix(self._target.tokens, ids), len(ids) - 1)
        if isinstance(self._proposer, PromptReader):
            keep = self._proposer.reusable(ids, cached)
        self._target.rollback(keep)
        self._engine.kept(keep)
        return keep, cached - keep

    def _ending(self, before: int, after: int) -> float:
        piece = self._vocab.piece
        return passage_ending(piece(before), piece(after))

    def _prefill(self, ids: list[int], done: int, *, row: bool) -> Iterator[int]:
        """Read ``ids`` behind the first ``done``; with ``row`` keep the row behind the last."""
        while done < len(ids):
            part = ids[done : done + min(PREFILL_CHUNK, self._target.n_batch)]
            if row and done + len(part) == len(ids):
                self._first = self._target.forward(part, outputs="last")[0]
            else:
                self._target.forward(part, outputs="none")
            if isinstance(self._proposer, PromptReader):
                self._proposer.read_prompt()
            done += len(part)
            yield done

    def _commit(
        self, loop: SpeculativeLoop, done: Round, t_s: float
    ) -> tuple[str, RoundDone, FinishReason | None]:
        """Emit a round's tokens up to a stop; cut the caches where the reply ends."""
        taken = self._reply.take(done.tokens)
        if taken.kept < len(done.tokens):
            loop.cut_back(len(self._tokens) - (len(done.tokens) - taken.kept))
        accepted = min(len(done.verdict.path), taken.kept)
        emitted = done.tokens[: taken.kept]
        draft, verdict = done.draft, done.verdict
        piece = self._vocab.piece
        rows = 1 if self._params.exact and draft.is_line else len(draft) + 1
        if rows > 1 and not self._engine.info.alike(rows, line=draft.is_line):
            self._engine.rounded(done.n_past)
        gap = verdict.gap
        event = RoundDone(
            index=self._stats.rounds,
            t_s=t_s,
            n_past=done.n_past,
            source=draft.source,
            draft_max=done.plan.draft_max,
            window_reason=done.plan.reason,
            drafted=draft.tokens,
            parents=draft.parents,
            drafted_text=tuple(_show(piece(t, special=True)) for t in draft.tokens),
            confidence=draft.confidence,
            p=verdict.p if len(verdict.p) == len(draft) else (None,) * len(draft),
            q=tuple(
                None if q is None else q.prob(t) for q, t in zip(draft.q, draft.tokens, strict=True)
            ),
            accepted=accepted,
            accepted_path=verdict.path[:accepted],
            target_token=verdict.target_token,
            target_text=(
                ""
                if verdict.target_token is None
                else _show(piece(verdict.target_token, special=True))
            ),
            target_kind=verdict.kind,
            emitted=emitted,
            emitted_text=tuple(_show(piece(t, special=True)) for t in emitted),
            cut=accepted + 1 - taken.kept,
            draft_ms=done.draft_ms,
            verify_ms=done.verify_ms,
            other_ms=done.other_ms,
            # later steps read what a pass of another width left in the cache
            near_tie=self._engine.may_round and gap is not None and gap < NEAR_TIE,
            sources=draft.sources,
            read=done.read,
        )
        self._stats.observe(event)
        return taken.text, event, taken.reason

    def _shift(self, loop: SpeculativeLoop) -> str:
        """Make room: keep the head of the prompt and the newer half of the rest, read them again.

        Reading again, rather than moving the cache, keeps every position's numbers as a fresh
        prompt would have them, so plain and speculative decoding still agree.
        """
        n_ctx = self._target.n_ctx
        head = min(self._prompt_n, n_ctx // 4)
        tail = (n_ctx - head) // 2
        dropped = len(self._tokens) - head - tail
        self._tokens.replace([*self._tokens[:head], *self._tokens[-tail:]])
        self._target.rollback(min(common_prefix(self._target.tokens, self._tokens), head))
        self._engine.kept(len(self._target.tokens))
        for _ in self._prefill(self._tokens[:-1], self._target.n_past, row=False):
            pass
        return f"context full: dropped {dropped} older tokens, kept {len(self._tokens)}"

    def _finished(
        self,
        reason: FinishReason | None,
        message: str | None,
        begin: float,
        *,
        tokenize_s: float,
        prefill_s: float,
        first_s: float | None,
        first_at: float,
    ) -> Finished:
        stats, n = self._stats, len(self._reply.token_ids)
        end = perf_counter()
        decode_s = end - first_at if first_s is not None else 0.0
        return Finished(
            reason=reason or "error",
            text=self._reply.text,
            token_ids=tuple(self._reply.token_ids),
            seed=self._seed,
            rounds=stats.rounds,
            draft_n=stats.drafted,
            draft_n_accepted=stats.accepted,
            cut=stats.cut,
            prompt_n=self._prompt_n,
            cached_n=self._cached_n,
            n_ctx=self._target.n_ctx,
            proposer=self._proposer.name,
            verify=self._params.verify,
            exactness=self._engine.info.exactness,
            acceptance_rate=stats.acceptance_rate,
            mean_acceptance_length=stats.mean_acceptance_length,
            accepted_per_position=tuple(stats.accepted_at),
            drafted_per_position=tuple(stats.drafted_at),
            near_ties=stats.near_ties,
            timings=Timings(
                load_ms=self._engine.info.load_ms,
                tokenize_ms=tokenize_s * 1e3,
                prefill_ms=prefill_s * 1e3,
                first_decode_ms=(first_s or 0.0) * 1e3,
                ttft_ms=(first_at - begin) * 1e3 if first_s is not None else 0.0,
                decode_ms=decode_s * 1e3,
                draft_ms=stats.draft_ms,
                verify_ms=stats.verify_ms,
                other_ms=max(self._rounds_s * 1e3 - stats.draft_ms - stats.verify_ms, 0.0),
                deliver_ms=self._deliver_s * 1e3,
                tok_per_s=(n - 1) / decode_s if n > 1 and decode_s > 0 else None,
            ),
            message=message,
        )

    def settle(self) -> None:
        """Whatever happened, leave the target's cache within the committed text."""
        if isinstance(self._window, AdaptiveWindow):
            self._window.finish()
        if not self._tokens or self._engine.closed:
            return  # refused before the cache was touched, or nothing left to settle
        n_past = self._target.n_past
        agreed = common_prefix(self._target.tokens, self._tokens)
        if n_past != len(self._target.tokens) or agreed < len(self._target.tokens):
            self._target.rollback(min(agreed, len(self._target.tokens)))


def _paid(proposer: Proposer) -> str:
    """The source of a proposer that costs time, "" if all it does is copy."""
    if isinstance(proposer, MixedProposer):
        return proposer.paid
    return "" if proposer.name in _FREE else proposer.name


def _copies(proposer: Proposer) -> bool:
    """Whether it copies from the text, among other things."""
    if isinstance(proposer, MixedProposer):
        return proposer.copies
    return isinstance(proposer, MergedProposer)


def _show(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
