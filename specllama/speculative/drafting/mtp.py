"""MTP / NextN: a block that the model was trained with guesses the token after the next.

It stands in the target's own file, or in one of its own (see ``assistant``).
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.arrays import Row
from specllama.errors import ContextFull
from specllama.speculative.drafting.assistant import AssistantDrafter
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.method import Kit, Method, with_own
from specllama.speculative.drafting.states import StateDrafter
from specllama.speculative.effects import Steps


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

    def read_prompt(self, tokens: Sequence[int], n: int) -> Steps[None]:
        begin = self._first_to_read(tokens, last=n)
        if begin is not None and begin < n:
            try:
                yield from self._read(tokens, begin, n)
            except ContextFull:
                self.forget()

    def _read(self, tokens: Sequence[int], begin: int, end: int) -> Steps[Row]:
        row = yield from super()._read(tokens, begin, end)
        self.states.forget(end - 2)  # the last pair is read again when a round is retried
        return row


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
