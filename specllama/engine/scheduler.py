"""Drives conversations: runs what they ask for and hands back what they say.

A pass is run only when nobody has anything to say and everybody's next wish is known, those of
drafting models first: lanes of one pool share it. Drafts wait for the target's pass that they are
for. Every conversation in it has the row of its pending token; the other rows go where they gain
most (``budget.allocate``). Who found no room in a pass is the first in the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import numpy as np

from specllama.backend.base import Lane, Part, Pool
from specllama.engine.conversation import Saying
from specllama.errors import ContextFull, EngineError
from specllama.events import Event, Finished
from specllama.speculative.asking import Ask, Offer, Pass, Shared, grant
from specllama.speculative.policy.budget import allocate

Said = tuple[int, Event | Exception]


@dataclass(slots=True)
class _Running:
    id: int
    saying: Saying[None]
    on_end: Callable[[], None]
    ask: Ask | None = None


class Scheduler:
    """Conversations that are being written, by id.

    Args:
        target: the pool that is asked last, when every draft is ready.
    """

    def __init__(self, target: Pool) -> None:
        self._target = target
        self._running: dict[int, _Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, id: int) -> bool:
        return id in self._running

    def add(self, id: int, saying: Saying[None], on_end: Callable[[], None]) -> None:
        """A conversation begins; ``on_end`` is called once when it is over, however it ends."""
        self._running[id] = _Running(id, saying, on_end)

    def step(self) -> list[Said]:
        """Go on until somebody says something: at most one event of each conversation.

        An exception is what ended its conversation; the others go on. [] when none is left.
        """
        while self._running:
            if len(self._running) == 1:
                [one] = self._running.values()
                saying = self._resume(one, None if one.ask is None else _tried(one.ask))
                if saying is not None:
                    return [(one.id, saying)]
                continue
            said = [
                (one.id, saying)
                for one in list(self._running.values())
                if one.ask is None and (saying := self._resume(one, None)) is not None
            ]
            if said := said or list(self._answers()):
                return said
        return []

    def _answers(self) -> Iterator[Said]:
        """Answer what can be answered now; what is said to it."""
        asking = [(one, self._pool_of(one.ask)) for one in self._running.values()]
        alone = [one for one, pool in asking if pool is None]
        # one by one: what a head says is good until it is asked again
        answers: Iterable[tuple[_Running, object]] = ((one, _tried(one.ask)) for one in alone)
        if not alone:
            # drafting models first: the target's pass is the one that all wait for
            pools = [pool for _, pool in asking if pool is not None]
            pool = next((pool for pool in pools if pool is not self._target), self._target)
            together = _room(pool, [one for one, its in asking if its is pool])
            offering = [one for one in together if isinstance(one.ask, Offer)]
            if offering:
                answers = list(zip(offering, _granted(pool, together), strict=True))
            else:
                answers = _passed(pool, together)
                for one in together:  # who had to wait comes first in the next pass
                    self._running[one.id] = self._running.pop(one.id)
        for one, answer in answers:
            saying = self._resume(one, answer)
            if saying is not None:
                yield one.id, saying

    def _pool_of(self, ask: Ask | None) -> Pool | None:
        """Where an answer could be shared with others."""
        if isinstance(ask, Offer):
            return self._target
        return cast(Lane, ask.lane).pool if isinstance(ask, Pass) else None

    def end(self, id: int) -> None:
        """Stop a conversation where it is."""
        one = self._running.get(id)
        if one is not None:
            try:
                one.saying.close()
            finally:
                self._over(one)

    def _resume(self, one: _Running, answer: object) -> Event | Exception | None:
        """Send an answer, or raise an error where it was asked for; what is said then, if any.

        Raises:
            KeyboardInterrupt, SystemExit: as they come; the conversation is over.
        """
        one.ask = None
        try:
            if isinstance(answer, BaseException):
                item = one.saying.throw(answer)
            else:
                item = one.saying.send(answer)
        except StopIteration:
            self._over(one)
            return None
        except Exception as error:
            self._over(one)
            return error
        except BaseException:
            self._over(one)
            raise
        if isinstance(item, Ask):
            one.ask = item
            return None
        if isinstance(item, Finished):  # its last word
            self.end(one.id)
        return item

    def _over(self, one: _Running) -> None:
        if self._running.pop(one.id, None) is not None:
            one.on_end()


def _tried(ask: Ask | None) -> object:
    """The answer to it, or the error that it ended with."""
    assert ask is not None
    try:
        return grant(ask)
    except BaseException as error:
        return error


def _widest(pool: Pool) -> int:
    """Most tokens of a pass that several share: each has the rows that it has alone."""
    exact = pool.kernels.exact_rows
    return min(pool.n_batch, exact) if exact > 1 else pool.n_batch


def _size(ask: Ask | None) -> tuple[int, int, int]:
    """(tokens, rows, branches) that it takes of a pass in any case."""
    if isinstance(ask, Offer):
        return 1, 1, _branches(ask.draft.parents)
    assert isinstance(ask, Pass)
    n = len(ask.tokens)
    rows = n if ask.outputs == "all" else int(ask.outputs == "last")
    return n, rows, 0 if ask.parents is None else _branches(ask.parents)


def _branches(parents: Sequence[int]) -> int:
    """Leaves of a tree beside the first."""
    return len(parents) - len({parent for parent in parents if parent >= 0}) - 1


def _room(pool: Pool, asking: Sequence[_Running]) -> list[_Running]:
    """Those who find room in one pass, the first of them in any case."""
    together: list[_Running] = []
    tokens = rows = branches = 0
    for one in asking:
        n, wanted, leaves = _size(one.ask)
        tokens, rows, branches = tokens + n, rows + wanted, branches + leaves
        full = tokens > _widest(pool) or rows > pool.max_rows or branches > pool.free_leaves
        if together and full:
            break
        together.append(one)
    return together


def _granted(pool: Pool, together: Sequence[_Running]) -> list[int]:
    """How many guesses of every offer go into the pass of these conversations."""
    offers = [one.ask for one in together if isinstance(one.ask, Offer)]
    if len(together) == 1:
        return [offers[0].size]
    sizes = [_size(one.ask) for one in together]
    tokens, rows = sum(n for n, _, _ in sizes), sum(n for _, n, _ in sizes)
    left = min(_widest(pool) - tokens, pool.max_rows - rows, sum(offer.size for offer in offers))
    # attention is dearest to the longest text
    v = max((offer.bidder.passes(tokens + left) for offer in offers), key=lambda v: v[-1])
    return allocate([offer.bidder.bid(offer) for offer in offers], v, taken=tokens)[0]


def _passed(pool: Pool, together: Sequence[_Running]) -> list[tuple[_Running, object]]:
    """Run passes of one pool together, and tell of it."""
    asks = [cast(Pass, one.ask) for one in together]
    begin = perf_counter()
    answers = _rows(pool, asks)
    ms, tokens = (perf_counter() - begin) * 1e3, sum(len(ask.tokens) for ask in asks)
    for i, ask in enumerate(asks):
        if ask.tell is not None:
            ask.tell(Shared(len(asks), tokens, ms, i == 0))
    return list(zip(together, answers, strict=True))


def _rows(pool: Pool, asks: Sequence[Pass]) -> Sequence[object]:
    """The rows for each of some passes, or the error that it ends with."""
    if len(asks) == 1:
        return [_tried(asks[0])]
    try:
        for ask in asks:
            if ask.keep is not None:
                cast(Lane, ask.lane).rollback(ask.keep)
        parts = [Part(cast(Lane, a.lane), a.tokens, a.outputs, a.parents) for a in asks]
        return pool.run(parts)
    except (ContextFull, EngineError, ValueError):
        pass  # one of them cannot have it: each hears for itself
    # rows are good until the next pass, and another follows
    answers = (_tried(ask) for ask in asks)
    return [rows.copy() if isinstance(rows, np.ndarray) else rows for rows in answers]
