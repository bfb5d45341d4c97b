"""Copies of a conversation: a message, its last block of code, the whole."""

from __future__ import annotations

from collections.abc import Callable

from specllama.tui.reading import code_blocks
from specllama.tui.screens.turn import TurnScreen


class Copying:
    """Copies of a screen's conversation, made with ``copy``."""

    def __init__(self, screen: TurnScreen, copy: Callable[[str], object]) -> None:
        self._screen = screen
        self._copy = copy

    def message(self, index: int) -> None:
        self._copy(self._screen.session.messages[index].content)

    def code(self, index: int) -> None:
        self._copy_code(self._screen.session.messages[index].content)

    def action_copy(self, what: str = "") -> None:
        """Copy the last reply, its last code block, or the conversation."""
        reply = self._last_reply()
        if what == "chat":
            self._copy(self._screen.session.export("md"))
        elif what == "code":
            self._copy_code(reply or "")
        elif reply is None:
            self._screen.notify("There is no reply to copy yet", timeout=2)
        else:
            self._copy(reply)

    def _copy_code(self, text: str) -> None:
        blocks = code_blocks(text)
        if blocks:
            self._copy(blocks[0])
        else:
            self._screen.notify("There is no code block here", timeout=2)

    def _last_reply(self) -> str | None:
        messages = reversed(self._screen.session.messages)
        return next((m.content for m in messages if m.role == "assistant"), None)
