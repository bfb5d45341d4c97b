"""The choice of a lane for a conversation, and of the cached prefix that it reuses.

One law for any number of lanes: a new prompt goes on from the longest beginning that a lane holds,
busy or idle, or that was parked, as far as its cells are those that a fresh reading would leave
(``Pool.exact_prefix``). Only a prompt that goes on from a whole conversation, its last reply
included, takes that one's cells as they were written; so do that turn's other tries. The very
prompt that was read last finds the row behind it. So no text depends on another conversation.
Where other parts of a pass round otherwise, or a running state goes on from where it stands, the
reply is marked instead (``Slot.goes_on``). A drafter that lacks the hidden states of what lies
there has it read again.

What an idle lane holds is parked in memory before another conversation takes the lane, or its
cells. So does a draft model.

While a message is typed, its conversation is read ahead (``seat_ahead``) in the only lane, in such
parts that the message's own request goes on from the cells it would have made itself. That takes
nothing away: what another text has to make room for is put aside, and comes back unless the next
request goes on from what was read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from typing import cast

from specllama.arrays import Row
from specllama.backend.base import Context, Lane
from specllama.backend.kernels import TILE, Kernels
from specllama.cancel import Cancel
from specllama.engine.pace import CHUNK, Pace
from specllama.engine.pair_loading import Loaded
from specllama.engine.slot import ParkedText, Slot
from specllama.errors import EngineError, PoolFull, SpecllamaError, StoreError
from specllama.models.memory import SPARE, available_memory
from specllama.settings.params import SERVER, GenerateParams
from specllama.speculative.drafting.drafter import Drafter
from specllama.text_history import History, common_prefix

_WORTH = 16  # fewer tokens are as soon read as found
_AGAIN = "the saved state of this conversation cannot be used, so it is read again"
_PRICE = 4  # tokens read ahead for each that need not be read later, at most


@dataclass(frozen=True, slots=True)
class Seat:
    """The place of a conversation: its slot, and the part of its prompt that is cached.

    Attributes:
        cached: the first tokens of its prompt, which the lane holds and nothing reads again.
        row: what follows the prompt, if it need not be read at all; its last token counts as read.
        again: tokens after those that the lane held, and the drafter needs read again.
        said: why less is drafted than was requested, or "".
        until: how many tokens of the prompt are read ahead, those cached among them.
        lost: why what was kept of the text on disk is read again, or "".
    """

    slot: Slot
    drafter: Drafter
    cached: int
    again: int
    said: str
    until: int = 0
    lost: str = ""
    row: Row | None = None


class Seats:
    """The slots of an engine: those that are taken, and the texts that the others hold.

    Parked texts take ``kv_ram`` bytes at most; the oldest leave first, so they do where the machine
    runs out of memory. What requests with an owner leave is written to disk (``shelf``). A cancel
    stops the running pass for the only conversation that is seated; others share it.

    Args:
        free_memory: bytes that the machine has left; 0 if they are not known.

    Attributes:
        free: slots without a conversation, the one that was used last in front.
        pace: times of the target's passes.
    """

    def __init__(self, loaded: Loaded, free_memory: Callable[[], int] = available_memory) -> None:
        self._info = loaded.info
        self._slots = loaded.slots
        self._pool = loaded.slots[0].target.pool
        self._most_bytes = loaded.kv_ram
        self.shelf = loaded.shelf
        self._free_memory = free_memory
        self._lot: list[ParkedText] = []  # the oldest first
        self._fetched: list[ParkedText] = []  # from disk, for the request that takes its seat now
        self._aside: ParkedText | None = None  # what the lane held before it read ahead
        self._taken: dict[int, tuple[Slot, Cancel]] = {}
        self._stop = loaded.stop
        self._closed = False
        self.free = list(loaded.slots)
        self.pace = Pace()

    @property
    def n_bytes(self) -> int:
        """Memory that parked texts take."""
        return sum(parked.n_bytes for parked in self._lot)

    def reset(self) -> None:
        """Forget every text, so that the next request reads its prompt afresh."""
        for slot in self._slots:
            slot.reset()
        self._lot.clear()
        self._aside = None

    def close(self) -> None:
        self._closed = True
        if self.shelf is not None:
            with suppress(SpecllamaError):  # what is lost is read again
                for slot in self.free:
                    slot.drop_ahead()
                self.keep()
            for one in (*self._lot, *([] if self._aside is None else [self._aside])):
                self._drop(one)
        for slot in self._slots:
            slot.close()
        if self.shelf is not None:
            self.shelf.close()

    def part(self, left: int) -> int:
        """Choose how many of ``left`` tokens of a prompt are read next."""
        chunk = CHUNK
        if len(self._taken) > 1:
            chunk = self.pace.chunk()
        elif self.pace.token_s is None and left > CHUNK and _way(self._pool.kernels, TILE) == TILE:
            chunk = TILE  # of a long one, where nothing tells yet how long it takes
        return self._pool.plan.part(left, chunk)

    def seat(self, id: int, ids: Sequence[int], params: GenerateParams, cancel: Cancel) -> Seat:
        """Take a free slot; its lane holds as much of the prompt as can be reused, from texts of
        the request's scope.

        Raises:
            UsageError, PairIncompatible: as ``Slot.drafter_for``; no lane was touched.
        """
        free, scope = self.free, "\0" if params.fresh else params.scope  # a scope of no text
        self._take_back(ids, scope, over=True)
        lost = self._fetch(ids, params)
        named = [slot for slot in free if self._slots.index(slot) == params.slot]
        nearest = max(named or free, key=lambda slot: self._usable(slot, ids, scope))
        keep = self._usable(nearest, ids, scope)
        tail, settled = nearest.settled - keep, nearest.settled
        elsewhere, _ = self._longest(ids, nearest, scope)
        stays = (tail < _WORTH or not self._most_bytes) and keep >= elsewhere
        slot = nearest if stays or named else self._place(free)
        drafter, said = slot.drafter_for(params, self._info)
        if stays:
            owner = slot.held.owner
            if tail >= _WORTH and (owner != params.owner or owner == SERVER):
                self._shelve(slot)
            self._cut(slot, keep)
        else:
            self.empty(slot, keep if slot is nearest else 0)
        slot.serves(scope)
        self._lead(slot, ids, scope)
        while not (slot.target.tokens or self._fill(slot, ids, scope)) and self.vacate():
            pass
        slot.target.capture(drafter.needs)
        n, known = len(ids), len(slot.target.tokens)
        most = known if drafter.needs == "nothing" else min(known, n - 1)  # for a state, too
        cached = min(drafter.reusable(ids, known), most)
        if cached < known:  # from where a fresh reading goes on
            begin = slot.held.begin(cached)
            cached = self._pool.exact_prefix(slot.target, cached, n, begin)
            self._cut(slot, cached)
        slot.goes_on(min(cached, settled) if stays else cached, n)
        slot.held = replace(
            slot.held, scope=params.scope, owner=params.owner, unkept=False, ahead=None
        )
        self._take(id, slot, cancel)
        row = slot.held.row[1] if cached == n and slot.held.row else None
        return Seat(slot, drafter, min(cached, n - 1), known - cached, said, lost=lost, row=row)

    def _place(self, free: Sequence[Slot]) -> Slot:
        """Choose the slot for a text that continues none in a slot."""
        if self._pool.alike is not None and self._most_bytes:  # lanes share passes with neighbours
            return min(free, key=self._slots.index)
        return next((one for one in free if not one.target.tokens), free[-1])

    def _take(self, id: int, slot: Slot, cancel: Cancel) -> None:
        self._fetched.clear()
        self.free.remove(slot)
        self._taken[id] = slot, cancel
        self._obey()

    # -- reading ahead --

    def seat_ahead(
        self, id: int, ids: Sequence[int], stable: int, params: GenerateParams, cancel: Cancel
    ) -> Seat:
        """Take the only slot to read a prompt that is still being typed; its first ``stable``
        tokens will not change.

        What is read are cells that the whole prompt would make itself, if it goes on so.

        Raises:
            UsageError, PairIncompatible: as ``Slot.drafter_for``.
        """
        [slot] = self._slots
        drafter, _ = slot.drafter_for(params, self._info)
        scope, begun = params.scope, ids[: stable + 1]
        self._take_back(begun, scope, over=False)
        lost = self._reopen(slot, begun, params)
        keep = min(self._usable(slot, begun, scope), stable)
        any_parts = self._pool.kernels.any_parts
        end = stable if any_parts else self._whole_parts(keep, stable, stable + 1)
        if self._pays(slot, ids, scope, keep, end) and self._may_read(slot, drafter, begun, keep):
            ahead = min(slot.settled, keep)
            if keep < slot.settled and self._aside is None:
                self._put_aside(slot, keep)
            self._cut(slot, keep)
            slot.target.capture(drafter.needs)
            slot.held = replace(slot.held, ahead=ahead)
        else:
            keep = end = min(common_prefix(slot.target.tokens, ids), stable)
        self._take(id, slot, cancel)
        return Seat(slot, drafter, keep, 0, "", end, lost)

    def _pays(self, slot: Slot, ids: Sequence[int], scope: str, keep: int, end: int) -> bool:
        """True if reading from ``keep`` to ``end`` saves the prompt's own request enough."""
        last, least = _last_part(self._pool.kernels, slot, keep, len(ids))
        if _way(self._pool.kernels, end - keep) != least:
            return False
        spared = last - self._usable(slot, ids, scope) - max(last - end, least)
        return spared > 0 and end - keep <= _PRICE * spared

    def in_vain(self, until: int, seconds: float, n: int) -> bool:
        """True if finishing the read-ahead costs a waiting request of ``n`` tokens more time than
        it saves: the reading began ``seconds`` ago, and reads up to ``until``."""
        [slot], pace, kernels = self._slots, self.pace, self._pool.kernels
        at = len(slot.target.tokens)
        last, least = _last_part(kernels, slot, at, n)
        if _way(kernels, until - at) != least:  # the request reads otherwise
            return at < until
        again = max(until - last + least, 0)  # and a pass more reads the weights once more
        return seconds < (pace.token_s or 0.0) * again + (pace.step_s or 0.0) * (at < until)

    def _may_read(self, slot: Slot, drafter: Drafter, begun: Sequence[int], keep: int) -> bool:
        """True if a text can be read ahead after the first ``keep`` tokens of a slot."""
        if self._pool.forgets or drafter.reusable(begun, keep) < keep:
            return False
        if keep >= slot.settled or self._aside is not None:
            return True
        target, free = self._info.target, self._free_memory()
        size = target.kv_bytes * slot.settled // max(target.n_ctx, 1)
        return drafter.needs == "nothing" and not 0 < free < SPARE + size

    def _put_aside(self, slot: Slot, keep: int) -> None:
        """Save a slot's content for a later request; its first ``keep`` tokens stay."""
        slot.drop_ahead()
        self._aside = ParkedText(self._pool.park(slot.target), slot.held)
        slot.held = replace(slot.held, unkept=False)
        if keep:
            self._pool.resume(self._aside.blob, slot.target)

    def _take_back(self, ids: Sequence[int], scope: str, *, over: bool) -> None:
        """Restore the lane's previous text unless the new prompt continues the text that was read
        ahead; ``over``: nothing continues the previous text any more."""
        if (aside := self._aside) is None:
            return
        [slot] = self._slots
        before, now = self._usable(aside, ids, scope), self._usable(slot, ids, scope)
        same = self._pool.kernels.any_parts or before == slot.held.ahead
        if now > before and same:
            if over:
                self._drop(aside)
                self._aside = None
            return
        self._aside = None
        slot.target.rollback(0)
        self._pool.resume(aside.blob, slot.target)
        slot.held = aside.held

    def _whole_parts(self, at: int, until: int, n: int) -> int:
        """Return the position up to which a request of ``n`` tokens that reads from ``at`` on reads
        in whole parts, at most ``until``."""
        size, plan = min(CHUNK, self._pool.n_batch), self._pool.plan
        while at + size <= until and n - 1 - at >= size == plan.part(n - 1 - at, CHUNK):
            at += size
        return at

    # -- leaving, and what stays --

    def release(self, id: int, keep: int) -> None:
        """End a conversation; its lane keeps its first ``keep`` tokens for others."""
        slot, _ = self._taken.pop(id)
        self._obey()  # what the lane reads again now is not to be stopped
        self.free.insert(0, slot)
        if not self._closed:
            slot.target.rollback(min(keep, len(slot.target.tokens)))
            if (held := slot.held).ahead is None:
                unkept = bool(held.owner) and len(slot.target.tokens) >= _WORTH
                slot.held = replace(held, unkept=unkept)

    def beside(self, slot: Slot) -> list[History]:
        """Return the texts of the other conversations of a slot's scope."""
        others = (one for one, _ in self._taken.values() if one is not slot)
        return [one.history for one in others if one.held.scope == slot.held.scope]

    def _obey(self) -> None:
        cancels = [cancel for _, cancel in self._taken.values()]
        if self.shelf is not None:
            (self.shelf.resting.clear if cancels else self.shelf.resting.set)()
        self._stop.follow(cancels[0] if len(cancels) == 1 else None)

    def vacate(self) -> bool:
        """Free the cells of an idle text; return True if there was one."""
        slot = next((slot for slot in reversed(self.free) if slot.target.tokens), None)
        if slot is None:
            return False
        self.empty(slot)
        for lane in slot.beside:
            lane.rollback(0)
        return True

    # -- on disk, and from there --

    def keep(self) -> None:
        """Send the texts of idle lanes to disk, if that is wanted and not yet done."""
        for slot in self.free:
            if slot.held.ahead is None:
                self._shelve(slot)

    def _shelve(self, slot: Slot) -> None:
        """Send a slot's text to disk, see ``keep``; the lane stays as it is."""
        if not slot.held.unkept or self.shelf is None or not self._worth_a_copy(slot):
            return
        target, free = self._info.target, self._free_memory()
        size = target.kv_bytes * len(slot.target.tokens) // max(target.n_ctx, 1)
        if 0 < free < SPARE + size:  # for a copy; later, perhaps
            return
        slot.held = replace(slot.held, unkept=False)
        with suppress(EngineError):  # the library does not give it away
            self.shelf.put(_outside(slot, self.pace, move=False))

    def _worth_a_copy(self, slot: Slot) -> bool:
        """True if a lane's text is worth a copy; on a CPU, reading it takes far longer."""
        n, on_cpu = len(slot.target.tokens), self._pool.kernels.on_cpu
        return n >= _WORTH and (on_cpu or self.pace.copy_pays(n, slot.target.runs))

    def _drop(self, one: ParkedText) -> None:
        """Forget a parked text; one that must be kept goes to disk."""
        if one.held.unkept and self.shelf is not None:
            self.shelf.put(one)

    def _fetch(self, ids: Sequence[int], params: GenerateParams) -> str:
        """Read a text from disk that holds more of a prompt than any in memory; return why the
        saved text cannot be used, or ""."""
        self._fetched.clear()
        if self.shelf is None or not params.owner or params.fresh:
            return ""
        held, _ = self._longest(ids, None, params.scope)
        usable = partial(self._usable, ids=ids, scope=params.scope)
        longest = self._slots[0].target.n_ctx
        try:
            found = self.shelf.take(params.scope, usable, held + _WORTH, longest)
        except StoreError as error:
            return f"{_AGAIN}: {error.message}"
        if found is None:
            return self.shelf.trouble()
        self._fetched = [found]
        return ""

    def _reopen(self, slot: Slot, begun: Sequence[int], params: GenerateParams) -> str:
        """Give the only slot a text from disk, to read further ahead; see ``_fetch``."""
        safe = slot.held.owner or len(slot.target.tokens) < _WORTH
        if self._aside is not None or slot.held.ahead is not None or not safe:
            return ""
        lost = self._fetch(begun, params)
        if self._fetched:
            self.empty(slot)
            slot.held = replace(slot.held, scope=params.scope)
            self._lead(slot, begun, params.scope)
            self._fill(slot, begun, params.scope)
            slot.held = replace(slot.held, owner=params.owner)
        return lost

    def _usable(self, place: Slot | ParkedText, ids: Sequence[int], scope: str) -> int:
        """Count the tokens of a prompt that can be reused from this text. Its last one is read for
        the first row, unless that row is known."""
        held = place.held
        if held.scope != scope:
            return 0
        cells = place.blob if isinstance(place, ParkedText) else place.target
        n, known, ahead = len(ids), common_prefix(cells.tokens, ids), held.ahead
        if held.row is not None and known == n == held.row[0] and ahead is None:
            return n
        known = min(known, n - 1)
        if ahead is not None and known > ahead and not self._pool.kernels.any_parts:
            known = self._whole_parts(ahead, known, n)
        return self._pool.exact_prefix(cells, known, n, held.begin(known))

    def _longest(
        self, ids: Sequence[int], but: Slot | None, scope: str
    ) -> tuple[int, Slot | ParkedText | None]:
        """Find the slot or parked text that holds the longest reusable part of a prompt."""
        others = (slot for slot in self._slots if slot is not but)
        places: list[Slot | ParkedText] = [*others, *self._lot, *self._fetched]
        found = ((self._usable(place, ids, scope), place) for place in places)
        return max(found, key=lambda one: one[0], default=(0, None))

    def _cut(self, slot: Slot, keep: int) -> None:
        slot.target.rollback(keep)
        slot.held = slot.held.cut(keep)

    def empty(self, slot: Slot, keep: int = 0) -> None:
        """Park a lane's content; if that is impossible, ``keep`` of it stays."""
        slot.drop_ahead()
        if self._most_bytes and self._worth_a_copy(slot):
            try:
                self._keep(_outside(slot, self.pace, move=True))
                keep = 0
            except EngineError:  # the library does not give it away
                slot.target.rollback(keep)
        else:
            self._shelve(slot)
            slot.target.rollback(keep := 0)
        slot.held = replace(slot.held.cut(keep), read=0, unkept=False)

    def _keep(self, text: ParkedText) -> None:
        tokens = text.blob.tokens
        self._lot = [
            other
            for other in self._lot
            if other.held.scope != text.held.scope
            or common_prefix(other.blob.tokens, tokens) < len(other.blob.tokens)
        ]
        self._lot.append(text)
        # the oldest leave until the others take no more memory than they may
        while self._lot and (self.n_bytes > self._most_bytes or 0 < self._free_memory() < SPARE):
            self._drop(self._lot.pop(0))

    def _fill(self, slot: Slot, ids: Sequence[int], scope: str) -> bool:
        """Give an empty lane the longest beginning of a prompt that is held anywhere; return False
        if there was no room for it."""
        keep, source = self._longest(ids, slot, scope)
        if not keep or source is None:
            return True
        try:
            if isinstance(source, Slot):
                self._pool.fork(source.target, keep, slot.target)
            else:
                self._pool.resume(source.blob, slot.target)
                slot.holds(source.blob.tokens, source.heads)
                slot.target.rollback(keep)
                if source in self._lot and len(source.blob.tokens) - keep < _WORTH:
                    self._lot.remove(source)
        except PoolFull:
            return False
        except EngineError:  # a tree that is not settled, or a state that is not taken: read afresh
            slot.target.rollback(0)
            return True
        slot.held = replace(source.held.cut(keep), unkept=False, ahead=None)
        return True

    def _lead(self, slot: Slot, ids: Sequence[int], scope: str) -> None:
        """Give the lanes of a slot's drafters what is held of a prompt."""
        slots = [one for one in self._slots if one.held.scope == scope]
        lot = [one for one in (*self._lot, *self._fetched) if one.held.scope == scope]
        for lane in slot.beside:
            _follow(lane, ids, slots, lot)


