"""DFlash: a small drafter guesses a block of tokens in one pass, all places at once.

It reads the target's hidden states, which become the memory that its block looks into; nothing that
it guesses is part of that. The distribution of each place, given the guesses before it:

DFlash     nothing but its row: every place was guessed without the others
DSpark     its row after the likeliest guesses; after another token the bias of that takes the
           place of theirs, in the logits of the likeliest tokens
DFlash2    a few candidates, and how well each follows each of the place before
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from specllama.arrays import IntArray, Row, Rows
from specllama.backend.base import Lane, Part
from specllama.speculative.drafting.drafter import Drafter, Held
from specllama.speculative.drafting.head_drafter import HeadDrafter
from specllama.speculative.drafting.method import NO_HEAD, Kit, Method, with_own
from specllama.speculative.effects import HeadPlace, Keep, Pass, Steps
from specllama.speculative.selection import Peaks
from specllama.speculative.tree import Path
from specllama.speculative.types import Draft, Room, Verdict

_MOVED = 256  # of a row's likeliest tokens, whose bias is computed; others are hardly drawn
_UNREAD = 1024  # states that wait while nothing is drafted; older ones are given up


class Markov(Protocol):
    """A bias by the token before."""

    def bias(self, ids: IntArray, behind: int) -> Row:
        """Return the bias that a token adds to the logits of ``ids`` [n] in the place after it."""

    def trust(self, behind: int) -> float:
        """Return the value that it adds to the log odds that the guess for that place is right."""


@dataclass
class Block:
    """A block of guesses for n consecutive places.

    Attributes:
        rows: logits [n, n_vocab] of a drafter's output; views.
        n_vocab: of the target.
        markov: of a DSpark.
        told: how likely the guess for each is right [n]; None of one that was not trained to say.
        candidates: the k tokens [n, k] that alone may stand there, where it says how they follow
            each other; ``rows`` is empty then.
        scores: of candidate j after candidate i of the place before, [n, i, j].
        scale, cap: what the target does to its logits, and the rows still lack; 0 for no cap.
    """

    rows: Rows
    n_vocab: int
    markov: Markov | None = None
    told: Row | None = None
    candidates: IntArray | None = None
    scores: Rows | None = None
    scale: float = 1.0
    cap: float = 0.0

    def row(self, before: Sequence[int]) -> Row:
        """Return the logits [n_vocab] of the place after these guesses."""
        place = len(before)
        if self.candidates is not None and self.scores is not None:
            # the first place is the same after all
            behind = int(np.argmax(self.candidates[place - 1] == before[-1])) if place else 0
            chosen: Row = np.full(self.n_vocab, -np.inf, np.float32)
            chosen[self.candidates[place]] = self.scores[place, behind]
            return chosen
        row: Row = self.rows[place, : self.n_vocab]
        if self.scale != 1.0:
            row = row * np.float32(self.scale)
        if self.cap:
            row = np.where(row > -np.inf, np.tanh(row / self.cap) * self.cap, row)
        if self.markov is None or self._follows(before):
            return row
        moved: Row = row.copy()
        peaks = Peaks(row)
        least = max(peaks.bar(_MOVED), float(np.finfo(np.float32).min))
        ids: IntArray = peaks.reaching(least).astype(np.int32)
        bias, instead = self.markov.bias, self._likeliest[place - 1]
        moved[ids] += bias(ids, before[-1])
        moved[ids] -= bias(ids, instead)
        return moved

    def sure(self, before: Sequence[int]) -> float | None:
        """Return the probability that the guess for that place is right; None if untrained for
        that."""
        if self.told is None:
            return None
        likely, markov = float(self.told[len(before)]), self.markov
        if markov is None or self._follows(before):
            return likely
        more = markov.trust(before[-1]) - markov.trust(self._likeliest[len(before) - 1])
        odds = math.exp(min(more, 50.0)) * likely / max(1.0 - likely, 1e-9)
        return odds / (1.0 + odds)

    def _follows(self, before: Sequence[int]) -> bool:
        """True if the computed rows belong after these guesses."""
        return not before or before[-1] == self._likeliest[len(before) - 1]

    @cached_property
    def _likeliest(self) -> list[int]:
        return [int(token) for token in self.rows.argmax(axis=1)]


@dataclass(frozen=True, slots=True)
class Places:
    """The layout of a drafter's input and output for a block.

    Attributes:
        guesses: most places of a block.
        mask: the token that stands where one is to be guessed.
        anchored: the place of the last token guesses what follows it; else the masks guess what
            stands in their own places.
        candidates: tokens among which each place chooses; 0 where rows say it.
        confident: it says how sure its guesses are.
        scale, cap: see ``Block``.
    """

    guesses: int
    mask: int
    anchored: bool = True
    candidates: int = 0
    confident: bool = False
    scale: float = 1.0
    cap: float = 0.0

    def tokens(self, token: int, n: int) -> list[int]:
        """Return the tokens that a pass reads to guess ``n`` places after ``token``."""
        return [token] + [self.mask] * (n - self.anchored)

    def block(self, out: Part, n_vocab: int, markov: Markov | None) -> Block:
        """Return the output of such a pass by place."""
        k, first = self.candidates, 0 if self.anchored else 1
        beside = out.left[first:]
        if k:  # tokens, which are exact as floats, and how each follows each
            scores = beside[:, k : k + k * k].reshape(-1, k, k)
            best = beside[:, :k].astype(np.int32)
            return Block(beside[:0], n_vocab, markov, candidates=best, scores=scores)
        sure = beside[:, 0] if self.confident else None
        return Block(out.rows[first:], n_vocab, markov, sure, scale=self.scale, cap=self.cap)


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
        target: Lane,
        places: Places,
        markov: Markov | None = None,
        *,
        n_vocab: int,
    ) -> None:
        self.needs = lane.layers
        super().__init__(lane, target, n_vocab=n_vocab)
        self._places, self._markov = places, markov
        self._block: Block | None = None

    def reusable(self, tokens: Sequence[int], cached: int) -> int:
        return self._with_states(self._lane.first, min(self._held, self._seen.kept), cached)

    def follow(self, tokens: Sequence[int], n: int) -> Steps[None]:
        yield from self._read(self._unread())

    def open(self, tokens: Sequence[int], room: Room) -> Steps[tuple[Row | None, int]]:
        unread = self._unread()
        if self._target.hidden.end < len(tokens) - 1:
            return None, 0  # states are not known to the end
        lag = max(unread, 1)  # whatever there is to read, the block is a pass
        read = min(room.judge.read(self.name, lag), lag)
        if read <= 0:
            return None, 0
        yield from self._read(min(read, unread))
        if self._lane.end != len(tokens) - 1 or self._lane.end == self._lane.first:
            return None, 0
        n = min(room.n, self._places.guesses)
        block = self._places.tokens(tokens[-1], n)
        out: Pass = yield Pass(self._lane, block, "all", range(-1, len(block) - 1))
        yield Keep(self._lane)
        self._block = self._places.block(out, self._n_vocab, self._markov)
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
        kept, _ = self._seen.follow(self._target.tokens)
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

    def hold(self, held: Held, text: Sequence[int]) -> None:
        super().hold(held, self._target.tokens)


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
