"""Pasted text of a terminal, kept as text whatever it contains.

Textual reads an ESC within a paste as the beginning of a key, so that what follows it would be
typed: the focus would move, and letters would act. Most terminals take ESC out of what they paste;
for the others it is done here, before Textual reads it.
"""

from __future__ import annotations

from collections.abc import Iterable

from textual._xterm_parser import XTermParser
from textual.drivers import linux_driver
from textual.message import Message

START, END = "\x1b[200~", "\x1b[201~"


class PasteParser(XTermParser):
    """Textual's parser, with pastes that hold no ESC."""

    def __init__(self, debug: bool = False) -> None:
        super().__init__(debug)
        self._inside = False
        self._passed = ""  # the last of what was typed: a start may be cut by the end of a read
        self._held = ""  # of a paste: what may be its end

    def feed(self, data: str) -> Iterable[Message]:
        passed = self._plain(data)
        # nothing at all is the end of the input
        return super().feed(passed) if passed or not data else ()

    def _plain(self, data: str) -> str:
        out, rest, self._held = "", self._held + data, ""
        while rest:
            if not self._inside:
                window = self._passed + rest
                self._inside = START in window
                end = window.find(START) + len(START) if self._inside else len(window)
                end -= len(self._passed)
                out, self._passed, rest = out + rest[:end], window[1 - len(START) :], rest[end:]
                continue
            text, ended, rest = rest.partition(END)
            if ended:
                self._inside, self._passed = False, ""
            else:
                n = next((n for n in range(len(END) - 1, 0, -1) if text.endswith(END[:n])), 0)
                text, self._held = text[: len(text) - n], text[len(text) - n :]
            out += text.replace("\x1b", "") + ended
        return out


def install() -> None:
    """Let every app of this process read its terminal through it."""
    linux_driver.XTermParser = PasteParser  # type: ignore[attr-defined]
