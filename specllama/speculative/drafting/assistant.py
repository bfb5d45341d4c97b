"""MTP in a file of its own: an assistant that looks into the target's cache and keeps nothing.

Its query stands at the position of the pending token, whatever it has guessed since: so it was
trained. What it needs of the text is the target's state behind the token before the pending one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specllama.arrays import Row
from specllama.backend.base import Out
from specllama.errors import ContextFull
from specllama.speculative.drafting.draft_tree import MayBranch
from specllama.speculative.drafting.states import Stated
from specllama.speculative.effects import Asking, HeadPlace, Pass
from specllama.speculative.tree import ROOT, Path
from specllama.speculative.types import Room


class AssistantDrafter(MayBranch):
    """Drafts a tree with an assistant, which reads nothing but the pending token.

    Args:
        lane: the assistant's look into the cache of ``target``; closed with the drafter.
        target: whose states it reads.
        n_vocab: of the target.
    """

    name = "mtp"
    needs = "nextn"

    def __init__(self, lane: HeadPlace, target: Stated, *, n_vocab: int) -> None:
        self._lane = lane
        self._target = target
        self._n_vocab = n_vocab
        self._own: dict[Path, Row] = {}  # its states behind drafted tokens

    @property
    def width(self) -> int:
        return self._lane.max_rows if self.request.leaves > 1 else 1

    def read_prompt(self, tokens: Sequence[int], n: int) -> Asking[None]:
        self._target.hidden.forget(n - 1)
        yield from ()

    def begin(self, tokens: Sequence[int], room: Room) -> Asking[tuple[Row | None, int]]:
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
        self._own = {(): out.states[0]}
        return out.rows[0, : self._n_vocab], 1 << 30

    def after(self, paths: Sequence[Path]) -> Asking[Sequence[Row]]:
        states = np.stack([self._own[path[:-1]] for path in paths])
        tokens, roots = [path[-1] for path in paths], [ROOT] * len(paths)
        out: Out = yield Pass(self._lane, tokens, "all", roots, states)
        self._own |= zip(paths, out.states, strict=True)
        return [*out.rows[:, : self._n_vocab]]

    def close(self) -> None:
        self._lane.close()
