"""The lines above the prompt: messages that wait for their turn, and the download that runs."""

from __future__ import annotations

from collections import deque

from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from specllama.text import sanitize_line
from specllama.tui.downloads import Downloads, figures
from specllama.tui.messages import StorageFailed
from specllama.tui.state import DraftFile
from specllama.tui.widgets.inked import Inked

SHOWN = 60
METER = 14


class Waiting(Inked, Static):
    """The first of the messages sent while a reply was being written, or before the model was
    there; hidden when none waits. They are kept on disk: the next start finds those of an app that
    was killed in the prompt."""

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


class DownloadLine(Inked, Widget):
    """The download that runs, or how it ended, until that is of no more use."""

    DEFAULT_CSS = """
    DownloadLine { height: 1; padding: 0 2; display: none; }
    DownloadLine.-shown { display: block; }
    """

    def __init__(self, downloads: Downloads, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.downloads = downloads

    def told(self) -> None:
        self.set_class(self.downloads.newest is not None, "-shown")
        self.refresh()

    def render(self) -> Content:
        download = self.downloads.newest
        if download is None:
            return Content("")
        ink, glyphs, width = self.ink, self.glyphs, self.content_size.width
        name = sanitize_line(download.ref)
        if download.state == "done":
            next_step = ": Ctrl+L loads it" if download.target else ""
            return Content.assemble(("✓ ", ink.good), (name, "bold"), (f" is here{next_step}", ""))
        if download.state == "stopped":
            return Content.assemble((f"○ {name} stopped; F6 continues it", ink.muted))
        if download.error is not None:
            line = f"{name}: {sanitize_line(download.error.message)}. F6 shows it"
            if len(line) + 2 > width:
                line = f"{name} failed. F6 says why"
            return Content.assemble((f"✗ {line}", ink.warn))
        words = [*figures(download), "F6 stops it"]
        if download.note or download.state == "stopping":
            words = [download.note or "stopping"]
        while len(words) > 1 and len(name) + METER + sum(len(w) + 3 for w in words) + 4 > width:
            words.pop(-2 if len(words) > 2 else -1)
        done, track = glyphs.meter(download.done / max(download.total, 1), METER)
        return Content.assemble(
            ("↓ ", ink.accent),
            (f"{name} ", "bold"),
            (done, ink.accent),
            (track, ink.muted),
            (f" {' · '.join(sanitize_line(w) for w in words)}", ink.muted),
        )
