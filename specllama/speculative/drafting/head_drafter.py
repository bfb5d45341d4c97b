"""Drafters with a block of the target's that reads its hidden states: NextN layers, EAGLE-3 heads.

It reads pairs: a token, and the target's hidden state after the token before it. Its own output
stands in for the target's next state, so it can continue by itself. The target's states come with
its verification passes: after a round, only the accepted tokens are read again, with those states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specllama.arrays import Row, Rows
from specllama.backend.base import Context, Out
from specllama.errors import ContextFull, EngineError
from specllama.speculative.drafting.draft_tree import grow
from specllama.speculative.drafting.drafter import Held
from specllama.speculative.drafting.stepping import Stepping
from specllama.speculative.effects import HeadPlace, Keep, Pass, Steps
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.tree import ROOT, Path
from specllama.speculative.types import Draft, Room
from specllama.text_history import Follower

if TYPE_CHECKING:
    from specllama.backend.base import HiddenRows


class Stated(Context, Protocol):
    """A target's lane that keeps hidden states of its passes."""

    @property
    def hidden(self) -> HiddenRows: ...


class HeadDrafter(Stepping):
    """A drafter with a head that reads the target's states; of trees if the target checks those.

    Args:
        lane: the head's, which is closed with the drafter.
        target: whose states it reads.
        n_vocab: of the target.
    """

    def __init__(self, lane: HeadPlace, target: Stated, *, n_vocab: int) -> None:
        self._lane, self._target, self._n_vocab = lane, target, n_vocab
        self._seen = Follower()
        self._held = 0  # tokens of the text whose states the lane holds
        self._own: dict[Path, Row] = {}  # the head's states after drafted tokens

    @property
    def width(self) -> int:
        return self._lane.max_rows if self.request.leaves > 1 else 1

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        if self.request.leaves == 1:
            return (yield from super().draft(tokens, chain, room))
        return (yield from grow(self, tokens, chain, room))

    def read_prompt(self, tokens: Sequence[int], n: int) -> Steps[None]:
        try:
            yield from self.follow(tokens, n)
        except ContextFull:
            self.forget()

    def begin(self, tokens: Sequence[int], room: Room) -> Steps[tuple[Row | None, int]]:
        try:
            return (yield from self.open(tokens, room))
        except ContextFull:
            self.forget()
            return None, 0

    def follow(self, tokens: Sequence[int], n: int) -> Steps[None]:
        """Read what ``read_prompt`` may read."""
        yield from ()

    def open(self, tokens: Sequence[int], room: Room) -> Steps[tuple[Row | None, int]]:
        """Read the text and return what ``begin`` returns.

        Raises:
            ContextFull: there is no room for it.
        """
        raise NotImplementedError

    def _grow(self, paths: Sequence[Path], nodes: Mapping[Path, int], head: int = 0) -> Steps[Rows]:
        """Read drafted tokens after the nodes of their parents, each with the head's own state."""
        states = np.stack([self._own[path[:-1]] for path in paths])
        tokens, parents = [path[-1] for path in paths], [nodes[path[:-1]] for path in paths]
        out: Out = yield Pass(self._lane, tokens, "all", parents, states, head)
        for path, state in zip(paths, out.states, strict=True):
            self._own.setdefault(path, state)  # of several heads that which drafts after it
        return out.rows[:, : self._n_vocab]

    def _with_states(self, first: int, end: int, cached: int) -> int:
        """Count the ``cached`` tokens after which states are known: it has read those of ``first``
        to ``end``, others may still wait to be read."""
        hidden = self._target.hidden
        if hidden.end > hidden.first:
            first, end = (first if first <= hidden.first <= end else hidden.first), hidden.end
        if end >= cached:
            return cached
        return end if first == 0 else 0

    def forget(self) -> None:
        self._held = 0

    def held(self) -> Held:
        if not (known := min(self._held, self._seen.kept)):
            return {}
        state, lane = self._lane.copied(), self._lane
        at = (lane.first, lane.end, known) if state else (0, 0, 0)
        return {"cells": np.frombuffer(state, np.uint8), "at": np.array(at, np.int64)}

    def hold(self, held: Held, text: Sequence[int]) -> None:
        self.forget()
        first, end, known = held["at"].tolist()
        cells = held["cells"].data
        if len(cells) and self._lane.restore(cells, first, end):
            self._seen.follow(text)
            self._held = known

    def close(self) -> None:
        self._lane.close()


