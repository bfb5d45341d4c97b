"""The nouns of one round: Draft, Law, Verdict, and the judge that a drafter asks. Pure numpy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np

from specllama.arrays import FloatArray, IntArray
from specllama.speculative.selection import Numbers, Peaks
from specllama.text_history import Places

CERTAIN: FloatArray = np.ones(1)
CERTAIN.flags.writeable = False


@dataclass(slots=True, eq=False)  # not frozen: one is made for every token, in a third of the time
class Law:
    """A sparse probability law over token ids.

    ``ids`` are unique and ascending; ``probs`` are positive and sum to 1 (float64).
    """

    ids: IntArray  # [n]
    probs: FloatArray  # [n]

    @staticmethod
    @lru_cache(maxsize=1024)
    def point(token: int) -> Law:
        return Law(np.array([token], np.int32), CERTAIN)

    def prob(self, token: int) -> float:
        i = int(np.searchsorted(self.ids, token))
        if i < len(self.ids) and int(self.ids[i]) == token:
            return float(self.probs[i])
        return 0.0

    def kept(self) -> Law:
        """Return a law that outlives the row that it came from."""
        return self

    # what a race asks (see ``noise.draw``): values that rise with the weights of the tokens

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def peaks(self) -> Peaks:
        return Peaks(self.probs)

    def at(self, places: Places | IntArray) -> IntArray:
        """Return the tokens at these indices of the values."""
        return self.ids[places]

    def weights(self, values: Numbers) -> FloatArray:
        """Return the weights of tokens with these values, up to a common factor."""
        return values.astype(np.float64, copy=False)

    def weight(self, value: float) -> float:
        return value

    def level(self, weight: float) -> float:
        """Return a value that every token of at least that weight reaches."""
        return weight


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
        return self.parents == tuple(range(-1, len(self.parents) - 1))

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
        """Return its first ``n`` nodes."""
        return self if n >= len(self) else self.only(range(n))

    def only(self, nodes: Sequence[int]) -> Draft:
        """Return some of its nodes, ascending, with the parent of each among them."""
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
        """List the nodes after a node that may be accepted."""
        found = [i for i, parent in enumerate(self.parents) if parent == node]
        return [i for i in found if not self.scout[i]] if self.scout else found

    def drawn_with(self, node: int) -> float:
        """Return the probability that a node's token had when it was drawn.

        Raises:
            ValueError: it is 0.
        """
        q = self.q[node]
        if (share := 1.0 if q is None else q.prob(self.tokens[node])) <= 0.0:
            raise ValueError(f"drafted token {self.tokens[node]} has probability 0 under its own q")
        return share


EMPTY_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's verdict on a draft: the accepted path, then one target token.

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


@dataclass(frozen=True, slots=True)
class Guess:
    """Tokens that a free source would copy, with figures for their worth.

    ``kind``: how its worth is estimated at first. Of a "prediction" the shares are the part of the
    expected text that came so far.

    ``match_length`` tokens at the end of the text equal those before the copied ones.
    ``shares[i]`` is how likely token i follows those before it by the text's own habits; () for
    unknown.
    """

    source: str
    tokens: tuple[int, ...]
    match_length: int
    shares: tuple[float, ...] = ()
    kind: Literal["copy", "prediction"] = "copy"


class DraftJudge:
    """The judge that a drafter asks during one round; this one says yes to everything.

    Attributes:
        weighs: guesses are weighed against each other; else the first one goes.
        granted: tokens of the text that it let be read.
    """

    weighs = False
    granted = 0

    def read(self, source: str, tokens: int) -> int:
        """Grant tokens to read: the model of ``source`` is about to read ``tokens`` of the text,
        or, with ``source`` "", the target's pass is about to evaluate ``tokens`` further rows,
        scouts included. Return the number granted, the newest of a text; 0: the source stays out of
        this round."""
        self.granted += tokens if source else 0
        return tokens

    def take(self, confidence: float | None, lead: float | None, token: int | None) -> bool:
        """True if the token of a finished step may join the draft. Under ``rejection`` and
        ``block`` this is called before the token is drawn, with ``lead`` and ``token`` None:
        leaving a token out because of its own value would bias the output."""
        return True

    def further(self, likely: float | None = None, rows: int = 0) -> bool:
        """True if a draft pass that has ``rows`` rows may read one more node, which the target
        reaches with probability ``likely`` (None: the end of the path of best guesses)."""
        return True

    def row(self, likely: float, *, keep: bool = True) -> bool:
        """True if a node off that path, which the target reaches with probability ``likely``, is
        worth a row. With ``keep`` it joins the draft now."""
        return True

    def pick(self, guesses: Sequence[Guess]) -> tuple[int, int]:
        """Choose one of the free sources' guesses, and how many of its tokens to send; 0 leaves the
        round to a source that pays. Called again if that source sends nothing."""
        return 0, len(guesses[0].tokens)

    def weighed(self, draft: Draft) -> Draft:
        """Return the draft of this round; one that was picked has the confidence that it was
        weighed by."""
        return draft


@dataclass(frozen=True, slots=True)
class Room:
    """The limit of a drafter in this round: at most ``n`` nodes, and the judge to ask."""

    n: int
    judge: DraftJudge = field(default_factory=DraftJudge)


@dataclass(frozen=True, slots=True)
class Booking:
    """The sources that a conversation's drafts are booked under.

    Attributes:
        method: who drafts.
        paid: the source among them that costs time, "" where all is free.
        own: its steps have a cost table of their own; else they are the draft model's.
        at_once: its first step gives all guesses of a round; a further one takes no time.
    """

    method: str = ""
    paid: str = ""
    own: bool = False
    at_once: bool = False

    @property
    def payer(self) -> str:
        """The source whose balance is charged when a draft yields nothing."""
        return self.paid or self.method
