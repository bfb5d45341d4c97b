"""What a draft window learns about a pair, apart from how it uses it: data that can be kept."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specllama.spec.calibrate import SourceState
from specllama.spec.cost import CostTable

CREDIT_FIRST = 8.0  # plain steps that a new pair may lose while it is learnt
CREDIT_MOST = 9.5  # and that a good run can save up; with what plain steps earn: 3 % of 500 tokens
HEADS = ("eagle3", "medusa", "mtp")  # proposers that step through something else than a draft model


@dataclass(slots=True)
class Costs:
    """Measured costs of a pair on a machine: target passes by rows, draft passes by tokens."""

    target: CostTable = field(default_factory=CostTable)
    draft: CostTable = field(default_factory=lambda: CostTable(hopeful=False))
    draft_share: float = 0.1  # prior: a draft step in target steps
    heads: dict[str, CostTable] = field(default_factory=dict)  # by proposer: a step of a head

    def steps(self, proposer: str) -> CostTable:
        """The table of what ``proposer`` pays per step: its heads, or the draft model."""
        if proposer not in HEADS:
            return self.draft
        return self.heads.setdefault(proposer, CostTable(hopeful=False))

    def to_dict(self) -> dict[str, Any]:
        heads = {name: table.to_dict() for name, table in self.heads.items()}
        return {"target": self.target.to_dict(), "draft": self.draft.to_dict(), "heads": heads}

    def restore(self, data: dict[str, Any]) -> None:
        """Take over ``to_dict`` data.

        Raises:
            ValueError, TypeError, KeyError: the data is not such a table.
        """
        target = CostTable.from_dict(data["target"])
        heads = {
            name: CostTable.from_dict(table, hopeful=False)
            for name, table in dict(data.get("heads", {})).items()
            if name in HEADS
        }
        self.draft = CostTable.from_dict(data["draft"], hopeful=False)
        self.target, self.heads = target, heads


@dataclass(slots=True)
class Learned:
    """What a window learns and keeps between requests of one pair, rule and temperature band.

    ``credit`` is in target steps. ``tokens`` and ``ms`` are decayed sums: the throughput.
    ``paying`` is the name of the source that pays per step, "" without one.
    """

    costs: Costs
    sources: dict[str, SourceState] = field(default_factory=dict)
    credit: float = CREDIT_FIRST
    tokens: float = 0.0
    ms: float = 0.0
    paying: str = ""

    def source(self, name: str, kind: str) -> SourceState:
        state = self.sources.get(name)
        if state is None:
            state = self.sources[name] = SourceState(kind)
        return state

    def to_dict(self) -> dict[str, Any]:
        return {
            "credit": self.credit,
            "sources": {name: state.to_dict() for name, state in self.sources.items()},
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over ``to_dict`` data.

        Raises:
            ValueError, TypeError, KeyError: the data is not such a state.
        """
        sources = {str(n): SourceState.from_dict(s) for n, s in data["sources"].items()}
        credit = min(max(float(data["credit"]), 0.0), CREDIT_MOST)
        if credit != credit:
            raise ValueError("credit is not a number")
        self.sources, self.credit = sources, credit
