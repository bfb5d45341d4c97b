"""Regular expressions of JSON schemas (ECMA 262) as expressions of ``automaton``.

All that is regular is accepted; look-around, back references and word boundaries are refused.
"""

from __future__ import annotations

from specllama.errors import UsageError
from specllama.grammar.automaton import (
    ANY,
    EMPTY,
    Alt,
    Chars,
    Edge,
    Expr,
    Intervals,
    Repeat,
    Seq,
    union,
    without,
)

MAX_COUNT = 2_000
_DIGIT: Intervals = ((48, 57),)
_WORD = union(_DIGIT, ((65, 90), (95, 95), (97, 122)))
_SPACE = union(
    ((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    ((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_ENDS: Intervals = ((10, 10), (13, 13), (0x2028, 0x2029))
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}


def parse_pattern(pattern: str) -> Expr:
    """Raises UsageError, with the reason, for anything that is not a regular expression."""
    return _Parser(pattern).whole()


class _Parser:
    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0

    def whole(self) -> Expr:
        expr = self._alternatives()
        if self._at < len(self._text):
            raise self._cannot("an unmatched )")
        return expr

    def _cannot(self, what: str) -> UsageError:
        return UsageError(f"the pattern {self._text!r} holds {what}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        c = self._peek()
        if not c:
            raise self._cannot("an unfinished part")
        self._at += 1
        return c

    def _eat(self, word: str) -> bool:
        found = self._text.startswith(word, self._at)
        self._at += len(word) * found
        return found

    def _alternatives(self) -> Expr:
        self._depth += 1
        if self._depth > 50:
            raise self._cannot("more than 50 groups in groups")
        parts = [self._sequence()]
        while self._eat("|"):
            parts.append(self._sequence())
        self._depth -= 1
        return Alt(tuple(parts)) if len(parts) > 1 else parts[0]

    def _sequence(self) -> Expr:
        parts: list[Expr] = []
        while self._peek() not in ("", "|", ")"):
            atom = self._atom()
            parts.append(self._quantified(atom))
        return Seq(tuple(parts)) if parts else EMPTY

    def _atom(self) -> Expr:
        c = self._next()
        if c == "^":
            return Edge(begin=True)
        if c == "$":
            return Edge(begin=False)
        if c == ".":
            return Chars(without(ANY, _LINE_ENDS))
        if c == "[":
            return Chars(self._class())
        if c == "\\":
            return Chars(self._escape())
        if c == "(":
            if self._eat("?") and not self._eat(":"):
                named = self._text.find(">", self._at)
                if not self._eat("<") or self._peek() in ("=", "!") or named < 0:
                    raise self._cannot("a look-around")
                self._at = named + 1
            inner = self._alternatives()
            if not self._eat(")"):
                raise self._cannot("an unmatched (")
            return inner
        if c in "*+?":
            raise self._cannot(f"a {c} with nothing before it")
        return Chars(((ord(c), ord(c)),))

    def _quantified(self, atom: Expr) -> Expr:
        least, most = 1, 1  # type: int, int | None
        if self._eat("*"):
            least, most = 0, None
        elif self._eat("+"):
            most = None
        elif self._eat("?"):
            least = 0
        elif self._peek() == "{" and (counts := self._counts()) is not None:
            least, most = counts
        else:
            return atom
        self._eat("?")  # lazy: the same language
        if isinstance(atom, Edge):
            raise self._cannot("a repeated ^ or $")
        return Repeat(atom, least, most)

    def _counts(self) -> tuple[int, int | None] | None:
        """``{m}``, ``{m,}``, ``{m,n}``; None if the brace is an ordinary character."""
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : max(end, 0)].partition(",")
        if not low.isdecimal() or not (high == "" or high.isdecimal()):
            if end < 0 or not low:
                raise self._cannot("a lone {")
            raise self._cannot("braces that are not a count")
        self._at = end + 1
        if max(len(low), len(high)) > 9 or max(int(low), int(high or 0)) > MAX_COUNT:
            raise self._cannot(f"a count above {MAX_COUNT}")
        if not comma:
            return int(low), int(low)
        if high and int(high) < int(low):
            raise self._cannot("a count whose end is before its beginning")
        return int(low), int(high) if high else None

    def _escape(self, *, in_class: bool = False) -> Intervals:
        c = self._next()
        if c.lower() in _CLASSES:
            of = _CLASSES[c.lower()]
            return of if c.islower() else without(ANY, of)
        if c == "b" and in_class:
            return ((8, 8),)
        if c in _CONTROLS and not (c == "0" and self._peek().isdecimal()):
            code = _CONTROLS[c]
        elif c == "c":
            code = ord(self._next()) % 32
        elif c == "x":
            code = self._hex(2)
        elif c == "u":
            if self._eat("{"):
                code = self._hex(self._text.find("}", self._at) - self._at)
                self._at += 1
            else:
                code = self._hex(4)
                if 0xD800 <= code < 0xDC00 and self._eat("\\u"):
                    code = 0x10000 + ((code - 0xD800) << 10) + (self._hex(4) - 0xDC00)
        elif c.isalnum():
            raise self._cannot(f"\\{c}, which a grammar cannot express")
        else:
            code = ord(c)
        if not 0 <= code <= 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._cannot("a code that is not a character")
        return ((code, code),)

    def _hex(self, digits: int) -> int:
        piece = self._text[self._at : self._at + max(digits, 0)]
        self._at += len(piece)
        try:
            return int(piece, 16)
        except ValueError:
            raise self._cannot("a bad escape") from None

    def _class(self) -> Intervals:
        negated = self._eat("^")
        of: Intervals = ()
        while not self._eat("]"):
            low = self._member()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                high = self._member()
                if len(low) > 1 or len(high) > 1 or low[0][0] != low[0][1] or low > high:
                    raise self._cannot("an invalid range")
                of = union(of, ((low[0][0], high[0][1]),))
            else:
                of = union(of, low)
        return without(ANY, of) if negated else without(of, ((0xD800, 0xDFFF),))

    def _member(self) -> Intervals:
        c = self._next()
        return self._escape(in_class=True) if c == "\\" else ((ord(c), ord(c)),)
