"""A small model with the same vocabulary drafts a chain, one token per step.

Accepted drafts stay in its lane, so after a round it reads only what is new: the target token, and
the last draft if all were accepted. Where reading a long backlog would cost too much, it reads only
the newest part of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.arrays import Row
from specllama.backend.base import Context, Outputs
from specllama.errors import ContextFull
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.method import Kit, Method, with_draft
from specllama.speculative.drafting.stepping import Stepping
from specllama.speculative.effects import Pass, Steps
from specllama.speculative.tree import Path
from specllama.speculative.types import Room
from specllama.text_history import Follower, common_prefix


class ChainDrafter(Stepping):
    """A drafter of chains with a second model.

    Args:
        lane: the draft model's own, any size.
        n_vocab: vocabulary size of the target; ids at or above it are never proposed.
        batch: most tokens fed in one pass when catching up; default: 512, or what a pass takes.
    """

    name = "draft"

    def __init__(self, lane: Context, *, n_vocab: int, batch: int | None = None) -> None:
        self.lane = lane
        self.lanes = (lane,)
        self._pass = Pass(lane, ())  # one for all of its steps
        self._n_vocab = min(n_vocab, lane.n_vocab)
        self._batch = batch or min(512, lane.n_batch)
        self._start = 0  # index of the lane's first token in the text
        self._base = 0  # tokens of the lane that are not drafted
        self._seen = Follower()
        self._agreed = 0, 0  # first token of the lane, and how many of it were the text's

    def start(self, request: Request) -> None:
        super().start(request)
        self._start_at(0)  # and what the lane holds may be another's

    def begin(self, tokens: Sequence[int], room: Room) -> Steps[tuple[Row | None, int]]:
        unread, fits = self._unread(tokens)
        if fits <= 0:
            return None, 0
        row = yield from self._catch_up(tokens, room, unread)
        self._base = len(self.lane.tokens)
        # step i evaluates one more token, so the last draft needs no place in the lane
        return row, fits

    def after(self, paths: Sequence[Path]) -> Steps[Sequence[Row]]:
        (path,) = paths
        held = tuple(self.lane.tokens[self._base :])
        keep = min(common_prefix(held, path), len(path) - 1)
        cut = None if keep == len(held) else self._base + keep
        yield self._asked(path[keep:], "last", cut)
        return [*self._pass.rows[:, : self._n_vocab]]

    def _asked(self, tokens: Sequence[int], outputs: Outputs, keep: int | None) -> Pass:
        self._pass.tokens, self._pass.outputs, self._pass.keep = tokens, outputs, keep
        return self._pass

    def _unread(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Return (tokens that the lane does not hold yet, drafts that fit after them).

        When the text outgrows the lane, the newer half of what fits is read again.
        """
        n_ctx = self.lane.n_ctx
        length = len(tokens) - self._start
        if length <= 0 or length > n_ctx:
            length = min(len(tokens), max(n_ctx // 2, 1))
            self._start = len(tokens) - length
        agreed = self.lane.reusable_prefix(min(self._agrees(tokens), length - 1))
        return length - agreed, n_ctx - length + 1

    def _agrees(self, tokens: Sequence[int]) -> int:
        """Count the lane's tokens that equal the text's: only new ones are compared."""
        held, start = self.lane.tokens, self._start
        kept, _ = self._seen.follow(tokens)
        before, agreed = self._agreed
        known = min(agreed, max(kept - start, 0), len(held)) if before == start else 0
        agreed = known + common_prefix(held[known:], tokens[start + known :])
        self._agreed = start, agreed
        return agreed

    def _catch_up(self, tokens: Sequence[int], room: Room, unread: int) -> Steps[Row | None]:
        """Read ``tokens`` to their end; return the logits after the last one.

        The window says how much may be read; where that is not all, the lane starts over from the
        newest tokens: a shorter memory is cheaper than reading everything that was missed. None if
        nothing may be read, or the text cannot be followed.
        """
        read = min(room.judge.read(self.name, unread), unread)
        if read <= 0:
            return None
        lag = tokens[len(tokens) - read :]
        if max(lag) >= self.lane.n_vocab:
            return None  # a token the draft model does not know: it cannot follow this text
        if read < unread:
            self._start_at(len(tokens) - read)
        keep: int | None = len(tokens) - read - self._start
        try:
            for i in range(0, read, self._batch):
                part = lag[i : i + self._batch]
                last = i + len(part) == read
                yield self._asked(part, "last" if last else "none", keep)
                keep = None
        except ContextFull:
            return None  # a draft model of another vocabulary may need more tokens for this text
        return self._pass.rows[0, : self._n_vocab]

    def _start_at(self, index: int) -> None:
        """Set the token of the text that is the lane's first."""
        self._start, self._agreed = index, (index, 0)

    def forget(self) -> None:
        self._start_at(0)


def _open(kit: Kit) -> Drafter:
    if isinstance(kit.draft, Drafter):
        return kit.draft
    assert kit.draft is not None
    return ChainDrafter(kit.draft, n_vocab=kit.target.n_vocab)


METHOD = Method(
    name="draft",
    label="Draft model",
    short="draft model",
    letter="d",
    blurb="A small model with the same vocabulary drafts, the target checks. "
    "The classic; best for chat and stories.",
    cost="draft model",
    why_not=with_draft,
    open=_open,
    auto=True,
)
