"""What a draft window learns about a pair, apart from how it uses it: data that can be kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specllama.speculative.calibrate import SourceState
from specllama.speculative.cost import CostTable
from specllama.speculative.drafting.method import books_own

BEHIND_MOST = 8.0  # plain steps that all drafting of a pair may be behind plain decoding, ever
CREDIT_FIRST = BEHIND_MOST - 0.5  # less what a pass may cost that was never timed
CREDIT_LEAST = -2.0  # a measuring error must not forbid a method for ever
CREDIT_MOST = 9.5  # that a good run can save up; with what plain steps earn: 3 % of 500 tokens
CREDIT_ASIDE = 3.5  # of that, where copies and a paying source share: what only copies may lose
_START_ASIDE = 1.0  # of the first credit, before copies have gained anything
_REPLY = 128.0  # tokens of a reply, before the first one
_REPLY_GAIN = 0.1
_REPLY_MOST = 2048
_PACE_DECAY = 0.985  # per round
_A_ROUND = 3.0  # tokens, before anything was drafted
_A_ROUND_GAIN = 0.03
_COPIED_GAIN = 1.0 / 256.0  # per token
_LOOKS = 16  # rounds that asked before it is judged whether asking pays
_LOOKS_GAIN = 1.0 / 64.0
_LOOKS_WAIT = 512  # rounds at most
LOOKS_SHARE = 0.005  # of the time, where it does not: half of what plain steps earn


@dataclass(slots=True)
class Costs:
    """Measured costs of a pair on a machine: target passes by rows, draft passes by tokens."""

    target: CostTable = field(default_factory=CostTable)
    draft: CostTable = field(default_factory=lambda: CostTable(hopeful=False))
    draft_share: float = 0.1  # prior: a draft step in target steps
    heads: dict[str, CostTable] = field(default_factory=dict)  # by method: a step of its own

    def steps(self, proposer: str) -> CostTable:
        """The table of what ``proposer`` pays per step: its own, or that of the draft model."""
        if not books_own(proposer):
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
            if books_own(name)
        }
        self.draft = CostTable.from_dict(data["draft"], hopeful=False)
        self.target, self.heads = target, heads


@dataclass(slots=True)
class Blind:
    """What rounds of a proposer that never asks gave and cost: running means of tokens accepted
    and target steps beyond a plain one. ``wait`` is how many rounds to leave it alone."""

    rounds: int = 0
    accepted: float = 0.0
    excess: float = 0.0
    wait: int = 0


@dataclass(slots=True)
class Looking:
    """What asking the proposers gave and cost, in target steps: running means.

    ``gain`` is of all rounds that asked, over plain steps; ``vain`` the cost of those that found
    nothing. ``wait`` is how many rounds not to ask. Where a step takes less than a millisecond,
    asking alone can cost a tenth of it.
    """

    rounds: int = 0
    gain: float = 0.0
    vain: float = 0.0
    wait: int = 0

    def found(self, gain: float) -> None:
        self.rounds += 1
        self.gain += max(_LOOKS_GAIN, 1.0 / self.rounds) * (gain - self.gain)

    def missed(self, cost: float) -> None:
        self.found(-cost)
        self.vain += max(_LOOKS_GAIN, 1.0 / self.rounds) * (cost - self.vain)
        if self.rounds >= _LOOKS and self.gain < 0.0 and self.vain > LOOKS_SHARE:
            self.wait = min(int(self.vain / LOOKS_SHARE), _LOOKS_WAIT)

    def to_list(self) -> list[float]:
        return [self.rounds, self.gain, self.vain, self.wait]

    @staticmethod
    def from_list(data: Sequence[Any]) -> Looking:
        """The inverse.

        Raises:
            ValueError, TypeError: the data is not such a list.
        """
        rounds, gain, vain, wait = data
        gain, vain = float(gain), float(vain)
        if not (math.isfinite(gain) and math.isfinite(vain)):
            raise ValueError("not finite numbers")
        return Looking(max(int(rounds), 0), gain, vain, min(max(int(wait), 0), _LOOKS_WAIT))


@dataclass(slots=True)
class Pace:
    """A running throughput: decayed sums of tokens and milliseconds."""

    tokens: float = 0.0
    ms: float = 0.0

    def add(self, tokens: int, ms: float, rounds: int = 1) -> None:
        """So many rounds that were about alike took ``ms`` for ``tokens``."""
        keep = _PACE_DECAY**rounds
        weight = (1.0 - keep) / (1.0 - _PACE_DECAY) / rounds
        self.tokens = self.tokens * keep + weight * tokens
        self.ms = self.ms * keep + weight * ms

    def rate(self, tokens: float = 0.0, ms: float = 0.0) -> float:
        """Tokens a millisecond, as if these had been there as well; 0 of nothing."""
        took = self.ms + ms
        return (self.tokens + tokens) / took if took > 0.0 else 0.0


@dataclass(slots=True)
class Balance:
    """What may still be lost, in plain steps: ``credit``, and a ``reserve`` that only copies touch.

    Where copies share it with a source that pays per step, ``aside`` of it is kept for them, so
    that looking at a draft model does not stop copies that have proved themselves. ``least`` is the
    deepest debt that is remembered.
    """

    credit: float = CREDIT_FIRST
    reserve: float = 0.0
    aside: float = 0.0
    least: float = -math.inf

    def share(self) -> None:
        """Copies and a paying source draw on this balance."""
        if not self.aside:
            self.aside = CREDIT_ASIDE
            self.reserve = min(max(self.credit, 0.0), _START_ASIDE)
            self.credit -= self.reserve

    def book(self, steps: float, *, copy: bool = False) -> None:
        """Add what a round gained, or take what it lost; ``copy``: by way of a copy."""
        if copy:
            whole = self.reserve + steps
            self.reserve = min(max(whole, 0.0), self.aside)
            steps = whole - self.reserve
        self.credit = min(max(self.credit + steps, self.least), self.most)

    @property
    def most(self) -> float:
        """What ``credit`` can hold beside the present reserve."""
        return CREDIT_MOST - max(self.reserve - _START_ASIDE, 0.0)

    @property
    def purse(self) -> float:
        """What a copy may lose: the reserve and the credit, less any debt."""
        return max(self.reserve + self.credit, 0.0)

    def earn(self, steps: float) -> None:
        """What a plain step adds (or what looking for a draft in vain took from it)."""
        enough = self.aside if self.credit < 0.0 else min(_START_ASIDE, self.aside)
        self.book(steps, copy=self.reserve < enough)

    def to_list(self) -> list[float]:
        return [self.credit, self.reserve, self.aside]

    @staticmethod
    def from_list(data: Sequence[Any], least: float = -math.inf) -> Balance:
        """The inverse.

        Raises:
            ValueError, TypeError: the data is not such a list.
        """
        credit, reserve, aside = map(float, data)
        if not all(math.isfinite(x) for x in (credit, reserve, aside)):
            raise ValueError("not finite numbers")
        aside = min(max(aside, 0.0), CREDIT_ASIDE)
        return Balance(
            min(max(credit, least), CREDIT_MOST), min(max(reserve, 0.0), aside), aside, least
        )


@dataclass(slots=True)
class Account:
    """What one method (a choice of ``--proposer``) may still lose, and how it does.

    Every loss and gain is booked twice: on the method's ``own`` balance, so that one method cannot
    spend what another has gained, and on that of the ``pair``, which all methods, rules and
    temperatures share: it is the bound. The smaller one decides. Both are kept between replies, so
    that many short ones lose no more than a long one. ``copied`` is the share of tokens that copies
    write, ``a_round`` the tokens of a round of another source: running means that tell how many
    rounds reading a text into it will serve.
    """

    pair: Balance = field(default_factory=Balance)
    own: Balance = field(default_factory=lambda: Balance(least=CREDIT_LEAST))
    blind: Blind = field(default_factory=Blind)
    looking: Looking = field(default_factory=Looking)
    pace: Pace = field(default_factory=Pace)
    copied: float = 0.0
    a_round: float = _A_ROUND

    @property
    def credit(self) -> float:
        """Plain steps that may be lost."""
        return min(self.own.credit, self.pair.credit)

    @property
    def most(self) -> float:
        """What ``credit`` can grow to."""
        return min(self.own.most, self.pair.most)

    @property
    def purse(self) -> float:
        """Plain steps that copies may lose."""
        return min(self.own.reserve + max(self.own.credit, 0.0), self.pair.purse)

    @property
    def shared(self) -> bool:
        """Whether copies and a paying source draw on it."""
        return self.own.aside > 0.0

    def wrote(self, tokens: int, drafted: int, *, copy: bool) -> None:
        """A round wrote so many tokens; ``copy``: by way of a copy."""
        self.copied += min(_COPIED_GAIN * tokens, 1.0) * (copy - self.copied)
        if drafted and not copy:
            self.a_round += _A_ROUND_GAIN * (tokens - self.a_round)

    def share(self) -> None:
        self.own.share()
        self.pair.share()

    def book(self, steps: float, *, copy: bool = False) -> None:
        self.own.book(steps, copy=copy)
        self.pair.book(steps, copy=copy)

    def earn(self, steps: float) -> None:
        self.own.earn(steps)
        self.pair.earn(steps)

    def to_dict(self) -> dict[str, Any]:
        blind = self.blind
        return {
            "own": self.own.to_list(),
            "blind": [blind.rounds, blind.accepted, blind.excess, blind.wait],
            "looking": self.looking.to_list(),
            "reading": [self.copied, self.a_round],
        }

    @staticmethod
    def from_dict(data: dict[str, Any], pair: Balance) -> Account:
        """The inverse, drawing on the balance of the ``pair``.

        Raises:
            ValueError, TypeError, KeyError: the data is not such an account.
        """
        own = Balance.from_list(data["own"], CREDIT_LEAST)
        rounds, accepted, excess, wait = data["blind"]
        accepted, excess = float(accepted), float(excess)
        looking = Looking.from_list(data["looking"])
        if not (math.isfinite(accepted) and math.isfinite(excess)):
            raise ValueError("not finite numbers")
        copied, a_round = map(float, data["reading"])
        if not (0.0 <= copied <= 1.0 <= a_round < math.inf):
            raise ValueError("not a share and a length")
        blind = Blind(max(int(rounds), 0), accepted, excess, max(int(wait), 0))
        return Account(pair, own, blind, looking, copied=copied, a_round=a_round)


@dataclass(slots=True)
class Learned:
    """What a window learns and keeps between requests of one pair, rule and temperature band.

    ``pair`` is the balance that all of them share. ``paying`` is the name of the source that pays
    per step, "" without one; ``reply`` the usual length of a reply in tokens, of ``replies`` ones.
    """

    costs: Costs
    pair: Balance = field(default_factory=Balance)
    sources: dict[str, SourceState] = field(default_factory=dict)
    accounts: dict[str, Account] = field(default_factory=dict)
    paying: str = ""
    reply: float = _REPLY
    replies: int = 0

    def ended(self, tokens: int) -> None:
        """A reply of so many tokens is over."""
        self.replies += 1
        gain = max(_REPLY_GAIN, 1.0 / (self.replies + 1))
        self.reply += gain * (min(tokens, _REPLY_MOST) - self.reply)

    def account(self, method: str) -> Account:
        found = self.accounts.get(method)
        if found is None:
            found = self.accounts[method] = Account(self.pair)
        return found

    def source(self, name: str, kind: str) -> SourceState:
        state = self.sources.get(name)
        if state is None:
            state = self.sources[name] = SourceState(kind)
        return state

    def to_dict(self) -> dict[str, Any]:
        return {
            "reply": [self.reply, self.replies],
            "accounts": {name: account.to_dict() for name, account in self.accounts.items()},
            "sources": {name: state.to_dict() for name, state in self.sources.items()},
        }

    def restore(self, data: dict[str, Any]) -> None:
        """Take over ``to_dict`` data.

        Raises:
            ValueError, TypeError, KeyError: the data is not such a state.
        """
        sources = {str(n): SourceState.from_dict(s) for n, s in data["sources"].items()}
        accounts = {str(n): Account.from_dict(a, self.pair) for n, a in data["accounts"].items()}
        reply, replies = float(data["reply"][0]), int(data["reply"][1])
        if not 0.0 <= reply <= _REPLY_MOST or replies < 0:
            raise ValueError("not a length")
        self.sources, self.accounts = sources, accounts
        self.reply, self.replies = reply, replies
