"""The keys at the bottom of a screen: those that have room, each of them whole."""

from __future__ import annotations

from textual import events
from textual.app import ComposeResult
from textual.widgets import Footer
from textual.widgets._footer import FooterKey


class Keys(Footer):
    """A footer that leaves out what does not fit, where Textual's clips it."""

    def compose(self) -> ComposeResult:
        keys = [key for key in super().compose() if isinstance(key, FooterKey)]
        room = self.app.size.width
        for key in sorted(keys, key=lambda key: not key.has_class("-command-palette")):
            needs = self._width(key)
            key.display = needs <= room
            room -= needs if needs <= room else 0
        yield from keys

    def _width(self, key: FooterKey) -> int:
        words = len(key.key_display) + len(key.description)
        if key.has_class("-command-palette"):
            return words + 5  # its line and padding
        return words + (2 if self.compact else 3)

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self.recompose)
