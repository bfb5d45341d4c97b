"""A conversation's place in the engine: its lane of the target, its drafters, its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

from specllama.arrays import Row
from specllama.backend.base import Blob, Context, Lane, Pool
from specllama.backend.kernels import TILE
from specllama.errors import EngineError, PairIncompatible, SpecllamaError, UsageError
from specllama.interface import EngineInfo
from specllama.settings.params import GenerateParams
from specllama.speculative.drafting.drafter import Drafter, Held
from specllama.speculative.drafting.method import HINTS, Facts, find, methods
from specllama.speculative.rules import rule_of
from specllama.text import number_of
from specllama.text_history import History


@dataclass(frozen=True, slots=True)
class HeldText:
    """The facts about a text whose cells are held: in a slot, outside of it, or on disk.

    Attributes:
        ends: where its replies ended. A prompt that goes on from there takes what is before it as
            it was written.
        row: of the prompt that was read last: how many tokens it has, and what follows them; None
            where the cells behind it are gone.
        read: tokens of that prompt, if all of it was read afresh; 0 where it went on from
            something, or another text was read since.
        inexact_from: the position from which the cells may differ from those of single steps by
            rounding; None if nowhere.
        scope: of the request that left it.
        owner: see ``GenerateParams.owner``.
        unkept: it is to be kept on disk, and is not there yet.
        ahead: in a slot, tokens that stood here before some were read ahead; None if none were.
    """

    ends: tuple[int, ...] = ()
    row: tuple[int, Row] | None = None
    read: int = 0
    inexact_from: int | None = None
    scope: str = ""
    owner: str = ""
    unkept: bool = False
    ahead: int | None = None

    def begin(self, known: int) -> int:
        """Return how many of the first ``known`` tokens stay as they were written."""
        return max((end for end in self.ends if end <= known), default=0)

    def cut(self, n: int) -> HeldText:
        """Return the facts about the first ``n`` tokens."""
        at, row = self.inexact_from, self.row
        return replace(
            self,
            ends=tuple(end for end in self.ends if end <= n),
            row=None if row is None or row[0] > n else row,
            inexact_from=None if at is None or n <= at else at,
        )


@dataclass(eq=False, slots=True)
class ParkedText:
    """A text outside the pools: its cells, those of its drafters' lanes, and by name what drafters
    know besides."""

    blob: Blob
    held: HeldText
    beside: Sequence[tuple[Pool, Blob]] = ()
    heads: Mapping[str, Held] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        arrays = (array.nbytes for held in self.heads.values() for array in held.values())
        row = self.held.row
        whole = self.blob.n_bytes + (0 if row is None else row[1].nbytes)
        return whole + sum(blob.n_bytes for _, blob in self.beside) + sum(arrays)


class Slot:
    """A slot: it serves one conversation at a time and keeps what the next one may reuse.

    Args:
        target: the lane of the target.
        drafters: by method; "none" is always there.
    """

    def __init__(self, target: Lane, drafters: Mapping[str, Drafter]) -> None:
        self.target = target
        self.drafters: dict[str, Drafter] = {"none": Drafter(), **drafters}
        self.history = History()  # the text of the present request, and of the last one until then
        self.held = HeldText()

    def drafter_for(self, params: GenerateParams, info: EngineInfo) -> tuple[Drafter, str]:
        """Return the drafter of a request, and a notice about it: mostly why nothing is drafted.

        Raises:
            UsageError: what was asked for needs a draft model or a head, and none was given; or
                the rule cannot judge it.
            PairIncompatible: the files lack what it needs.
        """
        none = self.drafters["none"]
        if not params.speculate or params.proposer == "none" or params.draft_max == 0:
            return none, ""
        if params.max_tokens is not None and params.max_tokens < params.min_speculative_tokens:
            return none, "" if info.draft is None else (
                f"no drafting for {number_of(params.max_tokens, 'token')}: "
                f"it starts to pay at {params.min_speculative_tokens}"
            )
        if self.target.max_rows < 2:
            return none, "nothing is drafted: no pass of two rows is bit-exact here (--exact)"
        drafter = self._named(params.proposer, info)
        rule = rule_of(params.verify, greedy=params.sampling.temperature == 0.0)
        method = find(drafter.name)
        branches = "no" if method is None else method.branches
        if not rule.chains_only or branches == "no" or self.target.max_leaves < 2:
            return drafter, ""
        if branches == "must":
            raise UsageError(
                f"{drafter.name} drafts trees, and {rule.name} verification judges chains only",
                "use --verify match or --verify rejection",
            )
        return drafter, f"{rule.name} verification judges chains only: branches are left out"

    def _named(self, name: str, info: EngineInfo) -> Drafter:
        if name == "auto":
            parts = (method.name for method in methods() if method.auto)
            name = next((n for n in ("mixed", *parts) if n in self.drafters), "none")
        if name not in self.drafters:
            raise _missing(name, info, sorted(self.drafters))
        return self.drafters[name]

    @property
    def beside(self) -> list[Context]:
        """The lanes that its drafters read the text in, each once."""
        every = [lane for drafter in self.drafters.values() for lane in drafter.lanes]
        return list(dict.fromkeys(every))

    @property
    def settled(self) -> int:
        """The number of the target's tokens that were not read ahead."""
        n, ahead = len(self.target.tokens), self.held.ahead
        return n if ahead is None else min(ahead, n)

    def drop_ahead(self) -> None:
        """Cut the text to what was not read ahead."""
        self.target.rollback(self.settled)
        self.held = replace(self.held, ahead=None)

    def serves(self, scope: str) -> None:
        """Forget all texts of another scope: drafts would reveal them."""
        if self.held.scope != scope:
            self.held = replace(self.held, scope=scope)
            self.history.clear()
            self._forget_drafts()

    def reset(self) -> None:
        """Forget every text, so that the next prompt is read afresh."""
        self.target.rollback(0)
        self.held = HeldText()
        self._forget_drafts()

    def _forget_drafts(self) -> None:
        for lane in self.beside:
            lane.rollback(0)
        for drafter in self.drafters.values():
            drafter.forget()

    def outside(self, *, move: bool) -> ParkedText:
        """Copy its content out of the pools; ``move``: the slot does not keep it.

        Raises:
            EngineError: the library does not give it away; it stays.
        """

        def give(pool: Pool, lane: Lane) -> Blob:
            return pool.park(lane) if move else pool.copied(lane)

        heads = {name: held for name, one in self.drafters.items() if (held := one.held())}
        blob = give(self.target.pool, self.target)
        beside: list[tuple[Pool, Blob]] = []
        for lane in self.beside:
            if lane.pool is not None and lane.tokens:
                with suppress(EngineError):
                    beside.append((lane.pool, give(lane.pool, cast(Lane, lane))))
        return ParkedText(blob, replace(self.held, ahead=None), beside, heads)

    def holds(self, text: Sequence[int], heads: Mapping[str, Held]) -> None:
        """Take over the text that the target's lane was given; ``heads``: the drafters'
        knowledge."""
        self.history.replace(text)
        for name, held in heads.items():
            self.drafters[name].hold(held, self.history)

    def close(self) -> None:
        for drafter in self.drafters.values():
            drafter.close()
        for lane in self.beside:
            lane.close()
        self.target.close()

    # -- cells that a pass of another width wrote --

    def mark_inexact_from(self, at: int) -> None:
        """Note that from ``at`` on, the cache may differ by rounding from that of single steps."""
        before = self.held.inexact_from
        if before is None or at < before:
            self.held = replace(self.held, inexact_from=at)

    def goes_on(self, cached: int, n: int) -> None:
        """Note that a prompt of ``n`` tokens continues its first ``cached`` ones, in this slot.

        Where passes round, those may differ from what a fresh reading would leave, unless they are
        what it left: a prompt as long as this one is read in the same parts. A running state goes
        on at the beginning of such a part, other lanes where nothing is left to be read, or the
        last token if it was read alone.
        """
        pool = self.target.pool
        kernels = pool.kernels
        alone = kernels.apart and (n > TILE or bool(kernels.widths))
        same = pool.forgets or cached == n or (cached == n - 1 and alone)
        if cached and not (self.held.read == n and same):
            self.held = replace(self.held, read=0)
            if pool.forgets or not kernels.any_parts:
                self.mark_inexact_from(cached - 1)
        else:
            self.held = replace(self.held, read=n)

    @property
    def inexact(self) -> bool:
        """True if a row can differ from that of plain decoding by rounding."""
        return self.held.inexact_from is not None


def _missing(name: str, info: EngineInfo, have: Sequence[str]) -> SpecllamaError:
    """Return the error for a request whose method is not loaded."""
    reason = next((m.reason for m in info.methods if m.name == name), "")
    if not reason and (method := find(name)):
        reason = method.why_not(Facts())
    hint = HINTS.get(reason)
    words = f"the proposer {name!r} cannot draft for this pair" + (f": {reason}" if reason else "")
    if hint is None and reason:  # no option makes good what the files lack
        return PairIncompatible(words, f"here: {', '.join(have)}")
    return UsageError(words, hint or f"here: {', '.join(have)}")
