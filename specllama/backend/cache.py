"""A pool's interface to the library that keeps its cells and runs its passes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specllama.arrays import HiddenNeed, Rows
from specllama.backend.batch import Batch


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a pool.

    Attributes:
        n_ctx: most tokens of a lane, and of all lanes together unless they are apart.
        lanes: most conversations at once.
        max_rows: most rows with logits in a pass.
        max_leaves: most branches of a token tree; 1 takes chains only.
        n_batch: most tokens in a pass.
        apart: every lane has ``n_ctx`` cells of its own.
    """

    n_ctx: int
    lanes: int = 4
    max_rows: int = 1
    max_leaves: int = 1
    n_batch: int = 512
    apart: bool = False

    @property
    def judged(self) -> bool:
        """True if a pass returns more than one row of each lane; not so for a draft model."""
        return self.max_rows > self.lanes

    @property
    def sequences(self) -> int:
        """Ids that lanes and leaves take, and the two that a pool of shared cells keeps to
        itself."""
        if self.apart:
            return self.lanes
        return (
            self.lanes + self.max_leaves - 1 + (2 if self.lanes > 1 or self.max_leaves > 1 else 0)
        )


class Cache(Protocol):
    """One KV cache. A cell holds a token at a position, for one sequence or for several.

    A token goes to the first free cell after the last one that was filled, or after the first one
    that was freed since if that comes earlier. A query sees the cells of its first sequence.
    """

    batch: Batch

    @property
    def n_cells(self) -> int: ...

    def require_open(self) -> None:
        """Raise EngineError if the cache is closed."""
        ...

    def require_running(self) -> None:
        """Raise Cancelled if the engine must stop."""
        ...

    def decode(self, *, tiled: bool) -> None:
        """Run the pass in the batch; errors are those of ``Context.forward``.

        Args:
            tiled: long reads may be computed in tiles, see ``kernels``.
        """
        ...

    def rows(self, n: int) -> Rows:
        """Return the first ``n`` rows of the last pass, in the order of the batch; a view."""
        ...

    def want(self, needs: set[HiddenNeed]) -> None:
        """Keep these hidden states from the next pass on."""
        ...

    def prepare(self, *, every_row: bool) -> None:
        """Set whether the next pass returns every row."""
        ...

    def states(self, need: HiddenNeed, n: int) -> Rows:
        """Return hidden states [n, width] of the last pass, in the order of the batch; a view."""
        ...

    def copy(self, sequence: int, to: int, begin: int, end: int) -> None:
        """Give another sequence the cells of positions ``begin`` to ``end - 1`` as well."""
        ...

    def remove(self, sequence: int, begin: int) -> bool:
        """Remove the cells from position ``begin`` on from a sequence; False if that fails."""
        ...

    def keep(self, sequence: int) -> None:
        """Free every cell that this sequence does not have."""
        ...

    def clear(self) -> None: ...

    def end(self, sequence: int) -> int:
        """Return the position after the last one of a sequence."""
        ...

    def state(self, sequence: int) -> bytes:
        """Return the whole state of a sequence; empty if the library does not expose it."""
        ...

    def restore(self, sequence: int, state: bytes) -> bool:
        """Fill an empty sequence with a result of ``state``."""
        ...

    def rewrite(self) -> bool:
        """Write all cells out and read them back, in order, into the first ones."""
        ...

    def beside(self, shape: Shape) -> Cache:
        """Create an empty cache of another shape on the same model, computed alike."""
        ...

    def close(self) -> None: ...
