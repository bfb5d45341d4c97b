"""Messages that were sent while a reply was being written, or before the model was there."""

from __future__ import annotations

from collections import deque

from textual.content import Content
from textual.widgets import Static

from specllama.text import sanitize_line
from specllama.tui.messages import StorageFailed
from specllama.tui.state import DraftFile
from specllama.tui.widgets.base import Inked

SHOWN = 60


class Waiting(Inked, Static):
    """One line above the prompt with the first of them; hidden when none waits. They are kept on
    disk: the next start finds those of an app that was killed in the prompt."""

    DEFAULT_CSS = """
    Waiting { height: 1; padding: 0 2; }
    """

    def __init__(self, draft: DraftFile, *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self.draft = draft
        self.texts: deque[str] = deque()
        self.display = False

    def put(self, text: str) -> None:
        self.texts.append(text)
        self._show()

    def take(self) -> str:
        """Remove and return the oldest."""
        text = self.texts.popleft()
        self._show()
        return text

    def take_all(self) -> list[str]:
        texts = list(self.texts)
        self.texts.clear()
        self._show()
        return texts

    def _show(self) -> None:
        if not self.draft.wait(self.texts):
            self.app.post_message(StorageFailed("waiting messages", str(self.draft.path)))
        self.display = bool(self.texts)
        if not self.texts:
            return
        first = sanitize_line(self.texts[0])
        first = first if len(first) <= SHOWN else first[: SHOWN - 1] + "…"
        more = f" and {len(self.texts) - 1} more" if len(self.texts) > 1 else ""
        muted = self.ink.muted
        self.update(
            Content.assemble(("waiting: ", muted), first, (f"{more}  (Esc takes it back)", muted))
        )
