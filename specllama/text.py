"""Text that arrives in pieces: UTF-8 across token boundaries, stop strings, safe terminal output.

    stream = TextStream(stops=["\\nUser:"])
    for piece in token_pieces:          # bytes of one token each
        show(stream.feed(piece))
        if stream.stopped:              # this token completed a stop string
            break
    show(stream.finish())

What is shown does not depend on how the bytes are cut into pieces, so plain and speculative
decoding agree even if a stop string begins in one round and ends in the next.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence


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


class _Stop:
    """A search for one stop string in a text in pieces, which reads each character once.

    Attributes:
        begun: length of the longest end of the text so far that begins the stop string.
    """

    __slots__ = ("_shorter", "begun", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        # for every length, that of the longest shorter beginning which is also an end of it
        self._shorter = [0, 0]
        for char in text[1:]:
            n = self._shorter[-1]
            while n and text[n] != char:
                n = self._shorter[n]
            self._shorter.append(n + (text[n] == char))

    def feed(self, piece: str) -> int | None:
        """Return how many characters of the piece completed the stop string; None if it is not
        complete."""
        text, n = self.text, self.begun
        if not n and text[0] not in piece:
            return None
        for i, char in enumerate(piece, 1):
            while n and text[n] != char:
                n = self._shorter[n]
            n += text[n] == char
            if n == len(text):
                return i
        self.begun = n
        return None


class _Outdent:
    """Finder of a line that is indented by fewer than ``least`` blanks or tabs; see ``_Stop``.

    The first line goes on from another text. An empty line is indented by none.
    """

    begun = 0
    text = ""  # the first character behind the indentation is cut, whatever it is

    def __init__(self, least: int) -> None:
        self._least = least
        self._indent: int | None = None  # of a line of which no more came yet

    def feed(self, piece: str) -> int | None:
        for i, char in enumerate(piece, 1):
            if self._indent is not None and char in " \t":
                self._indent += 1
                continue
            if self._indent is not None and self._indent < self._least:
                return i
            self._indent = 0 if char == "\n" else None
        return None


class TextStream:
    """Detokenised text with stop strings, fed one token at a time.

    A stop string is never shown, nor anything after it. Text that may turn out to begin a stop
    string is held back until the next pieces decide. The stop string that is complete first
    counts; of several complete at the same character, the longest.

    Args:
        lines: stop strings too. One that lacks only a line break at the end of the text counts.
        indent: the text ends in a line that is indented less, before its first character.
    """

    __slots__ = ("_held", "_lines", "_shown", "_stop", "_stops", "_utf8")

    def __init__(
        self, stops: Sequence[str] = (), lines: Sequence[str] = (), indent: int = 0
    ) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._lines = [_Stop(line) for line in lines]
        self._stops: list[_Stop | _Outdent] = [_Outdent(indent)] if indent > 0 else []
        self._stops += [*map(_Stop, dict.fromkeys(stops)), *self._lines]
        self._utf8 = Utf8Stream()
        self._held = ""
        self._shown: list[str] = []
        self._stop: str | None = None

    @property
    def stopped(self) -> bool:
        """True if a stop string is complete; the token fed last completed it."""
        return self._stop is not None

    @property
    def stop(self) -> str | None:
        """The stop string that was met; "" where the indentation ended the text."""
        return self._stop

    @property
    def text(self) -> str:
        """The text that was shown so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    @property
    def held(self) -> str:
        """Complete characters that are held back because a stop string may begin there."""
        return self._held

    def feed(self, piece: bytes) -> str:
        """Take the bytes of one token; return the text that may be shown now ('' if held back).

        After a stop nothing more comes out.
        """
        if self.stopped:
            return ""
        new = self._utf8.feed(piece)
        before = len(self._held)
        self._held += new
        if not self._stops:
            return self._show(len(self._held))
        met = [
            (before + at, before + at - (len(stop.text) or 1), stop.text)
            for stop in self._stops
            if (at := stop.feed(new)) is not None
        ]
        if not met:
            return self._show(len(self._held) - max(stop.begun for stop in self._stops))
        _, start, self._stop = min(met)
        out = self._show(start)
        self._held = ""
        return out

    def finish(self) -> str:
        """End the text: return what was held back, without a character left incomplete."""
        if self.stopped:
            return ""
        begun = (one.begun for one in self._lines if one.text[one.begun :] == "\n")
        return self._show(len(self._held) - max(begun, default=0))

    def _show(self, n: int) -> str:
        out, self._held = self._held[:n], self._held[n:]
        if out:
            self._shown.append(out)
        return out


_BIDI_NAMES = {
    0x202A: "LRE",
    0x202B: "RLE",
    0x202C: "PDF",
    0x202D: "LRO",
    0x202E: "RLO",
    0x2066: "LRI",
    0x2067: "RLI",
    0x2068: "FSI",
    0x2069: "PDI",
}


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


def percent(part: float | None) -> str:
    """Format a part in 0..1 as a percentage; "–" if unknown."""
    return "–" if part is None else f"{part:.0%}"


def rate(speed: float | None) -> str:
    """Format tokens a second; "–" if unknown."""
    return "–" if speed is None else f"{speed:.{1 if speed < 100 else 0}f}"


def encodable(text: str) -> str:
    """Replace lone surrogates (from arguments, file names, JSON), so that UTF-8 encoding works."""
    return text.encode("utf-8", "replace").decode("utf-8")
