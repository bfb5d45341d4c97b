"""Typed access to the inks and glyphs that the app gives every widget."""

from __future__ import annotations

from typing import cast

from textual.app import App
from textual.dom import DOMNode

from specllama.interface import MethodInfo
from specllama.tui.themes import Glyphs, Ink, glyphs_for, ink_for


class InkedApp(App[int]):
    """An app whose widgets draw with inks and glyphs. Any app may host the widgets (tests do)."""

    glyph_choice = "auto"
    _glyphs: tuple[str, tuple[MethodInfo, ...], Glyphs] | None = None

    @property
    def methods(self) -> tuple[MethodInfo, ...]:
        """The methods of the loaded pair."""
        return ()

    @property
    def glyphs(self) -> Glyphs:
        choice, methods, known = self.glyph_choice, self.methods, self._glyphs
        if known is None or known[0] != choice or known[1] is not methods:  # every line asks
            known = self._glyphs = choice, methods, glyphs_for(choice, methods)
        return known[2]

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
