"""Small charts of block characters, readable without color."""

from __future__ import annotations

from collections.abc import Sequence

from specllama.rates import Depth
from specllama.store.summary import Slice

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉█"


def columns(values: Sequence[float | None], *, height: int, top: float, unit: str) -> list[str]:
    """Draw a column chart, one column per value; ``·`` marks a missing one.

    Args:
        values: finite numbers from 0 to ``top``, or None.
        height: rows.
        top: value of the upper edge, > 0.
        unit: written after the axis labels.
    """
    rows: list[str] = []
    labels = {height - 1: top, height // 2 if height > 2 else -1: top / 2, 0: 0.0}
    for row in reversed(range(height)):
        cells = []
        for value in values:
            if value is None:
                cells.append("·" if row == 0 else " ")
                continue
            filled = min(max(value / top, 0.0), 1.0) * height - row
            eighth = round(min(max(filled, 0.0), 1.0) * 8)
            # A value of zero is still a value: show that there was something.
            cells.append(_EIGHTHS[max(eighth, 1)] if row == 0 else _EIGHTHS[eighth])
        label = f"{labels[row]:.0f}{unit}" if row in labels else ""
        rows.append(f"{label:>6} │{''.join(cells)}")
    rows.append(" " * 7 + "└" + "─" * len(values))
    return rows


def bar(share: float | None, width: int) -> str:
    """Draw a horizontal bar for a share of 0 to 1, in eighths of a cell."""
    if share is None:
        return "·"
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + _PARTS[eighths % 8].strip()


def time_chart(slices: Sequence[Slice]) -> list[str]:
    """Draw acceptance in percent over seconds since the start."""
    rates = [s.stats.acceptance_rate for s in slices]
    lines = columns(
        [None if rate is None else rate * 100 for rate in rates], height=8, top=100, unit="%"
    )
    end = f"{slices[-1].end_s:.1f} s"
    begin = f"{slices[0].begin_s:.1f}"
    lines.append(" " * 8 + begin + end.rjust(max(len(slices) - len(begin), len(end) + 1)))
    return lines


def position_chart(positions: Sequence[Depth], width: int) -> list[str]:
    """Draw acceptance by depth in the draft."""
    return [
        f"{p.depth:>6} │{bar(p.of_rounds, width):<{width}} "
        f"{'–' if p.of_rounds is None else f'{p.of_rounds:.0%}':>4} of rounds, "
        f"{'–' if p.of_drafted is None else f'{p.of_drafted:.0%}':>4} of {p.drafted} drafted"
        for p in positions
    ]
