"""The round loop: propose, verify, commit.

    tokens            prompt + emitted; the last one is *pending*: not yet in the target's cache
    draft             the proposer's guess of what follows
    rows              target logits after pending and after every drafted token, one pass
    verdict           the accepted path and one target token
    rollback          the caches keep what was accepted

Invariant after every round: ``target.n_past == len(tokens) - 1``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter

from specllama.backend.base import Context
from specllama.errors import EngineError
from specllama.params import VerifyRule
from specllama.speculative.drafting.drafter import Proposer, RowReader
from specllama.speculative.rules import Coins, verify_block, verify_match, verify_rejection
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT, Draft, Law, Room, Row, Rows, Verdict
from specllama.speculative.window import Outcome, Plan, Window


@dataclass(frozen=True, slots=True)
class Round:
    """One finished round, before stop handling. Times in milliseconds.

    ``tokens`` are the new tokens: the accepted drafts, then the target token if one was drawn.
    ``read`` are those of the text that the proposer read first.
    """

    draft: Draft
    verdict: Verdict
    plan: Plan
    tokens: tuple[int, ...]
    n_past: int
    draft_ms: float
    verify_ms: float
    other_ms: float
    read: int = 0


class TargetRows:
    """Rows of one verify pass, evaluated in groups of at most ``group`` tokens, on demand.

    Groups keep a pass within the row count that is bit-identical to single-row decoding, and the
    groups behind a rejection are never evaluated. ``first`` is the first row, where it is known.
    """

    def __init__(
        self,
        target: Context,
        tokens: list[int],
        draft: Draft,
        group: int,
        first: Row | None = None,
    ) -> None:
        self._target = target
        self._tokens = tokens
        self._parents = None if draft.is_line else [-1, *(p + 1 for p in draft.parents)]
        self._group = len(tokens) if self._parents is not None else group
        self._first = 0
        self._rows: Rows | None = None if first is None else first[None]
        self.seconds = 0.0

    def __call__(self, index: int) -> Row:
        """The row after token ``index`` of the pass; indices must not decrease."""
        if index < self._first:
            raise EngineError("rows of an earlier group were overwritten")
        while self._rows is None or index >= self._first + len(self._rows):
            start = self._first + (0 if self._rows is None else len(self._rows))
            part = self._tokens[start : start + self._group]
            begin = perf_counter()
            self._rows = self._target.forward(part, outputs="all", parents=self._parents)
            self.seconds += perf_counter() - begin
            self._first = start
        row: Row = self._rows[index - self._first]
        return row


class TargetWalk:
    """The target's laws along the draft: rows through the sampler chain."""

    def __init__(self, rows: TargetRows, chain: SamplerChain) -> None:
        self._rows = rows
        self._chain = chain

    @property
    def position(self) -> int:
        return self._chain.position

    @property
    def scale(self) -> float:
        return self._chain.scale

    @property
    def gap(self) -> float:
        return self._chain.gap

    def law(self, node: int) -> Law:
        return self._chain.law(self._rows(node + 1))

    def advance(self, token: int) -> None:
        self._chain.advance(token)

    def fork(self) -> TargetWalk:
        return TargetWalk(self._rows, self._chain.fork())


