"""Input lines of a plain chat: from a terminal with history and editing, or from a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specllama.errors import UsageError
from specllama.files import MOST_BYTES
from specllama.paths import data_dir, private_file, private_folder
from specllama.replies import attach

PROMPT, MORE = ">>> ", "... "
FENCE = '"""'
HISTORY_LINES = 1000
READ = "/read "  # a path follows


def open_lines(words: Sequence[str], *, keep: bool = True) -> Lines:
    """Open standard input; on a terminal, Tab completes ``words``.

    Args:
        keep: keep what is typed for the next chat.
    """
    return TerminalLines(words, keep=keep) if sys.stdin.isatty() else PipedLines()


def history_file() -> Path:
    """Return the file of messages typed into plain chats."""
    return data_dir() / "chat_history"


def read_message(read: Callable[[str], str | None]) -> str | None:
    r"""Put a message together: ``\`` at a line's end or a pair of ``\"\"\"`` joins lines.

    Args:
        read: gives the next line without its newline, or None at the end; its argument is the
            prompt to show.
    """
    line = read(PROMPT)
    if line is None:
        return None
    if line.lstrip().startswith(FENCE):
        return _fenced(line.lstrip()[len(FENCE) :], read)
    parts = [line]
    while parts[-1].endswith("\\"):
        parts[-1] = parts[-1][:-1]
        more = read(MORE)
        if more is None:
            break
        parts.append(more)
    return "\n".join(parts)


def _fenced(first: str, read: Callable[[str], str | None]) -> str:
    """Read lines up to the closing fence; an input that ends closes it."""
    parts: list[str] = []
    line: str | None = first
    while line is not None:
        if line.rstrip().endswith(FENCE):
            parts.append(line.rstrip()[: -len(FENCE)])
            break
        parts.append(line)
        line = read(MORE)
    return "\n".join(parts).strip("\n")


class PipedLines:
    """Piped lines, each a message. Any bytes: parts that are not UTF-8 become U+FFFD."""

    interactive = False

    def message(self) -> str | None:
        """Return the next message, several lines joined; None at the end of the input."""
        return read_message(self._read)

    def _read(self, prompt: str) -> str | None:
        raw = sys.stdin.buffer.readline(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise UsageError(f"a line of the input is longer than {MOST_BYTES // 2**20} MiB")
        return raw.decode("utf-8-sig", "replace").rstrip("\r\n") if raw else None


class TerminalLines:
    """Line editing and a history that outlives the process, where readline is there."""

    interactive = True

    def __init__(self, words: Sequence[str], *, keep: bool = True) -> None:
        self._words = list(words)
        self._readline = _readline()
        self._keep = keep
        self._history: Path = history_file()
        if self._readline is not None:
            self._prepare(self._readline)

    def message(self) -> str | None:
        text = read_message(self._read)
        if text is not None and self._readline is not None and self._keep:
            # A full disk must not end the chat.
            with contextlib.suppress(OSError):
                private_folder(self._history.parent)
                private_file(self._history)
                self._readline.write_history_file(str(self._history))
        return text

    def _read(self, prompt: str) -> str | None:
        try:
            if sys.stdout.isatty():
                return input(prompt)
            # input() would put the prompt among the data.
            print(prompt, end="", file=sys.stderr, flush=True)
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        except EOFError:
            print(file=sys.stderr)
            return None

    def _prepare(self, readline: Any) -> None:
        with contextlib.suppress(OSError):
            readline.read_history_file(str(self._history))
        readline.set_history_length(HISTORY_LINES)
        readline.set_completer(self._complete)
        readline.set_completer_delims(" ")
        readline.parse_and_bind("tab: complete")

    def _complete(self, text: str, state: int) -> str | None:
        line = self._readline.get_line_buffer()[: self._readline.get_endidx()]
        if line.startswith(READ):
            begun = line[len(READ) :]
            found = [path[len(begun) - len(text) :] for path in attach.paths(begun)]
        else:
            found = [word for word in self._words if text and word.startswith(text)]
        return found[state] if state < len(found) else None


def _readline() -> Any:
    try:
        import readline
    except ImportError:  # a Python that was built without it
        return None
    return readline


Lines = TerminalLines | PipedLines
"""A source of messages; ``interactive`` if a person types them."""
