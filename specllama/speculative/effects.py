"""The requests of rounds and drafters: they never run a model themselves.

Both are generators. They yield an effect and are sent the answer, so that their driver
decides what shares a pass: ``run_alone`` answers one conversation at once, a scheduler answers many
from one pass per model, replay and tests answer from a recording or a table.

=========  ============================================  =====================================
yielded    means                                         answered with
=========  ============================================  =====================================
``Pass``   evaluate these tokens, states, or both        itself: rows, states that were left
``Keep``   of the lane, this beginning or this path      None
``Offer``  this draft could be sent                      how many of ``size`` guesses may go
=========  ============================================  =====================================
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from specllama.backend.base import Context, Outputs, Part, Passes
from specllama.speculative.budget import Bid
from specllama.speculative.types import Draft


class HeadPlace(Protocol):
    """A head's lane: the states that it has read of a text, by positions of that text.

    ``Pass.keep`` and ``Keep.length`` are positions, too: what the lane holds from there on is cut,
    and where it holds nothing before, its next token lies there. A pass with ``parents`` drafts
    after the end; whatever is kept, and every pass over text, drops these nodes.

    Attributes:
        n_batch: most rows of one pass.
        first, end: positions of the first token that it holds, and of the one after the last.
        width: of a state that it reads.
        heads: one continues by its own states; each of several drafts one depth.
        max_rows: most nodes that one pass is asked for.
        layers: the target's layers whose inputs it reads; () for other states.
    """

    n_batch: int
    first: int
    end: int
    width: int
    heads: int
    max_rows: int
    layers: tuple[int, ...]

    @property
    def pool(self) -> Passes: ...

    def copied(self) -> bytes:
        """Copy its content without nodes; b"" if the library does not expose it."""

    def restore(self, state: memoryview, first: int, end: int) -> bool:
        """Take a copy made by ``copied``, from ``first`` to ``end``; return False, and hold
        nothing, if the library refuses."""

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Pass(Part):
    """A ``Part`` of a pass, after the first ``keep`` tokens of the lane (None: after all of them).

    The lane's last ``reopen`` tokens are the first nodes of its tree. Errors: see
    ``Context.forward``.
    """

    outputs: Outputs = "last"
    keep: int | None = None
    reopen: int = 0

    @property
    def pool(self) -> Passes:
        """The pool that runs it; a lane that runs alone stands for its pool."""
        pool: Passes | None = self.lane.pool
        return self.lane if pool is None else pool

    def prepare(self) -> None:
        """Set the lane's text to the tokens that the pass follows."""
        if self.keep is not None:
            self.lane.rollback(self.keep)
        if self.reopen:
            self.lane.reopen(self.reopen)


@dataclass(frozen=True, slots=True)
class Keep:
    """A wish to keep the first ``length`` tokens of the lane, or the nodes of ``path``."""

    lane: Context | HeadPlace
    length: int | None = None
    path: tuple[int, ...] = ()


_UNSEEN = 0.75  # acceptance of a guess that must not be looked at


@dataclass(frozen=True, slots=True)
class Offer:
    """A draft that is ready.

    Attributes:
        size: guesses that the bid is for; a drafter that is granted as many sends all of it.
        peek: what goes may depend on what was drafted. Where tokens were sampled it may not: a
            token that is left out for its own sake, or for what follows it, biases the output. Then
            ``size`` is what could have been drafted, known before the first draw.
        bid: makes its conversation's bid for guesses of a shared pass, see ``budget``.
    """

    draft: Draft
    size: int
    peek: bool
    bid: Callable[[Offer], Bid]

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
        """Return the best ``n`` guesses of the draft: the likeliest, with their parents.

        Unseen it is the beginning of the line of first children, whatever stands alongside it.
        """
        if self.peek:
            reach = self.survival
            best = sorted(range(len(reach)), key=lambda node: -reach[node])[:n]
            return self.draft.only(sorted(best))
        parents = self.draft.parents
        line = next((i for i, parent in enumerate(parents) if parent != i - 1), len(parents))
        return self.draft.first(min(n, line))


Effect = Pass | Keep | Offer
T = TypeVar("T")
Steps = Generator[Effect, Any, T]


def run_alone(steps: Steps[T], answer: Callable[[Effect], object] | None = None) -> T:
    """Run the steps to their end and return the result. Without ``answer`` every wish is granted.

    Errors of an answer are raised where it was asked for.
    """
    answer = answer or perform
    try:
        effect = next(steps)
        while True:
            try:
                answered = answer(effect)
            except BaseException as error:
                effect = steps.throw(error)
            else:
                effect = steps.send(answered)
    except StopIteration as done:
        return cast(T, done.value)


def perform(effect: Effect) -> object:
    """Run a wish at once, on its lane; every offered token goes."""
    if isinstance(effect, Pass):
        effect.prepare()
        effect.pool.run((effect,))
        return effect
    if isinstance(effect, Keep):
        lane = cast("Context", effect.lane)
        if effect.length is None:
            lane.keep_path(effect.path)
        else:
            lane.rollback(effect.length)
        return None
    return effect.size
