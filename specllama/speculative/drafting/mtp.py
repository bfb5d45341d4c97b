"""MTP / NextN: a block that the model was trained with guesses the token after the next.

It reads pairs: a token of the text, and the target's own state behind the token before it. Its
output stands in for the target's next state, so that it can go on by itself. States of the
target come from its verification passes: after a round, drafts and what was made of them are
rolled back, and the accepted tokens are read again with the true states, nothing else is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from specllama.backend.hidden import HiddenRows
from specllama.errors import ContextFull, EngineError
from specllama.speculative.drafting.drafter import Request
from specllama.speculative.drafting.method import Method, with_own
from specllama.speculative.history import History, common_prefix
from specllama.speculative.noise import draw
from specllama.speculative.sampling import SamplerChain, confidence
from specllama.speculative.types import (
    EMPTY_DRAFT,
    Draft,
    HiddenNeed,
    Law,
    Room,
    Row,
    Rows,
    Verdict,
)


class Nextn(Protocol):
    """A NextN block with a cache of its own; pairs lie at the positions of their tokens."""

    @property
    def n_ctx(self) -> int:
        """Most pairs."""
        ...

    @property
    def n_batch(self) -> int: ...

    @property
    def width(self) -> int:
        """Of a state."""
        ...

    @property
    def first(self) -> int:
        """Position of the first pair in the cache."""
        ...

    @property
    def end(self) -> int:
        """Position of the next pair."""
        ...

    def feed(self, tokens: Sequence[int], states: Rows) -> tuple[Row, Row]:
        """Read pairs at the end; ``states`` [n, width] belong to the tokens before.

        Returns the logits [n_vocab] of what follows (a view, until the next call) and the state
        [width] behind the last pair.

        Raises:
            ContextFull, EngineError: the cache is as it was, or empty.
        """
        ...

    def rollback(self, end: int) -> None:
        """Cut pairs from position ``end`` on, which is ``first`` or later.

        Raises:
            EngineError: it could not; the cache is empty and begins at 0.
        """
        ...

    def begin_at(self, position: int) -> None:
        """Empty the cache; the next pair lies at ``position``."""
        ...

    def close(self) -> None: ...


class Reading(Protocol):
    """A target that keeps states: of ``tokens``, those in its cache."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def hidden(self) -> HiddenRows: ...


class MtpProposer:
    """Drafts a chain with the target's NextN block.

    Args:
        nextn: the block. The proposer closes it.
        target: whose states it reads.
        n_vocab: of the target.
    """

    name = "mtp"
    needs: HiddenNeed = "nextn"

    def __init__(self, nextn: Nextn, target: Reading, *, n_vocab: int) -> None:
        self._nextn = nextn
        self._target = target
        self._n_vocab = n_vocab
        self._request: Request | None = None
        self._text = History()  # tokens up to the last pair that holds a state of the target

    @property
    def nextn(self) -> Nextn:
        return self._nextn

    def start(self, request: Request) -> None:
        self._request = request

    def reusable(self, tokens: Sequence[int], cached: int) -> int:
        # the first pair to be read needs the state before it
        if self._target.hidden.end >= cached:
            return max(cached - 1, 0) if self._target.hidden.first >= cached else cached
        covered = min(common_prefix(self._text, tokens), self._nextn.end, cached) - 1
        return covered if self._nextn.first == 0 and covered > 0 else 0

    def read_prompt(self) -> None:
        """Take the states of the prompt while they come, so that they need not be kept."""
        tokens = self._target.tokens
        begin = self._begin(tokens, last=len(tokens))
        if begin is not None and begin < len(tokens):
            try:
                self._read(tokens, begin)
            except ContextFull:
                self.forget()

    def propose(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        request = self._request
        if request is None:
            raise EngineError("propose before start")
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
            self._restart(tokens, begin)
        try:
            row, state = self._read(tokens, begin)
        except ContextFull:
            self.forget()
            return EMPTY_DRAFT
        return self._chain(row, state, chain, room, request)

    def _chain(
        self, row: Row, state: Row, chain: SamplerChain, room: Room, request: Request
    ) -> Draft:
        """Draw a token, hand it back with the state that led to it, and so on."""
        ahead = chain.fork()
        drawn = request.rule == "match" or ahead.greedy
        drafted: list[int] = []
        laws: list[Law | None] = []
        scores: list[float | None] = []
        while True:
            row = row[: self._n_vocab]
            score = confidence(row)
            # judged on the law alone, before the token is drawn: allowed under every rule
            if not score >= request.p_min:
                break
            if not drawn and not room.include(score, None, None):
                break
            try:
                law = ahead.law(row)
            except EngineError:
                break  # NaN, or a grammar with no way on
            if drawn:
                token, lead = draw(law, request.seed, ahead.position)
                if not room.include(score, min(lead, ahead.gap), token):
                    break
            else:
                token = request.coins.pick(law.ids, law.probs)
            drafted.append(token)
            laws.append(None if ahead.greedy else law)
            scores.append(score)
            if (
                len(drafted) == room.n
                or request.is_eog(token)
                or not room.keep_going(len(drafted), score)
            ):
                break
            ahead.advance(token)
            try:
                row, state = self._nextn.feed([token], state[None])
            except ContextFull:
                break
        return Draft.chain(drafted, self.name, q=laws, confidence=scores)

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
            nextn.rollback(begin)
            del self._text[begin:]
            return begin
        begin = known.first + 1 if known.first else 0
        if begin > last:
            return None
        self._restart(tokens, begin)
        return begin

    def _restart(self, tokens: Sequence[int], begin: int) -> None:
        self._nextn.begin_at(begin)
        self._text.replace(tokens[:begin])

    def _read(self, tokens: Sequence[int], begin: int) -> tuple[Row, Row]:
        """Read the pairs from ``begin``, the end of the cache, to the end of ``tokens``."""
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
            answer = nextn.feed(part, states)
            self._text += part
        known.forget(len(tokens) - 2)  # the last pair is read again when a round is retried
        return answer

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        # what the block made of its own drafts is cut when the next round begins
        pass

    def forget(self) -> None:
        """Begin without any memory of a text."""
        self._text.clear()
        self._nextn.begin_at(0)

    def close(self) -> None:
        self._nextn.close()


METHOD = Method(
    name="mtp",
    label="MTP / NextN",
    short="MTP",
    letter="t",
    blurb="Heads that some models were trained with predict the tokens after the next.",
    cost="own",
    why_not=with_own("mtp", "the target's file has no NextN layers"),
    auto=True,
)
