"""Typed access to the inks and glyphs that the app gives every widget."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from textual.app import App
from textual.dom import DOMNode

from specllama.interface import MethodInfo
from specllama.tui.themes import UNICODE, Glyphs, Ink, ink_for


class InkedApp(App[int]):
    """An app whose widgets draw with inks and glyphs. Any app may host the widgets (tests do)."""

    _glyphs = UNICODE

    @property
    def methods(self) -> tuple[MethodInfo, ...]:
        """The methods of the loaded pair."""
        return ()

    @property
    def glyphs(self) -> Glyphs:
        if self._glyphs.methods is not self.methods:  # every line asks
            self._glyphs = replace(UNICODE, methods=self.methods)
        return self._glyphs

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
