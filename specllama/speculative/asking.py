"""What rounds and drafters ask for: they never run a model themselves.

Both are generators. They yield what they need and are sent the answer, so that whoever drives them
decides what shares a pass: ``drive`` answers one conversation at once, a scheduler answers many
from one pass per model, replay and tests answer from a recording or a table.

=========  ====================================  =========================================
yielded    means                                 answered with
=========  ====================================  =========================================
``Pass``   evaluate these tokens                 rows [n, n_vocab], good until the lane's next pass
``Feed``   evaluate these beside states  (row [n_vocab], state [width]) behind the last
``Grow``   evaluate these as nodes of a tree     (rows [n, n_vocab], states [n, width])
``Drop``   forget the nodes of that tree         None
``Encode`` make states of the target's           states [n, width]
``Read``   take in states of the target's        None
``Fill``   guess some places, all at once        ``Filled``, good until the next ``Fill``
``Look``   what a head makes of a state          row [n_vocab], good until the next ``Look``
``Offer``  this draft could be sent              how many of ``size`` guesses may go
``Keep``   of the lane's tree, this path         None
``Cut``    of the lane, the first tokens         None
=========  ====================================  =========================================
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from specllama.arrays import IntArray, Row, Rows
from specllama.speculative.budget import Bid
from specllama.speculative.types import Draft

if TYPE_CHECKING:
    from specllama.backend.base import Context, Filled, Outputs
    from specllama.speculative.drafting.medusa_heads import HeadSource


class Place(Protocol):
    """A lane as those see it who may not run it: how large it is and what it holds."""

    @property
    def n_ctx(self) -> int: ...

    @property
    def n_vocab(self) -> int: ...

    @property
    def n_batch(self) -> int:
        """Most tokens in one pass."""
        ...

    @property
    def tokens(self) -> list[int]:
        """Tokens in the cache; read-only."""
        ...

    def reach(self, keep_len: int) -> int:
        """How many of its first ``keep_len`` tokens it can be cut to without reading any again."""
        ...


@dataclass(frozen=True, slots=True)
class Shared:
    """A pass among several conversations: of so many ``lanes`` and ``tokens`` together.

    ``first`` is true for one of them, who books what the pass took.
    """

    lanes: int
    tokens: int
    ms: float
    first: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """Evaluate ``tokens`` behind the first ``keep`` of the lane (None: behind all of them).

    ``parents`` make it a tree, see ``Context.forward``, whose errors it may raise; the lane's last
    ``reopen`` tokens are its first nodes. ``tell`` is told of a pass that was run where other
    conversations wait for theirs.
    """

    lane: Place
    tokens: Sequence[int]
    outputs: Outputs = "last"
    keep: int | None = None
    parents: Sequence[int] | None = None
    reopen: int = 0
    tell: Callable[[Shared], None] | None = None

    def prepare(self) -> None:
        """Make the lane's text what the tokens follow."""
        lane = cast("Context", self.lane)
        if self.keep is not None:
            lane.rollback(self.keep)
        if self.reopen:
            lane.reopen(self.reopen)


class HeadLane(Protocol):
    """A lane of something that reads the target's hidden states, by positions of the text."""

    @property
    def n_batch(self) -> int:
        """Most tokens in one pass."""
        ...

    @property
    def first(self) -> int:
        """Position of the first token that it holds."""
        ...

    @property
    def end(self) -> int:
        """Position of the next one."""
        ...

    def begin_at(self, position: int) -> None:
        """Hold nothing; the next token lies at ``position``."""
        ...

    def rollback_to(self, end: int) -> None:
        """Cut tokens from position ``end`` on, which is ``first`` or later.

        Raises:
            EngineError: it could not; nothing is held and the next position is 0.
        """
        ...

    def close(self) -> None: ...


