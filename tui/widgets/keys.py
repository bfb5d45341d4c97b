"""The keys at the bottom of a screen: those that have room, each of them whole."""

from __future__ import annotations

from collections.abc import Iterable

from textual.app import ComposeResult
from textual.widgets import Footer
from textual.widgets._footer import FooterKey


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
