"""The app's memory between runs: its own preferences, prompt history, unsent text.

Everything is written atomically (a temporary file, then rename), so a crash leaves the old file or
the new one. A full disk costs what would be remembered, never the app: writers return False, and
the screen shows that once.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from specllama import paths
from specllama.files import DAMAGE, read_json
from specllama.store.codec import encode, keep_valid

DEFAULT_THEME = "specllama"
HISTORY_LIMIT = 500
HISTORY_ENTRY_LIMIT = 20_000
VIEWS = {
    "text": "Replies as text",
    "drafted": "Replies as drafted",
    "ghosts": "Replies as drafted, with refused guesses",
}


def write_atomically(path: Path, data: bytes) -> bool:
    try:
        paths.replace_file(path, data)
    except OSError:
        return False
    return True


@dataclass(slots=True)
class Preferences:
    """The app's own settings. Unknown keys of a newer version are ignored, bad values too.

    Attributes:
        damaged: the file holds something else; ``save`` keeps it under another name.
    """

    theme: str = DEFAULT_THEME
    view: str = "text"
    animation: str = "auto"
    show_panel: bool = True
    first_look: bool = True  # the demonstration is still to be shown
    last_target: str = ""
    last_draft: str = ""
    system_prompt: str = ""
    keys: dict[str, str] = field(default_factory=dict)
    favourites: list[str] = field(default_factory=list)  # references of models
    damaged: bool = False

    @property
    def notice(self) -> str:
        """A notice about the file; "" if there is none."""
        if not self.damaged:
            return ""
        return (
            f"the app's settings in {self.path()} are damaged: the usual ones are used, and the "
            f"file is kept as {self._aside().name} when they are saved"
        )

    @classmethod
    def _aside(cls) -> Path:
        return cls.path().with_suffix(".json.damaged")

    @staticmethod
    def path() -> Path:
        return paths.config_dir() / "tui.json"

    @classmethod
    def load(cls) -> Preferences:
        try:
            found = read_json(cls.path(), dict[str, Any]) or {}
        except OSError:
            return cls()
        except DAMAGE:
            return cls(damaged=True)
        out: Preferences = keep_valid(cls(), {**found, "damaged": False})
        if out.view not in VIEWS:
            out.view = "text"
        return out

    def save(self) -> bool:
        if self.damaged:
            with suppress(OSError):
                self.path().replace(self._aside())
            self.damaged = False
        kept = asdict(self)
        del kept["damaged"]
        return write_atomically(self.path(), msgspec.json.format(encode(kept), indent=2))


class PromptHistory:
    """Prompts that were sent, newest last; one JSON string a line."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or paths.data_dir() / "tui" / "history.jsonl"
        self.entries: list[str] = []
        with suppress(OSError):
            for line in self.path.read_bytes().split(b"\n"):
                with suppress(*DAMAGE):  # a line torn by a crash
                    self.entries.append(msgspec.json.decode(line, type=str))
        del self.entries[:-HISTORY_LIMIT]

    def add(self, entry: str) -> bool:
        if not entry.strip() or len(entry) > HISTORY_ENTRY_LIMIT or self.entries[-1:] == [entry]:
            return True
        self.entries.append(entry)
        del self.entries[:-HISTORY_LIMIT]
        return write_atomically(self.path, b"".join(encode(e) + b"\n" for e in self.entries))


@dataclass(slots=True)
class Unsent:
    """Text that no engine has got yet: the prompt's with its large pastes, and the messages that
    wait for their turn."""

    text: str = ""
    pastes: dict[str, str] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)


class DraftFile:
    """The file that keeps unsent text until it is sent."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or paths.data_dir() / "tui" / "unsent.json"
        self._now = Unsent()

    def load(self) -> Unsent:
        """Read what the app left before. The messages that waited are now the caller's."""
        with suppress(OSError, *DAMAGE):
            found: Unsent = read_json(self.path, Unsent) or Unsent()
            return found
        return Unsent()

    def save(self, text: str, pastes: dict[str, str]) -> bool:
        self._now.text, self._now.pastes = text, pastes
        return self._write()

    def wait(self, texts: Iterable[str]) -> bool:
        """Store the messages that wait now."""
        self._now.waiting = list(texts)
        return self._write()

    def _write(self) -> bool:
        if self._now == Unsent():
            try:
                self.path.unlink(missing_ok=True)
            except OSError:
                return False
            return True
        return write_atomically(self.path, encode(self._now))
