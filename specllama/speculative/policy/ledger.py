"""The loss that drafting may still cause: a balance for every source, bounded in sum.

Time is measured in plain steps. Every token that is written earns ``EPSILON``; a round
that drafted adds what it gained over plain decoding or takes what it lost. The sum of all balances
begins below ``BEHIND`` and never exceeds it, and nothing is begun that is known to be able to make
it negative. Therefore all drafting of a pair together is never more than ``BEHIND`` plain steps,
and then ``EPSILON`` of the time, behind plain decoding, but for one pass at most that took longer
than could be foreseen: nothing is drafted until that is paid back.

Where a source promises a gain it may lose what nobody owns, and its own balance. Where it does not
it explores, from its own balance alone: so what looking at it costs is bounded, source by source.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from specllama.speculative.policy.constants import BEHIND, EPSILON, OWN


@dataclass
class Ledger:
    """The balances of a pair, kept between requests. Plain steps.

    Attributes:
        spare: nobody's own; it can be negative, for a pass may take longer than could be foreseen.
        own: by source.
        lead: what drafting gained beyond full balances. It pays for such passes, and for nothing
            else: a machine that was busy once does not empty a balance.
    """

    spare: float = BEHIND - OWN
    own: dict[str, float] = field(default_factory=dict)
    lead: float = 0.0

    def __post_init__(self) -> None:
        self.lead = min(max(self.lead, 0.0), BEHIND)
        self.own = {name: min(max(own, 0.0), BEHIND) for name, own in self.own.items()}
        self.spare = min(self.spare, BEHIND - sum(self.own.values()))

    @property
    def total(self) -> float:
        return self.spare + sum(self.own.values())

    def balance(self, source: str) -> float:
        """Return the balance that a source may explore with."""
        if source not in self.own:
            self.own[source] = given = min(OWN, max(self.spare, 0.0))
            self.spare -= given
        return self.own[source]

    def covers(self, source: str) -> float:
        """Return the loss that a source may risk if it promises a gain."""
        return max(self.balance(source) + self.spare, 0.0)

    def become(self, other: Ledger) -> None:
        """Take over the values of another ledger."""
        self.spare, self.own, self.lead = other.spare, dict(other.own), other.lead

    def book(
        self, source: str, steps: float, *, exploring: bool = False, overrun: float = 0.0
    ) -> None:
        """Add a source's gain, or subtract its loss in the time that could be foreseen; ``overrun``
        is the time beyond that."""
        paid = min(self.lead, max(overrun - max(steps, 0.0), 0.0))
        self.lead -= paid
        steps += paid - overrun
        own = self.balance(source)
        if exploring:
            self.own[source] = min(max(own + steps, 0.0), BEHIND)
        elif steps > 0.0:
            self.own[source] = max(own, min(own + steps, OWN))
        else:
            self.own[source] = min(own, max(own + steps + max(self.spare, 0.0), 0.0))
        beyond = self._rest(steps + own - self.own[source])
        self.lead = min(self.lead + beyond, BEHIND)

    def earn(self, tokens: float, source: str) -> None:
        """Credit EPSILON per written token, half to this source and half to the shared reserve."""
        half = EPSILON * tokens / 2.0
        own = self.balance(source)
        self.own[source] = min(own + half, max(own, BEHIND))
        self._rest(2.0 * half + own - self.own[source])

    def _rest(self, steps: float) -> float:
        """Add to the shared reserve; return the excess over the bound."""
        most = BEHIND - sum(self.own.values())
        beyond = max(self.spare + steps - most, 0.0)
        self.spare = min(self.spare + steps, most)
        return beyond
