"""The way a pool's passes are computed, as far as it decides which of them give the same bits.

Two ways of adding up cells matter (see ``symbols``). One by one, a row is a function of its
lane's cells in the order in which they lie, whatever lies between them. In tiles of 64 it depends
on where in them they lie: the bits are those of a lane alone for one that lies as if it were alone.

Two kinds of products do, where weights are K-quants: row by row, as in steps, or in tiles, which
read 30 tokens in half of the time. So a text is read in one of three ways, by how long it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specllama.settings.params import DRAFT_MAX

Read = tuple[int, int, int]  # cells of a text that were read, from and to, and ``Kernels.least``

ZONE = 256  # cells in whose multiples attention is computed (llama-kv-cache.cpp get_n_kv)
GROUP = 16  # rows that products of wide passes take at once (ggml-cpu/arch/x86/repack.cpp)
LACKING = 3  # so many rows cost less than what is left over costs row by row (measured)
TILE = 64  # tokens of a pass from which attention is tiled (ggml-cpu/common.h GGML_FA_TILE_Q)
WIDE = 8  # and products of K-quants (ggml-cpu/tiled/tiled.cpp ggml_tiled_min_batch)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels and settings that compute a pool's passes.

    Attributes:
        on_cpu: all of it is computed on the CPU.
        threads: most that a pass takes.
        flash: flash attention, "on", "off" or "auto" (llama.cpp's choice).
        kv: types of the K and of the V cache.
        any_width: attention computes a row alike in passes of any width, long reads apart.
        tiles: passes of at least ``TILE`` tokens that read a text are computed in tiles.
        wide: passes of at least so many are faster with other products than those of steps.
        exact_rows: widest pass that was found to be like single steps, bit for bit; 0 where that
            was not measured yet. No text may depend on whether it was.
        exact_trees: rows of branches were, too.
        widths: passes that return rows have one of so many, ascending, see ``padding``; ()
            leaves them as wide as they are asked for.
    """

    on_cpu: bool = True
    threads: int = 1
    flash: str = "on"
    kv: tuple[str, str] = ("f16", "f16")
    any_width: bool = True
    tiles: bool = False
    wide: int = TILE
    exact_rows: int = 1
    exact_trees: bool = False
    widths: tuple[int, ...] = ()

    @property
    def any_parts(self) -> bool:
        """True if a text has the same bits in whatever parts it is read, apart from tiles."""
        return self.exact_rows > DRAFT_MAX and not self.widths

    @property
    def apart(self) -> int:
        """The number of tokens at the end of a text that steps read: the last one, unless wide
        passes are far cheaper."""
        return int(not self.tiles or self.wide == TILE or bool(self.widths))

    def shared(self, n_batch: int) -> int:
        """Return the most tokens of a pass that conversations share, so that each has the rows that
        it has alone. Until that is measured, they share none."""
        exact = self.exact_rows
        return n_batch if exact == 1 else max(min(n_batch, exact), 1)

    def least(self, n: int) -> int:
        """Return the fewest tokens of a pass that computes cells as one does that reads ``n``."""
        if not self.tiles or n < self.wide:
            return 1
        return TILE if n >= TILE else self.wide

    def exact_prefix(self, read: Sequence[Read], keep: int, n: int, begin: int = 0) -> int:
        """Count the cells, of the first ``keep``, that a fresh reading of ``n`` tokens would write
        alike, and that leave enough tokens to be read as they would be; ``read``: the passes that
        wrote them.

        The first ``begin`` stay as they were written; what follows is read in one way.
        """
        end = n - self.apart
        least = self.least(end - begin)
        if least == 1:
            return min([keep, *(first for first, until, _ in read if until > begin)])
        known = begin
        for first, until, way in read:
            if first > known or (way != least and until > begin):
                break
            known = max(known, until)
        keep = min(keep, known)
        return max(end - least, begin) if 0 < end - keep < least else keep
