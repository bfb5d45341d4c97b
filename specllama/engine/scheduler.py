"""The scheduler of conversations: it runs their requests and returns their events.

A pass is run only when no conversation has an event and the next effect of each is known, those of
drafting models first: lanes of one pool share it. Drafts wait for the target's pass that they are
for. Every conversation in it has the row of its pending token; the other rows go where they gain
most (``budget.allocate``). Who found no room in a pass is the first in the next one. Where the
target's cells run out, the youngest is parked in memory and goes on later as if nothing had been.
While a conversation waits for cells, no later one takes a seat.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import cast

from specllama.backend.base import Blob, Lane, Passes, Pool, Shared
from specllama.cancel import Cancel
from specllama.engine.conversation import EventSteps
from specllama.engine.seating import Seats
from specllama.errors import Cancelled, EngineError, PoolFull, SpecllamaError
from specllama.events import Event
from specllama.speculative.budget import allocate
from specllama.speculative.effects import Effect, Keep, Offer, Pass, perform

Said = tuple[int, Event | Exception]

_AHEAD = 64  # cells that each conversation should find free when one comes back


@dataclass(slots=True)
class Running:
    """A conversation in a lane of the target.

    Attributes:
        settle: called once when it is over, however it ends: how many tokens its lane keeps.
        unread: tokens of its prompt that its lane does not hold, while there is no room for them.
        drafting_s: what draft models took until it last wrote.
    """

    id: int
    steps: EventSteps[None]
    settle: Callable[[], int]
    lane: Lane
    cancel: Cancel
    unread: int = 0
    drafting_s: float = 0.0
    effect: Effect | None = None
    parked: Blob | None = None  # what its lane held, while others have the cells

    @property
    def waits(self) -> bool:
        return self.parked is not None or self.unread > 0


class Scheduler:
    """The running conversations, by id.

    Args:
        target: the pool that is asked last, when every draft is ready.
        seats: those of the conversations, left when they are over; idle texts give up cells.
    """

    def __init__(self, target: Pool, seats: Seats) -> None:
        self._target = target
        self._seats = seats
        self.preemptions = 0
        self._drafting_s = 0.0  # that passes of draft models took
        self._running: dict[int, Running] = {}
        self._line: dict[int, tuple[Cancel, Callable[[], Running]]] = {}  # who has no seat yet

    def __len__(self) -> int:
        return len(self._running) + len(self._line)

    def __contains__(self, id: int) -> bool:
        return id in self._running or id in self._line

    def enter(self, id: int, cancel: Cancel, begin: Callable[[], Running]) -> None:
        """Begin a conversation, after those that wait for cells; ``begin`` takes its seat.

        Raises:
            SpecllamaError: what ``begin`` raises, unless it is called later: ``step`` says so then.
        """
        if self.crowded:
            self._line[id] = cancel, begin
        else:
            self.add(begin())

    def add(self, one: Running) -> None:
        """Add a conversation; among others it waits until there is room for its prompt."""
        if self._fits(one.unread):
            one.unread = 0
        one.drafting_s = self._drafting_s
        self._running[one.id] = one

    def cancel(self, ids: Container[int]) -> None:
        """End these conversations; from any thread."""
        running = [(one.id, one.cancel) for one in tuple(self._running.values())]
        line = [(id, cancel) for id, (cancel, _) in tuple(self._line.items())]
        for id, cancel in running + line:
            if id in ids:
                cancel.set()

    def step(self) -> list[Said]:
        """Run passes until a conversation has an event; return one of each conversation, and those
        that follow it at once.

        An exception is what ended its conversation; the others go on. [] when none is left.
        """
        while len(self):
            said = self._unparked() if self.crowded else []
            said += [
                (one.id, event)
                for one in list(self._running.values())
                if one.effect is None and not one.waits
                if (event := self._resume(one, None)) is not None
            ]
            if said := said or list(self._answers()):
                return self._followed(said)
        return []

    def _followed(self, said: list[Said]) -> list[Said]:
        """Add the events that follow without another pass."""
        whole: list[Said] = []
        for id, event in said:
            whole.append((id, event))
            while not isinstance(event, BaseException) and event.followed:
                one = self._running.get(id)
                then = None if one is None else self._resume(one, None)
                if then is None:
                    break
                whole.append((id, event := then))
        return whole

    def _answers(self) -> Iterator[Said]:
        """Run the next shared pass and yield the resulting events."""
        asking = [
            (one, self._pool_of(one.effect)) for one in self._running.values() if not one.waits
        ]
        # what drafts comes first: the target's pass is the one that all wait for
        pool = next((pool for _, pool in asking if pool is not self._target), self._target)
        together = _room(pool, [one for one, its in asking if its is pool])
        answers: Iterable[tuple[Running, object]]
        offering = [one for one in together if isinstance(one.effect, Offer)]
        if offering:
            answers = zip(offering, _granted(self._target, together), strict=True)
        else:
            answers = self._passed(pool, together)
            if len(asking) > 1:
                for one, _ in answers:  # who had to wait comes first in the next pass
                    self._running[one.id] = self._running.pop(one.id)
        for one, answer in answers:
            event = self._resume(one, answer)
            if event is not None:
                yield one.id, event

    def _passed(self, pool: Passes, together: list[Running]) -> list[tuple[Running, object]]:
        """Run passes of one pool together, and report them to their conversations."""
        begin = perf_counter()
        answered = self._run(pool, together)
        passes = [cast(Pass, one.effect) for one, _ in answered]
        seconds, tokens = perf_counter() - begin, sum(effect.size for effect in passes)
        if pool is not self._target:
            self._drafting_s += seconds
            return answered
        if passes:
            whole = any(effect.outputs != "none" for effect in passes)
            self._seats.pace.passed(tokens, seconds, whole=whole)
        guesses = sum([effect.size - 1 for effect in passes if effect.outputs == "all"])
        for i, ((one, _), effect) in enumerate(zip(answered, passes, strict=True)):
            waited_ms, ms = (self._drafting_s - one.drafting_s) * 1e3, seconds * 1e3
            if effect.outputs == "all":
                one.drafting_s = self._drafting_s
            effect.shared = None
            if len(self._running) > 1:
                effect.shared = Shared(len(passes), tokens, ms, i == 0, guesses, waited_ms)
        return answered

    def _run(self, pool: Passes, together: list[Running]) -> list[tuple[Running, object]]:
        """Run a shared pass; return its conversations, and for each the pass or an error."""
        while together:
            passes = [cast(Pass, one.effect) for one in together]
            try:
                for effect in passes:
                    effect.prepare()
                pool.run(passes)
                return list(zip(together, passes, strict=True))
            except PoolFull as full:
                if self._seats.vacate() or (pool is self._target and self._preempt()):
                    together = [one for one in together if one.parked is None]
                    continue
                error: BaseException = full
            except BaseException as failed:
                error = failed
            if len(together) == 1:
                return [(together[0], error)]
            if not isinstance(error, (SpecllamaError, ValueError)):
                raise error
            answered: list[tuple[Running, object]] = []
            for one, effect in zip(together, passes, strict=True):  # one of them cannot have it
                answered.append((one, self._tried(effect)))
                effect.rows = effect.rows.copy()  # another pass follows
            return answered
        return []

    def _tried(self, effect: Effect) -> object:
        """Return the result of an effect, or the error that it ended with."""
        while True:
            try:
                return perform(effect)
            except PoolFull as full:
                if not self._seats.vacate():
                    return full
            except BaseException as error:
                return error

    # -- who has to wait for cells --

    @property
    def crowded(self) -> bool:
        """True if a conversation waits for cells."""
        return bool(self._line) or any(one.waits for one in self._running.values())

    def _preempt(self) -> bool:
        """Park a conversation that waits for room for its prompt, else the youngest that waits for
        a pass of the target and is not the last. Return True if there was one."""
        active = [one for one in self._running.values() if not one.waits]
        asking = [o for o in active if o.effect and self._pool_of(o.effect) is self._target]
        return self._park_unread() or (len(active) > 1 and self._park(asking))

    def _park_unread(self) -> bool:
        """Park a conversation that holds a part of its prompt and waits for room for the rest."""
        running = self._running.values()
        return self._park([o for o in running if o.unread and o.parked is None and o.lane.tokens])

    def _park(self, among: Sequence[Running]) -> bool:
        """Park the youngest of these."""
        if not among:
            return False
        youngest = max(among, key=lambda one: one.id)
        try:
            youngest.parked = self._target.park(youngest.lane)
        except EngineError:  # its tree is not settled, or the library does not give it away
            return False
        self.preemptions += 1
        return True

    def _unparked(self) -> list[Said]:
        """Bring back parked conversations, and let others begin, the oldest first, if there is
        room; return the events of those that were cancelled."""
        said: list[Said] = []
        for one in sorted(self._running.values(), key=lambda one: one.id):
            if not one.waits:
                continue
            if one.cancel.is_set():
                one.unread, one.parked = 0, None  # who never began says so itself
                ended = Cancelled("the request was cancelled")
                if one.effect is not None and (event := self._resume(one, ended)) is not None:
                    said.append((one.id, event))
                continue
            back = 0
            if one.parked is not None:  # else its next pass would park it again
                size = 0 if one.effect is None else _size(one.effect)[0]
                back = len(one.parked.tokens) + max(_AHEAD, size)
            if not self._fits(one.unread + back, _AHEAD if back else 0):
                break
            one.unread, one.drafting_s = 0, self._drafting_s  # what was drafted did not hold it up
            if one.parked is not None and (lost := self._unpark(one)):
                said.append((one.id, lost))
        while self._line and not any(one.waits for one in self._running.values()):
            id, (_, begin) = next(iter(self._line.items()))
            try:
                self.add(begin())
            except Exception as error:
                said.append((id, error))
            finally:  # not earlier: it can be cancelled at any time
                self._line.pop(id, None)
        return said

    def _fits(self, cells: int, ahead: int = 0) -> bool:
        """True if a further conversation finds this many cells, and every other one ``ahead``; a
        conversation that would be alone always does."""
        active = sum(not one.waits for one in self._running.values())
        while active and self._target.room < cells + ahead * active:
            if not self._seats.vacate():
                return False
        return True

    def _unpark(self, one: Running) -> Event | Exception | None:
        """Give a conversation its cells back; return its event if they are lost."""
        blob, one.parked = one.parked, None
        assert blob is not None
        while True:
            try:
                self._target.resume(blob, one.lane)
                return None
            except (PoolFull, EngineError) as error:
                full = isinstance(error, PoolFull)
                if not (full and (self._seats.vacate() or self._park_unread())):
                    return self._resume(one, error)

    def _pool_of(self, effect: Effect | None) -> Passes:
        """Return the pool that runs the effect."""
        return effect.pool if isinstance(effect, Pass) else self._target

    def end(self, id: int) -> None:
        """Stop a conversation at once."""
        self._line.pop(id, None)
        one = self._running.get(id)
        if one is not None:
            try:
                one.steps.close()
            finally:
                self._over(one)

    def _resume(self, one: Running, answer: object) -> Event | Exception | None:
        """Send an answer, or raise an error, into a conversation; return its next event, if any.

        Raises:
            KeyboardInterrupt, SystemExit: as they come; the conversation is over.
        """
        one.effect = None
        try:
            while True:
                if isinstance(answer, BaseException):
                    item = one.steps.throw(answer)
                else:
                    item = one.steps.send(answer)
                if not isinstance(item, Keep):
                    break
                answer = self._tried(item)
        except StopIteration:
            self._over(one)
            return None
        except Exception as error:
            self._over(one)
            return error
        except BaseException:
            self._over(one)
            raise
        if isinstance(item, Pass | Offer):
            one.effect = item
            return None
        if item.ends:
            self.end(one.id)
        return item

    def _over(self, one: Running) -> None:
        if self._running.pop(one.id, None) is not None:
            self._seats.release(one.id, one.settle())


def _size(effect: Effect | None) -> tuple[int, int, int]:
    """Return the least (tokens, rows, branches) that it takes of a pass."""
    if isinstance(effect, Offer):
        return 1, 1, _branches(effect.draft.parents)
    assert isinstance(effect, Pass)
    n = effect.size
    rows = n if effect.outputs == "all" else int(effect.outputs == "last")
    branches = 0 if effect.parents is None else effect.lane.branches(effect.parents, effect.reopen)
    return n, rows, branches


def _branches(parents: Sequence[int]) -> int:
    """Count the leaves of a tree after the first."""
    return len(parents) - len({parent for parent in parents if parent >= 0}) - 1


def _room(pool: Passes, asking: list[Running]) -> list[Running]:
    """Choose the conversations that fit into one pass; always at least the first."""
    if len(asking) == 1:
        return asking
    together: list[Running] = []
    tokens = rows = branches = 0
    for one in asking:
        n, wanted, leaves = _size(one.effect)
        tokens, rows, branches = tokens + n, rows + wanted, branches + leaves
        full = (
            tokens > pool.kernels.shared(pool.n_batch)
            or rows > pool.max_rows
            or branches > pool.free_leaves
        )
        if together and full:
            break
        together.append(one)
    return together


def _granted(pool: Pool, together: Sequence[Running]) -> list[int]:
    """Return how many guesses of every offer go into the pass of these conversations."""
    offers = [one.effect for one in together if isinstance(one.effect, Offer)]
    if len(together) == 1:
        return [offers[0].size]
    sizes = [_size(one.effect) for one in together]
    tokens, rows = sum(n for n, _, _ in sizes), sum(n for _, n, _ in sizes)
    most = min(pool.kernels.shared(pool.n_batch) - tokens, pool.max_rows - rows)
    left = min(most, sum(offer.size for offer in offers))
    # attention is dearest to the longest text
    bids = [offer.bid(offer) for offer in offers]
    v = max((bid.passes(tokens + left) for bid in bids), key=lambda v: v[-1])
    given, _ = allocate(bids, v, taken=tokens)
    if pool.alike is None:
        return given
    each = min(-(-sum(given) // len(together)), pool.alike)
    return [min(each, offer.size) for offer in offers]
