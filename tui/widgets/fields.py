"""Controls of one line: a switch with its state in words, a choice that opens a list."""

from __future__ import annotations

from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Select, Switch

from specllama.tui.widgets.base import Inked


class Toggle(Inked, Switch):
    """A switch whose states differ without color, too."""

    DEFAULT_CSS = """
    Toggle { border: none; height: 1; width: 9; padding: 0 1; background: transparent; }
    Toggle:focus, Toggle:hover { border: none; background: $panel; }
    """

    def render(self) -> Content:
        on = self.value
        bar, knob = self.glyphs.line * 2, self.glyphs.bullet if on else self.glyphs.ring
        ink = self.ink.good if on else self.ink.muted
        track = f"{bar}{knob}" if on else f"{knob}{bar}"
        return Content.assemble((track, ink), (" on" if on else " off", "" if on else ink))


class Choose(Inked, Select[str], inherit_bindings=False):
    """A choice that Up and Down leave, as they leave every other field."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space", "show_overlay", "Open")]

    DEFAULT_CSS = """
    Choose > SelectCurrent { background: $surface; padding: 0 1; }
    Choose:focus > SelectCurrent { background: $panel; background-tint: transparent; }
    """

    def __init__(self, options: tuple[str, ...], value: str, *, id: str | None = None) -> None:
        pairs = [(option, option) for option in options]
        super().__init__(pairs, value=value, allow_blank=False, compact=True, id=id)
