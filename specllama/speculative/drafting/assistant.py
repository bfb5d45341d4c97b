"""MTP in a file of its own: an assistant that reads the target's cache and keeps nothing.

Its query stands at the position of the pending token, whatever it has guessed since: so it was
trained. What it needs of the text is the target's state after the token before the pending one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specllama.arrays import Row
from specllama.backend.base import Out
from specllama.errors import ContextFull
from specllama.speculative.drafting.states import HeadDrafter
from specllama.speculative.effects import Pass, Steps
from specllama.speculative.tree import ROOT, Path
from specllama.speculative.types import Room


class AssistantDrafter(HeadDrafter):
    """A drafter of trees with an assistant, which reads nothing but the pending token."""

    name = "mtp"
    needs = "nextn"

    def read_prompt(self, tokens: Sequence[int], n: int) -> Steps[None]:
        self._target.hidden.forget(n - 1)
        yield from ()

    def begin(self, tokens: Sequence[int], room: Room) -> Steps[tuple[Row | None, int]]:
        at = len(tokens) - 1
        known = self._target.hidden
        state = known.rows(at - 1, at)
        if state is None or not room.judge.read(self.name, 1):
            return None, 0
        state = state.copy()
        known.forget(at - 1)  # it is read again when a round is retried
        try:
            out: Out = yield Pass(self._lane, tokens[-1:], "last", states=state, keep=at)
        except ContextFull:
            return None, 0
        self._own: dict[Path, Row] = {(): out.states[0]}  # its states after drafted tokens
        return out.rows[0, : self._n_vocab], 1 << 30

    def after(self, paths: Sequence[Path]) -> Steps[Sequence[Row]]:
        states = np.stack([self._own[path[:-1]] for path in paths])
        tokens, roots = [path[-1] for path in paths], [ROOT] * len(paths)
        out: Out = yield Pass(self._lane, tokens, "all", roots, states)
        self._own |= zip(paths, out.states, strict=True)
        return [*out.rows[:, : self._n_vocab]]
