"""EAGLE-3: a one-layer head reads the target's hidden states and drafts a tree.

The dynamic tree of EAGLE-2: nodes leave one heap by their cumulative confidence, the head reads a
node when nothing likelier is left, and the best nodes over all levels make the draft. Where the
target or the rule takes chains only, a chain.

The head's lane looks up the states by itself (``EagleLane``); what is left to do here is to tell it
when a round begins and never to draft for text whose states are not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specllama.speculative.asking import Asking, Cut, Place
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.draft_tree import TreeDrafter
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.method import NO_HEAD, Kit, Method, with_own
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import Draft, Room

_DEPTH = 8  # own states drift: no training goes further than this


class EagleLane(Place, Protocol):
    """A head's lane: tokens in, logits out; the states beside them are its own affair.

    ``base`` is the index, in the target's text, of the lane's first token.
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

    @property
    def settled(self) -> int:
        """Tokens of the lane that were read with states of the target."""
        ...

    def fuse(self) -> None:
        """Take the states of the target's passes since the last call."""
        ...

    def covers(self, tokens: Sequence[int]) -> int:
        """How many of the first of these tokens belong to the text that was fused."""
        ...


class EagleDrafter(TreeDrafter):
    """Drafts with an EAGLE-3 head.

    Args:
        lane: the head's.
        n_vocab: vocabulary size of the target.
        siblings, floor: as for ``TreeDrafter``.
    """

    name = "eagle3"
    needs = "layer_inputs"

    def __init__(
        self, lane: EagleLane, *, n_vocab: int, siblings: int = 3, floor: float = 0.02
    ) -> None:
        self._states = lane
        super().__init__(lane, n_vocab=n_vocab, batch=lane.n_ctx, siblings=siblings, floor=floor)

    def reusable(self, tokens: Sequence[int], cached: int) -> int:
        states = self._states
        states.fuse()
        covered = states.covers(tokens)
        if covered >= cached:
            return cached
        return covered if states.first_known == 0 else 0

    def read_prompt(self) -> Asking[None]:
        """Fuse the states of a part of the prompt, so that the target need not keep them."""
        yield from ()
        self._states.fuse()

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Asking[Draft]:
        states = self._states
        states.fuse()
        # a new round begins: what was read with guessed states goes
        yield Cut(states, 0 if self._start < states.first_known else states.settled)
        if self.request.leaves > 1:
            return (yield from super().draft(tokens, chain, room))
        return (yield from ChainDrafter.draft(self, tokens, chain, room))

    def _unread(self, tokens: Sequence[int]) -> tuple[int, int]:
        states = self._states
        if states.known != len(tokens) - 1 or states.first_known >= len(tokens) - 1:
            return 0, 0  # the target gave no states of this text away
        self._start = max(self._start, states.first_known)
        unread, fits = super()._unread(tokens)
        if states.base != self._start:  # what is held was read beside other states
            states.base = self._start
            unread = len(tokens) - self._start
        return unread, min(fits, _DEPTH)

    def _can_start(self, read: int, unread: int) -> bool:
        # one token alone has no state beside it
        return read >= min(unread, 2)

    def _start_at(self, index: int) -> None:
        super()._start_at(index)
        self._states.base = index


def _open(kit: Kit) -> Drafter:
    return EagleDrafter(kit.own("eagle3"), n_vocab=kit.target.n_vocab)


METHOD = Method(
    name="eagle3",
    label="EAGLE-3",
    short="EAGLE-3",
    letter="e",
    blurb="A one-layer head reads the target's hidden states and drafts a tree. "
    "Needs a head trained for the target.",
    cost="own",
    why_not=with_own("eagle3", NO_HEAD),
    open=_open,
    branches="may",
    auto=True,
)
