"""stdout: data and nothing else.

Text from models and files is sanitized when stdout is a terminal. In pipes and files it is left
alone, and is valid UTF-8 whatever the locale. ``prepare`` sees to that for every writer, click and
rich among them; where a terminal lacks a character, it gets a plain sign for it.

A reader that goes away (``| head``) raises BrokenPipeError, which ends the program quietly.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from specllama.text import encodable, sanitize

PLAIN = "specllama.plain"
"""Errors handler of an encoding: a plain sign for one that it lacks."""

_SIGNS = {"✓": "+", "✗": "x", "×": "x", "·": "-", "↓": "v", "→": "->", "…": "...", "–": "-",
          "“": '"', "”": '"', "■": "#", "□": "o", **dict.fromkeys("█▉▊▋", "#")}  # fmt: skip


def _plainly(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_SIGNS.get(sign, "?") for sign in lacking), error.end


codecs.register_error(PLAIN, _plainly)


def prepare() -> None:
    """Let everything be encodable that this process prints from now on."""
    utf8 = None if is_terminal() else "utf-8"
    for stream, encoding in ((sys.stdout, utf8), (sys.stderr, None)):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors=PLAIN)


def is_terminal(stream: TextIO | None = None) -> bool:
    """True if a stream, by default stdout, is a terminal."""
    try:
        return (stream or sys.stdout).isatty()
    except (AttributeError, ValueError):  # closed
        return False


def all_terminals() -> bool:
    """True if a person types here and sees all that is printed."""
    return all(map(is_terminal, (sys.stdin, sys.stdout, sys.stderr)))


def width(default: int = 80) -> int:
    """Return the columns to draw in; pipes and files get the default."""
    import shutil

    return shutil.get_terminal_size((default, 24)).columns if is_terminal() else default


def use_colour(stream: TextIO | None = None) -> bool:
    return (
        is_terminal(stream) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def write(text: str, *, end: str = "") -> None:
    """Write text and show it at once."""
    text += end
    write_bytes(_encoded(sanitize(text)) if is_terminal() else encodable(text).encode("utf-8"))


def line(text: str = "") -> None:
    write(text, end="\n")


def write_styled(text: str) -> None:
    """Write text with our own colour codes; the caller has sanitized untrusted parts."""
    write_bytes(_encoded(text))


def _encoded(text: str) -> bytes:
    return text.encode(sys.stdout.encoding or "utf-8", PLAIN)


def write_bytes(raw: bytes) -> None:
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:  # a test's StringIO
        sys.stdout.write(raw.decode("utf-8", "replace"))
    else:
        sys.stdout.flush()
        buffer.write(raw)
        buffer.flush()


def json_line(value: Any) -> None:
    """Print a value on one line: one of a JSON Lines stream, or the whole answer of a command, an
    object whose lists stand under a name."""
    from specllama.store.codec import encode

    write_bytes(encode(value) + b"\n")


def discard() -> None:
    """Let the interpreter flush into nothing after a broken pipe, instead of failing again."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_FENCE = "```"
_JOINER = "\u200d"


class WordWrap:
    """A wrapper of text in pieces to lines of at most ``width`` columns; lines of code keep their
    length.

    A word comes out once its end is known, so nothing that was shown is moved. Between signs of two
    columns (Chinese, Japanese, Korean, emoji) a line may end as well.
    """

    def __init__(self, width: int) -> None:
        self._width = max(width, 1)
        self._column = 0
        self._gap = self._word = self._begin = ""
        self._code = False

    def feed(self, text: str) -> str:
        """Add a piece; return what can be shown now."""
        out = []
        for sign in sanitize(text):
            if sign == "\n":
                out.append(f"{self._placed()}\n")
                self._code ^= self._begin.startswith(_FENCE)
                self._column, self._gap, self._begin = 0, "", ""
            elif sign.isspace():
                out.append(self._placed())
                self._gap += sign
            else:
                if self._breaks_before(sign):
                    out.append(self._placed())
                self._word += sign
                if len(self._begin) < len(_FENCE):
                    self._begin += sign
        return "".join(out)

    def finish(self) -> str:
        """Return the last word; the text is over."""
        return self._placed()

    def _breaks_before(self, sign: str) -> bool:
        if not self._word or not columns(sign) or self._word.endswith(_JOINER):
            return False
        return columns(sign) == 2 or columns(self._word[-1]) == 2

    def _placed(self) -> str:
        if not (word := self._word):
            return ""
        gap, self._gap, self._word = self._gap, "", ""
        wide = max(columns(word), 1)
        end = self._column + len(gap) + wide
        if end > self._width and self._column and not self._code:
            self._column = wide
            return f"\n{word}"
        self._column = end
        return gap + word


def columns(text: str) -> int:
    """Return the number of columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def wrapped(text: str, width: int) -> str:
    """Break a whole text between words."""
    wrap = WordWrap(width)
    return wrap.feed(text) + wrap.finish()


@cache
def examples() -> dict[str, str]:
    """Return the texts below the help of commands, by their names."""
    return tomllib.loads(Path(__file__).with_name("examples.toml").read_text("utf-8"))
