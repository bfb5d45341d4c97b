"""Prompt lookup: what followed the last n tokens the last time they occurred.

An index maps every n-gram (n_min to n_max) to the position after its newest occurrence but one,
so a token costs O(n_max) and a draft one dictionary look-up per size. Longest match first.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.spec.proposer import Request
from specllama.spec.proposers.backoff import Backoff
from specllama.spec.proposers.draft_model import common_prefix
from specllama.spec.sampling import SamplerChain
from specllama.spec.types import EMPTY_DRAFT, Draft, Guess, HiddenNeed, Room, Verdict

LONG_MATCH = 32  # beyond this a longer match says nothing more


class NgramProposer:
    """Drafts by copying from the prompt and the reply so far.

    Args:
        n_max: longest n-gram looked up.
        n_min: shortest; 2 finds more and is wrong more often, 3 is calmer.
    """

    name = "ngram"
    needs: HiddenNeed = "nothing"

    def __init__(self, *, n_max: int = 6, n_min: int = 2) -> None:
        if not 1 <= n_min <= n_max:
            raise ValueError(f"need 1 <= n_min <= n_max, got {n_min} and {n_max}")
        self._sizes = range(n_max, n_min - 1, -1)
        self._tokens: list[int] = []
        self._newest: dict[tuple[int, ...], int] = {}
        self._before: dict[tuple[int, ...], int] = {}
        self._habits = Backoff()
        self._hits: dict[int, list[int]] = {n: [0, 0] for n in self._sizes}
        self._found_size = 0  # of this round's match
        self._last_size = 0  # and of the one that was sent
        self._request: Request | None = None

    def start(self, request: Request) -> None:
        self._request = request
        self._hits = {n: [0, 0] for n in self._sizes}

    def propose(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        guesses = self.guesses(tokens, room.n)
        if not guesses:
            return EMPTY_DRAFT
        which, length = room.pick(guesses)
        return self.send(guesses[which], length, room)

    def guesses(self, tokens: Sequence[int], most: int) -> list[Guess]:
        """The continuation of the best match, up to the end of a turn; [] without a match."""
        self._last_size = 0
        if most <= 0:
            return []
        at, size = self.lookup(tokens)
        if size == 0:
            return []
        copied = self._tokens[at : at + most]
        is_eog = self._request.is_eog if self._request else None
        if is_eog is not None:
            stop = next((i for i, t in enumerate(copied) if is_eog(t)), None)
            if stop is not None:
                copied = copied[: stop + 1]
        self._found_size = size
        endings = self._request.endings(tokens[-1], copied) if self._request else ()
        shares = self._habits.likely(copied)
        return [Guess(self.name, tuple(copied), self._agreement(at), shares, endings)]

    def send(self, guess: Guess, length: int, room: Room) -> Draft:
        """The first ``length`` tokens of this round's guess as a draft."""
        if length <= 0:
            return EMPTY_DRAFT
        self._last_size = self._found_size
        hits, tries = self._hits[self._last_size]
        score = (hits + 1.0) / (tries + 2.0)
        return Draft.chain(guess.tokens[:length], self.name, confidence=[score] * length)

    def _agreement(self, at: int) -> int:
        """How many tokens before ``at`` equal those at the end of the text, up to LONG_MATCH."""
        tokens = self._tokens
        end, n = len(tokens), 0
        while n < LONG_MATCH and n < at and tokens[at - 1 - n] == tokens[end - 1 - n]:
            n += 1
        return n

    def lookup(self, tokens: Sequence[int]) -> tuple[int, int]:
        """(position of the continuation, n-gram size) of the best match, size 0 for none."""
        self._follow(tokens)
        for n in self._sizes:
            if len(self._tokens) <= n:
                continue
            key = tuple(self._tokens[-n:])
            at = self._before.get(key)
            if at is not None:
                return at, n
        return 0, 0

    def _follow(self, tokens: Sequence[int]) -> None:
        """Index the tokens that are new; start over if the text before them changed."""
        keep = common_prefix(self._tokens, tokens)
        if keep < len(self._tokens):
            self._tokens = []
            self._newest.clear()
            self._before.clear()
            self._habits = Backoff()
            keep = 0
        self._habits.extend(tokens[keep:])
        for token in tokens[keep:]:
            self._tokens.append(token)
            end = len(self._tokens)
            for n in self._sizes:
                if end >= n:
                    key = tuple(self._tokens[end - n :])
                    previous = self._newest.get(key)
                    if previous is not None:
                        self._before[key] = previous
                    self._newest[key] = end

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        if self._last_size and len(draft) and draft.sources[0] == self.name:
            hits = self._hits[self._last_size]
            # only tested positions count: what lies behind a rejection was never judged
            hits[0] += len(verdict.path)
            hits[1] += min(len(verdict.path) + 1, len(draft))
        self._last_size = 0

    def close(self) -> None:
        pass
