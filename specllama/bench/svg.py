"""Small charts as inline SVG: bars with whiskers, and lines. No scripts, no fonts, no network."""

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
    """Horizontal bars: (label, value, low, high); ``mark`` draws a reference line."""
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


def lines(
    title: str,
    series: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    *,
    x_label: str = "",
    mark: float | None = None,
) -> str:
    """Polylines over a common axis: (label, points)."""
    points = [p for _, line in series for p in line]
    if not points:
        return ""
    height, left, bottom = 260, 46, 40
    x0, x1 = min(p[0] for p in points), max(p[0] for p in points)
    y1 = max([p[1] for p in points] + [mark or 0.0]) * 1.05 or 1.0

    def at(x: float, y: float) -> str:
        px = left + (x - x0) / ((x1 - x0) or 1.0) * (_WIDTH - left - 150)
        py = height - bottom - y / y1 * (height - bottom - 30)
        return f"{_num(px)} {_num(py)}"

    out = [_open(height, title)]
    for k in range(5):
        y = y1 * k / 4
        px, py = at(x0, y).split()
        out.append(f'<path class="g" d="M{px} {py}H{_WIDTH - 150}"/>')
        out.append(f'<text class="a" x="{left - 6}" y="{py}">{y:.1f}</text>')
    for x in sorted({p[0] for p in points}):
        px = at(x, 0).split()[0]
        out.append(f'<text class="t" x="{px}" y="{height - bottom + 16}">{x:g}</text>')
    if mark is not None:
        out.append(f'<path class="m" d="M{at(x0, mark)}L{at(x1, mark)}"/>')
    for i, (label, line) in enumerate(series):
        path = "L".join(at(x, y) for x, y in line)
        out.append(f'<path class="s s{i % 6}" d="M{path}"/>')
        px, py = at(*line[-1]).split()
        out.append(
            f'<text class="k s{i % 6}" x="{float(px) + 6:.0f}" y="{float(py) + 4:.0f}">'
            f"{escape(label)}</text>"
        )
    out.append(f'<text class="t" x="{_WIDTH // 2 - 60}" y="{height - 6}">{escape(x_label)}</text>')
    out.append("</svg>")
    return "".join(out)


def _open(height: int, title: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f'<text class="h" x="0" y="14">{escape(title)}</text>'
    )
