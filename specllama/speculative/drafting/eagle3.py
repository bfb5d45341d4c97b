"""EAGLE-3: a one-layer head reads the target's hidden states and drafts a tree.

The dynamic tree of EAGLE-2: nodes leave one heap by their cumulative confidence, the head reads a
depth in one pass, and the best nodes over all depths make the draft. Where the target or the rule
takes chains only, a chain.

Three states of the target's pass make one of the head's (its encoder); these are kept for the whole
text, so that the head may begin anew anywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specllama.arrays import Row, with_final
from specllama.backend.base import HiddenRows, Lane
from specllama.speculative.drafting.drafter import Drafter, Held
from specllama.speculative.drafting.head_drafter import StateDrafter
from specllama.speculative.drafting.method import NO_HEAD, Kit, Method, with_own
from specllama.speculative.effects import HeadPlace, Pass, Steps
from specllama.speculative.types import Room
from specllama.text_history import Follower


class EagleDrafter(StateDrafter):
    """A drafter with an EAGLE-3 head."""

    name = "eagle3"
    deepest = 8  # no training goes further than this

    def __init__(self, lane: HeadPlace, target: Lane, *, n_vocab: int) -> None:
        super().__init__(lane, target, n_vocab=n_vocab)
        self.needs = lane.layers
        self._fused = HiddenRows()
        self._of = Follower()  # the target's text

    @property
    def states(self) -> HiddenRows:
        return self._fused

    def reusable(self, tokens: Sequence[int], cached: int) -> int:
        if with_final(self.needs):  # which reading again does not give
            return cached
        end = min(self._fused.end, self._of.kept)
        return self._with_states(self._fused.first, end, cached)

    def follow(self, tokens: Sequence[int], n: int) -> Steps[None]:
        """Fuse the states of a part of the prompt, so that the target need not keep them."""
        yield from self._fuse()

    def _fuse(self) -> Steps[None]:
        """Take the hidden states of the target's passes since the last call."""
        hidden = self._target.hidden
        kept, _ = self._of.follow(self._target.tokens)
        new = hidden.end > hidden.first
        self._fused.cut(min(kept, self._fused.end, hidden.first if new else kept))
        for at in range(hidden.first, hidden.end, self._lane.n_batch):
            features = hidden.rows(at, min(at + self._lane.n_batch, hidden.end))
            if features is not None:
                fused: Pass = yield Pass(self._lane, (), "states", states=features)
                self._fused.add(at, fused.left)
        hidden.forget(hidden.end)

    def open(self, tokens: Sequence[int], room: Room) -> Steps[tuple[Row | None, int]]:
        yield from self._fuse()
        return (yield from super().open(tokens, room))

    def held(self) -> Held:
        end = min(self._fused.end, self._of.kept)
        fused = self._fused.rows(first := self._fused.first, end)
        if fused is None:
            return {}
        return {**super().held(), "fused": fused.copy(), "first": np.array([first])}

    def hold(self, held: Held, text: Sequence[int]) -> None:
        if "at" in held:
            super().hold(held, text)
        else:
            self.forget()
        self._fused.clear(first := int(held["first"][0]))
        self._fused.add(first, held["fused"])
        self._of.follow(self._target.tokens)


def _open(kit: Kit) -> Drafter:
    return EagleDrafter(kit.own("eagle3").open(kit.target), kit.target, n_vocab=kit.target.n_vocab)


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
