"""One round: draft, verify, commit.

    tokens            prompt + emitted; the last one is *pending*: not yet in the target's lane
    draft             the drafter's guess of what follows
    rows              target logits after pending and after every drafted token, one pass
    verdict           the accepted path and one target token
    rollback          the lane keeps what was accepted

A round runs no model: it yields what it needs (``effects``). Invariant after every round: the
target's lane holds ``tokens[:-1]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from specllama.arrays import Row, Rows
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.effects import Keep, LaneView, Offer, Pass, Shared, Steps
from specllama.speculative.rules import Coins, Rule
from specllama.speculative.sampling import SamplerChain, likeliest
from specllama.speculative.types import EMPTY_DRAFT, Draft, Law, Room, Verdict, Willing
from specllama.speculative.window import Outcome, Plan, Window


@dataclass(frozen=True, slots=True)
class Round:
    """One finished round, before stop handling. Times in milliseconds.

    ``tokens`` are the new tokens: the accepted drafts, then the target token if one was drawn.
    ``read`` are those of the text that the drafter read first.
    """

    draft: Draft
    verdict: Verdict
    plan: Plan
    tokens: tuple[int, ...]
    n_past: int
    draft_ms: float
    verify_ms: float
    other_ms: float
    wait_ms: float = 0.0  # between the round before and this one
    read: int = 0
    likely: tuple[list[tuple[int, float]], ...] = ()  # see ``likeliest``, of each of ``tokens``


@dataclass(slots=True)
class _Times:
    """The times at which the parts of a round ended, in seconds of the clock."""

    begin: float
    wait_ms: float
    drafted: float = 0.0
    evaluated: float = 0.0
    judged: float = 0.0
    settled: float = 0.0
    done: float = 0.0

    @property
    def draft_ms(self) -> float:
        return (self.drafted - self.begin) * 1e3

    @property
    def verify_ms(self) -> float:
        return (self.evaluated - self.drafted + self.settled - self.judged) * 1e3

    @property
    def round_ms(self) -> float:
        return (self.done - self.begin) * 1e3

    @property
    def own_ms(self) -> float:
        """The time outside the target's pass and the wait for it."""
        return self.draft_ms + (self.done - self.evaluated) * 1e3


class TargetWalk:
    """The target's laws along the draft: rows [1 + n, n_vocab] through the sampler chain."""

    def __init__(self, rows: Rows, chain: SamplerChain, measured: bool = True) -> None:
        self._rows = rows
        self._chain = chain
        self._measured = measured  # whether it is asked how near another token was

    @property
    def position(self) -> int:
        return self._chain.position

    @property
    def scale(self) -> float:
        return self._chain.scale

    def slack(self, token: int) -> float:
        return self._chain.slack(token) if self._measured else math.inf

    def law(self, node: int) -> Law:
        return self._chain.law(self._rows[node + 1])

    def advance(self, token: int) -> None:
        self._chain.advance(token)

    def fork(self) -> TargetWalk:
        return TargetWalk(self._rows, self._chain.fork(), self._measured)


