"""The engine's interface to an inference library: ``llama_pool`` is one, ``fake`` a table.

A backend is a function like ``open_gguf`` and a line, both in ``engine/opening.py``.

A *pool* is one KV cache of one model; a *lane* is one conversation's place in it. Lanes take tokens
in passes, several lanes in one pass where the pool runs them together. What else is in a pool
changes no bit of a lane's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from specllama.arrays import HiddenNeed, Rows
from specllama.backend.exactness import Exactness
from specllama.backend.hidden import HiddenRows as HiddenRows
from specllama.backend.kernels import Kernels
from specllama.backend.pass_plan import PassPlan, Planned

if TYPE_CHECKING:
    from specllama.cancel import Cancel
    from specllama.events import Report
    from specllama.interface import ModelInfo
    from specllama.models.gguf import GgufHeader

# which tokens of a pass return a row of logits; "states" are made by a head's encoder, without any
Outputs = Literal["all", "last", "none", "states"]
Verdict = Literal["token", "text", "cut"]
MAKE_ROOM = "start a new chat, raise --ctx-size, or use --on-full shift"  # of a full cache
_SPACE = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True)
class Shared:
    """A pass that several conversations share: ``lanes``, ``tokens`` and, among those, ``guesses``
    count all of them.

    ``first`` is true for one of them, who books what the pass took. ``drafting_ms`` is what draft
    models took since this conversation wrote last: it waited for them.
    """

    lanes: int
    tokens: int
    ms: float
    first: bool
    guesses: int
    drafting_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token that is found by its text, before anything is merged.

    Attributes:
        control: found only where special tokens are asked for; user-defined ones always are.
        strips_left, strips_right: it swallows the white space next to it.
    """

    id: int
    text: str
    control: bool
    strips_left: bool = False
    strips_right: bool = False


def partition(
    text: str, specials: Sequence[SpecialToken], judge: Callable[[SpecialToken, int, int], Verdict]
) -> list[int | str]:
    """Split a text into special tokens and the texts between them, as llama.cpp finds them.

    Each special token in turn, the longest first, takes its occurrences in what is left, from the
    left to the right, and the white space next to them if it is of that kind.

    Args:
        specials: longest text first.
        judge: called with (special, start, end) for an occurrence: a "token", ordinary "text", or
            a "cut" after its first character, which leaves two neighbouring texts.
    """
    pieces: list[int | tuple[int, int]] = [(0, len(text))]
    for special in specials:
        if special.text not in text:
            continue
        out: list[int | tuple[int, int]] = []
        for piece in pieces:
            if isinstance(piece, int):
                out.append(piece)
                continue
            start, end = search, _ = piece
            while (at := text.find(special.text, search, end)) >= 0:
                after = at + len(special.text)
                verdict = judge(special, at, after)
                search = at + 1
                if verdict == "cut":
                    out.append((start, search))
                    start = search
                elif verdict == "token":
                    left = at
                    while special.strips_left and left > start and text[left - 1] in _SPACE:
                        left -= 1
                    out += [(start, left), special.id]
                    start = after
                    while special.strips_right and start < end and text[start] in _SPACE:
                        start += 1
                    search = start
            out.append((start, end))
        pieces = [p for p in out if isinstance(p, int) or p[0] < p[1]]
    return [p if isinstance(p, int) else text[p[0] : p[1]] for p in pieces if p != (0, 0)]


@dataclass(frozen=True, slots=True)
class Gap:
    """Tokens that mark a gap in a text: before, after, where it is; and the beginning of a file."""

    before: int
    after: int
    gap: int
    file: int | None = None