class StateLane(HeadLane, Protocol):
    """A lane of a block that reads tokens beside hidden states."""

    @property
    def width(self) -> int:
        """Of a state."""
        ...

    @property
    def heads(self) -> int:
        """How many it has: 1 continues by its own states, of several each drafts one token."""
        ...

    @property
    def max_rows(self) -> int:
        """Most rows that ``grow`` is asked for at once."""
        ...

    def feed(self, tokens: Sequence[int], states: Rows) -> tuple[Row, Row]:
        """Read tokens at the end, each beside a state of ``states`` [n, width], with all heads.

        Returns what the first one says: the logits [n_vocab] of what follows (a view, until the
        next call) and the state [width] behind the last token.

        Raises:
            ContextFull, EngineError: the lane is as it was, or empty.
        """
        ...

    def grow(
        self, tokens: Sequence[int], states: Rows, parents: Sequence[int], head: int = 0
    ) -> tuple[Rows, Rows]:
        """Read drafted tokens as nodes of a tree behind the end, each beside a state [n, width].

        One head's tree grows call by call (``parents``: see ``Part``), of several each is given all
        of its own. ``feed`` and cuts drop it. Returns logits [n, n_vocab] (a view, until the
        next call) and states [n, width] behind each.

        Raises:
            ContextFull, EngineError: the lane is as it was, or empty.
        """
        ...

    def drop(self) -> None:
        """Forget the tree."""
        ...


class Encoder(StateLane, Protocol):
    """One whose states are made of several of the target's."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the target, whose inputs they are made of."""
        ...

    def encode(self, features: Rows) -> Rows:
        """States [n, width] of the target's, side by side [n, features].

        Raises:
            EngineError: the library refused.
        """
        ...


class Markov(Protocol):
    """A bias by the token before."""

    def bias(self, ids: IntArray, behind: int) -> Row:
        """What a token adds to the logits of ``ids`` [n] in the place behind it."""
        ...

    def trust(self, behind: int) -> float:
        """What it adds to the log odds that the guess for that place is right."""
        ...


class BlockLane(HeadLane, Protocol):
    """A lane of a drafter that reads hidden states alone, and guesses a block of places at once."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Of the target, whose inputs it reads."""
        ...

    @property
    def guesses(self) -> int:
        """Most places of a block."""
        ...

    def read(self, states: Rows) -> None:
        """Take in ``states`` [n, features] of the target at the end.

        Raises:
            ContextFull, EngineError: the lane is as it was, or empty.
        """
        ...

    @property
    def markov(self) -> Markov | None:
        """How its guesses follow each other, where ``Filled`` has it for one line of them only."""
        ...

    def fill(self, token: int, n: int) -> Filled:
        """Guess ``n`` places behind ``token``, which follows what was read; no trace is left.

        Raises:
            ContextFull, EngineError: as for ``read``.
        """
        ...


@dataclass(frozen=True, slots=True)
class Feed:
    """Evaluate ``tokens`` beside ``states`` from position ``at`` on; ``anew``: hold only these.

    Errors are those of ``StateLane.feed``.
    """

    lane: StateLane
    tokens: Sequence[int]
    states: Rows  # [n, width]
    at: int
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Grow:
    """See ``StateLane.grow``."""

    lane: StateLane
    tokens: Sequence[int]
    states: Rows  # [n, width]
    parents: Sequence[int]
    head: int = 0


@dataclass(frozen=True, slots=True)
class Drop:
    """See ``StateLane.drop``."""

    lane: StateLane


@dataclass(frozen=True, slots=True)
class Encode:
    """Make states for a block of hidden states of the target."""

    lane: Encoder
    features: Rows  # [n, features]


@dataclass(frozen=True, slots=True)
class Read:
    """Take in states of the target from position ``at`` on; ``anew``: hold only these.

    Errors are those of ``BlockLane.read``.
    """

    lane: BlockLane
    states: Rows  # [n, features]
    at: int
    anew: bool = False


@dataclass(frozen=True, slots=True)
class Fill:
    """Guess ``n`` places behind ``token``, which follows what the lane has read."""

    lane: BlockLane
    token: int
    n: int


@dataclass(frozen=True, slots=True)
class Look:
    """What head ``depth`` (from 1) guesses from a hidden state of the target."""

    heads: HeadSource
    state: Row  # [width]
    depth: int


