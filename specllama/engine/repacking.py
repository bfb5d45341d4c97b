"""Which layout of a model's weights is taken here: measured once for a file, a build, a machine.

On a CPU, llama.cpp rearranges ("repacks") weights of some types for wide products. In one of the
two layouts a pass of several rows may compute them as single steps would, in the other not (Q4_K
only as stored, IQ4_NL only repacked): the exact one is taken. Where both are exact or neither is,
the faster one is: prompts may be read slower repacked, and replies written faster. A later
measurement never changes the choice: rows of the two layouts differ in their last bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from specllama.backend import trial, verdicts
from specllama.backend.base import Outputs
from specllama.backend.cores import physical_cores
from specllama.events import Event, Notice
from specllama.models.memory import repacked_bytes

if TYPE_CHECKING:
    from specllama.backend.llama_pool import LlamaPool
    from specllama.engine.gguf_pair import Pair

logger = logging.getLogger("specllama.engine.repacking")

SCHEMA = "specllama.layouts.v2"
WAITING = "measuring which layout of the weights is exact and fast here; once for this model"
READ, WRITTEN = 1000, 200  # tokens of the turn that decides
LEAST_BYTES = 64 << 20  # weights below that lie in caches, and a load takes longer than is gained
EQUAL = 0.98  # a layout that takes this part of the time is not worth leaving llama.cpp's own for
_WIDTHS = (1, 2, 3, 4, 6, 8)  # rows of passes that write
_TIMED = 3  # passes of each kind; the shortest counts


class Speed(msgspec.Struct, frozen=True):
    """Tokens a second of one layout.

    Attributes:
        read: of a prompt.
        written: of a reply in passes of one row. drafted: at the best width, where every rate of
            acceptance is as likely as another (``exactness.Group.price``).
    """

    read: float
    written: float
    drafted: float

    @property
    def turn_s(self) -> float:
        """Seconds of a turn of ``READ`` and ``WRITTEN`` tokens."""
        return READ / self.read + WRITTEN / max(self.written, self.drafted)


class Layouts(msgspec.Struct, frozen=True):
    """What was measured of both layouts.

    Attributes:
        repack: which one is taken. exact: because rows of wide passes are bitwise in it alone.
    """

    stored: Speed
    repacked: Speed
    repack: bool
    exact: bool = False

    def __str__(self) -> str:
        a, b = self.repacked, self.stored
        why = ", the layout in which passes are bitwise" if self.exact else ""
        return (
            f"{'repacked' if self.repack else 'as stored'}{why}: repacked, {a.read:.0f} tok/s are "
            f"read and {a.written:.1f} written; as stored, {b.read:.0f} and {b.written:.1f}"
        )


def repacks(
    pair: Pair,
    measure: Callable[[bool], Speed],
    bitwise: Callable[[bool], bool],
    report: Callable[[Event], None] | None,
) -> bool:
    """Whether to load the target of a pair with its weights repacked.

    Args:
        measure: loads the target, repacked or as stored, and tells its speed.
        bitwise: whether its passes of every width compute a row alike.
        report: hears that it is being measured.
    """
    if not trial.repacks():
        return False
    if pair.options.repack != "auto":
        return pair.options.repack == "on"
    if not _has_choice(pair):
        return True

    def both() -> Layouts:
        if report is not None:
            report(Notice(WAITING, topic="layout"))
        stored, repacked = measure(False), measure(True)
        faster = stored.turn_s > EQUAL * repacked.turn_s
        if bitwise(faster) or not bitwise(not faster):
            return Layouts(stored, repacked, faster)
        return Layouts(stored, repacked, not faster, exact=True)

    found = verdicts.kept(SCHEMA, _key(pair), Layouts, both)
    logger.info("weights of %s: %s", pair.target.path.name, found)
    return found.repack


def line(pair: Pair) -> str:
    """How the target's weights will lie in memory, and why."""
    if not trial.repacks():
        return "as stored: repacked, they end this build of llama.cpp here"
    if pair.options.repack != "auto":
        return "repacked where llama.cpp can" if pair.options.repack == "on" else "as stored"
    if not _has_choice(pair):
        return "as llama.cpp lays them out; another layout would gain nothing"
    found = verdicts.known(SCHEMA, _key(pair), Layouts)
    if found is None:
        return "repacked or as stored: measured when the model is first loaded"
    return str(found)


def _has_choice(pair: Pair) -> bool:
    return not pair.on_gpu and repacked_bytes(pair.target) > LEAST_BYTES


def _key(pair: Pair) -> dict[str, Any]:
    options = pair.options
    return {
        **verdicts.circumstances(pair.target),
        "threads": options.threads or physical_cores(),
        "flash_attn": options.flash_attn,
        "batch": options.batch(on_gpu=False),
        "cpu": str(options.cpu),
    }


def speed(pool: LlamaPool, batch: int) -> Speed:
    """What a pool that holds nothing reads and writes.

    Args:
        batch: tokens of a pass that reads.
    """
    lane = pool.open()

    def seconds(width: int, outputs: Outputs) -> float:
        begin = perf_counter()
        lane.forward([0] * width, outputs=outputs)
        return perf_counter() - begin

    seconds(1, "last")  # fetches the weights, starts the threads
    lane.rollback(0)
    reads: list[float] = []
    writes: dict[int, list[float]] = {w: [] for w in _WIDTHS if w <= pool.max_rows}
    for _ in range(_TIMED):
        reads.append(seconds(batch, "last"))
        for width, times in writes.items():
            times.append(seconds(width, "all"))
            lane.rollback(batch)
        lane.rollback(0)
    lane.close()
    per_token = [min(times) / sum(1 / n for n in range(1, w + 1)) for w, times in writes.items()]
    return Speed(batch / min(reads), 1 / min(writes[1]), 1 / min(per_token))
