"""Text broken between words for a terminal, also while it arrives in pieces."""

from __future__ import annotations

from specllama.text import sanitize

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
