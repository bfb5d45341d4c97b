"""Slots that a client names: what one holds goes to a file, and comes back from it."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from specllama.backend.base import Lane
from specllama.engine.parked import copied
from specllama.engine.seating import Seats
from specllama.engine.shelf import Shelf
from specllama.engine.slot import Slot
from specllama.errors import EngineError


def save(seats: Seats, slot: Slot, path: Path) -> tuple[int, int]:
    """Write what an idle slot holds to a file; its tokens and bytes.

    Raises:
        EngineError, StoreError: it cannot be.
    """
    return len(_idle(seats, slot).target.tokens), _shelf(seats).export(copied(slot), path)


def restore(seats: Seats, slot: Slot, path: Path) -> tuple[int, int]:
    """Give an idle slot what ``save`` wrote; its tokens and bytes.

    Raises:
        EngineError, PoolFull, StoreError: it cannot be.
    """
    text, n_bytes = _shelf(seats).fetch(path)
    seats.empty(_idle(seats, slot))
    slot.scope, slot.owner = text.scope, ""
    for lane in slot.beside:
        lane.rollback(0)
        for pool, blob in text.beside:
            if pool is lane.pool:
                pool.resume(blob, cast(Lane, lane))
    slot.target.pool.resume(text.blob, slot.target)
    slot.holds(text.blob.tokens, text.heads)
    slot.read, slot.reply_end = text.read, text.reply_end
    if text.inexact_from is not None:
        slot.mark_inexact_from(text.inexact_from)
    return len(text.blob.tokens), n_bytes


def erase(seats: Seats, slot: Slot) -> tuple[int, int]:
    """Forget what an idle slot holds; how many tokens that was, and 0 bytes.

    Raises:
        EngineError: it is not idle.
    """
    n = len(_idle(seats, slot).target.tokens)
    slot.reset()
    return n, 0


def _shelf(seats: Seats) -> Shelf:
    if seats.shelf is None:
        raise EngineError("states are kept nowhere", "start it without --kv-disk off")
    return seats.shelf


def _idle(seats: Seats, slot: Slot) -> Slot:
    if slot not in seats.free:
        raise EngineError("this slot is writing a reply", "wait until it has ended")
    slot.target.rollback(slot.settled)
    slot.ahead = None
    return slot
