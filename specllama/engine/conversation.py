"""One request, from its prompt to ``Finished``: prefill, rounds, stops, a full context.

A generator of events for the caller and of effects (``speculative.effects``) for the scheduler.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import Any, TypeVar

from specllama import verdict
from specllama.arrays import Row, Rows
from specllama.backend.base import Outputs
from specllama.backend.kernels import TILE
from specllama.cancel import Cancel
from specllama.engine.pair_loading import Loaded
from specllama.engine.prompting import Prepared
from specllama.engine.reply import ReplyBuilder
from specllama.engine.seating import Seat, Seats
from specllama.errors import Cancelled, ContextFull
from specllama.events import (
    Event,
    Finished,
    FinishReason,
    Notice,
    PrefillProgress,
    ReasoningDelta,
    RoundDone,
    Started,
    TextDelta,
    Timings,
)
from specllama.figures import SpecStats
from specllama.rates import Payoff, speed
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.drafter import Request
from specllama.speculative.drafting.method import booked
from specllama.speculative.effects import Effect, Keep, Pass, Steps
from specllama.speculative.round import Rounds
from specllama.speculative.rules import RandomCoins, rule_of
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.window import Window
from specllama.text_history import History, common_prefix

_AS_STARTED = ("seed", "prompt_n", "cached_n", "n_ctx", "proposer", "verify", "exactness")
_SAID_AGAIN = 8  # reading fewer tokens again than this is not worth a word

T = TypeVar("T")
EventSteps = Generator[Event | Effect, Any, T]


class Clock:
    """The times of one request, by ``perf_counter``; the clock starts when it is made.

    Attributes:
        tokenized: when its prompt was. reading: when that began to be read. read: when a part of it
            was read last.
    """

    def __init__(self) -> None:
        self.begun = self.tokenized = self.reading = self.read = perf_counter()
        self._first: float | None = None  # when the first token was there
        self._first_ms = (0.0, 0.0)  # of its round, what was drafting and verifying
        self._rounds_s = self._deliver_s = 0.0  # in rounds, and of that until events were taken

    @property
    def tokenize_ms(self) -> float:
        return (self.tokenized - self.begun) * 1e3

    @property
    def queue_ms(self) -> float:
        return (self.reading - self.tokenized) * 1e3

    def wrote(self, event: RoundDone) -> None:
        if self._first is None:
            self._first = self.begun + event.t_s
            self._first_ms = event.draft_ms, event.verify_ms

    def delivered(self, begun: float, handed: float) -> None:
        """Note that the events of a round that began at ``begun`` were handed out at ``handed``,
        and have been taken."""
        now = perf_counter()
        self._deliver_s += now - handed
        self._rounds_s += now - begun

    def timings(self, stats: SpecStats, n: int, load_ms: float) -> Timings:
        """Return the timings of a reply of ``n`` tokens that ends now."""
        first = self._first
        decode_s = 0.0 if first is None else perf_counter() - first
        draft_ms = stats.draft_ms - self._first_ms[0]
        verify_ms = stats.verify_ms - self._first_ms[1]
        return Timings(
            load_ms=load_ms, tokenize_ms=self.tokenize_ms,
            prefill_ms=(self.read - self.reading) * 1e3,
            first_decode_ms=0.0 if first is None else (first - self.read) * 1e3,
            ttft_ms=0.0 if first is None else (first - self.begun) * 1e3,
            queue_ms=self.queue_ms, decode_ms=decode_s * 1e3, draft_ms=draft_ms,
            verify_ms=verify_ms, waiting_ms=max(decode_s * 1e3 - draft_ms - verify_ms, 0.0),
            other_ms=max(self._rounds_s * 1e3 - stats.draft_ms - stats.verify_ms, 0.0),
            deliver_ms=self._deliver_s * 1e3, tok_per_s=speed(n, decode_s),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ready:
    """A request that is prepared as far as that needs no pass. It is for one conversation.

    Attributes:
        clock: runs since the request came.
        stable: of a message that is still being typed, how many tokens of the prompt stand, which
            are only read; None writes a reply.
    """

    params: GenerateParams
    seed: int
    prepared: Prepared
    chain: SamplerChain
    clock: Clock
    stable: int | None = None


class Conversation:
    """One request from prompt to Finished, in a seat of its own."""

    def __init__(
        self, loaded: Loaded, seats: Seats, seat: Seat, ready: Ready, cancel: Cancel
    ) -> None:
        self._loaded = loaded
        self._seats = seats
        self._seat = seat
        self._slot = slot = seat.slot
        self._drafter = seat.drafter
        self._target = slot.target
        self._plan = slot.target.pool.plan
        self._ahead = ready.stable is not None
        self._tokens = History() if self._ahead else slot.history
        self._ready = ready
        self._params = ready.params
        self._cancel = cancel
        self._seed = ready.seed
        self._stats = SpecStats()
        self._passes: list[RoundDone] = []  # after the first token
        self._clock = ready.clock
        self._full: str | None = None  # why the context ended the reply
        self._window = Window(0, steps=loaded.windows.steps)

    def run(self) -> EventSteps[None]:
        """Yield the events of a request."""
        prepared, seat = self._ready.prepared, self._seat
        self._reply = ReplyBuilder(self._params, self._loaded.prompting.vocab, prepared.reader)
        self._tokens.replace(prepared.ids[: seat.until] if self._ahead else prepared.ids)
        self._clock.reading = self._clock.read = perf_counter()
        self._started = self._start(seat.cached)
        yield self._started
        self._undrafted = seat.said if self._drafter.name == "none" else ""
        for notice in prepared.notices:
            yield Notice(notice, "warning", "template")
        if seat.lost:
            yield Notice(seat.lost, "warning", "state")
        if seat.said:
            yield Notice(seat.said, topic="routing")
        if seat.again > _SAID_AGAIN:
            why = f"{self._drafter.name} needs the target's hidden states"
            yield Notice(f"reading {seat.again} tokens again: {why}", topic="routing")
        reason: FinishReason = "cancelled"
        try:
            if self._ahead:
                yield from self._read_ahead()
                yield self._finished("length")
                return
            row = yield from self._read_prompt()
            rounds = yield from self._begin(self._ready.chain)
            reason = yield from self._write(rounds, row)
        except Cancelled:
            pass
        yield from _said(*self._reply.finish(reason))
        yield self._finished(reason)

    def settle(self) -> int:
        """End the conversation; return how many tokens of the target's lane are committed."""
        self._window.finish()
        if self._ahead:
            return len(self._target.tokens)
        if (maker := self._loaded.maker) is not None:
            maker.hear(self._reply.token_ids)
        keep = common_prefix(self._target.tokens, self._tokens)
        if self._stats.rounds and keep > self._started.prompt_n:
            held = self._slot.held
            self._slot.held = replace(held, ends=(*held.ends, keep))
        return keep

    # -- the parts of a request --

    def _start(self, cached: int) -> Started:
        params, drafter = self._params, self._drafter
        wish = params.draft_limit(self._loaded.info.exact_rows)
        limit = min(wish, self._plan.guesses(0, math.inf))
        return Started(
            prompt_n=len(self._tokens), cached_n=cached, n_ctx=self._target.n_ctx,
            seed=self._seed, proposer=drafter.name, verify=params.verify,
            draft_max=0 if drafter.name == "none" else limit,
            exactness=self._loaded.info.exactness, tokenize_ms=self._clock.tokenize_ms,
            queue_ms=self._clock.queue_ms, position=self._ready.prepared.position,
            slot=self._loaded.slots.index(self._slot),
        )  # fmt: skip

    def _read_prompt(self) -> EventSteps[Row]:
        """Read the uncached part; return the row after the prompt."""
        self._cancel.check()
        done, total = self._started.cached_n, self._started.prompt_n
        if (row := self._seat.row) is not None:  # this very prompt was the last one here
            yield from self._drafter.read_prompt(self._tokens, total)
            self._clock.read = perf_counter()
            yield self._progress(total)
            self._cancel.check()
            return row
        if total - done > self._seats.part(total - done):
            yield self._progress(done)
        while done < total:
            done, rows = yield from self._read(self._tokens, done, row=True)
            self._clock.read = perf_counter()
            yield self._progress(done)
            self._cancel.check()
        last: Row = rows[0]  # the last token of a prompt is always read
        last.flags.writeable = False  # the next prompt like it begins with it
        if not self._target.pool.forgets:
            self._slot.held = replace(self._slot.held, row=(total, last))
        return last

    def _progress(self, done: int) -> PrefillProgress:
        total, cached = self._started.prompt_n, self._started.cached_n
        return PrefillProgress(done, total, cached, self._seats.pace.left_ms(total - done))

    def _read_ahead(self) -> EventSteps[None]:
        """Read the uncached part of a text that is still being typed."""
        done, total = self._started.cached_n, self._started.prompt_n
        while done < total:
            self._cancel.check()
            done, _ = yield from self._read(self._tokens, done, row=False)
            self._clock.read = perf_counter()
            yield self._progress(done)

    def _begin(self, chain: SamplerChain) -> EventSteps[Rounds]:
        """Set up the drafter, the rule and the window, which decides how far to draft."""
        windows = self._loaded.windows
        params, drafter = self._params, self._drafter
        rule = rule_of(params.verify, greedy=chain.greedy)
        drafter.start(
            Request(
                seed=self._seed,
                rule=rule,
                coins=self._coins(2),
                is_eog=self._reply.is_stop,
                p_min=params.draft_p_min,
                leaves=1 if rule.chains_only else self._target.max_leaves,
                pass_rows=self._target.max_rows,
                n_ctx=self._target.n_ctx,
                prediction=self._ready.prepared.prediction,
                thinking=self._reply.thinking,
                beside=partial(self._seats.beside, self._slot),
            )
        )
        if advice := drafter.advice():
            yield Notice(message=advice, topic="routing")
        if drafter.name != "none":
            self._window = windows(params)
        if trouble := windows.trouble():
            yield Notice(message=trouble, level="warning", topic="profile")
        self._window.drafts_with(booked(drafter))
        read = self._started.prompt_n - self._started.cached_n
        self._window.prefilled(read, self._started.prompt_n)
        return Rounds(
            target=self._target, drafter=drafter, tokens=self._tokens, chain=chain,
            window=self._window, rule=rule, seed=self._seed, coins=self._coins(1),
            is_stop=self._reply.is_stop, accept=self._accept,
            piece=partial(self._loaded.prompting.vocab.piece, special=True),
            chances=params.chances, inexact=self._inexact, baseline=windows.baseline,
            undrafted=self._undrafted, begun=self._clock.begun, ended=self._clock.read,
        )  # fmt: skip

    def _inexact(self, rows: int, line: bool, past: int) -> bool:
        """True if a pass's rows may differ from those of single steps, also because a pass of
        another width wrote the cache."""
        rows = self._plan.rows(rows)
        if rows > 1 and not self._loaded.info.is_exact(rows, line=line):
            self._slot.mark_inexact_from(past)
        return self._slot.inexact

    def _coins(self, stream: int) -> RandomCoins:
        """Return coins that differ from another reply's with this seed: it may be copied from."""
        started = self._started
        return RandomCoins((started.seed, stream, started.position, started.prompt_n))

    def _write(self, rounds: Rounds, first: Row | None) -> EventSteps[FinishReason]:
        """Run rounds until one ends the reply; ``first`` is the row after the prompt."""
        clock, reply, n_ctx = self._clock, self._reply, self._target.n_ctx
        while reply.reason is None:
            self._cancel.check()
            if len(self._tokens) > n_ctx and not (yield from self._make_room()):
                return "context"
            begun = perf_counter()
            room = self._plan.guesses(len(self._tokens) - 1, reply.remaining)
            try:
                event = yield from rounds.round(room, first=first)
            except ContextFull as full:  # others took what room there was
                self._full = full.message
                return "context"
            first = None
            if event.index and self._drafter.name != "none":
                self._passes.append(event)
            self._stats.observe(event)
            clock.wrote(event)
            handed = perf_counter()
            yield from _said(*reply.new)
            yield event
            clock.delivered(begun, handed)
        return reply.reason

    def _accept(self, tokens: Sequence[int]) -> int:
        took_ms, most_ms = (perf_counter() - self._clock.read) * 1e3, self._params.most_ms
        return self._reply.accept(tokens, late=0 < most_ms < took_ms)

    # -- steps --

    def _read(self, ids: Sequence[int], done: int, *, row: bool) -> Steps[tuple[int, Rows]]:
        """Read a part of ``ids`` after the first ``done``; return how many are read now.

        With ``row`` also the row after the last of all, once it is there.
        """
        pool = self._target.pool
        apart = row and (pool.kernels.apart or pool.forgets)
        left = len(ids) - apart - done
        tokens = ids[done : done + self._seats.part(left)]
        end = done + len(tokens)
        last = row and end == len(ids)
        parts: list[tuple[Sequence[int], Outputs]] = [(tokens, "last" if last else "none")]
        shares = pool.lanes > 1 and pool.kernels.tiles and apart and not pool.forgets
        if last and len(tokens) > TILE and shares:
            # they are two passes in any case, and others can share the second one
            parts = [(tokens[:-1], "none"), (tokens[-1:], "last")]
        for tokens, outputs in parts:
            out: Pass = yield Pass(self._target, tokens, outputs)
            info = self._loaded.info
            if out.shared is not None and (info.exact_rows < 2 or info.widths):
                self._slot.mark_inexact_from(done)  # it is read in other passes than alone
        rows = out.rows.copy()  # another conversation's pass may come before it is drawn from
        yield from self._drafter.read_prompt(self._tokens, end)
        return end, rows

    def _make_room(self) -> EventSteps[bool]:
        """Keep the head of the prompt and the newer half of the rest, and read them again. Return
        False if the reply is to end there instead.

        Reading again, rather than moving the cache, keeps every position's numbers as a fresh
        prompt would have them, so plain and speculative decoding still agree.
        """
        n_ctx, tokens = self._target.n_ctx, self._tokens
        if self._params.on_full == "stop":
            self._full = f"the context of {n_ctx} tokens is full"
            return False
        head = min(self._started.prompt_n, n_ctx // 4)
        tail = (n_ctx - head) // 2
        dropped = len(tokens) - head - tail
        tokens.replace([*tokens[:head], *tokens[-tail:]])
        same = min(common_prefix(self._target.tokens, tokens), head)
        keep = self._target.pool.exact_prefix(self._target, same, len(tokens))
        yield Keep(self._target, keep)
        self._slot.held = replace(self._slot.held.cut(keep), read=0)
        done, text = len(self._target.tokens), tokens[:-1]
        while done < len(text):
            done, _ = yield from self._read(text, done, row=False)
        said = f"context full: dropped {dropped} older tokens, kept {len(tokens)}"
        yield Notice(said, "warning", "context")
        return True

    def _finished(self, reason: FinishReason) -> Finished:
        stats, reply, started = self._stats, self._reply, self._started
        same: dict[str, Any] = {name: getattr(started, name) for name in _AS_STARTED}
        return Finished(
            reason=reason, **same, text=reply.text, reasoning=reply.reasoning,
            seams=reply.seams, stop=reply.stop, token_ids=tuple(reply.token_ids),
            rounds=stats.rounds, draft_n=stats.drafted, draft_n_accepted=stats.accepted,
            cut=stats.cut, acceptance_rate=stats.acceptance_rate,
            mean_acceptance_length=stats.mean_acceptance_length,
            accepted_per_position=tuple(stats.accepted_at),
            drafted_per_position=tuple(stats.drafted_at), near_ties=stats.near_ties,
            timings=self._clock.timings(stats, len(reply.token_ids), self._loaded.info.load_ms),
            message=self._full, verdict=None if started.proposer == "none" else self._judged(),
        )  # fmt: skip

    def _judged(self) -> Payoff:
        found = verdict.judge(self._passes)
        remedies = self._loaded.windows.remedies(self._params, self._passes)
        return replace(found, remedies=remedies)


def _said(reasoning: str, text: str) -> Iterator[Event]:
    if reasoning:
        yield ReasoningDelta(text=reasoning)
    if text:
        yield TextDelta(text=text)
