"""MTP / NextN: a block that the model was trained with guesses the token after the next.

It reads pairs: a token of the text, and the target's own state behind the token before it. Its
output stands in for the target's next state, so that it can go on by itself. States of the
target come from its verification passes: after a round, drafts and what was made of them are
rolled back, and the accepted tokens are read again with the true states, nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specllama.arrays import Row, Rows
from specllama.errors import ContextFull, EngineError
from specllama.history import History, common_prefix
from specllama.speculative.asking import Asking, Feed, Place, StateLane
from specllama.speculative.drafting.draft_model import Extending
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.method import Kit, Method, with_own
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT, Draft, Room

if TYPE_CHECKING:
    from specllama.backend.base import HiddenRows


class Stated(Place, Protocol):
    """A target's lane that keeps hidden states of its passes."""

    @property
    def hidden(self) -> HiddenRows: ...


class MtpDrafter(Extending):
    """Drafts a chain with the target's NextN block.

    Args:
        nextn: the block's lane, which is closed with the drafter.
        target: whose states it reads.
        n_vocab: of the target.
    """

    name = "mtp"
    needs = "nextn"

    def __init__(self, nextn: StateLane, target: Stated, *, n_vocab: int) -> None:
        self._nextn = nextn
        self._target = target
        self._n_vocab = n_vocab
        self._text = History()  # tokens up to the last pair that holds a state of the target
        self._anew = False  # whether the lane has to begin anew
        self._end = 0  # position of its next pair
        self._state: Row = np.zeros(nextn.width, np.float32)  # behind the newest pair

    def reusable(self, tokens: Sequence[int], cached: int) -> int:
        # the first pair to be read needs the state before it
        if self._target.hidden.end >= cached:
            return max(cached - 1, 0) if self._target.hidden.first >= cached else cached
        covered = min(common_prefix(self._text, tokens), self._nextn.end, cached) - 1
        return covered if self._nextn.first == 0 and covered > 0 else 0

    def read_prompt(self) -> Asking[None]:
        """Take the states of the prompt while they come, so that they need not be kept."""
        tokens = self._target.tokens
        begin = self._begin(tokens, last=len(tokens))
        if begin is not None and begin < len(tokens):
            try:
                yield from self._read(tokens, begin)
            except ContextFull:
                self.forget()

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Asking[Draft]:
        length = len(tokens)
        # the pending token's pair is read again if need be: its logits are the first draft's
        begin = self._begin(tokens, last=length - 1)
        if room.n <= 0 or begin is None:
            return EMPTY_DRAFT
        unread = length - begin
        read = min(room.begin(self.name, unread), unread)
        if read <= 0:
            return EMPTY_DRAFT
        if read < unread:  # a shorter memory is cheaper than all that was missed
            begin = length - read
            self._begin_anew(tokens, begin)
        try:
            row = yield from self._read(tokens, begin)
        except ContextFull:
            self.forget()
            return EMPTY_DRAFT
        return (yield from self._extend(row, chain.fork(), room, room.n))

    def _evaluate(self, token: int) -> Asking[Row]:
        """Hand the token back with the state that led to it."""
        return (yield from self._feed([token], self._state[None], self._end))

    def _feed(self, tokens: Sequence[int], states: Rows, at: int) -> Asking[Row]:
        anew, self._anew = self._anew, False
        answer: tuple[Row, Row] = yield Feed(self._nextn, tokens, states, at, anew)
        row, self._state = answer
        self._end = at + len(tokens)
        return row[: self._n_vocab]

    def _begin(self, tokens: Sequence[int], last: int) -> int | None:
        """Cut the cache to what holds for ``tokens``; the first position to read, at most ``last``.

        None where the target's states are not known to the end. A cache whose next pairs lack
        theirs begins anew where states are known; for a single missing one, zeros stand in, as
        before the first token, rather than give up the memory.
        """
        known, nextn, n = self._target.hidden, self._nextn, len(tokens)
        if known.end < n - 1 or (last < n > 1 and known.first > n - 2):
            return None
        begin = min(common_prefix(self._text, tokens), last)
        if nextn.first <= begin <= nextn.end and known.first <= begin:
            self._text.cut(begin)
            return begin
        begin = known.first + 1 if known.first else 0
        if begin > last:
            return None
        self._begin_anew(tokens, begin)
        return begin

    def _begin_anew(self, tokens: Sequence[int], begin: int) -> None:
        """What the lane holds is of no use: the next pair lies at ``begin``."""
        self._anew = True
        self._text.replace(tokens[:begin])

    def _read(self, tokens: Sequence[int], begin: int) -> Asking[Row]:
        """Read the pairs from ``begin`` to the end of ``tokens``; the logits behind the last."""
        known, nextn = self._target.hidden, self._nextn
        for at in range(begin, len(tokens), nextn.n_batch):
            part = tokens[at : at + nextn.n_batch]
            states = np.zeros((len(part), nextn.width), np.float32)
            lack = max(known.first - (at - 1), 0)  # 1 before the first token, or one forgotten
            if lack < len(part):
                rows = known.rows(at - 1 + lack, at - 1 + len(part))
                if rows is None:
                    raise EngineError("hidden states of the target are missing")
                states[lack:] = rows
            row = yield from self._feed(part, states, at)
            self._text += part
        known.forget(len(tokens) - 2)  # the last pair is read again when a round is retried
        return row

    def forget(self) -> None:
        """Begin without any memory of a text."""
        self._text.clear()

    def close(self) -> None:
        self._nextn.close()


def _open(kit: Kit) -> Drafter:
    return MtpDrafter(kit.own("mtp"), kit.target, n_vocab=kit.target.n_vocab)


METHOD = Method(
    name="mtp",
    label="MTP / NextN",
    short="MTP",
    letter="t",
    blurb="Heads that some models were trained with predict the tokens after the next.",
    cost="own",
    why_not=with_own("mtp", "the target's file has no NextN layers"),
    open=_open,
    auto=True,
)
