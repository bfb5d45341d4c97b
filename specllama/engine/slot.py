"""A conversation's place in the engine: its lane of the target, its drafters, what was written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from specllama.backend.base import Context, Lane
from specllama.errors import PairIncompatible, UsageError
from specllama.interface import EngineInfo
from specllama.params import GenerateParams
from specllama.speculative.asking import Cut, grant
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.method import NO_DRAFT, NO_HEAD
from specllama.speculative.history import History
from specllama.speculative.rules import rule_of


class Slot:
    """Serves one conversation at a time and keeps what the next one may use again.

    Args:
        target: the lane of the target.
        drafters: by method; "none" is always there.
    """

    def __init__(self, target: Lane, drafters: Mapping[str, Drafter]) -> None:
        self.target = target
        self.drafters: dict[str, Drafter] = {"none": Drafter(), **drafters}
        self.history = History()  # the text of the present request, and of the last one until then
        self._rounded: int | None = None

    def drafter_for(self, params: GenerateParams, info: EngineInfo) -> tuple[Drafter, str]:
        """The drafter of a request, and what to say about it: mostly why nothing is drafted.

        Raises:
            UsageError: a method was named that this engine does not have, or that the rule cannot
                judge.
            PairIncompatible: NextN layers were asked of a target that has none to run.
        """
        none = self.drafters["none"]
        if not params.speculate or params.proposer == "none" or params.draft_max == 0:
            return none, ""
        if params.max_tokens is not None and params.max_tokens < params.min_speculative_tokens:
            return none, (
                f"speculation skipped: {params.max_tokens} tokens asked for, "
                f"it starts to pay at {params.min_speculative_tokens}"
            )
        if params.exact and info.exact_rows < 2:
            return none, "nothing is drafted: no pass of two rows is bit-exact here (--exact)"
        drafter = self._named(params.proposer, info)
        rule = rule_of(params.verify, greedy=params.sampling.temperature == 0.0)
        if not rule.chains_only or drafter.branches == "no" or self.target.max_leaves < 2:
            return drafter, ""
        if drafter.branches == "must":
            raise UsageError(
                f"{drafter.name} drafts trees, and {rule.name} verification judges chains only",
                "use --verify match or --verify rejection",
            )
        return drafter, f"{rule.name} verification judges chains only: branches are left out"

    def _named(self, name: str, info: EngineInfo) -> Drafter:
        if name == "auto":
            name = next(n for n in ("mixed", "ngram", "none") if n in self.drafters)
        found = self.drafters.get(name)
        if found is not None:
            return found
        have = ", ".join(sorted(self.drafters))
        reason = next((m.reason for m in info.methods if m.name == name), "")
        hint = f"here: {have}"
        if name in ("draft", "mixed") or reason == NO_DRAFT:
            hint = "give a draft model with -d"
        elif reason == NO_HEAD:
            hint = "give a head that was trained for this target with --head FILE"
        why = f": {reason}" if reason else ""
        if name == "mtp":  # the file decides, not the command line
            raise PairIncompatible(f"the proposer 'mtp' cannot draft{why}", hint)
        raise UsageError(f"the proposer {name!r} is not available for this pair{why}", hint)

    def reset(self) -> None:
        """Forget every text, so that the next prompt is read afresh."""
        self.target.rollback(0)
        self.kept(0)
        for drafter in self.drafters.values():
            for lane in drafter.lanes:
                grant(Cut(lane, 0))
            drafter.forget()

    def close(self) -> None:
        for drafter in self.drafters.values():
            drafter.close()
            for lane in drafter.lanes:
                cast(Context, lane).close()
        self.target.close()

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
