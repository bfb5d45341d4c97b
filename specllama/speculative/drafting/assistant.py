"""MTP in a file of its own: an assistant that looks into the target's cache and keeps nothing.

Its query stands at the position of the pending token, whatever it has guessed since: so it was
trained. What it needs of the text is the target's state behind the token before the pending one.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.arrays import Row, Rows
from specllama.errors import ContextFull
from specllama.speculative.asking import Asking, Feed, StateLane
from specllama.speculative.drafting.states import Stated
from specllama.speculative.drafting.stepping import Stepping
from specllama.speculative.shortlist import Scores
from specllama.speculative.tree import Path
from specllama.speculative.types import Room


class AssistantDrafter(Stepping):
    """Drafts a chain with an assistant, which reads nothing but the pending token.

    Args:
        lane: the assistant's look into the cache of ``target``; closed with the drafter.
        target: whose states it reads.
        n_vocab: of the target.
    """

    name = "mtp"
    needs = "nextn"

    def __init__(self, lane: StateLane, target: Stated, *, n_vocab: int) -> None:
        self._lane = lane
        self._target = target
        self._n_vocab = n_vocab
        self._at = 0  # position of the pending token
        self._own: list[Rows] = []  # its states [1, width] behind the first drafted tokens

    def read_prompt(self, tokens: Sequence[int], n: int) -> Asking[None]:
        self._target.hidden.forget(n - 1)
        yield from ()

    def begin(self, tokens: Sequence[int], room: Room) -> Asking[tuple[Row | None, int]]:
        self._at = at = len(tokens) - 1
        known = self._target.hidden
        state = known.rows(at - 1, at)
        if state is None or not room.begin(self.name, 1):
            return None, 0
        state = state.copy()
        known.forget(at - 1)  # it is read again when a round is retried
        try:
            return (yield from self._feed(tokens[-1], state, 0)), 1 << 30
        except ContextFull:
            return None, 0

    def after(self, paths: Sequence[Path]) -> Asking[Sequence[Scores]]:
        (path,) = paths
        n = len(path)
        row = yield from self._feed(path[-1], self._own[n - 1], n)
        return [row]

    def _feed(self, token: int, state: Rows, n: int) -> Asking[Row]:
        """The logits behind ``n`` drafted tokens, of which ``token`` is the last."""
        answer: tuple[Row, Row] = yield Feed(self._lane, [token], state, self._at, anew=True)
        row, own = answer
        self._own[n:] = [own[None]]
        return row[: self._n_vocab]

    def close(self) -> None:
        self._lane.close()