class StateDrafter(HeadDrafter):
    """A drafter of trees that reads pairs of tokens and states."""

    lacks = 0  # states before the first pair that zeros may stand in for
    deepest = 1 << 30  # drafted tokens in a line: own states drift

    def __init__(self, lane: HeadPlace, target: Stated, *, n_vocab: int) -> None:
        super().__init__(lane, target, n_vocab=n_vocab)
        if lane.heads > 1:
            self.deepest = lane.heads
        self._anew = False  # whether the lane has to begin anew
        self._nodes: dict[Path, int] = {(): ROOT}  # drafted tokens that the lane has read

    @property
    def states(self) -> HiddenRows:
        """The target's states that go with the next token, by position."""
        return self._target.hidden

    def open(self, tokens: Sequence[int], room: Room) -> Steps[tuple[Row | None, int]]:
        length = len(tokens)
        # the pending token's pair is read again if need be: its logits are the first draft's
        begin = self._first_to_read(tokens, last=length - 1)
        if begin is None:
            return None, 0
        unread = length - begin
        read = min(room.judge.read(self.name, unread), unread)
        if read <= 0:
            return None, 0
        if read < unread:  # a shorter memory is cheaper than all that was missed
            begin = length - read
            self._begin_anew(begin)
        return (yield from self._read(tokens, begin, length)), self.deepest

    def after(self, paths: Sequence[Path]) -> Steps[Sequence[Row]]:
        if self._lane.heads > 1:
            return (yield from self._by_heads(paths))
        n = len(self._nodes) - 1
        nodes = self._nodes | {path: node for node, path in enumerate(paths, n)}
        rows = yield from self._grow(paths, nodes)
        self._nodes = nodes
        return [*rows]

    def settle(self, path: Path) -> Steps[None]:
        yield Keep(self._lane)  # what is accepted is read again, alongside the target's states

    def _by_heads(self, paths: Sequence[Path]) -> Steps[Sequence[Row]]:
        """Draft one depth with each head, which reads all that is above."""
        found: dict[Path, Row] = {}
        for depth in sorted({len(path) for path in paths}):
            asked = [path for path in paths if len(path) == depth]
            read = dict.fromkeys(path[:n] for n in range(1, depth + 1) for path in asked)
            nodes = {(): ROOT} | {path: node for node, path in enumerate(read)}
            rows = yield from self._grow([*read], nodes, depth)
            found |= {path: rows[nodes[path]].copy() for path in asked}
        return [found[path] for path in paths]

    def _first_to_read(self, tokens: Sequence[int], last: int) -> int | None:
        """Return the first position to read, at most ``last``; None if later states are unknown.

        A lane whose next pairs lack theirs begins anew where states are known.
        """
        known, lane = self.states, self._lane
        kept, _ = self._seen.follow(tokens)
        self._held = min(self._held, kept)
        if known.end < last or 0 < last <= known.first:
            return None
        begin = min(self._held, last)
        if lane.first <= begin <= lane.end and known.first + 1 - self.lacks <= begin:
            return begin
        begin = known.first + 1 if known.first or not self.lacks else 0
        if begin > last:
            return None
        self._begin_anew(begin)
        return begin

    def _begin_anew(self, begin: int) -> None:
        """Start over at ``begin``: the lane's content is of no use."""
        self._anew = True
        self._held = begin

    def _read(self, tokens: Sequence[int], begin: int, end: int) -> Steps[Row]:
        """Read the pairs from ``begin`` to ``end``; returns the logits after the last."""
        known, lane = self.states, self._lane
        self._own.clear()
        for at in range(begin, end, lane.n_batch):
            part = tokens[at : min(at + lane.n_batch, end)]
            states = np.zeros((len(part), lane.width), np.float32)
            lack = max(known.first - (at - 1), 0)  # 1 before the first token, or one forgotten
            if lack < len(part):
                rows = known.rows(at - 1 + lack, at - 1 + len(part))
                if rows is None:
                    raise EngineError("hidden states of the target are missing")
                states[lack:] = rows
            if self._anew:
                yield Keep(lane, 0)
                self._anew = False
            out: Out = yield Pass(lane, part, "last", states=states, keep=at)
            self._own[()] = out.states[0]
            self._held = at + len(part)
        self._nodes = {(): ROOT}
        return out.rows[0, : self._n_vocab]

    def forget(self) -> None:
        self._begin_anew(0)

    def held(self) -> Held:
        return {} if self._anew else super().held()

    def hold(self, held: Held, text: Sequence[int]) -> None:
        super().hold(held, text)
        self._anew = not self._held