class Rounds:
    """The rounds of one conversation.

    Args:
        target: its lane, which holds ``tokens[:-1]``, or all of them if the first round is given
            the row after them.
        tokens: prompt tokens; grows in place.
        chain: the sampler chain positioned after ``tokens``.
        pass_rows: widest pass of the target.
        chances: tell the probability of every token, and of so many others; None does not.
        inexact: of a pass (rows, whether they follow each other, tokens before them), whether its
            rows may differ by rounding from those of single steps; only then near-ties are logged.
        clock: seconds; a virtual one in simulations.
    """

    def __init__(
        self,
        *,
        target: LaneView,
        drafter: Drafter,
        tokens: list[int],
        chain: SamplerChain,
        window: Window,
        rule: Rule,
        seed: int,
        coins: Coins,
        is_stop: Callable[[int], bool],
        pass_rows: int,
        chances: int | None = None,
        inexact: Callable[[int, bool, int], bool] = lambda rows, line, past: True,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._chances = chances
        self._inexact = inexact
        self.tokens = tokens
        self.chain = chain
        self.target = target
        self.drafter = drafter
        self.window = window
        self._rule = rule
        self._seed = seed
        self._coins = coins
        self._is_stop = is_stop
        self._pass_rows = pass_rows
        self._clock = clock or perf_counter
        # whether a draft may be cut for what it holds, see ``Offer``
        self._peek = rule.peek or chain.greedy
        self._shared: Shared | None = None
        self._ended: float | None = None  # the round before

    def round(self, remaining: float = math.inf, *, first: Row | None = None) -> Steps[Round]:
        """Draft, verify and commit once.

        Args:
            remaining: tokens that it may add at most; a draft never exceeds ``remaining - 1``.
            first: the row [n_vocab] after all ``tokens``, from the pass that read the prompt: the
                first token is drawn from it, and nothing is drafted or evaluated.

        Raises:
            ContextFull: no room for the pending token.
        """
        clock, at = self._clock, self._begin()
        past = len(self.tokens) - 1
        plan, draft, read, cut = Plan(0, "first token"), EMPTY_DRAFT, 0, None
        if first is None:
            plan = self.window.plan(self._room(remaining, past))
        at.drafted = clock()
        if plan.draft_max > 0:
            draft, read, cut = yield from self._draft(plan, at)
        self._shared = None
        try:
            rows = (yield self._pass(draft)).rows if first is None else first[None]
            at.evaluated = clock()
            n = len(draft) + 1 if self._shared is None else self._shared.tokens
            walk = TargetWalk(rows, self.chain, self._inexact(n, draft.is_line, past))
            verdict = self._rule.judge(draft, walk, self._seed, self._coins, self._is_stop)
            if len(draft):
                self.drafter.read_rows(draft, lambda node: rows[node + 1])
        except GeneratorExit:
            raise  # no driver answers any more
        except BaseException:
            # a cache that could not be rolled back may hold less by now
            yield Keep(self.target, min(past, len(self.target.tokens)))
            raise
        at.judged = clock()
        kept = len(verdict.path)
        new = [draft.tokens[i] for i in verdict.path]
        if verdict.target_token is None:
            kept -= 1  # the path ends on a stop token, which stays pending
        else:
            new.append(verdict.target_token)
        likely = self._likely(rows, verdict, new)
        if not draft.is_line:
            yield Keep(self.target, path=(0, *(i + 1 for i in verdict.path[:kept])))
        elif kept < len(draft):
            yield Keep(self.target, past + 1 + kept)
        at.settled = clock()

        if verdict.target_token is not None:
            self.chain.advance_committed(verdict.target_token, self._is_stop)
        self.tokens.extend(new)
        self.drafter.commit(self.tokens, draft, verdict)
        at.done = self._ended = clock()
        if first is None:  # else there was no pass to learn from
            told = self.window.observe(self._outcome(draft, verdict, tuple(new), at))
            plan = cut or told or plan
        return Round(
            draft=draft,
            verdict=verdict,
            plan=plan,
            tokens=tuple(new),
            n_past=past,
            draft_ms=at.draft_ms,
            verify_ms=at.verify_ms,
            other_ms=at.round_ms - at.draft_ms - at.verify_ms,
            wait_ms=at.wait_ms,
            read=read,
            likely=likely,
        )

    def _draft(self, plan: Plan, at: _Times) -> Steps[tuple[Draft, int, Plan | None]]:
        """Return the draft to send, the tokens of the text read for it, and the reason for a
        cut."""
        room = Room(plan.draft_max, plan.judge or Willing())
        draft = yield from self.drafter.draft(self.tokens, self.chain, room)
        at.drafted, cut = self._clock(), None
        if n := len(draft):
            most = n if self._peek else max(plan.draft_max, n)
            offer = Offer(draft, most, self._peek, self.window)
            granted: int = yield offer
            if granted < offer.size and len(draft := offer.cut(granted)) < n:
                cut = Plan(len(draft), f"{len(draft)} of {n} guesses: others share the pass")
        return draft, room.judge.granted, cut

    def _pass(self, draft: Draft) -> Pass:
        """Return the pass of the pending token and the guesses; it returns a row after each."""
        parents = None if draft.is_line else [-1, *(p + 1 for p in draft.parents)]
        tokens = [self.tokens[-1], *draft.tokens]
        return Pass(self.target, tokens, "all", parents=parents, on_shared=self._on_shared)

    def _outcome(
        self, draft: Draft, verdict: Verdict, tokens: tuple[int, ...], at: _Times
    ) -> Outcome:
        shared = self._shared
        ms = at.round_ms if shared is None else at.own_ms + shared.ms
        return Outcome(len(draft), len(verdict.path), tokens, at.draft_ms, ms, shared, at.wait_ms)

    def _begin(self) -> _Times:
        begin = self._clock()
        return _Times(begin, 0.0 if self._ended is None else (begin - self._ended) * 1e3)

    def _likely(
        self, rows: Rows, verdict: Verdict, new: list[int]
    ) -> tuple[list[tuple[int, float]], ...]:
        """Return the likeliest tokens of the row that each new token was drawn from."""
        if self._chances is None:
            return ()
        drawn_at = (-1, *verdict.path)
        return tuple(
            [
                likeliest(rows[node + 1], token, self._chances)
                for node, token in zip(drawn_at, new, strict=False)
            ]
        )

    def _on_shared(self, shared: Shared) -> None:
        self._shared = shared

    def _room(self, remaining: float, past: int) -> int:
        return int(min(remaining - 1, self.target.n_ctx - past - 1, self._pass_rows - 1))

    def cut_back(self, n_tokens: int) -> Steps[None]:
        """Forget everything after the first ``n_tokens`` (a stop inside an accepted run)."""
        del self.tokens[n_tokens:]
        yield Keep(self.target, min(n_tokens - 1, len(self.target.tokens)))
