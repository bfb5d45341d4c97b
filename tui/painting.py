"""Drawing limited to visible, changed lines.

Textual draws every widget that touches a changed line, also where others lie over it, and the whole
of it. While a reply is written that is most of what a flush costs: a message, its body and each
list in it are large empty boxes below the paragraphs that fill them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import cast

from textual._compositor import ChopsUpdate, Compositor
from textual.geometry import Region
from textual.strip import Strip

Spans = Mapping[int, Sequence[tuple[int, int]]]
"""By line, the columns [first, last) that are to be drawn."""


class LeanCompositor(Compositor):
    """A compositor that asks widgets for the lines it needs, from the front to the back."""

    def render_partial_update(self) -> ChopsUpdate | None:
        screen = self.size.region
        regions = [region.intersection(screen) for region in self._dirty_regions]
        self._dirty_regions.clear()
        lines: dict[int, list[tuple[int, int]]] = {}
        spans = list(self._regions_to_spans(region for region in regions if region))
        for y, first, last in spans:
            lines.setdefault(y, []).append((first, last))
        if not spans:
            return None
        return ChopsUpdate(self._drawn(lines), spans, [cuts[1:] for cuts in self.cuts])

    def _render_chops(
        self, crop: Region, is_rendered_line: Callable[[int], bool]
    ) -> Sequence[Mapping[int, Strip]]:
        lines = {y: [crop.column_span] for y in crop.line_range if is_rendered_line(y)}
        return cast("Sequence[Mapping[int, Strip]]", self._drawn(lines))

    def _drawn(self, spans: Spans) -> list[dict[int, Strip | None]]:
        """Draw the visible parts of these spans: by line and column, as cut at the edges of
        widgets."""
        cuts = self.cuts
        drawn: list[dict[int, Strip | None]] = [dict.fromkeys(line[:-1]) for line in cuts]
        wanted = {
            y: {first for first, last in pairwise(cuts[y]) if _touched(first, last, spans[y])}
            for y in spans
        }
        for widget, (region, clip) in self.visible_widgets.items():
            seen = region.intersection(clip)
            first, last = seen.column_span
            lines = [y for y in seen.line_range if _some(wanted.get(y, ()), first, last)]
            for top, height in _runs(lines):
                part = Region(first - region.x, top - region.y, last - first, height)
                for y, strip in enumerate(widget.render_lines(part), top):
                    at = [cut for cut in cuts[y] if first <= cut <= last]
                    pieces = strip.divide([cut - first for cut in at[1:]])
                    # what lies in front stays; a line may be shorter than its widget is wide
                    for x, piece in zip(at, pieces, strict=False):
                        if x in wanted[y]:
                            drawn[y][x] = piece
                            wanted[y].remove(x)
        return drawn


def _touched(first: int, last: int, spans: Iterable[tuple[int, int]]) -> bool:
    return any(begin < last and first < end for begin, end in spans)


def _some(wanted: Iterable[int], first: int, last: int) -> bool:
    return any(first <= x < last for x in wanted)


def _runs(lines: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Yield (first, length) of each run of consecutive lines."""
    for _, run in groupby(enumerate(lines), lambda pair: pair[1] - pair[0]):
        found = [y for _, y in run]
        yield found[0], len(found)