class Vocab(Protocol):
    @property
    def n_tokens(self) -> int: ...

    @property
    def longest(self) -> int:
        """Most bytes of a text that one token can stand for; 0 if there is no such bound."""

    @property
    def adds_bos(self) -> bool:
        """True if ``add_special`` puts a begin token in front."""

    @property
    def specials(self) -> Sequence[SpecialToken]:
        """Every special token, longest text first."""

    def special(self, token: int) -> SpecialToken | None:
        """Return the special token of this id; None for other ids."""

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool, after_text: bool = False
    ) -> list[int]:
        """Return token ids; ``after_text`` says that the text continues another one."""

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return the bytes of a token; control tokens are empty unless ``special``."""

    def is_eog(self, token: int) -> bool:
        """True if the token ends a turn."""

    @property
    def gap(self) -> Gap | None:
        """The tokens that mark a gap in a text; None if the model cannot fill gaps."""


_NOTHING: Rows = np.empty((0, 0), np.float32)


@dataclass(slots=True, eq=False)
class Part:
    """The part of one lane in a pass, and its output. It can be asked for again.

    Attributes:
        lane: a ``Lane``, or a head's.
        tokens: evaluated after those of the lane; none where a head reads states alone.
        outputs: which of them return a row of logits.
        parents: for a tree, parents[i] is the node that token i follows, -1 for the lane's text.
            Nodes are counted over all passes that the tree grew by, ``tokens`` after those before.
            None is a chain.
        states: hidden states [n, width] that a head reads alongside the tokens, or instead of them.
        head: which one evaluates the nodes, of several that draft in turn.
        rows: logits [n, n_vocab] of the tokens that return one: a view, good until the pool's next
            pass.
        left: of a head, the states [n, width] that it leaves after the same tokens.
        shared: of the target, where other conversations wait for its passes.
    """

    lane: Any
    tokens: Sequence[int]
    outputs: Outputs = "all"
    parents: Sequence[int] | None = None
    states: Rows | None = None
    head: int = 0
    rows: Rows = field(default_factory=lambda: _NOTHING)
    left: Rows = field(default_factory=lambda: _NOTHING)
    shared: Shared | None = None

    @property
    def size(self) -> int:
        """Rows of the batch that it takes."""
        return len(self.tokens) if self.states is None else len(self.states)


class Context(Protocol):
    """A cache of one text, and passes over it: a lane, or a draft's replacement for one.

    Attributes:
        n_ctx: most tokens of the text.
        n_batch: most tokens in one pass. max_rows: most rows with logits in one.
        max_leaves: most leaves of a tree pass; 1 where only chains are possible.
    """

    n_vocab: int
    n_batch: int
    max_rows: int
    max_leaves: int

    @property
    def n_ctx(self) -> int: ...

    @property
    def pool(self) -> Pool | None:
        """The pool whose passes it can share with others; None if it runs alone."""

    @property
    def tokens(self) -> list[int]:
        """Tokens in the cache, in order; read-only for callers."""

    @property
    def n_past(self) -> int:
        """``len(tokens)``, as the cache itself reports it."""

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        """Evaluate tokens after the present ones: a pass of one part, see ``Part``.

        Returns logits [n_rows, n_vocab]: a view that the next pass overwrites. Until it is settled
        with ``keep_path`` or ``rollback`` a tree takes no pass but those that it grows by.

        Raises:
            ContextFull: no room for the tokens.
            Cancelled: the engine's stop flag is set; the cache holds what it held before, or the
                beginning of it where the model cannot roll back.
            EngineError: the library refused; the cache is as it was before.
        """

    def reopen(self, n: int) -> None:
        """Turn the last ``n`` tokens into the first nodes of a tree, each the child of the one
        before. Do nothing if there already is a tree."""

    def keep_path(self, path: Sequence[int]) -> None:
        """Keep only the root-to-node ``path`` of a tree (nodes in the order of their passes)."""

    def reusable_prefix(self, keep_len: int) -> int:
        """Count the first tokens that can be kept after a cut to ``keep_len``, with none of them
        read again. Drafts have no say in it."""

    def rollback(self, keep_len: int) -> None:
        """Cut the text to its first ``keep_len`` tokens.

        Raises:
            ValueError: keep_len is negative or beyond the end.
            EngineError: the library could not cut; the cache was cleared.
        """

    def close(self) -> None: ...


class Lane(Context, Protocol):
    """One conversation's place in a pool. Closing it gives the place back."""

    @property
    def pool(self) -> Pool: ...

    @property
    def hidden(self) -> HiddenRows:
        """Hidden states that passes left, by position; follows every rollback."""

    @property
    def runs(self) -> int:
        """The number of stretches of neighboring cells that hold the text."""

    def branches(self, parents: Sequence[int], reopen: int = 0) -> int:
        """Count the leaves that a tree pass adds to the lane's tree, see ``Part``. The last
        ``reopen`` tokens become a tree first."""

    def capture(self, need: HiddenNeed) -> None:
        """Keep this state of the passes from here on, "nothing" to stop.

        "final_hidden" is kept of the tokens whose rows are returned. Logits do not change.
        """


