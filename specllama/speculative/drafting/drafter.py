"""Drafters, the sources of drafts: one per method and conversation, deterministic or sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from specllama.arrays import HiddenNeed, Row
from specllama.backend.base import Context
from specllama.speculative.effects import Steps
from specllama.speculative.rules import Coins, Rule
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT, Draft, Guess, Room, Verdict
from specllama.text_history import History

Held = Mapping[str, npt.NDArray[Any]]  # what a drafter knows of a text, by name


@dataclass(frozen=True, slots=True)
class Request:
    """The fixed facts of one reply, while it is written.

    Attributes:
        coins: the draft's own; where the rule draws with common noise, drafts do, too.
        leaves: most leaves of a tree; 1 where the target or the rule takes chains only.
        pass_rows: the widest pass; with ``n_ctx``, the target's context, it bounds scouts, which
            the draft window does not.
        prediction: what the caller expects the reply to be; () for nothing.
        thinking: whether the reply has not begun yet, for a thought before it.
        beside: the texts of conversations that are written at the same time, to copy from.
    """

    seed: int
    rule: Rule
    coins: Coins
    is_eog: Callable[[int], bool]
    p_min: float = 0.0
    leaves: int = 1
    pass_rows: int = 1
    n_ctx: int = 0
    prediction: Sequence[int] = ()
    thinking: Callable[[], bool] = lambda: False
    beside: Callable[[], Sequence[History]] = lambda: ()

    def drawn(self, chain: SamplerChain) -> bool:
        """True if a draft's token is drawn as the target draws its own, so that it may be judged by
        its value; else it is sampled, and dropping it for its value would bias the output."""
        return self.rule.common_noise or chain.greedy


class Drafter:
    """One source of drafts for one conversation; here, one that never drafts.

    A drafter may keep state between rounds (its own lane, an index), synchronised from the
    ``tokens`` it is given: it must cope with any history, after edits, retries and cut replies.

    Attributes:
        name: what its drafts are booked under.
        needs: hidden states that the target's passes have to give away.
        paid: the one that costs time of the sources that it joins, "" without one.
        lanes: of its own, which its opener closes.
        request: of the present reply.
    """

    name = "none"
    needs: HiddenNeed = "nothing"
    paid = ""
    lanes: tuple[Context, ...] = ()

    request: Request

    def start(self, request: Request) -> None:
        """Begin a new reply."""
        self.request = request

    def advice(self) -> str:
        """Return one sentence for the user, "" for none; called after ``start``."""
        return ""

    def reusable(self, tokens: Sequence[int], cached: int) -> int:
        """Count the ``cached`` first tokens of a new prompt that the target need not read again.

        Where another drafter drafted in between, hidden states were not kept.
        """
        return cached

    def read_prompt(self, tokens: Sequence[int], n: int) -> Steps[None]:
        """Read a further part of the prompt ``tokens``, whose first ``n`` the target has read."""
        yield from ()

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        """Guess what follows ``tokens`` (whose last is pending: not yet seen by the target).

        ``chain`` is the target's sampler chain positioned at the next token; fork it, never
        advance it. At most ``room.n`` nodes that could be accepted.
        """
        yield from ()
        return EMPTY_DRAFT

    def read_rows(self, draft: Draft, row: Callable[[int], Row]) -> None:
        """Read the rows of the draft's pass. ``row(node)``: logits after a node, -1: pending.

        Called before ``commit``; the rows are valid during the call only.
        """

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        """End the round; ``tokens`` now include the emitted ones."""

    def forget(self) -> None:
        """Forget every text and its lanes' content: later drafts are those of a new engine."""

    def held(self) -> Held:
        """Copy the knowledge of its text that its lanes do not hold; {} if there is none, or if it
        can be rebuilt from the text at once."""
        return {}

    def hold(self, held: Held, text: Sequence[int]) -> None:
        """Take back a copy made by ``held``. Its lanes now hold that text and nothing else."""

    def close(self) -> None:
        """Free its resources: the engine is closed."""


class Joined(Drafter):
    """A drafter that drafts with others.

    Args:
        sources: see there.
    """

    def __init__(self, sources: Sequence[Drafter]) -> None:
        self.sources = tuple(sources)
        self.lanes = tuple(lane for source in sources for lane in source.lanes)

    def start(self, request: Request) -> None:
        super().start(request)
        for source in self.sources:
            source.start(request)

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        for source in self.sources:
            source.commit(tokens, draft, verdict)

    def forget(self) -> None:
        for source in self.sources:
            source.forget()

    def close(self) -> None:
        for source in self.sources:
            source.close()


class Copier(Drafter):
    """A free source: its guesses can be weighed against others before one is sent."""

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        yield from ()
        guesses = self.guesses(tokens, chain, room.n)
        which, length = room.judge.pick(guesses) if guesses else (0, 0)
        return self.send(guesses[which], length, room) if length else EMPTY_DRAFT

    def guesses(self, tokens: Sequence[int], chain: SamplerChain, most: int) -> Sequence[Guess]:
        """List possible continuations of ``tokens``, at most ``most`` tokens each, likeliest first.

        ``chain`` is the target's, as for ``draft``.
        """
        raise NotImplementedError

    def send(self, guess: Guess, length: int, room: Room) -> Draft:
        """Return the first ``length`` tokens of one of this round's guesses as a draft.

        Where a window judges, other ways on may stand alongside them if it finds them worth a row.
        """
        return Draft.chain(guess.tokens[:length], self.name)


def written(tokens: Sequence[int], verdict: Verdict) -> Sequence[int]:
    """Return the tokens that the round added to ``tokens``."""
    n = len(verdict.path) + (verdict.target_token is not None)
    return tokens[len(tokens) - n :]
