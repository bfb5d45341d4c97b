"""Small charts as inline SVG: bars with whiskers. No scripts, no fonts, no network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_WIDTH = 720


def _num(x: float) -> str:
    return f"{x:.1f}".rstrip("0").rstrip(".")


def bars(
    title: str,
    rows: Sequence[tuple[str, float, float | None, float | None]],
    *,
    mark: float | None = None,
    unit: str = "",
) -> str:
    """Draw horizontal bars: (label, value, low, high); ``mark`` draws a reference line."""
    if not rows:
        return ""
    top = max([value for _, value, _, _ in rows] + [h or 0.0 for *_, h in rows] + [mark or 0.0])
    scale = (_WIDTH - 290) / top if top > 0 else 1.0
    left, step = 210, 24
    height = 34 + step * len(rows)
    out = [_open(height, title)]
    for i, (label, value, low, high) in enumerate(rows):
        y = 28 + i * step
        out.append(f'<text class="l" x="{left - 8}" y="{y + 12}">{escape(label)}</text>')
        kind = "good" if mark is None or value >= mark else "bad"
        out.append(
            f'<rect class="{kind}" x="{left}" y="{y}" width="{_num(max(value * scale, 0.5))}" '
            f'height="16" rx="2"/>'
        )
        if low is not None and high is not None:
            a, b = left + low * scale, left + high * scale
            out.append(f'<path class="w" d="M{_num(a)} {y + 8}H{_num(b)}"/>')
        end = left + max(value, high or 0.0) * scale + 6
        out.append(f'<text class="v" x="{_num(end)}" y="{y + 12}">{value:.2f}{escape(unit)}</text>')
    if mark is not None:
        x = left + mark * scale
        out.append(f'<path class="m" d="M{_num(x)} 22V{height - 6}"/>')
    out.append("</svg>")
    return "".join(out)


def _open(height: int, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f'<text class="h" x="0" y="14">{escape(title)}</text>'
    )
