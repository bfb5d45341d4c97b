"""Parts of a pass over a pool's cells: laid into the batch, and entered into their lanes' books."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specllama.arrays import Rows, with_final
from specllama.backend.base import Outputs
from specllama.backend.batch import Batch
from specllama.backend.cells import Places
from specllama.backend.lane import CachedTree, CellLane
from specllama.backend.pass_plan import PassPlan
from specllama.backend.tree_layout import Layout
from specllama.errors import EngineError

if TYPE_CHECKING:
    from specllama.backend.llama_cache import LlamaCache


@dataclass(slots=True)
class PassPart:
    """A part of a pass, checked."""

    lane: CellLane
    tokens: Sequence[int]
    outputs: Outputs
    parents: tuple[int, ...] = ()  # of a tree's nodes
    laid: Layout | None = None  # the lane's tree with it
    opened: Sequence[int] = ()  # sequences of the leaves that it opens
    pads: int = 0  # guesses at its end that only fill the pass
    rows: Rows | None = None  # what the pass returned for it

    @property
    def past(self) -> int:
        """Tokens of the lane that were evaluated before, those of its tree among them."""
        tree = self.lane.growing
        return len(self.lane.tokens) + (0 if tree is None else len(tree.tokens))

    @property
    def n_rows(self) -> int:
        return len(self.tokens) if self.outputs == "all" else int(self.outputs == "last")

    @property
    def gives_final(self) -> bool:
        """True if final hidden states are kept of it."""
        return with_final(self.lane.need) and self.n_rows == len(self.tokens)

    @property
    def may_widen(self) -> bool:
        """True if it may be padded where a wider pass costs less."""
        return self.lane.cheap and self.outputs == "all" and self.lane.growing is None

    def lay(self, parents: Sequence[int], max_leaves: int, *, kept: bool) -> int:
        """Turn it into nodes of the lane's tree; return the number of branches that they open.

        Args:
            kept: passes are kept to widths.

        Raises:
            EngineError: the pool does not take such a tree.
            ValueError: a parent does not precede its child, or one is missing.
        """
        if max_leaves == 1:
            raise EngineError("this pool takes chains, no tree passes")
        if len(parents) != len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens with {len(parents)} parents")
        if self.lane.growing is not None and kept:
            raise EngineError("a tree takes one pass where passes are kept to widths")
        self.parents, self.laid = tuple(parents), self.lane.grown(parents)
        if self.laid.n_leaves > max_leaves:
            raise EngineError(f"a tree has at most {max_leaves} leaves, not {self.laid.n_leaves}")
        return len(self.laid.copies)

    def pad(self, n: int) -> None:
        """Hang ``n`` more guesses on its end."""
        end = len(self.tokens)
        self.tokens = [*self.tokens, *[self.tokens[-1]] * n]
        self.pads = n
        if self.laid is not None:
            self.laid = self.lane.grown([*self.parents, *range(end - 1, end + n - 1)])

    def fill(self, room: int) -> None:
        """Pad the part if it nearly fills its last group of rows; ``room``: the most pads."""
        if lacks := PassPlan.lacks(len(self.tokens), room):
            self.pad(lacks)

    def drop_pads(self) -> None:
        """Remove the pads from the lane's text after the pass; a tree's are rejected with it."""
        if self.pads and self.laid is None:
            self.lane.rollback(len(self.lane.tokens) - self.pads)

    def write(self, batch: Batch, rows: slice | Places) -> None:
        """Lay its tokens into the batch."""
        size, past = len(self.tokens), len(self.lane.tokens)
        batch.token[rows] = self.tokens
        batch.position[rows] = past + (
            np.arange(size) if self.laid is None else np.array(self.laid.new_depth)
        )
        batch.output[rows] = self.outputs == "all"
        if self.outputs == "last":
            at = size - 1 - self.pads
            batch.output[at if isinstance(rows, slice) else rows[at]] = 1

    def address(self, cache: LlamaCache, free: list[int], rows: slice | Places) -> None:
        """Write the sequences of its tokens into the batch."""
        lane, batch, laid = self.lane, cache.batch, self.laid
        batch.sequences[rows, 0] = lane.sequence
        if laid is None:
            return
        past = len(lane.tokens)
        held = [lane.sequence] if lane.tree is None else lane.tree.sequences
        self.opened = [free.pop() for _ in laid.copies]
        for opened, (leaf, n_above) in zip(self.opened, laid.copies, strict=True):
            cache.copy(held[leaf], opened, 0, past + n_above)
        ids = np.array([*held, *self.opened])
        at = np.arange(len(self.tokens)) if isinstance(rows, slice) else rows
        for i, below in zip(at, laid.leaves, strict=True):
            batch.n_sequences[i] = len(below)
            batch.sequences[i, : len(below)] = ids[list(below)]

    def keep_states(
        self, cache: LlamaCache, rows: slice | Places, order: Places | None, total: int
    ) -> None:
        """Keep the hidden states that its lane wants, after the pass."""
        lane, past = self.lane, self.past
        if lane.need == "final_hidden":
            if self.gives_final:
                states = cache.states(lane.need, total)
                lane.hidden.add(past, states if order is None else states[order[rows]])
        elif lane.need != "nothing" and self.gives_final == with_final(lane.need):
            lane.hidden.add(past, cache.states(lane.need, cache.batch.n)[rows])

    def undo(self, cache: LlamaCache, free: list[int]) -> None:
        """Restore the lane's cache as it was before a pass that failed."""
        for leaf in self.opened:
            cache.remove(leaf, 0)
            free.append(leaf)
        lane, tree = self.lane, self.lane.tree
        if tree is None:
            cache.remove(lane.sequence, len(lane.tokens))
            return
        for end, sequence in zip(tree.layout.ends, tree.sequences, strict=True):
            cache.remove(sequence, len(lane.tokens) + len(tree.layout.above(end)))

    def enter(self, tokens: list[int], places: Places, way: int) -> None:
        """Record that the lane holds these tokens now, in these cells."""
        lane, size, past = self.lane, len(self.tokens), len(self.lane.tokens)
        if self.laid is not None:
            tree = lane.tree or CachedTree([], self.laid, [lane.sequence], places[:0])
            tree.tokens += tokens
            tree.layout = self.laid
            tree.sequences += self.opened
            tree.places = np.concatenate((tree.places, places))
            lane.tree = tree
            return
        if way > 1:
            lane.read.append((past, past + size, way))
        lane.places[past : past + size] = places
        lane.n_cells += size
        lane.tokens.extend(tokens)


