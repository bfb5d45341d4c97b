"""The app's look: the theme and motion of the user, and typed access to inks and glyphs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from traceback import walk_tb
from typing import cast

from textual import on
from textual.app import App, ComposeResult
from textual.content import Content
from textual.dom import DOMNode
from textual.theme import Theme
from textual.widget import Widget
from textual.widgets import Footer
from textual.widgets._footer import FooterKey

from specllama.interface import MethodInfo
from specllama.tui import themes
from specllama.tui.messages import InkChanged, StorageFailed
from specllama.tui.state import DEFAULT_THEME, Preferences
from specllama.tui.themes import Glyphs, Ink, ink_for


class InkedApp(App[int]):
    """An app whose widgets draw with inks and glyphs. Any app may host the widgets (tests do)."""

    @property
    def methods(self) -> tuple[MethodInfo, ...]:
        """The methods of the loaded pair."""
        return ()

    @property
    def glyphs(self) -> Glyphs:
        return Glyphs(methods=self.methods)

    @property
    def ink(self) -> Ink:
        return ink_for(self.current_theme)


class Inked:
    """A mixin, on purpose not a DOMNode: CSS types are inherited along the first such base, so one
    here would hide Screen's and Widget's own styles."""

    @property
    def glyphs(self) -> Glyphs:
        return cast(InkedApp, cast(DOMNode, self).app).glyphs

    @property
    def ink(self) -> Ink:
        return cast(InkedApp, cast(DOMNode, self).app).ink


def flow(
    parts: Iterable[Content | tuple[str, str]], width: int, gap: str | tuple[str, str] = "  "
) -> list[Content]:
    """Write the parts one after the other, on as many lines as they need; none is broken."""
    lines: list[Content] = []
    for one in parts:
        longer = Content.assemble(lines[-1], gap, one) if lines else Content.assemble(one)
        if lines and longer.cell_length <= width:
            lines[-1] = longer
        else:
            lines.append(Content.assemble(one))
    return lines


class ThemedApp(InkedApp):
    """An app in the theme and the motion that the user has chosen."""

    def __init__(self) -> None:
        self.prefs = Preferences.load()
        super().__init__()
        self._told: set[str] = set()
        self._given = ""  # a theme that the terminal asks for, not the user

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return themes.variable_defaults(self.get_theme(self.theme) if self.theme else None)

    def get_css_variables(self) -> dict[str, str]:
        variables = super().get_css_variables()
        if not self.current_theme.ansi:
            variables = self.theme_variables = themes.readable(variables)
        return variables

    def choose_looks(self) -> None:
        for theme in themes.THEMES:
            self.register_theme(theme)
        known = self.prefs.theme in self.available_themes
        self.theme = self.prefs.theme if known else DEFAULT_THEME
        few = self.console.color_system == "standard" and not self.is_headless
        if few and self.theme == DEFAULT_THEME:  # ours would be rounded to white
            self.theme = self._given = themes.FEW_COLOURS
        self.theme_changed_signal.subscribe(self, self._theme_changed)
        # Over SSH every animated frame is traffic.
        if self.prefs.animation == "none" or (
            self.prefs.animation == "auto" and os.environ.get("SSH_CONNECTION")
        ):
            self.animation_level = "none"

    def _theme_changed(self, theme: Theme) -> None:
        if theme.name not in (self.prefs.theme, self._given):
            self.prefs.theme = theme.name
            self.save_prefs()
        self.redraw()

    def redraw(self) -> None:
        for screen in self.screen_stack:
            screen.post_message(InkChanged())

    def _handle_exception(self, error: Exception) -> None:
        """End the app on an error, unless it comes from a part of the screen that has gone: what
        was still on its way there comes too late, in Textual's own screens as well."""
        for frame, _ in walk_tb(getattr(error, "error", error).__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, Widget) and (owner._pruning or not owner.is_attached):
                return
        super()._handle_exception(error)

    def save_prefs(self) -> None:
        if not self.prefs.save():
            self.post_message(StorageFailed("settings of the app", str(Preferences.path())))

    @on(StorageFailed)
    def _storage_failed(self, event: StorageFailed) -> None:
        if event.what not in self._told:
            self._told.add(event.what)
            self.notify(
                f"The {event.what} cannot be written to {event.reason}; it is kept in memory.",
                title="Disk",
                severity="warning",
                markup=False,
            )


class Keys(Footer):
    """A footer that leaves out keys that do not fit, where Textual's clips them."""

    def compose(self) -> ComposeResult:
        keys = [key for key in super().compose() if isinstance(key, FooterKey)]
        self._fit(keys)
        yield from keys

    def on_resize(self) -> None:
        self._fit(self.query(FooterKey))

    def _fit(self, keys: Iterable[FooterKey]) -> None:
        room = self.app.size.width
        for key in sorted(keys, key=lambda key: not key.has_class("-command-palette")):
            needs = self._width(key)
            key.display = needs <= room
            room -= needs if key.display else 0

    def _width(self, key: FooterKey) -> int:
        words = len(key.key_display) + len(key.description)
        if key.has_class("-command-palette"):
            return words + 5  # its line and padding
        return words + (2 if self.compact else 3)
