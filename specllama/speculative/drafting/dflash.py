"""DFlash: a small drafter guesses a block of tokens in one pass, all places at once.

It reads the target's hidden states, which become the memory that its block looks into; nothing that
it guesses is part of that. DFlash2 and DSpark files say besides how guesses follow each other
(``blocks``), so that every law is that of a place after the tokens drawn before it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from specllama.arrays import Row
from specllama.backend.base import Out
from specllama.errors import ContextFull
from specllama.history import Follower, History
from specllama.speculative.drafting.blocks import Block, Markov, Places
from specllama.speculative.drafting.drafter import Drafter, Held
from specllama.speculative.drafting.method import NO_HEAD, Kit, Method, with_own
from specllama.speculative.drafting.states import HeadDrafter, Stated
from specllama.speculative.effects import HeadPlace, Keep, Pass, Steps
from specllama.speculative.tree import Path
from specllama.speculative.types import Draft, Room, Verdict

_UNREAD = 1024  # states that wait while nothing is drafted; older ones are given up


class DflashDrafter(HeadDrafter):
    """A drafter with a block model.

    Args:
        lane, target, n_vocab: see ``HeadDrafter``.
        places: how a block is asked for. markov: how its guesses follow each other.
    """

    name = "dflash"

    def __init__(
        self,
        lane: HeadPlace,
        target: Stated,
        places: Places,
        markov: Markov | None = None,
        *,
        n_vocab: int,
    ) -> None:
        self.needs = lane.layers
        super().__init__(lane, target, n_vocab=n_vocab)
        self._places, self._markov = places, markov
        self._of = Follower()  # the target's text
        self._held = 0  # tokens of it whose states the lane holds
        self._block: Block | None = None

    def reusable(self, tokens: Sequence[int], cached: int) -> int:
        hidden, end = self._target.hidden, min(self._held, self._of.kept)
        first = self._lane.first
        if hidden.end > hidden.first:  # not read yet
            first, end = (first if first <= hidden.first <= end else hidden.first), hidden.end
        if end >= cached:
            return cached
        return end if first == 0 else 0

    def read_prompt(self, tokens: Sequence[int], n: int) -> Steps[None]:
        try:
            yield from self._read(self._unread())
        except ContextFull:
            self.forget()

    def begin(self, tokens: Sequence[int], room: Room) -> Steps[tuple[Row | None, int]]:
        unread = self._unread()
        if self._target.hidden.end < len(tokens) - 1:
            return None, 0  # states are not known to the end
        lag = max(unread, 1)  # whatever there is to read, the block is a pass
        read = min(room.judge.read(self.name, lag), lag)
        if read <= 0:
            return None, 0
        try:
            yield from self._read(min(read, unread))
            if self._lane.end != len(tokens) - 1 or self._lane.end == self._lane.first:
                return None, 0
            n = min(room.n, self._places.guesses)
            block = self._places.tokens(tokens[-1], n)
            out: Out = yield Pass(self._lane, block, "all", range(-1, len(block) - 1))
            yield Keep(self._lane)
        except ContextFull:
            self.forget()
            return None, 0
        self._block = Block(self._places.filled(out), self._n_vocab, self._markov)
        return self._block.row(()), n

    def after(self, paths: Sequence[Path]) -> Steps[Sequence[Row]]:
        yield from ()
        (path,) = paths
        assert self._block is not None
        return [self._block.row(path)]

    def alike(self, path: Path) -> Hashable:
        follows = self._markov is not None or self._places.candidates
        return len(path), path[-1:] if follows else ()

    def sure(self, path: Sequence[int], row: Row) -> float:
        told = None if self._block is None else self._block.sure(path)
        return super().sure(path, row) if told is None else told

    def _unread(self) -> int:
        """Count the target's states that are still to be read."""
        hidden = self._target.hidden
        kept, _ = self._of.follow(self._target.tokens)
        self._held = min(self._held, kept)
        if hidden.end <= hidden.first:
            return 0
        joined = hidden.first <= self._held <= hidden.end
        return hidden.end - (self._held if joined else hidden.first)

    def _read(self, n: int) -> Steps[None]:
        """Read the newest ``n`` states of the target, and forget all."""
        hidden, lane = self._target.hidden, self._lane
        at, end = hidden.end - n, hidden.end
        while at < end:
            upto = min(at + lane.n_batch, end)
            states = hidden.rows(at, upto)
            assert states is not None
            # what lies before is of no use where something is missing between
            if not lane.first <= at <= min(lane.end, self._held):
                yield Keep(lane, 0)
            yield Pass(lane, (), "none", states=states, keep=at)
            self._held = at = upto
        hidden.forget(end)

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        hidden = self._target.hidden
        if hidden.end - hidden.first > 2 * _UNREAD:
            hidden.forget(hidden.end - _UNREAD)

    def forget(self) -> None:
        """Begin without any memory of a text."""
        self._held = 0

    def held(self) -> Held:
        return self._cells(known) if (known := min(self._held, self._of.kept)) else {}

    def hold(self, held: Held, text: History) -> None:
        self._held = self._take_cells(held)
        self._of.follow(self._target.tokens)


def _open(kit: Kit) -> Drafter:
    own, target = kit.own("dflash"), kit.target
    facts = own.facts
    places = Places(
        facts.guesses, facts.mask, facts.anchored, facts.candidates, facts.confident,
        facts.scale, facts.cap,
    )  # fmt: skip
    return DflashDrafter(own.open(target), target, places, own.markov, n_vocab=target.n_vocab)


METHOD = Method(
    name="dflash",
    label="DFlash / DSpark",
    short="DFlash",
    letter="f",
    blurb="A small drafter reads the target's hidden states and guesses a block of tokens in one "
    "pass. Needs one trained for the target.",
    cost="own",
    why_not=with_own("dflash", NO_HEAD),
    open=_open,
    branches="may",
    auto=True,
    at_once=True,
)
