"""How the passes of a pool are computed, as far as it decides which of them give the same bits.

Two ways of adding up cells matter (see ``attention``). One by one, a row is a function of its
lane's cells in the order in which they lie, whatever lies between them. In tiles of 64 it depends
on where in them they lie: the bits are those of a lane alone for one that lies as if it were alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from specllama.settings.params import DRAFT_MAX

ZONE = 256  # cells in whose multiples attention is computed (llama-kv-cache.cpp get_n_kv)
GROUP = 16  # rows that products of wide passes take at once (ggml-cpu/arch/x86/repack.cpp)
LACKING = 3  # so many rows cost less than what is left over costs row by row (measured)
TILE = 64  # tokens of a pass from which attention is tiled (ggml-cpu/common.h GGML_FA_TILE_Q)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a pool's passes are computed with.

    Attributes:
        on_cpu: all of it is computed on the CPU.
        threads: most that a pass takes.
        flash: flash attention, "on", "off" or "auto" (llama.cpp's choice).
        kv: types of the K and of the V cache.
        any_width: attention computes a row alike in passes of any width, long reads apart.
        tiles: passes of at least ``TILE`` tokens that return no rows are computed in tiles.
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
    exact_rows: int = 1
    exact_trees: bool = False
    widths: tuple[int, ...] = ()

    @property
    def any_parts(self) -> bool:
        """Whether a text has the same bits in whatever parts it is read, tiles apart."""
        return self.exact_rows > DRAFT_MAX and not self.widths

    @property
    def in_tiles(self) -> bool:
        """True if a prompt goes on from no other tiles than it would be read in itself."""
        return self.tiles and not self.widths
