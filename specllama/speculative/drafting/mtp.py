"""MTP / NextN: a block that the model was trained with guesses the token after the next.

It stands in the target's own file, or in one of its own: an assistant that reads the target's cache
and keeps nothing. Its query stands at the position of the pending token, whatever it has guessed
since: so it was trained. Of the text it needs the target's state after the token before that.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.arrays import Row
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.head_drafter import HeadDrafter, StateDrafter
from specllama.speculative.drafting.method import Kit, Method, with_own
from specllama.speculative.effects import Pass, Steps
from specllama.speculative.tree import ROOT, Path
from specllama.speculative.types import Room


class MtpDrafter(StateDrafter):
    """A drafter of trees with the target's NextN block, which reads the prompt as the target does.

    States are dropped once their pairs are read. For a single missing one, zeros stand in, as
    before the first token, rather than give up the memory.
    """

    name = "mtp"
    needs = "nextn"
    lacks = 1

    def reusable(self, tokens: Sequence[int], cached: int) -> int:
        # the first pair to be read needs the state before it
        known = self.states
        if known.end >= cached:
            return max(cached - 1, 0) if known.first >= cached else cached
        covered = min(self._held, self._seen.kept, self._lane.end, cached) - 1
        return covered if self._lane.first == 0 and covered > 0 else 0

    def follow(self, tokens: Sequence[int], n: int) -> Steps[None]:
        begin = self._first_to_read(tokens, last=n)
        if begin is not None and begin < n:
            yield from self._read(tokens, begin, n)

    def _read(self, tokens: Sequence[int], begin: int, end: int) -> Steps[Row]:
        row = yield from super()._read(tokens, begin, end)
        self.states.forget(end - 2)  # the last pair is read again when a round is retried
        return row


class AssistantDrafter(HeadDrafter):
    """A drafter of trees with an assistant, which reads nothing but the pending token."""

    name = "mtp"
    needs = "nextn"

    def follow(self, tokens: Sequence[int], n: int) -> Steps[None]:
        self._target.hidden.forget(n - 1)
        yield from ()

    def open(self, tokens: Sequence[int], room: Room) -> Steps[tuple[Row | None, int]]:
        at = len(tokens) - 1
        known = self._target.hidden
        state = known.rows(at - 1, at)
        if state is None or not room.judge.read(self.name, 1):
            return None, 0
        state = state.copy()
        known.forget(at - 1)  # it is read again when a round is retried
        out: Pass = yield Pass(self._lane, tokens[-1:], "last", states=state, keep=at)
        self._own = {(): out.left[0]}
        return out.rows[0, : self._n_vocab], 1 << 30

    def after(self, paths: Sequence[Path]) -> Steps[Sequence[Row]]:
        return [*(yield from self._grow(paths, {path[:-1]: ROOT for path in paths}))]


def _open(kit: Kit) -> Drafter:
    own, target = kit.own("mtp"), kit.target
    kind = AssistantDrafter if own.graph.borrows else MtpDrafter
    return kind(own.open(target), target, n_vocab=target.n_vocab)


METHOD = Method(
    name="mtp",
    label="MTP / NextN",
    short="MTP",
    letter="t",
    blurb="Layers that some models were trained with predict the token after the next; in their "
    "own file, or in an assistant's beside it.",
    cost="own",
    why_not=with_own("mtp", "the target's file has no NextN layers"),
    open=_open,
    branches="may",
    auto=True,
)
