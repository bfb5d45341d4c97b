"""Several sources in order of preference: the first that has a draft wins the round.

The choice depends on the text so far only, never on a sampled draft token, so it is exact under
every verification rule. With an n-gram source first, repeats cost nothing and the model fills in.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.spec.proposer import Proposer, Request
from specllama.spec.sampling import SamplerChain
from specllama.spec.types import EMPTY_DRAFT, Draft, HiddenNeed, Room, Verdict


class MixedProposer:
    name = "mixed"
    needs: HiddenNeed = "nothing"

    def __init__(self, sources: Sequence[Proposer]) -> None:
        if not sources:
            raise ValueError("a mixed proposer needs at least one source")
        self._sources = tuple(sources)

    @property
    def sources(self) -> tuple[Proposer, ...]:
        return self._sources

    def start(self, request: Request) -> None:
        for source in self._sources:
            source.start(request)

    def propose(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        for source in self._sources:
            draft = source.propose(tokens, chain, room)
            if len(draft):
                return draft
        return EMPTY_DRAFT

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        for source in self._sources:
            source.commit(tokens, draft, verdict)

    def close(self) -> None:
        for source in self._sources:
            source.close()
