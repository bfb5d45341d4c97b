"""A small matcher for GBNF, after its description: which texts a grammar lets through.

One rule a line, without comments; a rule may refer to itself only behind a character.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_TOKEN = re.compile(
    r"""\s*(?: "(?P<literal>(?:\\.|[^"\\])*)" | \[(?P<set>(?:\\.|[^\]\\])*)\]
    | (?P<name>[\w-]+) | \{(?P<low>\d+)(?P<comma>,)?(?P<high>\d*)\} | (?P<sign>[()|?*+.]) )""",
    re.VERBOSE,
)
_CHAR = re.compile(r"\\x(..)|\\u(....)|\\U(.{8})|\\(.)|(.)", re.DOTALL)
_NAMED = {"n": "\n", "r": "\r", "t": "\t"}


def _chars(text: str) -> list[tuple[int, bool]]:
    """Code points, each with whether it was escaped."""
    out = []
    for two, four, eight, escaped, plain in _CHAR.findall(text):
        code = two or four or eight
        if code:
            out.append((int(code, 16), True))
        elif escaped:
            out.append((ord(_NAMED.get(escaped, escaped)), True))
        else:
            out.append((ord(plain), False))
    return out


def _set(text: str) -> tuple[bool, list[tuple[int, int]]]:
    negated = text.startswith("^")
    chars = _chars(text[negated:])
    ranges, i = [], 0
    while i < len(chars):
        if i + 2 < len(chars) and chars[i + 1] == (ord("-"), False):
            ranges.append((chars[i][0], chars[i + 2][0]))
            i += 3
        else:
            ranges.append((chars[i][0], chars[i][0]))
            i += 1
    return negated, ranges


class Gbnf:
    """``accepts`` says whether the rule ``root`` matches a whole text."""

    def __init__(self, grammar: str) -> None:
        self.rules: dict[str, Any] = {}
        for line in grammar.splitlines():
            name, _, body = line.partition(" ::= ")
            tokens = [m for m in _TOKEN.finditer(body)]
            assert sum(len(m.group()) for m in tokens) == len(body.rstrip()), line
            self.rules[name], rest = self._alternatives(tokens, 0)
            assert rest == len(tokens), line

    def _alternatives(self, tokens: list[Any], at: int) -> tuple[Any, int]:
        options: list[Any] = []
        parts: list[Any] = []
        while at < len(tokens):
            token = tokens[at]
            sign = token["sign"]
            at += 1
            if sign == ")":
                at -= 1
                break
            if sign == "|":
                options.append(("seq", tuple(parts)))
                parts = []
            elif sign == ".":
                parts.append(("set", True, []))
            elif sign == "(":
                inner, at = self._alternatives(tokens, at)
                parts.append(inner)
                at += 1
            elif sign or token["low"]:
                low, high = {"?": (0, 1), "*": (0, None), "+": (1, None), None: (0, 0)}[sign]
                if token["low"]:
                    low = int(token["low"])
                    high = int(token["high"]) if token["high"] else None if token["comma"] else low
                parts.append(("repeat", parts.pop(), low, high))
            elif token["literal"] is not None:
                parts.append(("literal", "".join(chr(c) for c, _ in _chars(token["literal"]))))
            elif token["set"] is not None:
                parts.append(("set", *_set(token["set"])))
            else:
                parts.append(("name", token["name"]))
        options.append(("seq", tuple(parts)))
        return ("alt", tuple(options)), at

    def accepts(self, text: str) -> bool:
        """Whether the whole text matches; by the sets of ends that each part can have."""
        rules = self.rules

        @cache
        def named(name: str, at: int) -> frozenset[int]:
            return ends(rules[name], at)

        def ends(part: Any, at: int) -> frozenset[int]:
            kind = part[0]
            if kind == "literal":
                return frozenset([at + len(part[1])] if text.startswith(part[1], at) else [])
            if kind == "set":
                if at >= len(text):
                    return frozenset()
                inside = any(low <= ord(text[at]) <= high for low, high in part[2])
                return frozenset([at + 1] if inside is not part[1] else [])
            if kind == "name":
                return named(part[1], at)
            if kind == "alt":
                return frozenset().union(*(ends(option, at) for option in part[1]))
            if kind == "seq":
                reached = {at}
                for inner in part[1]:
                    reached = {end for start in reached for end in ends(inner, start)}
                return frozenset(reached)
            _, inner, low, high = part
            reached, found, times = {at}, set(), 0
            if low == 0:
                found.add(at)
            while reached and (high is None or times < high):
                reached = {end for start in reached for end in ends(inner, start)}
                times += 1
                if times >= low:
                    if high is None and reached <= found:
                        break
                    found |= reached
            return frozenset(found)

        return len(text) in named("root", 0)
