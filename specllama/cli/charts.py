"""Small charts of block characters, readable without color."""

from __future__ import annotations

from collections.abc import Sequence

from specllama.cli import output
from specllama.rates import Depth
from specllama.text import percent

_LEVELS = ("100%", "", "", "50%", "", "", "", "0%")  # the rows of a chart over time


def bar(share: float | None, width: int, parts: str = " ▏▎▍▌▋▊▉") -> str:
    """Draw a bar for a share of 0 to 1 of the width, to an eighth of a cell."""
    if share is None:
        return "·"
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + parts[eighths % 8].strip()


def time_chart(slices: Sequence[tuple[float, float, float | None]]) -> str:
    """Draw shares over seconds, one column for each (begin, end, share); ``·`` marks a time
    without one."""
    rising = [bar(kept, len(_LEVELS), " ▁▂▃▄▅▆▇") or "▁" for _, _, kept in slices]
    rows = zip(*(column.ljust(len(_LEVELS))[::-1] for column in rising), strict=True)
    lines = [f"{level:>6} │{''.join(row)}" for level, row in zip(_LEVELS, rows, strict=True)]
    begin, end = f"{slices[0][0]:.1f}", f" {slices[-1][1]:.1f} s"
    seconds = f"{'':8}{begin}{end.rjust(len(slices) - len(begin))}"
    return "\n".join([*lines, f"{'':7}└{'─' * len(slices)}", seconds])


def position_chart(positions: Sequence[Depth]) -> str:
    """Draw acceptance by depth in the draft, as wide as there is room."""
    width = max(10, min(output.width() - 46, 40))
    return "".join(
        f"{p.depth:>6} │{bar(p.of_rounds, width):<{width}} {percent(p.of_rounds):>4} of rounds, "
        f"{percent(p.of_drafted):>4} of {p.drafted} drafted\n"
        for p in positions
    )