def require_tokens(tokens: Sequence[int], n_vocab: int) -> None:
    """Refuse an empty part, and tokens that the model does not know."""
    if len(tokens) == 0:
        raise ValueError("a pass needs at least one token")
    if min(tokens) < 0 or max(tokens) >= n_vocab:
        raise EngineError(f"a token is outside the vocabulary of {n_vocab}")


def lay(sizes: Sequence[int], *, in_turn: bool = False) -> list[slice | Places]:
    """Return the batch rows of some pieces: every first token, then every second one.

    Args:
        in_turn: one piece after the other instead.
    """
    if len(sizes) == 1:
        return [slice(0, sizes[0])]
    if in_turn:
        return list(np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1]))
    nth = np.concatenate([np.arange(size) for size in sizes])
    piece = np.repeat(np.arange(len(sizes)), sizes)
    at = np.empty(len(nth), np.int64)
    at[np.lexsort((piece, nth))] = np.arange(len(nth))
    return list(np.split(at, np.cumsum(sizes)[:-1]))


def pick(rows: Rows, which: Places) -> Rows:
    """Return some rows, ascending; a view if they are evenly spaced."""
    steps = np.diff(which)
    if len(which) and (steps == (step := int(steps[0]) if len(steps) else 1)).all():
        return rows[which[0] : which[-1] + 1 : step]
    return rows[which]
