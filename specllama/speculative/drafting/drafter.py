"""Where drafts come from, as a protocol. A proposer is any deterministic or sampled guesser."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from specllama.params import VerifyRule
from specllama.speculative.rules import Coins
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT, Draft, Guess, HiddenNeed, Room, Row, Verdict


@dataclass(frozen=True, slots=True)
class Request:
    """What stays fixed while one reply is generated.

    ``coins`` are the draft's own; under ``match`` drafts are drawn with the common noise instead.
    ``leaves`` is how many leaves a tree may have: 1 where the target takes chains only, or where
    passes are cut to exact groups, which a tree cannot be. ``pass_rows`` is the widest pass and
    ``n_ctx`` the target's context: scouts are bounded by these, not by the draft window.
    ``ending(before, after)`` is how likely a passage ends between two tokens, from 0 to 1; None
    where nobody can tell.
    """

    seed: int
    rule: VerifyRule
    coins: Coins
    is_eog: Callable[[int], bool]
    p_min: float = 0.0
    leaves: int = 1
    pass_rows: int = 1
    n_ctx: int = 0
    ending: Callable[[int, int], float] | None = None

    def endings(self, last: int, copied: Sequence[int]) -> tuple[float, ...]:
        """How likely what is copied after ``last`` ends before each of its tokens.

        A copied token that ends the turn is no reason to doubt itself.
        """
        ending, is_eog = self.ending, self.is_eog
        if ending is None:
            return ()
        pairs = zip((last, *copied), copied, strict=False)
        return tuple(0.0 if is_eog(after) else ending(before, after) for before, after in pairs)


class Proposer(Protocol):
    """One source of drafts.

    A proposer may keep state between rounds (its own KV cache, an index), synchronised from the
    ``tokens`` it is given: it must cope with any history, after edits, retries and cut replies.
    """

    name: str
    needs: HiddenNeed

    def start(self, request: Request) -> None:
        """A new reply begins."""
        ...

    def propose(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        """Guess what follows ``tokens`` (whose last is pending: not yet seen by the target).

        ``chain`` is the target's sampler chain positioned at the next token; fork it, never
        advance it. At most ``room.n`` nodes that could be accepted.
        """
        ...

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        """The round is over; ``tokens`` now include what was emitted."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class RowReader(Protocol):
    """A proposer that learns from the target's logits at its own nodes."""

    def read_rows(self, draft: Draft, row: Callable[[int], Row]) -> None:
        """After verification, before ``commit``. ``row(node)``: logits after a node, -1: pending.

        The rows are valid during the call only.
        """
        ...


@runtime_checkable
class PromptReader(Protocol):
    """A proposer that takes hidden states of the prompt while it is read."""

    def reusable(self, tokens: Sequence[int], cached: int) -> int:
        """How many of the ``cached`` first tokens of a new prompt the target need not read again.

        Where another proposer drafted in between, their states were not kept.
        """
        ...

    def read_prompt(self) -> None:
        """The target has read a further part of the prompt."""
        ...


@runtime_checkable
class Copier(Protocol):
    """A free source: its guesses can be weighed against others before one is sent."""

    def guesses(self, tokens: Sequence[int], most: int) -> Sequence[Guess]:
        """What might follow ``tokens``, at most ``most`` tokens each, the likeliest first."""
        ...

    def send(self, guess: Guess, length: int, room: Room) -> Draft:
        """The first ``length`` tokens of one of this round's guesses as a draft.

        Where a window judges, other ways on may stand beside them if it finds them worth a row.
        """
        ...


@runtime_checkable
class Remembering(Protocol):
    """A proposer that copies from earlier requests as well."""

    def forget(self) -> None:
        """Forget them: what follows is drafted as in a new engine."""
        ...


@runtime_checkable
class Advising(Protocol):
    """A proposer that has something to say to the user."""

    def advice(self) -> str:
        """One sentence, "" for none; asked after ``start``."""
        ...


class NoProposer:
    """Plain decoding: never drafts."""

    name = "none"
    needs: HiddenNeed = "nothing"

    def start(self, request: Request) -> None:
        pass

    def propose(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        return EMPTY_DRAFT

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        pass

    def close(self) -> None:
        pass