class Bidder(Protocol):
    """What a draft is worth to a conversation that shares its pass, see ``budget``."""

    def bid(self, offer: Offer) -> Bid: ...

    def passes(self, rows: int) -> Sequence[float]:
        """Milliseconds of the target's passes of 0, 1, ..., ``rows`` rows; zeros if unknown."""
        ...


_UNSEEN = 0.75  # acceptance of a guess that must not be looked at


@dataclass(frozen=True, slots=True)
class Offer:
    """A draft that is ready.

    Attributes:
        size: guesses that the bid is for; whoever is granted as many sends all of it.
        peek: what goes may depend on what was drafted. Where tokens were sampled it may not: a
            token that is left out for its own sake, or for what follows it, biases the output. Then
            ``size`` is what could have been drafted, known before the first draw.
    """

    draft: Draft
    size: int
    peek: bool
    bidder: Bidder

    @property
    def survival(self) -> list[float]:
        """Probability that the target follows to each node; unknown confidences count as 1."""
        if not self.peek:
            return [_UNSEEN**i for i in range(1, self.size + 1)]
        reach: list[float] = []
        for parent, likely in zip(self.draft.parents, self.draft.confidence, strict=True):
            above = reach[parent] if parent >= 0 else 1.0
            reach.append(above if likely is None else above * min(likely, 1.0))
        return reach

    def cut(self, n: int) -> Draft:
        """What goes of it where only ``n`` guesses may: the likeliest, their parents among them.

        Unseen it is the beginning of the line of first children, whoever stands beside it.
        """
        if self.peek:
            reach = self.survival
            best = sorted(range(len(reach)), key=lambda node: -reach[node])[:n]
            return self.draft.only(sorted(best))
        parents = self.draft.parents
        line = next((i for i, parent in enumerate(parents) if parent != i - 1), len(parents))
        return self.draft.first(min(n, line))


@dataclass(frozen=True, slots=True)
class Keep:
    """Of the lane's tree keep the nodes of ``path``."""

    lane: Place
    path: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """Of the lane keep the first ``length`` tokens."""

    lane: Place
    length: int


Ask = Pass | Feed | Grow | Drop | Encode | Read | Fill | Look | Offer | Keep | Cut
T = TypeVar("T")
Asking = Generator[Ask, Any, T]


def drive(asking: Asking[T], answer: Callable[[Ask], object] | None = None) -> T:
    """Answer until it is done; returns its result. Without ``answer`` every wish is granted.

    Errors of an answer are raised where it was asked for.
    """
    answer = answer or grant
    try:
        ask = next(asking)
        while True:
            try:
                answered = answer(ask)
            except BaseException as error:
                ask = asking.throw(error)
            else:
                ask = asking.send(answered)
    except StopIteration as done:
        return cast(T, done.value)


def grant(ask: Ask) -> object:
    """Run what is asked for at once, on its lane; every offered token goes."""
    if isinstance(ask, Offer):
        return ask.size
    if isinstance(ask, Feed | Read):
        if ask.anew:
            ask.lane.begin_at(ask.at)
        else:
            ask.lane.rollback_to(ask.at)
        if isinstance(ask, Feed):
            return ask.lane.feed(ask.tokens, ask.states)
        ask.lane.read(ask.states)
        return None
    if isinstance(ask, Grow):
        return ask.lane.grow(ask.tokens, ask.states, ask.parents, ask.head)
    if isinstance(ask, Drop):
        ask.lane.drop()
        return None
    if isinstance(ask, Encode):
        return ask.lane.encode(ask.features)
    if isinstance(ask, Fill):
        return ask.lane.fill(ask.token, ask.n)
    if isinstance(ask, Look):
        return ask.heads.logits(ask.state, ask.depth)
    lane = cast("Context", ask.lane)
    if isinstance(ask, Pass):
        ask.prepare()
        return lane.forward(ask.tokens, outputs=ask.outputs, parents=ask.parents)
    if isinstance(ask, Keep):
        lane.keep_path(ask.path)
    else:  # a cache that could not be rolled back may hold less by now
        lane.rollback(min(ask.length, len(lane.tokens)))
    return None
