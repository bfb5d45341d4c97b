"""Which lane a conversation gets, and what becomes of the text that lies there.

One law for any number of lanes: a new prompt goes on from the longest beginning that a lane holds,
busy or idle, or that was parked, as far as its cells are those that a fresh reading would leave
(``Lane.alike``). Only a prompt that goes on from a whole conversation, its last reply included,
takes that one's cells as they were written. So no text depends on another conversation. Where
other parts of a pass round otherwise, or a running state goes on from where it stands, the reply is
marked instead (``Slot.goes_on``).

What an idle lane holds is parked in memory before another conversation takes the lane, or its
cells. So does a draft model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import cast

from specllama.backend.base import Blob, Context, Lane, Pool
from specllama.engine.slot import Slot
from specllama.errors import EngineError, PoolFull
from specllama.history import common_prefix
from specllama.models.memory import SPARE, available_memory
from specllama.speculative.drafting.drafter import Drafter

_WORTH = 16  # fewer tokens are as soon read as found


@dataclass(eq=False, slots=True)
class _Parked:
    blob: Blob
    rounded: int | None  # see ``Slot.rounded``
    read: int  # see ``Slot``
    whole: int
    scope: str
    beside: Sequence[tuple[Pool, Blob]]  # of its drafters' lanes

    @property
    def n_bytes(self) -> int:
        return self.blob.n_bytes + sum(blob.n_bytes for _, blob in self.beside)


def usable_with(drafter: Drafter, lane: Lane, ids: Sequence[int]) -> int:
    """How many tokens of a prompt that a lane was given need not be read for this drafter: one that
    lacks the hidden states of what lies there has it read again, from where a fresh reading goes
    on."""
    known = len(lane.tokens)
    cached = drafter.reusable(ids, known)
    return known if cached >= known else lane.alike(cached, len(ids))


class Seating:
    """The lanes of a pool.

    Args:
        slots: all of them.
        most_bytes: of parked texts, the oldest of which are forgotten; so they are where the
            machine runs out of memory.
        free: bytes of it that are left; 0 if nobody knows.
    """

    def __init__(
        self,
        pool: Pool,
        slots: Sequence[Slot],
        most_bytes: int,
        free: Callable[[], int] = available_memory,
    ) -> None:
        self._pool = pool
        self._slots = slots
        self._most_bytes = most_bytes
        self._free_memory = free
        self._lot: list[_Parked] = []  # the oldest first

    @property
    def n_bytes(self) -> int:
        """Memory that parked texts take."""
        return sum(parked.n_bytes for parked in self._lot)

    def forget(self) -> None:
        self._lot.clear()

    def seat(self, ids: Sequence[int], free: list[Slot], scope: str = "") -> Slot:
        """Take a slot out of ``free``, which has the one that was used last in front; its lane
        holds as much of the prompt as need not be read: of texts of this scope."""
        nearest = max(free, key=lambda slot: self._usable(slot, ids, scope))
        keep = self._usable(nearest, ids, scope)
        tail = len(nearest.target.tokens) - keep
        elsewhere, _ = self._longest(ids, nearest, scope)
        if (tail < _WORTH or not self._most_bytes) and keep >= elsewhere:
            slot = nearest
            slot.target.rollback(keep)
            slot.kept(keep)
        else:
            slot = next((one for one in free if not one.target.tokens), free[-1])
            self._empty(slot, keep if slot is nearest else 0)
        free.remove(slot)
        if slot.scope != scope:
            slot.scope = scope
            for lane in slot.beside:
                lane.rollback(0)
            for drafter in slot.drafters.values():  # what is drafted is told
                drafter.forget()
        for lane in slot.beside:
            self._follow(lane, ids, scope)
        while not (slot.target.tokens or self._fill(slot, ids, scope)) and self.vacate(free):
            pass
        return slot

    def vacate(self, free: Sequence[Slot]) -> bool:
        """Take the cells of an idle text; whether there was one."""
        slot = next((slot for slot in reversed(free) if slot.target.tokens), None)
        if slot is None:
            return False
        self._empty(slot)
        for lane in slot.beside:
            lane.rollback(0)
        return True

    def _usable(self, place: Slot | _Parked, ids: Sequence[int], scope: str) -> int:
        """How many tokens of a prompt need not be read where this is held; its last one gives the
        first row."""
        if place.scope != scope:
            return 0
        held = place.blob if isinstance(place, _Parked) else place.target
        known = min(common_prefix(held.tokens, ids), len(ids) - 1)
        goes_on = known == len(held.tokens) == place.whole
        return known if goes_on else held.alike(known, len(ids))

    def _longest(
        self, ids: Sequence[int], but: Slot, scope: str
    ) -> tuple[int, Slot | _Parked | None]:
        """Where most tokens of a prompt need not be read, in another slot or parked."""
        others = (slot for slot in self._slots if slot is not but)
        places: list[Slot | _Parked] = [*others, *self._lot]
        found = ((self._usable(place, ids, scope), place) for place in places)
        return max(found, key=lambda one: one[0], default=(0, None))

    def _empty(self, slot: Slot, keep: int = 0) -> None:
        """Park what a lane holds; where that cannot be, ``keep`` of it stays."""
        if self._most_bytes and len(slot.target.tokens) >= _WORTH:
            try:
                blob = self._pool.park(slot.target)
                beside = _parked(slot.beside)
                self._keep(
                    _Parked(blob, slot.rounded_at, slot.read, slot.whole, slot.scope, beside)
                )
                keep = 0
            except EngineError:  # the library does not give it away
                slot.target.rollback(keep)
        else:
            slot.target.rollback(keep := 0)
        slot.kept(keep)
        slot.read = 0

    def _keep(self, parked: _Parked) -> None:
        tokens = parked.blob.tokens
        self._lot = [
            other
            for other in self._lot
            if other.scope != parked.scope
            or common_prefix(other.blob.tokens, tokens) < len(other.blob.tokens)
        ]
        self._lot.append(parked)
        while self._lot and (self.n_bytes > self._most_bytes or 0 < self._free_memory() < SPARE):
            del self._lot[0]

    def _fill(self, slot: Slot, ids: Sequence[int], scope: str) -> bool:
        """Give an empty lane the longest beginning of a prompt that is held anywhere; False where
        there was no room for it."""
        keep, source = self._longest(ids, slot, scope)
        if not keep or source is None:
            return True
        try:
            if isinstance(source, Slot):
                self._pool.fork(source.target, keep, slot.target)
                rounded = source.rounded_at
            else:
                self._pool.resume(source.blob, slot.target)
                slot.target.rollback(keep)
                rounded = source.rounded
                if len(source.blob.tokens) - keep < _WORTH:
                    self._lot.remove(source)
        except PoolFull:
            return False
        except EngineError:  # a tree that is not settled, or a state that is not taken: read afresh
            slot.target.rollback(0)
            return True
        slot.read = source.read
        if rounded is not None and rounded < keep:
            slot.rounded(rounded)
        return True

    def _follow(self, lane: Context, ids: Sequence[int], scope: str) -> None:
        """Give a draft model's lane the longest beginning of a prompt that is held anywhere; how
        far that is the text its drafter finds out."""
        pool = lane.pool
        if pool is None:
            return
        slots = [slot for slot in self._slots if slot.scope == scope]
        others = [other for slot in slots for other in slot.beside if other.pool is pool]
        lot = [one for one in self._lot if one.scope == scope]
        blobs = [blob for one in lot for whose, blob in one.beside if whose is pool]
        sources: list[tuple[Sequence[int], Callable[..., object]]] = [
            *((one.tokens, partial(pool.fork, cast(Lane, one), len(one.tokens))) for one in others),
            *((blob.tokens, partial(pool.resume, blob)) for blob in blobs),
        ]
        held, give = max(sources, key=lambda source: common_prefix(source[0], ids))
        if common_prefix(held, ids) > common_prefix(lane.tokens, ids):
            lane.rollback(0)
            with suppress(EngineError, PoolFull):  # what it lacks it reads itself
                give(into=lane)


def _parked(lanes: Sequence[Context]) -> list[tuple[Pool, Blob]]:
    """What draft models' lanes held, where it can be taken."""
    found: list[tuple[Pool, Blob]] = []
    for lane in lanes:
        if lane.pool is not None and lane.tokens:
            with suppress(EngineError):
                found.append((lane.pool, lane.pool.park(cast(Lane, lane))))
    return found
