"""The nouns of one round: Draft, Law, Verdict. Pure numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from specllama.arrays import FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class Law:
    """A sparse probability law over token ids.

    ``ids`` are unique and ascending; ``probs`` are positive and sum to 1 (float64).
    """

    ids: IntArray  # [n]
    probs: FloatArray  # [n]

    @staticmethod
    def point(token: int) -> Law:
        return Law(np.array([token], np.int32), np.ones(1))

    def prob(self, token: int) -> float:
        i = int(np.searchsorted(self.ids, token))
        if i < len(self.ids) and int(self.ids[i]) == token:
            return float(self.probs[i])
        return 0.0


@dataclass(frozen=True, slots=True)
class Draft:
    """A tree of guesses below the pending token.

    ``parents[i] == -1`` hangs node i on the pending token; parents precede children. ``q[i]`` is
    the law token i was really drawn from, None for a point mass (n-gram, greedy, re-tokenised).
    ``confidence[i]`` estimates the acceptance of node i given its parent was accepted, None where
    unknown. ``scout[i]`` nodes are evaluated by the target but never accepted.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: tuple[Law | None, ...] = ()
    confidence: tuple[float | None, ...] = ()
    sources: tuple[str, ...] = ()
    scout: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if not (len(self.parents) == len(self.q) == len(self.confidence) == len(self.sources) == n):
            raise ValueError("draft fields differ in length")
        if any(not -1 <= parent < i for i, parent in enumerate(self.parents)):
            raise ValueError("a draft node's parent must precede it")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_line(self) -> bool:
        """Every node follows the one before it; the target's pass needs no tree."""
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    @property
    def is_chain(self) -> bool:
        """A line whose every node may be accepted."""
        return self.is_line and not any(self.scout)

    @property
    def source(self) -> str:
        """One word for the whole draft: its only source, or the sources joined by '+'."""
        seen = list(dict.fromkeys(self.sources))
        return "+".join(seen) if seen else "none"

    @staticmethod
    def chain(
        tokens: Sequence[int],
        source: str,
        *,
        q: Sequence[Law | None] | None = None,
        confidence: Sequence[float | None] | None = None,
    ) -> Draft:
        n = len(tokens)
        return Draft(
            tokens=tuple(int(t) for t in tokens),
            parents=tuple(range(-1, n - 1)),
            q=tuple(q) if q is not None else (None,) * n,
            confidence=tuple(confidence) if confidence is not None else (None,) * n,
            sources=(source,) * n,
        )

    def first(self, n: int) -> Draft:
        """Its first ``n`` nodes."""
        return self if n >= len(self) else self.only(range(n))

    def only(self, nodes: Sequence[int]) -> Draft:
        """Some of its nodes, ascending, the parent of each among them."""
        at = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        return Draft(
            tuple(self.tokens[i] for i in nodes),
            tuple(at[self.parents[i]] for i in nodes),
            tuple(self.q[i] for i in nodes),
            tuple(self.confidence[i] for i in nodes),
            tuple(self.sources[i] for i in nodes),
            tuple(self.scout[i] for i in nodes) if self.scout else (),
        )

    def children(self, node: int) -> list[int]:
        return [i for i, parent in enumerate(self.parents) if parent == node]


EMPTY_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a draft: the accepted path, then one target token.

    ``target_token`` is None only when the path ends on a stop token. ``kind`` is "recovered" after
    a rejection, "bonus" when a whole path to a leaf was accepted, "plain" when nothing was drafted.
    ``p[i]`` is the target's probability of node i where it was computed. ``gap`` is the smallest
    lead of a winning token over the runner-up (logits when greedy, perturbed log scores under
    common noise), None where not measured.
    """

    path: tuple[int, ...]
    target_token: int | None
    kind: Literal["recovered", "bonus", "plain"]
    p: tuple[float | None, ...] = ()
    gap: float | None = None


def _read_all(source: str, lag: int) -> int:
    return lag


def _always(depth: int, confidence: float | None) -> bool:
    return True


def _take(confidence: float | None, lead: float | None, token: int | None) -> bool:
    return True


def _worth(likely: float) -> bool:
    return True


def _read(likely: float, rows: int) -> bool:
    return True


def _all_of(n: int) -> int:
    return n


@dataclass(frozen=True, slots=True)
class Guess:
    """What a free source would copy, and what it knows of its worth.

    ``match_length`` tokens at the end of the text equal those before the copied ones.
    ``shares[i]`` is how likely token i follows those before it by the text's own habits; () for
    unknown.
    ``endings[i]`` is how likely a passage ends before token i, from 0 to 1; () for unknown.
    """

    source: str
    tokens: tuple[int, ...]
    match_length: int
    shares: tuple[float, ...] = ()
    endings: tuple[float, ...] = ()


def _first_whole(guesses: Sequence[Guess]) -> tuple[int, int]:
    return 0, len(guesses[0].tokens)


@dataclass(frozen=True, slots=True)
class Room:
    """How far a proposer may go this round, and whom it asks on the way.

    ``n`` is the most nodes to draft. The questions, which the window answers:

    ``begin(source, lag)``: a source that pays per step is about to feed ``lag`` tokens that it has
    not read; the answer is how many of the newest it may read, 0 to stay out of this round.

    ``include(confidence, lead, token)``: a step was run; may its token join the draft? Under
    ``rejection`` and ``block`` it is asked before the token is drawn, with ``lead`` and ``token``
    None; a token left out because of its own value would bias the output.

    ``keep_going(depth, confidence)``: asked before a further step (depth = nodes drafted so far
    on this chain, confidence = of the last one).

    ``pick(guesses)``: all that the free sources would copy; the answer is which one to send and how
    many of its tokens, 0 to leave the round to a source that pays. Asked again when that source
    stayed out or found nothing to send.

    ``beside(likely)``: a tree may get a node off the path of its best guesses, which the target
    reaches with this probability; is it worth a row? ``worth(likely)`` asks the same of one that
    may join later.

    ``ride(likely, rows)``: a draft pass of so many ``rows`` is about to run; is what may follow
    such a node worth a further one? Of a pass for its sake alone with ``rows`` 0.

    ``rows(most)``: how many rows a pass may have that evaluates more than can be accepted.
    """

    n: int
    keep_going: Callable[[int, float | None], bool] = field(default=_always)
    begin: Callable[[str, int], int] = field(default=_read_all)
    include: Callable[[float | None, float | None, int | None], bool] = field(default=_take)
    pick: Callable[[Sequence[Guess]], tuple[int, int]] = field(default=_first_whole)
    beside: Callable[[float], bool] = field(default=_worth)
    worth: Callable[[float], bool] = field(default=_worth)
    ride: Callable[[float, int], bool] = field(default=_read)
    rows: Callable[[int], int] = field(default=_all_of)

    @property
    def judged(self) -> bool:
        """Whether a window weighs the guesses, rather than taking the first."""
        return self.pick is not _first_whole
