"""Small charts of block characters, readable without color."""

from __future__ import annotations

from collections.abc import Sequence

from specllama.rates import Depth
from specllama.store.summary import Slice

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_PARTS = " ▏▎▍▌▋▊▉█"
_HEIGHT = 8  # rows of a chart over time


def bar(share: float | None, width: int) -> str:
    """Draw a horizontal bar for a share of 0 to 1, in eighths of a cell."""
    if share is None:
        return "·"
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + _PARTS[eighths % 8].strip()


def time_chart(slices: Sequence[Slice]) -> list[str]:
    """Draw acceptance in percent over seconds since the start, one column per slice; ``·`` marks
    one without guesses."""
    labels, lines = {_HEIGHT - 1: "100%", _HEIGHT // 2: "50%", 0: "0%"}, []
    for row in reversed(range(_HEIGHT)):
        cells = "".join(_cell(one.stats.acceptance_rate, row) for one in slices)
        lines.append(f"{labels.get(row, ''):>6} │{cells}")
    lines.append(" " * 7 + "└" + "─" * len(slices))
    end = f"{slices[-1].end_s:.1f} s"
    begin = f"{slices[0].begin_s:.1f}"
    lines.append(" " * 8 + begin + end.rjust(max(len(slices) - len(begin), len(end) + 1)))
    return lines


def _cell(rate: float | None, row: int) -> str:
    """Draw the part of a column that lies in a row, counted from below."""
    if rate is None:
        return " " if row else "·"
    eighth = round(min(max(rate * _HEIGHT - row, 0.0), 1.0) * 8)
    # a rate of zero is still a rate: show that there was something
    return _EIGHTHS[eighth if row else max(eighth, 1)]


def position_chart(positions: Sequence[Depth], width: int) -> list[str]:
    """Draw acceptance by depth in the draft."""
    return [
        f"{p.depth:>6} │{bar(p.of_rounds, width):<{width}} "
        f"{'–' if p.of_rounds is None else f'{p.of_rounds:.0%}':>4} of rounds, "
        f"{'–' if p.of_drafted is None else f'{p.of_drafted:.0%}':>4} of {p.drafted} drafted"
        for p in positions
    ]
