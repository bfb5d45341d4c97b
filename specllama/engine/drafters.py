"""The drafters of one conversation, made from the opened parts of its pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specllama.settings import methods
from specllama.speculative.drafting.copying import TextFollower
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.library import Library
from specllama.speculative.drafting.method import Facts, find

if TYPE_CHECKING:
    from specllama.backend.base import Lane
    from specllama.speculative.effects import LaneView


@dataclass(slots=True)
class Drafters:
    """A maker of the drafters of one conversation, each made once; see ``Kit``.

    Attributes:
        parts: what was opened of the target's own, by method; ``reasons``: why other was not.
        made: drafters by method, so far.
    """

    target: Lane
    draft: LaneView | Drafter | None = None
    library: Library = field(default_factory=Library)
    parts: Mapping[str, Any] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)
    reader: TextFollower = field(default_factory=TextFollower)
    made: dict[str, Drafter] = field(default_factory=dict)

    @property
    def facts(self) -> Facts:
        return Facts(
            draft=self.draft is not None,
            laws=not isinstance(self.draft, Drafter),
            trees=self.target.max_leaves > 1,
            own={**self.reasons, **dict.fromkeys(self.parts, "")},
        )

    def own(self, method: str) -> Any:
        return self.parts[method]

    def drafter(self, method: str) -> Drafter | None:
        if method not in self.made:
            entry = find(method)
            if entry is None or entry.why_not(self.facts):
                return None
            self.made[method] = entry.open(self)
        return self.made[method]

    def all(self) -> dict[str, Drafter]:
        """Return the drafters of every method that the pair has, in order."""
        return {name: found for name in methods.names() if (found := self.drafter(name))}
