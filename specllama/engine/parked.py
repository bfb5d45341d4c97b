"""A conversation's saved state: KV cells and drafter state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from specllama.backend.base import Blob, Lane, Pool
from specllama.engine.slot import Origin, Slot
from specllama.errors import EngineError
from specllama.speculative.drafting.drafter import Held


@dataclass(eq=False, slots=True)
class ParkedText:
    """A text that was held by a slot, see there.

    Attributes:
        beside: of its drafters' lanes.
        heads: what drafters know beside their lanes, by name.
        unkept: it is to be kept on disk, and is not there yet.
    """

    blob: Blob
    origin: Origin
    scope: str
    owner: str = ""
    beside: Sequence[tuple[Pool, Blob]] = ()
    heads: Mapping[str, Held] = field(default_factory=dict)
    unkept: bool = False

    @property
    def n_bytes(self) -> int:
        """Memory that it takes."""
        arrays = (array.nbytes for held in self.heads.values() for array in held.values())
        row = self.origin.row
        whole = self.blob.n_bytes + (0 if row is None else row[1].nbytes)
        return whole + sum(blob.n_bytes for _, blob in self.beside) + sum(arrays)


def copied(slot: Slot) -> ParkedText:
    """Copy a slot's content; the slot keeps it.

    Raises:
        EngineError: the library does not give it away.
    """
    return _outside(slot, lambda pool, lane: pool.copied(lane))


def parked(slot: Slot) -> ParkedText:
    """Move a slot's content out of it.

    Raises:
        EngineError: the library does not give it away; it stays.
    """
    return _outside(slot, lambda pool, lane: pool.park(lane))


def _outside(slot: Slot, give: Callable[[Pool, Lane], Blob]) -> ParkedText:
    heads = {name: held for name, one in slot.drafters.items() if (held := one.held())}
    blob = give(slot.target.pool, slot.target)
    beside: list[tuple[Pool, Blob]] = []
    for lane in slot.beside:
        if lane.pool is not None and lane.tokens:
            with suppress(EngineError):
                beside.append((lane.pool, give(lane.pool, cast(Lane, lane))))
    return ParkedText(
        blob,
        slot.origin,
        slot.scope,
        slot.owner,
        beside,
        heads,
        slot.unkept,
    )