class SpeculativeLoop:
    """Rounds over one conversation.

    Args:
        target: its cache must hold ``tokens[:-1]``, or all of them if the first round is given
            the row behind them.
        tokens: prompt tokens; grows in place.
        chain: the sampler chain positioned after ``tokens``.
        exact_rows: largest pass, 0 for no bound (then ``target.max_rows`` is).
    """

    def __init__(
        self,
        *,
        target: Context,
        proposer: Proposer,
        tokens: list[int],
        chain: SamplerChain,
        window: Window,
        rule: VerifyRule,
        seed: int,
        coins: Coins,
        is_stop: Callable[[int], bool],
        exact_rows: int = 0,
    ) -> None:
        self.target = target
        self.proposer = proposer
        self.tokens = tokens
        self.chain = chain
        self.window = window
        self._rule = rule
        self._seed = seed
        self._coins = coins
        self._is_stop = is_stop
        self._group = exact_rows if exact_rows > 0 else target.max_rows
        self._reader = proposer if isinstance(proposer, RowReader) else None

    def round(self, remaining: float = math.inf, *, first: Row | None = None) -> Round:
        """One propose, verify, commit.

        Args:
            remaining: tokens still wanted; a draft never exceeds ``remaining - 1``.
            first: the row [vocab] behind all ``tokens``, from the pass that read the prompt: the
                first token is drawn from it, and nothing is drafted or evaluated.

        Raises:
            ContextFull: no room for the pending token.
        """
        begin = perf_counter()
        past = len(self.tokens) - 1
        room = int(min(remaining - 1, self.target.n_ctx - past - 1, self.target.max_rows - 1))
        plan = self.window.plan(room) if first is None else Plan(0, "first token")
        draft = EMPTY_DRAFT
        read = 0
        if plan.draft_max > 0:
            offered = plan.room or Room(plan.draft_max, self.window.keep_going)

            def begin_reading(source: str, lag: int) -> int:
                nonlocal read
                granted = min(offered.begin(source, lag), lag)
                read += granted
                return granted

            draft = self.proposer.propose(
                self.tokens, self.chain, replace(offered, begin=begin_reading)
            )
            if plan.explain is not None:
                plan = plan.explain(draft)
        drafted = perf_counter()

        rows = TargetRows(self.target, [self.tokens[-1], *draft.tokens], draft, self._group, first)
        try:
            verdict = self._verify(draft, TargetWalk(rows, self.chain))
            if self._reader is not None and len(draft):
                self._reader.read_rows(draft, lambda node: rows(node + 1))
        except BaseException:
            # a cache that had to be replayed and could not is empty by now
            self.target.rollback(min(past, self.target.n_past))
            raise
        new = [draft.tokens[i] for i in verdict.path]
        cut = perf_counter()
        if draft.is_line:
            # a stop token that was accepted may lie in a group that was never evaluated
            self.target.rollback(min(self.target.n_past, past + 1 + len(new)))
        else:
            self.target.keep_path([0, *(i + 1 for i in verdict.path)])
        verify_s = rows.seconds + perf_counter() - cut

        if verdict.target_token is not None:
            self.chain.advance_committed(verdict.target_token, self._is_stop)
            new.append(verdict.target_token)
        self.tokens.extend(new)
        if verdict.target_token is None:
            # the path ends on a stop token, which stays pending
            self.target.rollback(len(self.tokens) - 1)
        self.proposer.commit(self.tokens, draft, verdict)
        done = perf_counter()
        draft_ms = (drafted - begin) * 1e3
        verify_ms = verify_s * 1e3
        finished = Round(
            draft=draft,
            verdict=verdict,
            plan=plan,
            tokens=tuple(new),
            n_past=past,
            draft_ms=draft_ms,
            verify_ms=verify_ms,
            other_ms=(done - begin) * 1e3 - draft_ms - verify_ms,
            read=read,
        )
        if first is None:  # else there was no pass to learn from
            self.window.observe(
                Outcome(
                    source=draft.source,
                    drafted=len(draft),
                    accepted=len(verdict.path),
                    emitted=len(new),
                    confidence=draft.confidence,
                    draft_ms=draft_ms,
                    verify_ms=verify_ms,
                    round_ms=(done - begin) * 1e3,
                    tokens=finished.tokens,
                )
            )
        return finished

    def _verify(self, draft: Draft, walk: TargetWalk) -> Verdict:
        if self._rule == "match" or self.chain.greedy:
            return verify_match(draft, walk, self._seed, self._is_stop)
        if self._rule == "block" and draft.is_chain:
            return verify_block(draft, walk, self._coins, self._is_stop)
        return verify_rejection(draft, walk, self._coins, self._is_stop)

    def cut_back(self, n_tokens: int) -> None:
        """Forget everything behind the first ``n_tokens`` (a stop inside an accepted run)."""
        del self.tokens[n_tokens:]
        self.target.rollback(min(self.target.n_past, n_tokens - 1))
