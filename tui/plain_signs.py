"""Plain ASCII for what the toolkit itself draws: frames, scrollbars, rules."""

from __future__ import annotations

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

SIGNS = str.maketrans(
    dict.fromkeys("─━═╌▔▁", "-")
    | dict.fromkeys("│┃║▌▐▍▎▏▊▉", "|")
    | dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╯╰╔╗╚╝", "+")
    | dict.fromkeys("▂▃▄▅▆▇▀", " ")  # the ends of a scrollbar's thumb
    | {"█": "#", "•": "*", "▪": "*", "→": ">", "…": "."}
)


class PlainSigns(LineFilter):
    """A filter that replaces sign by sign, so that nothing moves."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment
            if segment.control or segment.text.isascii()
            else Segment(segment.text.translate(SIGNS), segment.style)
            for segment in segments
        ]
