"""EAGLE-3: a one-layer head reads the target's hidden states and drafts a tree.

The dynamic tree of EAGLE-2: nodes leave one heap by their cumulative confidence, the head reads a
node when nothing likelier is left, and the best nodes over all levels make the draft. Where the
target takes chains only, a chain.

The head's context looks up the states by itself (``EagleStates``); what is left to do here is to
tell it when a round begins and never to draft for text whose states are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specllama.backend.base import Context
from specllama.errors import EngineError
from specllama.speculative.drafting.draft_model import DraftModelProposer
from specllama.speculative.drafting.draft_tree import DraftTreeProposer
from specllama.speculative.drafting.method import NO_HEAD, Method, with_own
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, HiddenNeed, Room, Row

_DEPTH = 8  # own states drift: no training goes further than this


class EagleStates(Context, Protocol):
    """A head's context: tokens in, logits out; the states beside them are its own affair.

    ``base`` is the index, in the target's text, of the cache's first token.
    """

    base: int

    @property
    def first_known(self) -> int:
        """The first position of the target's text from which on its states are known."""
        ...

    @property
    def known(self) -> int:
        """One past the last position whose state is known."""
        ...

    def fuse(self) -> None:
        """Take the states of the target's passes since the last call."""
        ...

    def covers(self, tokens: Sequence[int]) -> int:
        """How many of the first of these tokens belong to the text that was fused."""
        ...

    def settle(self) -> None:
        """Drop what was read with guessed states."""
        ...


class EagleProposer(DraftTreeProposer):
    """Drafts with an EAGLE-3 head.

    Args:
        context: the head.
        n_vocab: vocabulary size of the target.
        siblings, floor: as for ``DraftTreeProposer``.
    """

    name = "eagle3"
    needs: HiddenNeed = "layer_inputs"

    def __init__(
        self, context: EagleStates, *, n_vocab: int, siblings: int = 3, floor: float = 0.02
    ) -> None:
        self._states = context
        super().__init__(
            context, n_vocab=n_vocab, batch=context.n_ctx, siblings=siblings, floor=floor
        )

    def reusable(self, tokens: Sequence[int], cached: int) -> int:
        states = self._states
        states.fuse()
        covered = states.covers(tokens)
        if covered >= cached:
            return cached
        return covered if states.first_known == 0 else 0

    def read_prompt(self) -> None:
        """Fuse the states of a part of the prompt, so that the target need not keep them."""
        self._states.fuse()

    def propose(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Draft:
        request = self._request
        if request is None:
            raise EngineError("propose before start")
        if request.leaves > 1:
            return super().propose(tokens, chain, room)
        return DraftModelProposer.propose(self, tokens, chain, room)

    def _unread(self, tokens: Sequence[int]) -> tuple[int, int]:
        states = self._states
        states.fuse()
        states.settle()
        if states.known != len(tokens) - 1 or states.first_known >= len(tokens) - 1:
            return 0, 0  # the target gave no states of this text away
        if self._start < states.first_known:
            self._start = states.first_known
            states.rollback(0)
        unread, fits = super()._unread(tokens)
        states.base = self._start
        return unread, min(fits, _DEPTH)

    def _catch_up(self, tokens: Sequence[int], unread: int, read: int) -> Row | None:
        if read < unread:
            if read < 2:
                return None  # one token alone has no state beside it
            self._states.base = len(tokens) - read
        return super()._catch_up(tokens, unread, read)


METHOD = Method(
    name="eagle3",
    label="EAGLE-3",
    short="EAGLE-3",
    letter="e",
    blurb="A one-layer head reads the target's hidden states and drafts a tree. "
    "Needs a head trained for the target.",
    cost="own",
    why_not=with_own("eagle3", NO_HEAD),
    trees=True,
    auto=True,
)