class Blob(Protocol):
    """A parked lane: its text and its cache content, outside the pool."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""


class Passes(Protocol):
    """The runner of lanes' passes, with the limits of one pass.

    Attributes:
        kernels: the kernels and thread settings that decide how passes are computed.
        n_batch: most tokens in one pass. max_rows: most rows with logits in one.
    """

    kernels: Kernels
    n_batch: int
    max_rows: int

    @property
    def free_leaves(self) -> int:
        """Branches that the trees of one pass may have in addition to one for each tree."""

    def run(self, parts: Sequence[Part]) -> None:
        """Evaluate all parts in one pass, or as few as return the bits of each part alone.

        The parts hold the output; their rows are good until the next pass. Raises what
        ``Context.forward`` raises; no lane has changed then.
        """


class Pool(Passes, Planned, Protocol):
    """One KV cache of one model, with room for several conversations.

    Attributes:
        lanes: most at once.
        plan: of the widths of its passes.
        compactions: number of times that ``compact`` freed ghosts.
    """

    lanes: int
    plan: PassPlan
    compactions: int

    @property
    def forgets(self) -> bool:
        """True if a cut may lose earlier state: the text then continues from an earlier point."""

    @property
    def alike(self) -> int | None:
        """The most guesses of each part, if only parts of one length can share a pass of the
        library. None if lengths may differ."""

    @property
    def ghosts(self) -> int:
        """Cells that ``compact`` would free."""

    @property
    def held(self) -> int:
        """Cells that lanes hold; a shared one counts once."""

    @property
    def room(self) -> int:
        """Cells that no lane holds."""

    def open(self) -> Lane:
        """Open an empty lane.

        Raises:
            EngineError: every lane is taken.
        """

    def fork(self, lane: Lane, keep: int, into: Lane | None = None) -> Lane:
        """Open a lane that shares the cells of the first ``keep`` tokens of another: a new lane, or
        ``into``, which must be empty.

        Raises:
            EngineError: every lane is taken.
            ValueError: there are fewer tokens, or ``into`` holds some.
        """

    def exact_prefix(self, held: Lane | Blob, keep: int, n: int, begin: int = 0) -> int:
        """Count the tokens, of the first ``keep`` in the cache, that a text of ``n`` tokens can
        reuse bit for bit: a fresh reading would write the same cells and split the rest into the
        same parts. The first ``begin`` tokens are not read; they stay as they were written. If the
        parts of a pass change rounding anyway, count all reusable tokens (``reusable_prefix``)."""

    def settle(self) -> None:
        """Carry out the lanes' pending decisions (every pass does that first)."""

    def copied(self, lane: Lane) -> Blob:
        """Copy the lane's content out of the pool; the lane keeps it.

        Raises:
            EngineError: the library does not give its state away.
        """

    def park(self, lane: Lane) -> Blob:
        """Move the lane's content out of the pool; the lane is empty then.

        Raises:
            EngineError: the library does not give its state away. The lane stays.
        """

    def resume(self, blob: Blob, into: Lane | None = None) -> Lane:
        """Restore a parked lane into a new lane, or into ``into``, which must be empty. A blob can
        be resumed more than once.

        Raises:
            EngineError: every lane is taken, or the library refused.
            PoolFull: no room for its tokens.
        """

    def compact(self) -> None:
        """Free all ghosts. Passes do it when they need the room.

        Raises:
            EngineError: the library lost its state; every lane is empty.
        """

    def close(self) -> None: ...


# -- what a backend opens --


@dataclass(frozen=True, slots=True)
class Opened:
    """A model and its pool. ``info`` holds the facts for people.

    ``key`` names everything by which cells of the pool would be others, where they are kept on
    disk, but for the contents of its ``files``; "" keeps none.
    """

    pool: Pool
    vocab: Vocab
    info: ModelInfo
    key: str = ""
    files: tuple[GgufHeader, ...] = ()


@dataclass(frozen=True, slots=True)
class Own:
    """The drafters made for one target only, by method.

    ``parts`` are for the methods to use (``Kit.own``), ``reasons`` say why one that was looked
    for is not there, ``files`` are those of heads.
    """

    parts: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    files: dict[str, GgufHeader] = field(default_factory=dict)


class Maker(Protocol):
    """A maker of what the next opening may use, from the replies that it hears."""

    def hear(self, reply: Sequence[int]) -> None:
        """Take the tokens of a reply into account."""

    @property
    def wanted(self) -> bool:
        """True if there is something to make."""

    def make(self, report: Report, stop: Cancel) -> None:
        """Make it, while nothing else runs.

        Raises:
            Cancelled: ``stop`` was set.
        """


@dataclass(frozen=True, slots=True)
class OpenedPair:
    """A target, maybe a draft model, and the facts of their files.

    Attributes:
        translated: the draft model has a vocabulary of its own.
        exactness: of the target's passes, as its pool's ``kernels`` state it.
        measure: finds that out where it is not known yet, and tells how far it is.
        maker: makes at rest what the next opening may use; None: nothing.
        own: opens what drafts for this target only, for all of its lanes.
        template: Jinja chat template, None for raw prompts; ``bos`` and ``eos``: texts for it.
        close: frees the models.
        here: names the build and the machine, on which costs depend.
    """

    target: Opened
    draft: Opened | None = None
    translated: bool = False
    exactness: Exactness = field(default_factory=Exactness)
    measure: Callable[[Report], Exactness] = lambda report: Exactness()
    maker: Maker | None = None
    own: Callable[[], Own] = Own
    template: str | None = None
    bos: str = ""
    eos: str = ""
    here: str = ""
    close: Callable[[], None] = field(default=lambda: None)
