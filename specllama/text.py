"""Text for people: UTF-8 across token boundaries, safe terminal output, numbers in words."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable


class Utf8Stream:
    """A decoder of UTF-8 in pieces; an incomplete sequence waits for its rest, a wrong one becomes
    U+FFFD.

    A text that ends inside a character ends before it: the sequence is dropped.
    """

    __slots__ = ("_decoder",)

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes) -> str:
        return self._decoder.decode(piece)


def decoded(raw: bytes) -> str:
    """Return a text that may end inside a character, without that end."""
    return Utf8Stream().feed(raw)


def spelled(piece: bytes) -> str:
    """Return a token for people: bytes that are not whole characters show as ``<F0 9F>``."""
    return piece.decode("utf-8", "specllama.bytes")


def _shown_bytes(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    end = error.end
    while end < len(error.object) and 0x80 <= error.object[end] < 0xC0:
        end += 1
    return f"<{error.object[error.start : end].hex(' ').upper()}>", end


codecs.register_error("specllama.bytes", _shown_bytes)
_BYTES = r"<[0-9A-F]{2}(?: [0-9A-F]{2})*>"
_RUN = re.compile(rf"{_BYTES}(?:\0?{_BYTES})+")


def whole(pieces: Iterable[str]) -> list[str]:
    """Join the bytes of characters that several tokens share (see ``spelled``): each character
    stands where its first byte does."""

    def read(run: re.Match[str]) -> str:
        raw = bytes.fromhex(re.sub("[<>\0]", " ", run[0]))
        return spelled(raw) + "\0" * run[0].count("\0")

    return _RUN.sub(read, "\0".join(piece.replace("\0", "␀") for piece in pieces)).split("\0")


class WordCount:
    """Words of a text that arrives in pieces, which may end within a word."""

    __slots__ = ("_inside", "words")

    def __init__(self) -> None:
        self.words = 0
        self._inside = False  # the last piece ended within a word

    def feed(self, piece: str) -> None:
        if piece:
            goes_on = self._inside and not piece[0].isspace()
            self.words += len(piece.split()) - goes_on
            self._inside = not piece[-1].isspace()


_BIDI_NAMES = dict(enumerate(["LRE", "RLE", "PDF", "LRO", "RLO"], 0x202A))
_BIDI_NAMES |= enumerate(["LRI", "RLI", "FSI", "PDI"], 0x2066)


def _visible() -> dict[int, str]:
    table = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    table[0x7F] = "\u2421"
    table.update({code: f"\u27e6{code:02X}\u27e7" for code in range(0x80, 0xA0)})
    table.update({code: f"\u27e6{name}\u27e7" for code, name in _BIDI_NAMES.items()})
    table.update({code: "\ufffd" for code in range(0xD800, 0xE000)})
    return table


_VISIBLE = _visible()
_VISIBLE_IN_LINE = {**_VISIBLE, 0x09: " ", 0x0A: " "}


def sanitize(text: str) -> str:
    """Make untrusted text safe for a terminal; everything that is shown passes here.

    Control characters except newline and tab become visible symbols (ESC is shown as the glyph of
    its name), C1 controls and bidirectional controls become ``⟦9B⟧`` and ``⟦RLO⟧``, lone surrogates
    U+FFFD. It works character by character, so streamed pieces may be passed one at a time; doing
    it twice changes nothing.
    """
    return text.translate(_VISIBLE)


def sanitize_line(text: str) -> str:
    """Sanitize one line (names, titles, paths): newlines and tabs become spaces, too."""
    return text.translate(_VISIBLE_IN_LINE)


def number_of(n: int, what: str, form: str = "") -> str:
    """Format a number of things: "1 token", "2 tokens"."""
    return f"{n:{form}} {what}{'s' if n != 1 else ''}"


def size(n_bytes: float) -> str:
    """Format bytes: 4.7 GB, 120 MB, 5.4 MB, 12 kB."""
    if n_bytes >= 0.95e9:
        return f"{n_bytes / 1e9:.1f} GB"
    if n_bytes >= 0.95e6:
        return f"{n_bytes / 1e6:.{0 if n_bytes >= 9.95e6 else 1}f} MB"
    return f"{max(n_bytes / 1e3, 0):.0f} kB"


def count(n: float) -> str:
    """Format a number of parameters: 8.2 B, 600 M, 5.5 M; "?" if unknown."""
    if n >= 0.95e9:
        return f"{n / 1e9:.1f} B"
    return f"{n / 1e6:.{0 if n >= 20e6 else 1}f} M" if n > 0 else "?"


def did_you_mean(word: str, names: Iterable[str], otherwise: str, cutoff: float = 0.5) -> str:
    """Return a hint with the names that a word comes close to; another one if there is none."""
    import difflib

    close = difflib.get_close_matches(word, list(names), n=3, cutoff=cutoff)
    return f"did you mean {' or '.join(close)}?" if close else otherwise


def figure(value: float | None, form: str = "", unit: str = "", *, unknown: str = "–") -> str:
    """Format a figure; ``unknown`` if there is none."""
    return unknown if value is None else f"{value:{form}}{unit}"


def percent(part: float | None) -> str:
    """Format a part in 0..1 as a percentage; "–" if unknown."""
    return figure(part, ".0%")


def rate(speed: float | None) -> str:
    """Format tokens a second; "–" if unknown."""
    return "–" if speed is None else f"{speed:.{1 if speed < 100 else 0}f}"


def encodable(text: str) -> str:
    """Replace lone surrogates (from arguments, file names, JSON), so that UTF-8 encoding works."""
    return text.encode("utf-8", "replace").decode("utf-8")
