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


STYLE = """
:root { color-scheme: light dark; --ink: #1d2329; --soft: #68737d; --line: #d5dbe0;
  --good: #2f8f6b; --bad: #c2573a; --paper: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #98a2ab; --line: #3a434b;
  --good: #4fb88f; --bad: #e08162; --paper: #14181c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 860px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; margin: 1rem 0;
  font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid var(--line); text-align: right; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
th { color: var(--soft); font-weight: 600; }
svg { width: 100%; height: auto; margin: 1rem 0; font: 12px system-ui, sans-serif; }
svg text { fill: var(--ink); } svg .l, svg .a { text-anchor: end; fill: var(--soft); }
svg .h { font-weight: 600; font-size: 13px; } svg .t { text-anchor: middle; fill: var(--soft); }
svg .good { fill: var(--good); } svg .bad { fill: var(--bad); }
svg .w { stroke: var(--ink); stroke-width: 1.5; } svg .g { stroke: var(--line); }
svg .m { stroke: var(--soft); stroke-dasharray: 4 3; fill: none; }
svg .s { fill: none; stroke-width: 2; } svg text.s { stroke: none; }
svg .s0 { stroke: #2f8f6b; } svg text.s0 { fill: #2f8f6b; }
svg .s1 { stroke: #3b78c4; } svg text.s1 { fill: #3b78c4; }
svg .s2 { stroke: #c2573a; } svg text.s2 { fill: #c2573a; }
svg .s3 { stroke: #9a6bc9; } svg text.s3 { fill: #9a6bc9; }
svg .s4 { stroke: #b08a1e; } svg text.s4 { fill: #b08a1e; }
svg .s5 { stroke: #68737d; } svg text.s5 { fill: #68737d; }
details { color: var(--soft); } pre { white-space: pre-wrap; }
"""
