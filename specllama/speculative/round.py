"""One round: draft, verify, commit.

    tokens            prompt + emitted; the last one is *pending*: not yet in the target's lane
    draft             the drafter's guess of what follows
    rows              target logits after pending and after every drafted token, one pass
    verdict           the accepted path and one target token
    accept            how many of the new tokens come before a stop
    rollback          the lane keeps what was accepted
    RoundDone         the record of it: the event, and the line in the log

A round runs no model: it yields what it needs (``effects``). Invariant after every round: the
target's lane holds ``tokens[:-1]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from specllama.arrays import Row, Rows
from specllama.backend.base import Context, Shared
from specllama.errors import Cancelled
from specllama.events import Chance, Chances, RoundDone
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.effects import Keep, Offer, Pass, Steps
from specllama.speculative.rules import Coins, Rule, Walk
from specllama.speculative.sampling import SamplerChain, likeliest
from specllama.speculative.types import EMPTY_DRAFT, Draft, DraftJudge, Room, Verdict
from specllama.speculative.window import Plan, Window
from specllama.text import spelled

# A lead below this, in logits before the temperature, can flip when a pass of another width rounds
# differently (measured: up to 0.1 on CPUs).
NEAR_TIE = 0.1

_FIRST = Plan(0, "first token")


@dataclass(kw_only=True)
class Rounds:
    """The rounds of one conversation.

    Attributes:
        target: its lane, which holds ``tokens[:-1]``, or all of them if the first round is given
            the row after them.
        tokens: prompt tokens; grows in place.
        chain: the sampler chain positioned after ``tokens``.
        accept: how many of a round's tokens are kept: those up to the one that ends the reply.
        piece: the bytes of a token, for the record.
        chances: tell the probability of every token, and of so many others; None does not.
        inexact: of a pass (rows, whether they follow each other, tokens before them), whether its
            rows may differ by rounding from those of single steps; only then near-ties are logged.
        baseline: the ``Baseline`` of a plain step after so many tokens, None where it is unknown.
        undrafted: why no round drafts, "" if they may.
        clock: seconds; a virtual one in simulations.
        begun: by it, when the request came.
        ended: when the round before ended, or the prompt had been read; None if that is unknown.
        index: of the next round.
    """

    target: Context
    drafter: Drafter
    tokens: list[int]
    chain: SamplerChain
    window: Window
    rule: Rule
    seed: int
    coins: Coins
    is_stop: Callable[[int], bool]
    accept: Callable[[Sequence[int]], int] = len
    piece: Callable[[int], bytes] = lambda token: b""
    chances: int | None = None
    inexact: Callable[[int, bool, int], bool] = lambda rows, line, past: True
    baseline: Callable[[int], Any] = lambda depth: None
    undrafted: str = ""
    clock: Callable[[], float] = field(default_factory=lambda: perf_counter)
    begun: float = 0.0
    ended: float | None = None
    index: int = 0

    def __post_init__(self) -> None:
        # whether a draft may be cut for what it holds, see ``Offer``
        self._peek = self.rule.peek or self.chain.greedy
        self._pass = Pass(self.target, (), "all")  # one for all rounds, as is the walk
        self._walk = Walk(self._pass.rows, self.chain)

    def round(self, room: float = math.inf, *, first: Row | None = None) -> Steps[RoundDone]:
        """Draft, verify and commit once.

        Args:
            room: guesses that there is room for.
            first: the row [n_vocab] after all ``tokens``, from the pass that read the prompt: the
                first token is drawn from it, and nothing is drafted or evaluated.

        Raises:
            ContextFull: no room for the pending token.
        """
        clock = self.clock
        begin = clock()
        wait_ms = 0.0 if self.ended is None else (begin - self.ended) * 1e3
        past = len(self.tokens) - 1
        plan, draft, read, why, shared = _FIRST, EMPTY_DRAFT, 0, "", None
        if first is None:
            plan = self.window.plan(room)
        drafted = clock()
        if plan.draft_max > 0:
            asked = Room(plan.draft_max, plan.judge or DraftJudge())
            draft = yield from self.drafter.draft(self.tokens, self.chain, asked)
            drafted, read = clock(), asked.judge.granted
            draft, why = yield from self._granted(plan, asked.judge.weighed(draft))
        try:
            if first is None:
                yield self._asked(draft)
                rows, shared = self._pass.rows, self._pass.shared
            else:
                rows = first[None]
            evaluated = clock()
            n = len(draft) + 1 if shared is None else shared.tokens
            inexact = self.inexact(n, draft.is_line, past)
            self._walk.rows, self._walk.measured = rows, inexact
            verdict = self.rule.judge(draft, self._walk, self.seed, self.coins, self.is_stop)
            if len(draft):
                self.drafter.read_rows(draft, lambda node: rows[node + 1])
        except GeneratorExit:
            raise  # no driver answers any more
        except BaseException:
            # a cache that could not be rolled back may hold less by now
            yield Keep(self.target, min(past, len(self.target.tokens)))
            raise
        judged = clock()
        new = [draft.tokens[i] for i in verdict.path]
        if verdict.target_token is not None:
            new.append(verdict.target_token)
        kept = self.accept(new)
        chances = self._likely(rows, verdict, new[:kept])
        with suppress(Cancelled):  # the text stands, whatever of it a running state loses
            if not draft.is_line:
                yield Keep(self.target, path=(0, *(i + 1 for i in verdict.path[: kept - 1])))
            elif kept <= len(draft):
                yield Keep(self.target, past + kept)
        settled = clock()
        self._commit(draft, verdict, new, kept)
        done = self.ended = clock()
        draft_ms, ms = (drafted - begin) * 1e3, (done - begin) * 1e3
        verify_ms = (evaluated - drafted + settled - judged) * 1e3
        # what is learned from; of a shared pass what it took alone, without the wait for it
        rest_ms = ms - draft_ms if shared is None else (done - evaluated) * 1e3 + shared.ms
        return self._record(
            plan, why or self.window.explain(len(draft)), draft, verdict, tuple(new[:kept]),
            rest_ms if first is None else None, shared, n_past=past, read=read,
            near_tie=inexact and verdict.gap is not None and verdict.gap < NEAR_TIE,
            chances=chances, draft_ms=draft_ms, verify_ms=verify_ms,
            other_ms=ms - draft_ms - verify_ms, wait_ms=wait_ms,
        )  # fmt: skip

    def _commit(self, draft: Draft, verdict: Verdict, new: list[int], kept: int) -> None:
        """Add the first ``kept`` new tokens; drafters learn from all that was judged."""
        if verdict.target_token is not None and kept == len(new):
            self.chain.advance_committed(verdict.target_token, self.is_stop)
        self.tokens.extend(new[:kept])
        whole = self.tokens if kept == len(new) else [*self.tokens, *new[kept:]]
        self.drafter.commit(whole, draft, verdict)

    def _granted(self, plan: Plan, draft: Draft) -> Steps[tuple[Draft, str]]:
        """Return the part of a draft to send, and the reason for a cut."""
        if n := len(draft):
            most = n if self._peek else max(plan.draft_max, n)
            offer = Offer(draft, most, self._peek, self.window.bid)
            granted: int = yield offer
            if granted < offer.size and len(draft := offer.cut(granted)) < n:
                return draft, f"{len(draft)} of {n} guesses: others share the pass"
        return draft, ""

    def _asked(self, draft: Draft) -> Pass:
        """Return the pass of the pending token and the guesses; it returns a row after each."""
        self._pass.lane, self._pass.tokens = self.target, [self.tokens[-1], *draft.tokens]
        self._pass.parents = None if draft.is_line else [-1, *(p + 1 for p in draft.parents)]
        return self._pass

    def _record(
        self,
        plan: Plan,
        why: str,
        draft: Draft,
        verdict: Verdict,
        emitted: tuple[int, ...],
        rest_ms: float | None,
        shared: Shared | None,
        **known: Any,
    ) -> RoundDone:
        """Return the record of a round: the event, and the line in the log. The window learns from
        it, unless there was no pass (``rest_ms`` None). ``known``: fields that are as they are."""
        drafted, target_token = draft.tokens, verdict.target_token
        n, accepted = len(drafted), min(len(verdict.path), len(emitted))
        plain = self.baseline(known["n_past"]) if n else None
        index, self.index = self.index, self.index + 1
        record = RoundDone(
            index=index,
            t_s=self.clock() - self.begun,
            source=draft.source,
            draft_max=n if why else plan.draft_max,
            window_reason=self.undrafted or why or plan.reason,
            drafted=drafted,
            parents=draft.parents,
            drafted_text=self._show(drafted),
            confidence=draft.confidence,
            p=verdict.p if len(verdict.p) == n else (None,) * n,
            q=tuple(
                [None if q is None else q.prob(t) for q, t in zip(draft.q, drafted, strict=True)]
            ),
            accepted=accepted,
            accepted_path=verdict.path[:accepted],
            target_token=target_token,
            target_text="" if target_token is None else self._show((target_token,))[0],
            target_kind=verdict.kind,
            emitted=emitted,
            emitted_text=self._show(emitted),
            cut=accepted + 1 - len(emitted),
            sources=draft.sources,
            plain_ms=None if plain is None else plain.ms,
            plain_age_s=None if plain is None else plain.age_s,
            plain_n=0 if plain is None else plain.n,
            plain_spread=None if plain is None else plain.spread,
            **known,
        )
        if rest_ms is not None:
            self.window.observe(record, rest_ms, shared)
        # what may be lost from here on; nobody has seen the record yet
        object.__setattr__(record, "balance", self.window.balance)
        return record

    def _show(self, tokens: Sequence[int]) -> tuple[str, ...]:
        piece = self.piece
        return tuple([spelled(piece(token)) for token in tokens])

    def _likely(self, rows: Rows, verdict: Verdict, new: Sequence[int]) -> tuple[Chances, ...]:
        """Return the likeliest tokens of the row that each new token was drawn from."""
        if self.chances is None:
            return ()
        told: list[Chances] = []
        for node, token in zip((-1, *verdict.path), new, strict=False):
            found = likeliest(rows[node + 1], token, self.chances)
            (_, logprob), *top = found
            others = [Chance(t, p, tuple(self.piece(t))) for t, p in top]
            told.append(Chances(token, logprob, tuple(self.piece(token)), tuple(others)))
        return tuple(told)
