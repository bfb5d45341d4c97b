"""Drives conversations: runs what they ask for and hands back what they say.

A pass is run only when nobody has anything to say and everybody's next wish is known, those of
drafting models first: lanes of one pool share it. Drafts wait for the target's pass that they are
for. Every conversation in it has the row of its pending token; the other rows go where they gain
most (``budget.allocate``). Who found no room in a pass is the first in the next one. Where the
target's cells run out, the youngest is parked in memory and goes on later as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

import numpy as np

from specllama.backend.base import Blob, Lane, Part, Pool
from specllama.cancel import Cancel
from specllama.engine.conversation import Saying
from specllama.engine.seating import Seats
from specllama.errors import Cancelled, EngineError, PoolFull, SpecllamaError
from specllama.events import Event
from specllama.speculative.asking import Ask, Offer, Pass, Shared, grant
from specllama.speculative.budget import allocate

Said = tuple[int, Event | Exception]

_AHEAD = 64  # cells that each conversation should find free when one comes back


@dataclass(slots=True)
class _Running:
    id: int
    saying: Saying[None]
    settle: Callable[[], int]
    lane: Lane
    cancel: Cancel
    ask: Ask | None = None
    parked: Blob | None = None  # what its lane held, while others have the cells
    unread: int = 0  # tokens of its prompt, while there is no room for them

    @property
    def waits(self) -> bool:
        return self.parked is not None or self.unread > 0


class Scheduler:
    """Conversations that are being written, by id.

    Args:
        target: the pool that is asked last, when every draft is ready.
        seats: those of the conversations, left when they are over; idle texts give up cells.
    """

    def __init__(self, target: Pool, seats: Seats) -> None:
        self._target = target
        self._seats = seats
        self.preemptions = 0
        self._running: dict[int, _Running] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, id: int) -> bool:
        return id in self._running

    def add(
        self,
        id: int,
        saying: Saying[None],
        settle: Callable[[], int],
        lane: Lane,
        cancel: Cancel,
        unread: int = 0,
    ) -> None:
        """A conversation begins in a lane of the target, among others not before there is room for
        the ``unread`` tokens of its prompt; ``settle`` is called once when it is over, however it
        ends: how many tokens its lane keeps."""
        unread = 0 if self._fits(unread) else unread
        self._running[id] = _Running(id, saying, settle, lane, cancel, unread=unread)

    def step(self) -> list[Said]:
        """Go on until somebody says something: at most one event of each conversation.

        An exception is what ended its conversation; the others go on. [] when none is left.
        """
        while self._running:
            if len(self._running) == 1:
                [one] = self._running.values()
                one.unread = 0
                if one.parked is not None:
                    if (lost := self._unpark(one)) is not None:
                        return [(one.id, lost)]
                    continue
                saying = self._resume(one, None if one.ask is None else self._alone(one.ask))
                if saying is not None:
                    return [(one.id, saying)]
                continue
            said = self._unparked() if self.crowded else []
            said += [
                (one.id, saying)
                for one in list(self._running.values())
                if one.ask is None and not one.waits
                if (saying := self._resume(one, None)) is not None
            ]
            if said := said or list(self._answers()):
                return said
        return []

    def _answers(self) -> Iterator[Said]:
        """Answer what can be answered now; what is said to it."""
        asking = [(one, self._pool_of(one.ask)) for one in self._running.values() if not one.waits]
        alone = [one for one, pool in asking if pool is None]
        # one by one: what a head says is good until it is asked again
        answers: Iterable[tuple[_Running, object]] = ((one, self._tried(one.ask)) for one in alone)
        if not alone:
            # drafting models first: the target's pass is the one that all wait for
            pools = [pool for _, pool in asking if pool is not None]
            pool = next((pool for pool in pools if pool is not self._target), self._target)
            together = _room(pool, [one for one, its in asking if its is pool])
            offering = [one for one in together if isinstance(one.ask, Offer)]
            if offering:
                answers = list(zip(offering, _granted(pool, together), strict=True))
            else:
                answers = self._passed(pool, together)
                for one, _ in answers:  # who had to wait comes first in the next pass
                    self._running[one.id] = self._running.pop(one.id)
        for one, answer in answers:
            saying = self._resume(one, answer)
            if saying is not None:
                yield one.id, saying

    def _alone(self, ask: Ask) -> object:
        """The answer to the only conversation."""
        if not isinstance(ask, Pass) or cast(Lane, ask.lane).pool is not self._target:
            return self._tried(ask)
        begin = perf_counter()
        answer = self._tried(ask)
        self._seats.pace.passed(len(ask.tokens), perf_counter() - begin)
        return answer

    def _passed(self, pool: Pool, together: list[_Running]) -> list[tuple[_Running, object]]:
        """Run passes of one pool together, and tell of it."""
        begin = perf_counter()
        together, answers = self._rows(pool, together)
        asks = [cast(Pass, one.ask) for one in together]
        ms, tokens = (perf_counter() - begin) * 1e3, sum(len(ask.tokens) for ask in asks)
        if asks and pool is self._target:
            self._seats.pace.passed(tokens, ms / 1e3)
        for i, ask in enumerate(asks):
            if ask.tell is not None:
                ask.tell(Shared(len(asks), tokens, ms, i == 0))
        return list(zip(together, answers, strict=True))

    def _rows(self, pool: Pool, together: list[_Running]) -> tuple[list[_Running], list[object]]:
        """Those who got their pass, and the rows for each or the error that it ends with."""
        while together:
            asks = [cast(Pass, one.ask) for one in together]
            try:
                for ask in asks:
                    ask.prepare()
                parts = [Part(cast(Lane, a.lane), a.tokens, a.outputs, a.parents) for a in asks]
                return together, list(pool.run(parts))
            except PoolFull as full:
                if self._seats.vacate() or (pool is self._target and self._preempt()):
                    together = [one for one in together if one.parked is None]
                    continue
                error: BaseException = full
            except BaseException as failed:
                error = failed
            if len(together) == 1:
                return together, [error]
            if not isinstance(error, (SpecllamaError, ValueError)):
                raise error
            # one of them cannot have it: each hears for itself;
            # rows are good until the next pass, and another follows
            answers = (self._tried(one.ask) for one in together)
            return together, [x.copy() if isinstance(x, np.ndarray) else x for x in answers]
        return [], []

    def _tried(self, ask: Ask | None) -> object:
        """The answer to it, or the error that it ended with."""
        assert ask is not None
        while True:
            try:
                return grant(ask)
            except PoolFull as full:
                if not self._seats.vacate():
                    return full
            except BaseException as error:
                return error

    # -- who has to wait for cells --

    @property
    def crowded(self) -> bool:
        """Whether somebody waits for cells."""
        return any(one.waits for one in self._running.values())

    def _preempt(self) -> bool:
        """Park the youngest conversation that waits for a pass of the target; whether there was one
        beside the last."""
        active = [one for one in self._running.values() if not one.waits]
        waiting = [
            one for one in active if one.ask is not None and self._pool_of(one.ask) is self._target
        ]
        if len(active) < 2 or not waiting:
            return False
        youngest = max(waiting, key=lambda one: one.id)
        try:
            youngest.parked = self._target.park(youngest.lane)
        except EngineError:  # its tree is not settled, or the library does not give it away
            return False
        self.preemptions += 1
        return True

    def _unparked(self) -> list[Said]:
        """Bring back who was parked, and let others begin, the oldest first, where there is room;
        what those say who were cancelled."""
        said: list[Said] = []
        for one in sorted(self._running.values(), key=lambda one: one.id):
            if not one.waits:
                continue
            if one.cancel.is_set():
                one.unread = 0  # it says so itself
                if one.parked is not None:
                    one.parked = None
                    saying = self._resume(one, Cancelled("the request was cancelled"))
                    if saying is not None:
                        said.append((one.id, saying))
                continue
            back = 0 if one.parked is None else len(one.parked.tokens) + _AHEAD
            if not self._fits(one.unread + back, _AHEAD if back else 0):
                break
            one.unread = 0
            if one.parked is not None and (lost := self._unpark(one)):
                said.append((one.id, lost))
        return said

    def _fits(self, cells: int, ahead: int = 0) -> bool:
        """Whether a further conversation finds so many cells, and every other one ``ahead``; one
        that would be alone always does."""
        active = sum(not one.waits for one in self._running.values())
        while active and self._target.room < cells + ahead * active:
            if not self._seats.vacate():
                return False
        return True

    def _unpark(self, one: _Running) -> Event | Exception | None:
        """Give a conversation its cells back; what it says if they are lost."""
        blob, one.parked = one.parked, None
        assert blob is not None
        while True:
            try:
                self._target.resume(blob, one.lane)
                return None
            except (PoolFull, EngineError) as error:
                if not (isinstance(error, PoolFull) and self._seats.vacate()):
                    return self._resume(one, error)

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
        if item.ends:
            self.end(one.id)
        return item

    def _over(self, one: _Running) -> None:
        if self._running.pop(one.id, None) is not None:
            self._seats.release(one.id, one.settle())


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
    lane = cast(Lane, ask.lane)
    return n, rows, 0 if ask.parents is None else lane.branches(ask.parents, ask.reopen)


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
