"""The download that runs, as a line above the prompt."""

from __future__ import annotations

from textual.content import Content
from textual.widget import Widget

from specllama.text import sanitize_line
from specllama.tui.downloads import Downloads, figures
from specllama.tui.widgets.base import Inked

METER = 14


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
            return Content.assemble((f"{glyphs.ring} {name} stopped; F6 continues it", ink.muted))
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
            (f"{glyphs.down} ", ink.accent),
            (f"{name} ", "bold"),
            (done, ink.accent),
            (track, ink.muted),
            (f" {f' {glyphs.dot} '.join(sanitize_line(w) for w in words)}", ink.muted),
        )
