"""One request, from its prompt to ``Finished``: reuse, prefill, rounds, stops, a full context.

A generator: it yields events for people, and asks (``speculative.asking``) for whoever drives it.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator
from time import perf_counter
from typing import Any

from specllama.arrays import Row, Rows
from specllama.cancel import Cancel
from specllama.engine.loaded import Loaded
from specllama.engine.reply import Reply
from specllama.engine.slot import Slot
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
from specllama.history import History, common_prefix
from specllama.interface import Prompt
from specllama.params import SEED_DRAWN, GenerateParams
from specllama.speculative.asking import Ask, Asking, Cut, Pass
from specllama.speculative.drafting.drafter import Request
from specllama.speculative.drafting.method import booked
from specllama.speculative.policy.controller import Controller
from specllama.speculative.round import Round, Rounds
from specllama.speculative.rules import RandomCoins, rule_of
from specllama.speculative.window import FixedWindow, Window
from specllama.stats import SpecStats
from specllama.text import passage_ending

# A lead below this, in logits before the temperature, can flip when a pass of another width rounds
# differently (measured: up to 0.1 on CPUs).
NEAR_TIE = 0.1

PREFILL_CHUNK = 512
_SAID_AGAIN = 8  # reading fewer tokens again than this is not worth a word

Saying = Generator[Event | Ask, Any, None]


class Conversation:
    """One request from prompt to Finished."""

    def __init__(self, loaded: Loaded, slot: Slot, params: GenerateParams, cancel: Cancel) -> None:
        self._loaded = loaded
        self._slot = slot
        self._target = slot.target
        self._vocab = loaded.prompting.vocab
        self._params = params
        self._cancel = cancel
        self._seed = params.seed if params.seed is not None else secrets.randbelow(SEED_DRAWN)
        self._stats = SpecStats()
        self._reply = Reply(params, self._vocab)  # until the prompt says how to read it
        self._tokens = History()
        self._prompt_n = self._cached_n = 0
        self._rounds_s = self._deliver_s = 0.0  # in rounds, and of that until events were taken
        self._drafter = slot.drafters["none"]
        self._window: Window | None = None
        self._first: Row | None = None  # behind the prompt, until its token is drawn

    def run(self, prompt: Prompt) -> Saying:
        begin = perf_counter()
        loaded, slot, params = self._loaded, self._slot, self._params
        ids, notice = loaded.prompting.encode(prompt)
        self._reply = Reply(params, self._vocab, loaded.prompting.reader(prompt, ids, params))
        n_ctx = self._target.n_ctx
        if len(ids) > n_ctx:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, the context {n_ctx}",
                "shorten it, or raise --ctx-size",
            )
        drafter, skipped = slot.drafter_for(params, loaded.info)
        chain = loaded.chains.chain(params, self._seed, ids)
        rule = rule_of(params.verify, greedy=chain.greedy)
        tokenized = perf_counter()

        self._target.capture(drafter.needs)
        self._drafter = drafter
        reason: FinishReason | None = None
        try:
            cached, again = yield from self._reuse(ids)
        except Cancelled:  # a model that cannot roll back reads again
            cached, again, reason = 0, 0, "cancelled"
        self._tokens = slot.history
        self._tokens.replace(ids)
        self._prompt_n = len(ids)
        self._cached_n = cached
        yield Started(
            prompt_n=len(ids),
            cached_n=cached,
            n_ctx=n_ctx,
            seed=self._seed,
            proposer=drafter.name,
            verify=params.verify,
            draft_max=self._reach() if drafter.name != "none" else 0,
            exactness=loaded.info.exactness,
        )
        if notice:
            yield Notice(message=notice, level="warning", topic="template")
        if skipped:
            yield Notice(message=skipped, topic="routing")
        if again > _SAID_AGAIN:
            yield Notice(
                message=f"reading {again} tokens again: {drafter.name} needs the target's hidden "
                "states",
                topic="routing",
            )

        started = perf_counter()
        try:
            done = cached
            while reason is None and done < len(ids):
                done = yield from self._read(ids, done, row=True)
                yield PrefillProgress(done=done, total=len(ids), cached=cached)
                if self._cancel.is_set():
                    reason = "cancelled"
        except Cancelled:
            reason = "cancelled"
        prefilled = perf_counter()

        pass_rows = self._pass_rows
        trees = not rule.chains_only and (loaded.info.exact_trees or not params.exact)
        drafter.start(
            Request(
                seed=self._seed,
                rule=rule,
                coins=RandomCoins((self._seed, 2)),
                is_eog=self._reply.is_stop,
                p_min=params.draft_p_min,
                leaves=self._target.max_leaves if trees else 1,
                pass_rows=pass_rows,
                n_ctx=n_ctx,
                ending=self._ending,
            )
        )
        if advice := drafter.advice():
            yield Notice(message=advice, topic="routing")
        window = FixedWindow(0) if drafter.name == "none" else loaded.windows(params)
        self._window = window
        if trouble := loaded.windows.trouble():
            yield Notice(message=trouble, level="warning", topic="profile")
        read_ms = (prefilled - started) * 1e3
        if isinstance(window, Controller):
            paid = booked(drafter)
            window.drafts_with(drafter.name, paid)
            if reason is None:  # else it would take a part for the whole
                window.prefilled(len(ids) - cached, read_ms, len(ids))
            if paid and (why := loaded.windows.cannot_gain(paid)):
                yield Notice(message=why, topic="routing")
        rounds = Rounds(
            target=self._target,
            drafter=drafter,
            tokens=self._tokens,
            chain=chain,
            window=window,
            rule=rule,
            seed=self._seed,
            coins=RandomCoins((self._seed, 1)),
            is_stop=self._reply.is_stop,
            pass_rows=pass_rows,
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
                    shifted = yield from self._shift()
                except Cancelled:
                    reason = "cancelled"
                    break
                yield Notice(message=shifted, level="warning", topic="context")
            begun = perf_counter()
            try:
                done_round = yield from rounds.round(self._reply.remaining, first=self._first)
                text, event, reason = yield from self._commit(rounds, done_round, begin)
            except ContextFull as full:
                reason, message = "context", full.message
                break
            except Cancelled:
                reason = "cancelled"
                break
            if first_s is None:
                first_at = begin + event.t_s
                first_s = first_at - prefilled
                self._first = None
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

    @property
    def _pass_rows(self) -> int:
        """Rows of the widest pass; with ``exact``, one that is bit-identical to single steps."""
        most = self._target.max_rows
        return min(most, self._loaded.info.exact_rows) if self._params.exact else most

    def _reach(self) -> int:
        return min(self._params.reach(self._loaded.info.exact_rows), self._pass_rows - 1)

    # -- steps --

    def _reuse(self, ids: list[int]) -> Asking[tuple[int, int]]:
        """Keep the cached prefix of the prompt; its last token is always evaluated, for its row.

        Returns the tokens kept, and how many more are in the cache but have to be read again
        because the drafter needs the hidden states that such a pass gives away.
        """
        cached = min(common_prefix(self._target.tokens, ids), len(ids) - 1)
        keep = self._drafter.reusable(ids, cached)
        yield Cut(self._target, keep)
        self._slot.kept(keep)
        return keep, cached - keep

    def _ending(self, before: int, after: int) -> float:
        piece = self._vocab.piece
        return passage_ending(piece(before), piece(after))

    def _read(self, ids: list[int], done: int, *, row: bool) -> Asking[int]:
        """Read a part of ``ids`` behind the first ``done``: how many are read now.

        With ``row`` keep the row behind the last of all.
        """
        part = ids[done : done + min(PREFILL_CHUNK, self._target.n_batch)]
        end = done + len(part)
        last = row and end == len(ids)
        rows: Rows = yield Pass(self._target, part, "last" if last else "none")
        if last:
            self._first = rows[0].copy()  # a pass of somebody else may come before it is drawn from
        yield from self._drafter.read_prompt()
        return end

    def _commit(
        self, rounds: Rounds, done: Round, begin: float
    ) -> Asking[tuple[str, RoundDone, FinishReason | None]]:
        """Emit a round's tokens up to a stop; cut the caches where the reply ends."""
        t_s = perf_counter() - begin
        taken = self._reply.take(done.tokens)
        if taken.kept < len(done.tokens):
            yield from rounds.cut_back(len(self._tokens) - (len(done.tokens) - taken.kept))
        accepted = min(len(done.verdict.path), taken.kept)
        emitted = done.tokens[: taken.kept]
        draft, verdict = done.draft, done.verdict
        piece = self._vocab.piece
        rows = len(draft) + 1
        if rows > 1 and not self._loaded.info.alike(rows, line=draft.is_line):
            self._slot.rounded(done.n_past)
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
            near_tie=self._slot.may_round and gap is not None and gap < NEAR_TIE,
            sources=draft.sources,
            read=done.read,
        )
        self._stats.observe(event)
        return taken.text, event, taken.reason

    def _shift(self) -> Asking[str]:
        """Make room: keep the head of the prompt and the newer half of the rest, read them again.

        Reading again, rather than moving the cache, keeps every position's numbers as a fresh
        prompt would have them, so plain and speculative decoding still agree.
        """
        n_ctx = self._target.n_ctx
        head = min(self._prompt_n, n_ctx // 4)
        tail = (n_ctx - head) // 2
        dropped = len(self._tokens) - head - tail
        self._tokens.replace([*self._tokens[:head], *self._tokens[-tail:]])
        yield Cut(self._target, min(common_prefix(self._target.tokens, self._tokens), head))
        done = len(self._target.tokens)
        self._slot.kept(done)
        text = self._tokens[:-1]
        while done < len(text):
            done = yield from self._read(text, done, row=False)
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
            proposer=self._drafter.name,
            verify=self._params.verify,
            exactness=self._loaded.info.exactness,
            acceptance_rate=stats.acceptance_rate,
            mean_acceptance_length=stats.mean_acceptance_length,
            accepted_per_position=tuple(stats.accepted_at),
            drafted_per_position=tuple(stats.drafted_at),
            near_ties=stats.near_ties,
            timings=Timings(
                load_ms=self._loaded.info.load_ms,
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

    def settle(self) -> list[Cut]:
        """However it ended: what leaves the target's lane within the committed text."""
        if isinstance(self._window, Controller):
            self._window.finish()
        if not self._tokens:
            return []  # refused before the lane was touched
        return [Cut(self._target, common_prefix(self._target.tokens, self._tokens))]


def _show(piece: bytes) -> str:
    return piece.decode("utf-8", "replace")
