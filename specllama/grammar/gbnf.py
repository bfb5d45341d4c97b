"""GBNF, llama.cpp's language of grammars, as a grammar of llguidance's (Lark).

Every character is a lexeme of its own. llguidance's lexemes are greedy, so a longer one would lose
texts in which a shorter match is the right one; of characters none begins another, and what is
ambiguous is left to the parser, which keeps every reading.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from specllama.errors import UsageError

MOST_CHARACTERS = 1 << 18
MOST_SYMBOLS = 20_000  # in all rules together
MOST_REPEATS = 2000
_HINT = "GBNF is described in llama.cpp's grammars/README.md"
_NOTHING = '""'
_FIRST, _LAST = 1, 0x10FFFF  # llama.cpp has no NUL in texts
_SURROGATES = range(0xD800, 0xE000)
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPED = {"t": "\t", "r": "\r", "n": "\n"}
_CHARACTER = re.compile(
    rf"\\(?P<hex>{'|'.join(f'{kind}[0-9a-fA-F]{{{n}}}' for kind, n in _HEX.items())})"
    r'|\\(?P<escaped>[trn\\"\[\]])|[^\\]',
    re.DOTALL,
)
_WORD, _DIGITS = re.compile(r"[A-Za-z0-9_-]+"), re.compile(r"\d+")
_BLANKS, _LINES = (re.compile(rf"(?:[{one}]|#[^\n]*)*+") for one in (r" \t", r" \t\r\n"))
_SIGNS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def lark_of(gbnf: str, root: str = "root") -> str:
    """Translate the grammar into Lark, with ``root`` as its rule.

    Raises:
        UsageError: it does not parse, or is larger than what is taken.
    """
    if not gbnf.strip():
        raise UsageError("the grammar is empty", _HINT)
    if "\0" in gbnf:
        raise UsageError("the grammar contains a NUL character", _HINT)
    if len(gbnf) > MOST_CHARACTERS:
        raise UsageError(f"the grammar has more than {MOST_CHARACTERS >> 10} Ki characters", _HINT)
    return _Parser(gbnf).lark(root)


@dataclass
class _Group:
    """Alternatives that are being read: of a rule, or in parentheses."""

    name: str
    done: list[list[str]] = field(default_factory=list)
    symbols: list[str] = field(default_factory=list)
    item: int = -1  # where the item begins that a sign would repeat

    def add(self, *symbols: str) -> None:
        """Add an item, which a sign may repeat."""
        self.item = len(self.symbols)
        self.symbols += symbols

    def next(self) -> None:
        self.done.append(self.symbols)
        self.symbols, self.item = [], -1


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._names: dict[str, str] = {}  # of rules, here and there
        self._where: dict[str, int] = {}  # a rule was first named here
        self._rules: dict[str, list[list[str]]] = {}
        self._sets: dict[str, str] = {}
        self._n_symbols = 0

    def lark(self, root: str) -> str:
        self._space(newlines=True)
        while self._at < len(self._text):
            self._rule()
            self._space(newlines=True)
        for name, its in self._names.items():
            if its not in self._rules:
                self._at = self._where[name]
                raise self._error(f"the rule {name[:80]} is not defined")
        if root not in self._names:
            raise UsageError(f"the grammar does not parse: it has no rule {root}", _HINT)
        lines = [f"start: {self._names[root]}"]
        for name, alternatives in self._rules.items():
            lines.append(f"{name}: {' | '.join(' '.join(a) or _NOTHING for a in alternatives)}")
        lines += [f"{name}: /[{characters}]/" for characters, name in self._sets.items()]
        return "\n".join(lines)

    # -- rules

    def _rule(self) -> None:
        name = self._named(self._name())
        self._space()
        if not self._text.startswith("::=", self._at):
            raise self._error("expecting ::=")
        self._at += 3
        self._space(newlines=True)
        self._rules[name] = self._alternatives(name)
        if self._at < len(self._text) and self._peek() not in "\r\n":
            raise self._error("expecting a newline or the end")

    def _alternatives(self, name: str) -> list[list[str]]:
        """Read a rule's body; groups get rules of their own, so nothing nests."""
        stack = [_Group(name)]
        while True:
            group, c = stack[-1], self._peek()
            nested = len(stack) > 1
            if c == "|":
                group.next()
                self._at += 1
                self._space(newlines=True)
                continue
            if c == "(":
                self._at += 1
                stack.append(_Group(self._new()))
            elif c == ")" and nested:
                self._at += 1
                stack.pop()
                group.next()
                self._rules[group.name] = group.done
                stack[-1].add(group.name)
                nested = len(stack) > 1
            elif c == '"':
                group.add(*self._literal())
            elif c == "[":
                group.add(self._set())
            elif c == ".":
                self._at += 1
                group.add(self._terminal([(_FIRST, _LAST)]))
            elif c in ("*", "+", "?", "{"):
                self._repeat(group)
            elif _WORD.match(c):
                group.add(self._named(self._name()))
            elif c in ("<", "!"):
                raise self._error("tokens are not taken in grammars: write their text")
            elif nested:
                raise self._error("expecting )" if c else "expecting ) at the end")
            else:
                group.next()
                return group.done
            self._count()
            self._space(newlines=nested or len(stack) > 1)

    def _repeat(self, group: _Group) -> None:
        sign = self._peek()
        least, most = _SIGNS[sign] if sign in _SIGNS else self._counts()
        self._at += 1
        parts = group.symbols[group.item :] if group.item >= 0 else []
        if not parts:
            raise self._error(f"expecting an item before {sign}")
        if max(least, most or 0) > MOST_REPEATS:
            raise self._error(f"more than {MOST_REPEATS} repetitions")
        one = parts[0]
        if len(parts) > 1:
            one = self._new()
            self._rules[one] = [parts]
        many = self._new()
        counts = f"{{{least},{'' if most is None else most}}}"
        self._rules[many] = [[] if most == 0 else [one + counts]]
        group.symbols[group.item :] = [many]

    def _counts(self) -> tuple[int, int | None]:
        """Read the counts between ``{`` and ``}``, and stop at the latter."""
        self._at += 1
        self._space(newlines=True)
        least = self._integer()
        most: int | None = least
        self._space(newlines=True)
        if self._peek() == ",":
            self._at += 1
            self._space(newlines=True)
            most = self._integer() if self._peek().isdecimal() else None
            self._space(newlines=True)
        if self._peek() != "}":
            raise self._error("expecting }")
        if most is not None and most < least:
            raise self._error("a repetition ends before it begins")
        return least, most

    # -- characters

    def _literal(self) -> list[str]:
        self._at += 1
        symbols = []
        while self._peek() != '"':
            c = self._character()
            symbols.append(self._terminal([(c, c)]))
            self._count()
        self._at += 1
        return symbols

    def _set(self) -> str:
        begin = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges = []
        while self._peek() != "]":
            low = high = self._character()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._character()
            ranges.append((low, high))
        self._at += 1
        found = self._terminal(ranges, negated=negated)
        if not found:
            self._at = begin
            raise self._error("no character is in the class")
        return found

    def _character(self) -> int:
        found = _CHARACTER.match(self._text, self._at)
        if found is not None:
            self._at = found.end()
            if digits := found["hex"]:
                return int(digits[1:], 16)
            return ord(_ESCAPED.get(found["escaped"], found["escaped"] or found[0]))
        if not self._peek():
            raise self._error("unexpected end")
        self._at += 1
        kind = self._peek()
        if kind not in _HEX:
            raise self._error(f"unknown escape \\{kind}")
        self._at += 1
        raise self._error(f"expecting {_HEX[kind]} hexadecimal digits")

    def _terminal(self, ranges: list[tuple[int, int]], *, negated: bool = False) -> str:
        """Return the terminal for one character of a set; "" if it is empty."""
        characters = "^\\x{0}" if negated else ""
        for low, high in ranges:
            low = max(_SURROGATES.stop if low in _SURROGATES else low, _FIRST)
            high = min(_SURROGATES.start - 1 if high in _SURROGATES else high, _LAST)
            if low <= high:
                characters += f"\\x{{{low:x}}}-\\x{{{high:x}}}"
        return characters and self._sets.setdefault(characters, f"C{len(self._sets)}")

    # -- scanning

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _read(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self._text, self._at)
        if found is None:
            return ""
        self._at = found.end()
        return found[0]

    def _space(self, *, newlines: bool = False) -> None:
        self._read(_LINES if newlines else _BLANKS)

    def _name(self) -> str:
        if name := self._read(_WORD):
            return name
        raise self._error("expecting a name")

    def _integer(self) -> int:
        digits = self._read(_DIGITS)
        if not 0 < len(digits) < 10:
            raise self._error("expecting a number")
        return int(digits)

    def _named(self, name: str) -> str:
        if name not in self._names:
            self._names[name], self._where[name] = f"n{len(self._names)}", self._at - len(name)
        return self._names[name]

    def _new(self) -> str:
        return f"g{self._count()}"

    def _count(self) -> int:
        self._n_symbols += 1
        if self._n_symbols > MOST_SYMBOLS:
            raise UsageError(f"the grammar has more than {MOST_SYMBOLS} symbols", _HINT)
        return self._n_symbols

    def _error(self, what: str) -> UsageError:
        line = self._text.count("\n", 0, self._at) + 1
        near = " ".join(self._text[self._at : self._at + 40].split())
        where = f"at {near!r} in line {line}" if near else "at the end"
        return UsageError(f"the grammar does not parse: {what} {where}", _HINT)
