"""The screen as a picture: SVG that needs nothing from elsewhere."""

from __future__ import annotations

import re

FONTS = re.compile(r"@font-face\s*\{[^}]*\}\s*")
UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # XML has no way to write them
FONT = "font-family: Fira Code, "


def self_contained(svg: str) -> str:
    """Remove the fonts that a drawing of Rich or Textual would fetch: use the reader's own."""
    svg = FONTS.sub("", svg).replace(FONT, "font-family: ui-monospace, Menlo, Consolas, ")
    return UNFIT.sub("\ufffd", svg)
