"""Small charts of block characters, readable without color."""

from __future__ import annotations

from collections.abc import Sequence

from specllama.rates import Depth

_PARTS = " ▏▎▍▌▋▊▉█"


def bar(share: float | None, width: int) -> str:
    """Draw a horizontal bar for a share of 0 to 1, in eighths of a cell."""
    if share is None:
        return "·"
    eighths = round(min(max(share, 0.0), 1.0) * width * 8)
    return "█" * (eighths // 8) + _PARTS[eighths % 8].strip()


def position_chart(positions: Sequence[Depth], width: int) -> list[str]:
    """Draw acceptance by depth in the draft."""
    return [
        f"{p.depth:>6} │{bar(p.of_rounds, width):<{width}} "
        f"{'–' if p.of_rounds is None else f'{p.of_rounds:.0%}':>4} of rounds, "
        f"{'–' if p.of_drafted is None else f'{p.of_drafted:.0%}':>4} of {p.drafted} drafted"
        for p in positions
    ]