def _way(kernels: Kernels, n: int) -> int:
    """Return how ``n`` tokens are read, see ``Kernels.least``; 0 if no part is like another."""
    return 0 if kernels.widths else kernels.least(n)


def _last_part(kernels: Kernels, slot: Slot, keep: int, n: int) -> tuple[int, int]:
    """Return the end of the last part of a prompt, and its least number of tokens, whatever a slot
    holds of it: ``keep`` tokens or more."""
    last = n - kernels.apart
    return last, _way(kernels, last - slot.held.begin(keep))


def _outside(slot: Slot, pace: Pace, *, move: bool) -> ParkedText:
    """Copy a slot's content as ``Slot.outside`` does, and record the time."""
    runs, begin = slot.target.runs, perf_counter()
    text = slot.outside(move=move)
    pace.copied(runs, perf_counter() - begin)
    return text


def _follow(
    lane: Context, ids: Sequence[int], slots: Sequence[Slot], lot: Sequence[ParkedText]
) -> None:
    """Give a draft model's lane the longest beginning of a prompt that other lanes hold, or that is
    parked; its drafter finds out how far that is the text."""
    pool = lane.pool
    if pool is None:
        return
    others = [other for slot in slots for other in slot.beside if other.pool is pool]
    blobs = [blob for one in lot for whose, blob in one.beside if whose is pool]
    sources: list[tuple[Sequence[int], Callable[..., object]]] = [
        *((one.tokens, partial(pool.fork, cast(Lane, one), len(one.tokens))) for one in others),
        *((blob.tokens, partial(pool.resume, blob)) for blob in blobs),
        ((), pool.open),
    ]
    held, give = max(sources, key=lambda source: common_prefix(source[0], ids))
    if common_prefix(held, ids) > common_prefix(lane.tokens, ids):
        lane.rollback(0)
        with suppress(EngineError, PoolFull):  # what it lacks it reads itself
            give(into=lane)
