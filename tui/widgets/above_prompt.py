"""The lines above the prompt: what waits, the download that runs, completions, attached files.

Slash commands are completed, the words that follow them, and paths after ``@``.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from textual import events
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from specllama.replies import attach
from specllama.text import sanitize_line
from specllama.tui.downloads import Downloads, figures
from specllama.tui.keymap import SLASH, Action
from specllama.tui.messages import StorageFailed
from specllama.tui.state import DraftFile
from specllama.tui.widgets.inked import Inked

METER = 14


class Waiting(Inked, Widget):
    """The first of the messages sent while a reply was being written, or before the model was
    there; hidden when none waits. They are kept on disk: the next start finds those of an app that
    was killed in the prompt."""

    def __init__(self, draft: DraftFile, *, id: str | None = None) -> None:
        super().__init__(id=id)
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
        self.refresh()

    def render(self) -> Content:
        if not self.texts:
            return Content("")
        muted = self.ink.muted
        more = f" and {len(self.texts) - 1} more" if len(self.texts) > 1 else ""
        begin = Content.styled("waiting: ", muted)
        end = Content.styled(f"{more}  (Esc takes it back)", muted)
        room = self.content_size.width - begin.cell_length - end.cell_length
        first = Content(sanitize_line(self.texts[0]))
        return Content.assemble(begin, first.truncate(max(room, 1), ellipsis=True), end)


class DownloadLine(Inked, Widget):
    """The download that runs, or how it ended, until that is of no more use."""

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


_BEGUN = re.compile(r"""(?<!\S)@("[^"\n]*|'[^'\n]*|[^\s@"']*)$""")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate: the text it inserts, and whether the text is complete then."""

    insert: str
    label: str
    help: str = ""
    short: str = ""  # instead of the help where that has no room
    final: bool = False


@dataclass(frozen=True, slots=True)
class Completion:
    """Candidates to replace the text from ``start`` to the cursor; there is at least one."""

    start: int
    candidates: tuple[Candidate, ...]


def complete(text: str, cursor: int) -> Completion | None:
    if text.startswith("/") and "\n" not in text and cursor == len(text):
        name, space, rest = text[1:].partition(" ")
        action = SLASH.get(name.lower())
        found = list(_commands(name)) if not space else list(_words(action, rest)) if action else []
        return Completion(0, tuple(found)) if found else None
    begun = _BEGUN.search(text[:cursor])
    if begun is None:
        return None
    found = list(_paths(begun[1].lstrip("\"'")))
    return Completion(begun.start(), tuple(found)) if found else None


def _commands(begun: str) -> Iterator[Candidate]:
    begun = begun.lower()
    at = {name: name.find(begun) for name in SLASH}
    # what begins so stands before what only contains it, and the very word before both
    for name in sorted(SLASH, key=lambda name: (name != begun, at[name] > 0)):
        if at[name] == 0 or (at[name] > 0 and len(begun) > 1):
            action = SLASH[name]
            insert = f"/{name} " if action.words else f"/{name}"
            yield Candidate(insert, f"/{name}", action.help, action.label, final=not action.words)


def _words(action: Action, begun: str) -> Iterator[Candidate]:
    for word in action.words:
        if word.startswith(begun.lower()):
            yield Candidate(f"/{action.slash} {word}", word, final=True)


def _paths(begun: str) -> Iterator[Candidate]:
    """Yield paths that continue this one, with the sizes of files."""
    for path in attach.paths(begun):
        insert, detail = f"{attach.named(path)} ", ""
        if path.endswith("/"):
            insert = _begun(path)
        else:
            try:
                detail = attach.size_of(Path(path).expanduser().stat().st_size)
            except (OSError, ValueError, RuntimeError):
                detail = "cannot be read"
        yield Candidate(insert, path, detail, detail)


def _begun(folder: str) -> str:
    """Return a folder as the beginning of a mention: a quote stays open."""
    quoted = attach.named(folder)
    return quoted if quoted == f"@{folder}" else quoted[:-1]


ROWS, ROWS_SHORT = 8, 4
LABEL_COLUMNS = 34


class Completions(Inked, Widget, can_focus=False):
    """A list between the strip and the prompt that takes its rows from the conversation, so that
    it covers nothing. The prompt has the keys."""

    def __init__(self, clicked: Callable[[], object]) -> None:
        super().__init__()
        self._clicked = clicked
        self.completion: Completion | None = None
        self._at = 0

    @property
    def chosen(self) -> Candidate | None:
        return self.completion.candidates[self._at] if self.completion else None

    def show(self, completion: Completion | None) -> None:
        if completion != self.completion:
            self.completion, self._at = completion, 0
            self.display = completion is not None
            self.refresh(layout=True)

    def move(self, step: int) -> None:
        assert self.completion is not None
        self._at = (self._at + step) % len(self.completion.candidates)
        self.refresh()

    @property
    def _window(self) -> range:
        """The candidates in sight, with the chosen one among them."""
        count = len(self.completion.candidates) if self.completion else 0
        rows = min(count, ROWS if self.app.size.height >= 24 else ROWS_SHORT)
        start = min(max(0, self._at - rows // 2), count - rows)
        return range(start, start + rows)

    def render(self) -> Content:
        if self.completion is None:
            return Content("")
        ink, found, width = self.ink, self.completion.candidates, self.content_size.width
        labels = max(len(sanitize_line(found[i].label)) for i in self._window)
        labels = min(labels, LABEL_COLUMNS, width - 4)
        room = width - labels - 4
        lines: list[Content] = []
        for i in self._window:
            whole = Content(sanitize_line(found[i].label))
            label = whole.truncate(labels, ellipsis=True, pad=True).plain
            mark = "▶ " if i == self._at else "  "
            help_ = _clauses(found[i].help, room) or found[i].short
            style = "bold $primary" if i == self._at else ""
            lines.append(Content.assemble((f"{mark}{label}", style), (f"  {help_}", ink.muted)))
        hint = " · ".join((f"  {self._at + 1}/{len(found)}", "Tab or Enter takes it", "Esc closes"))
        lines.append(Content.assemble((hint, ink.muted)))
        return Content("\n").join(lines)

    def on_click(self, event: events.Click) -> None:
        row = event.get_content_offset(self)
        if row is not None and row.y < len(self._window):
            self._at = self._window[row.y]
            self._clicked()


class Attached(Inked, Static):
    """One chip for each file that goes with the message: its name, size and tokens; or why it
    cannot."""

    def show(self, chips: Sequence[tuple[str, str, bool]]) -> None:
        """Show the name of each file, its size and tokens, and whether it can be sent."""
        self.display = bool(chips)
        ink, glyphs = self.ink, self.glyphs
        lines = []
        for name, words, goes in chips:
            mark = (f"{glyphs.accepted} ", ink.accent) if goes else ("! ", ink.warn)
            style = ink.muted if goes else ink.warn
            text = f"{sanitize_line(name)}  " if goes else ""
            lines.append(Content.assemble(mark, (text, "bold"), (sanitize_line(words), style)))
        self.update(Content("\n").join(lines))


def _clauses(text: str, columns: int) -> str:
    """Cut a sentence at the last end of a clause that there is room for."""
    if len(text) <= columns:
        return text
    ends = [m.end() - (m[0] != "?") for m in re.finditer(r"[,;:?](?=\s)", text)]
    return text[: max((end for end in ends if end <= columns), default=0)]
