"""Calls of tools in texts: how each family writes them, how they are written and read here.

``tool_calls.toml`` has a table for each syntax. Calls and results of earlier turns stand in a
conversation as text, in the way of Hermes and Qwen or, where its table says so, in the model's own.

Replies are read by one lenient reader, whatever family wrote them. What stands around a call
(fences, marks of any family, a second pair of braces, a list, the wrappers of APIs) is taken off.
What is left must be pieces that each name an offered tool, with arguments that fit its schema.
Slips that leave one meaning are read; nothing is guessed.
"""

from __future__ import annotations

import json
import re
import secrets
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import product
from typing import Any, NoReturn

import msgspec

from specllama.grammar.fitting import fits
from specllama.interface import Message, ToolSyntax

OPENING, CLOSING, RESPONSE = "<tool_call>", "</tool_call>", "<tool_response>"


@dataclass(frozen=True, slots=True)
class Syntax:
    """One family's way of writing calls; ``tool_calls.toml`` explains the fields."""

    looks: str
    call: str
    spell: tuple[str, ...] = ()
    leads: tuple[str, ...] = ()
    joins: tuple[str, ...] = ()
    whole: str = "calls"
    between: str = "w"
    key: str = "arguments"


_TABLES = tomllib.loads(files("specllama.replies").joinpath("tool_calls.toml").read_text("utf-8"))
_READ: dict[str, str] = _TABLES.pop("read")
SYNTAXES = msgspec.convert(_TABLES, dict[str, Syntax])


def syntax_of(shown: str) -> ToolSyntax:
    """Return the syntax that a template shows; "" if it is none of ours."""
    return next((name for name, one in SYNTAXES.items() if re.search(one.looks, shown)), "")


# ---- as earlier turns are written

_EARLIER = re.compile(  # a call of an earlier turn; none is looked for behind another opening
    rf"{OPENING}\n((?:(?!{OPENING}\n).)*?)\n{CLOSING}", re.DOTALL
)


def call_text(calls: Sequence[Call]) -> str:
    """Write calls of an earlier turn as models do."""
    return "\n".join(
        f'{OPENING}\n{{"name": "{call.name}", "arguments": {_spaced(call.arguments)}}}\n{CLOSING}'
        for call in calls
    )


def _spaced(arguments: str) -> str:
    """Put blanks where models do; clients leave them out, and the cache would end there."""
    with suppress(msgspec.DecodeError, RecursionError):
        return msgspec.json.format(arguments, indent=0)
    return arguments or "{}"


def result_text(content: str) -> str:
    return f"{RESPONSE}\n{content}\n</tool_response>"


def respelled(message: Message, syntax: ToolSyntax) -> Message:
    """Write a message's calls in the model's own syntax, if text can hold that."""
    spell = SYNTAXES[syntax].spell if syntax in SYNTAXES else ()
    if message.role != "assistant" or not spell:
        return message
    begin, value, end = spell

    def respell(found: re.Match[str]) -> str:
        try:
            call = msgspec.json.decode(found[1])
            texts = {
                key: one if isinstance(one, str) else msgspec.json.encode(one).decode()
                for key, one in call["arguments"].items()
            }
            values = [value.format(*one) for one in texts.items()]
            return "".join((begin.format(call["name"]), *values, end))
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError, RecursionError):
            return found[0]

    return replace(message, content=_EARLIER.sub(respell, message.content))


# ---- as replies are read

_MARKS = [
    form.format(word) for form, word in product(_READ["forms"].split(), _READ["words"].split())
]
_MARKS.append("</tool_response>")
_MARK = re.compile(r"[<\[][^\s<>\[\]]{1,40}[>\]]")
_CLOSES = re.compile(r"[<\[]\|?/|.*_end\||<\|end_|\[end_|<[\w:]+\|>")
_MOST_MARKS = 8  # before a call
FENCE = re.compile(r"`{3,}|~{3,}")
_OBJECT = re.compile(r"\{|\[\s*\{")
_INFO = re.compile(r"[^\n`~{\[<(]{0,80}")
_NOTE = r"(?://|\#)[^\n]*\n|/\*(?s:.*?)\*/"
_NOTE_BEGUN = re.compile(r"(?:(?://|\#)[^\n]*|/|/\*(?s:(?!.*\*/).*))\Z")
_SPACE, _BLANK, _GAP, _NOTES, _STRAY = map(re.compile, (
    r"\s*", rf"(?:\s|{_NOTE})*", r"[\s,;]*", rf"(?:[\s,;]|{_NOTE})*", r"(?:[\s,;]*[}\]])*"
))  # fmt: skip

# what stands in front of a name, and between it and its arguments
_TAGGED = ("function", "invoke", "tool", "tool_call", "function_call")
_TAG_LEADS = tuple(f"<{word}{sign}" for word in _TAGGED for sign in ("=", ' name="'))
_LEADS = (*_TAG_LEADS, *(lead for syntax in SYNTAXES.values() for lead in syntax.leads))
_LEAD = re.compile("|".join(map(re.escape, _LEADS)))
_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_ROOTS = re.compile(r"\A(?:functions|default_api)\.")
_ONE_OBJECT = re.compile(r"\(\s*(?=\{)")  # arguments in parentheses
_JOINS = tuple(join for syntax in SYNTAXES.values() for join in syntax.joins)
_JOIN = re.compile(rf"(?:\[CALL_ID\]\w*|```\w*|\s|>|{'|'.join(map(re.escape, _JOINS))})*")
_TAG = re.compile(
    r"\s*(?:<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>"
    r'|<parameter name="([^"]+)"[^>]*>(.*?)</parameter>'
    r"|<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>)",
    re.DOTALL,
)
_TAGS_END = re.compile(rf"\s*(?=</(?:\w+:)?(?:{'|'.join(_TAGGED)})>)")
_TAGS = ("<parameter", "<arg_key>", *(f"</{word}>" for word in (*_TAGGED, "minimax:tool_call")))

_NAMES, _ARGUMENTS, _WRAPPERS, _BESIDE = (
    _READ[name].split() for name in ("names", "arguments", "wrappers", "beside")
)
_KEYS = (*_NAMES, *_ARGUMENTS, *_WRAPPERS, *_BESIDE)

_QUOTES = ('"""', '"', "'", '<|"|>')
_TOKEN = re.compile(
    r'"""(?P<a>(?:[^"\\]|\\.|""?(?!"))*+)"""|"(?!"")(?P<b>(?:[^"\\]|\\.)*+)"'
    r"""|'(?P<c>(?:[^'\\]|\\.)*+)'|<\|"\|>(?P<raw>.*?)<\|"\|>"""
    r"|(?P<word>[\w.+:/-]*[\w.+/-](?=\()|[\w.+-]+)|[{}\[\](),:=]",
    re.DOTALL,
)
_WORD = re.compile(r"[\w.+-]+\Z")
_ESCAPE = re.compile(r'\\.|"', re.DOTALL)
_ESCAPES = {r"\'": "'", '"': r"\""}
_LITERALS = {"True": "true", "False": "false", "None": "null"}
_DEEPEST = 100
_CLOSERS, _CLOSED_BY = {"{": "}", "[": "]"}, {"}": "}", "]": "]", ")": "}}"}


def _plain(text: str) -> str:
    """Return text in the form for comparing marks: DeepSeek writes them with other characters."""
    return text.translate({0xFF5C: "|", 0x2581: "_"}).lower()


# what may have begun where a text ends: before calls, in marks, between a name and its arguments
_STARTS = (*_MARKS, *_TAG_LEADS, "```", "~~~")
_IN_MARKS, _BETWEEN = (*_STARTS, *map(_plain, _LEADS)), (*map(_plain, _JOINS), *_TAGS)
_KNOWN = frozenset(_MARKS)


class NoCall(Exception):
    """The text cannot become a call."""


class TooShort(Exception):
    """The text ends before it is clear whether it holds a call."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(members)
    if len(found) < len(members):  # a name twice has two meanings
        raise ValueError
    return found


_READER = json.JSONDecoder(strict=False, object_pairs_hook=_once)


class CallScanner:
    """A scanner for calls in a text, from a place on.

    Args:
        tools: their schemas, by name.
        over: nothing more comes. ``closed``: because the model ended it, so that brackets that are
            open at the end are closed there.

    Attributes:
        begun: a call has surely begun where the text is too short.
    """

    def __init__(
        self, text: str, tools: Mapping[str, Any], *, over: bool = False, closed: bool = False
    ) -> None:
        self.text, self._tools, self.over, self._closed = text, tools, over, closed
        self.begun = self._fenced = False

    def closing(self, at: int) -> int:
        """Return the end of a mark that ends calls or the reply, and stands there; 0: none does."""
        mark = self._mark(at)
        end = at + len(mark)
        last = self._closed and mark and not self.text[end:].strip()
        return end if last or _CLOSES.match(mark) else 0

    def unit(self, at: int, *, bare: bool = True) -> tuple[list[Call], int]:
        """Read the calls in one wrapper, or side by side without any; returns their end as well.

        Args:
            bare: they may stand without a mark.

        Raises:
            NoCall, TooShort: see there.
        """
        self.begun = self._fenced = False
        calls: list[Call] = []
        marks, end = 0, at
        while True:
            if calls:
                at = end = self._behind(_STRAY, at)
            at = self._behind(_NOTES if self._fenced else _GAP, at)
            if at == len(self.text):
                if not self.over or not (calls or self._closed):
                    raise TooShort
                break
            if self._fenced and _NOTE_BEGUN.match(self.text, at) and not self.over:
                raise TooShort
            mark, fence = self._mark(at), FENCE.match(self.text, at)
            if calls and not self._fenced and (mark or fence):
                end = self.closing(at) or end
                break
            if mark and (calls or not _CLOSES.match(mark)) and marks < _MOST_MARKS:
                at, marks, self.begun = at + len(mark), marks + 1, True
            elif fence and self._fenced:
                end = fence.end()
                if end == len(self.text) and not self.over:  # it may be longer
                    raise TooShort
                break
            elif fence and (bare or marks):
                at, self._fenced = self._behind(_INFO, fence.end()), True
            else:
                try:
                    found, at = self._piece(at, marked=marks > 0, bare=bare)
                except TooShort:
                    if self.over and calls:  # those before the cut stay
                        break
                    raise
                except NoCall:
                    beside = _OBJECT.match(self.text, at) or "\n" not in self.text[end:at]
                    if not calls or self._fenced or beside:
                        raise
                    break
                calls, end = calls + found, at
        if not calls:
            raise NoCall
        return calls, end

    def _piece(self, at: int, *, marked: bool, bare: bool) -> tuple[list[Call], int]:
        """Read one object, list, or name with its arguments."""
        self._partial(at, _IN_MARKS if marked else _STARTS)
        head = self.text[at]
        if head in "{[" and (marked or bare):
            value, end = self._json(at)
            return self._meant(value), end
        lead = _LEAD.match(self.text, at) if marked or head == "<" else None
        begin = at if lead is None else lead.end()
        end = self._behind(_NAME, begin)
        written = self.text[begin:end]
        if end == len(self.text) and not self._closed:
            self._name(written, whole=False)
            self.begun |= lead is not None
            raise TooShort
        name = self._name(written)
        if lead is None and bare and self.text.startswith("(", end):
            if alone := _ONE_OBJECT.match(self.text, end):
                value, end = self._json(alone.end(), arguments=True)
                return [self._call(name, value)], self._ending(")", end)
            value, end = self._json(at)
            return self._meant(value), end
        if not (marked or lead):
            raise NoCall
        at, self.begun = self._behind(_JOIN, end), True
        self._fenced |= "```" in self.text[end:at]
        if self.text.startswith("{", at):
            value, end = self._json(at, arguments=True)
            own = "name" in self._tools[name].get("properties", {})
            whole = value.get("name") == name and not own
            return self._meant(value) if whole else [self._call(name, value)], end
        arguments: dict[str, Any] = {}
        while tag := _TAG.match(self.text, at):
            key, text = (one for one in tag.groups() if one is not None)
            if key.strip() in arguments:
                raise NoCall
            arguments[key.strip()] = self._value(name, key.strip(), text)
            at = tag.end()
        ended = _TAGS_END.match(self.text, at)
        if ended is None:
            at = self._behind(_SPACE, at)
            self._partial(at, _BETWEEN)
            if self.text.startswith(_TAGS[:2], at) and not self._closed:
                raise TooShort
            if at < len(self.text):
                raise NoCall
        return [self._call(name, arguments)], ended.end() if ended else at

    def _behind(self, pattern: re.Pattern[str], at: int) -> int:
        found = pattern.match(self.text, at)
        return at if found is None else found.end()

    def _ending(self, sign: str, at: int) -> int:
        """Return the place after a sign that must come next."""
        at = self._behind(_SPACE, at)
        if at == len(self.text) and not self._closed:
            raise TooShort
        if not self.text.startswith(sign, at):
            raise NoCall
        return at + len(sign)

    def _mark(self, at: int) -> str:
        found = _MARK.match(self.text, at)
        mark = _plain(found[0]) if found else ""
        return mark if mark in _KNOWN else ""

    def _partial(self, at: int, wholes: Iterable[str]) -> None:
        """Raise TooShort if the text ends, and one of these may have begun."""
        tail = _plain(self.text[at : at + 40])
        ends = len(self.text) - at <= 40 and not self._closed
        if ends and any(whole != tail and whole.startswith(tail) for whole in wholes):
            self.begun |= len(tail) > 2
            raise TooShort

    def _name(self, written: str, *, whole: bool = True) -> str:
        """Return the offered tool that is meant, or one whose name begins so."""
        short = _ROOTS.sub("", written)
        for name in (written, short, re.sub(r":\d*\Z", "", short)):
            if name in self._tools or (not whole and any(t.startswith(name) for t in self._tools)):
                return name
        if not whole and any(root.startswith(written) for root in ("functions.", "default_api.")):
            return written
        raise NoCall

    def _value(self, tool: str, key: str, text: str) -> Any:
        """Read a value between tags: JSON, unless the schema asks for a text or it is none."""
        schema = self._tools[tool].get("properties", {}).get(key)
        plain = isinstance(schema, dict) and schema.get("type") == "string"
        with suppress(NoCall):
            value = text if plain else _decoded(_LITERALS.get(text.strip(), text.strip()))
            return value if fits(value, schema, self._tools[tool]) else text
        return text

    def _meant(self, value: Any) -> list[Call]:
        """Return the calls that a value stands for: itself, or what it wraps."""
        if isinstance(value, list) and value:
            return [call for one in value for call in self._meant(one)]
        if not isinstance(value, dict):
            raise NoCall
        wrapped = [value[k] for k in _WRAPPERS if isinstance(value.get(k), list | dict)]
        named = [value[k] for k in _NAMES if isinstance(value.get(k), str)]
        given = [value[k] for k in _ARGUMENTS if k in value]
        if len(wrapped) + len(named) != 1 or len(given) > len(named) or value.get("content"):
            raise NoCall
        if wrapped:
            return self._meant(wrapped[0])
        return [self._call(self._name(named[0]), given[0] if given else {})]

    def _call(self, name: str, arguments: Any) -> Call:
        if isinstance(arguments, str) and arguments.strip():
            arguments = _decoded(arguments)
        arguments = {} if arguments in (None, "", []) else arguments
        if not isinstance(arguments, dict) or not fits(arguments, self._tools[name]):
            raise NoCall
        try:
            said = json.dumps(arguments, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            return Call(name, said.encode().decode())
        except ValueError:  # half a character, or a number without end
            raise NoCall from None

    def _json(self, at: int, *, arguments: bool = False) -> tuple[Any, int]:
        """Read the value that begins there, in JSON or nearly so; returns its end as well.

        Args:
            arguments: it is those of a call, rather than one.
        """
        out: list[str] = []  # the same in strict JSON
        closers: list[str] = []  # of what is open
        keys = ["arguments"] if arguments else []  # under which that is
        doubled: set[int] = set()  # depths with a second brace
        key = ""  # of the member that is read
        while closers or not out:
            at = self._behind(_BLANK, at)
            of_call = all(one in _WRAPPERS for one in filter(None, keys))
            at_key = not key and bool(closers) and closers[-1] != "]"
            token = _TOKEN.match(self.text, at)
            if at == len(self.text) and self._closed:
                out += reversed(closers)
                break
            open_ended = token and (token["word"] or token[0] == '""')  # it may go on
            if token is None or (open_ended and token.end() == len(self.text)):
                self._unfinished(at, key, of_call=of_call, at_key=at_key)
            assert token is not None
            at, said = token.end(), token[0]
            if said == "{" and out[-1:] == ["{"] and len(closers) not in doubled:
                doubled.add(len(closers))
            elif said in _CLOSERS:
                if at_key or len(closers) == _DEEPEST:
                    raise NoCall
                closers.append(_CLOSERS[said])
                keys.append(key)
                out.append(said)
                key = ""
            elif said in ("}", "]", ")"):
                if closers[-1:] != [_CLOSED_BY[said]]:
                    raise NoCall
                second = self._behind(_SPACE, at)
                if len(closers) in doubled and self.text.startswith("}", second):
                    at = second + 1
                doubled.discard(len(closers))
                if out[-1] == ",":
                    out.pop()
                out.append(closers.pop())
                keys.pop()
                key = ""
            elif said in (",", ":", "=", "("):
                if said == "(" or (said != "," and (said == "=") != (closers[-1:] == ["}}"])):
                    raise NoCall
                out.append(said.replace("=", ":"))
                key = key if said != "," else ""
            elif token["word"] and self.text.startswith("(", at):
                if key or at_key or not of_call:
                    raise NoCall
                out.append(f'{{"name":{json.dumps(self._name(said))},"arguments":{{')
                closers.append("}}")
                keys.append("arguments")
                at, self.begun = at + 1, True
            else:
                out.append(_strict(token, key=at_key))
                written = _decoded(out[-1])
                if of_call:
                    self._member(written, key, at_key=at_key)
                key = written if at_key else key
        return _decoded("".join(out)), at

    def _member(self, written: Any, key: str, *, at_key: bool, whole: bool = True) -> None:
        """Raise NoCall if no call has a member of this name, or of this value."""
        if at_key:
            self.begun |= bool(written)
            fine = any(one == written if whole else one.startswith(written) for one in _KEYS)
        elif isinstance(written, str) and (key in _NAMES or not (key or whole)):
            self._name(written, whole=whole)
            fine = True
        else:
            fine = bool(key) and not (key == "content" and written)
        if not fine:
            raise NoCall

    def _unfinished(self, at: int, key: str, *, of_call: bool, at_key: bool) -> NoReturn:
        """Raise NoCall or TooShort: what goes on there can belong to no call, or may."""
        rest = self.text[at:]
        quotes = next((one for one in _QUOTES if rest.startswith(one)), "")
        word = rest and not quotes
        if rest == '""' or (_NOTE_BEGUN.match(rest) and not self._closed):
            raise TooShort
        if word and not _WORD.match(rest):
            self._partial(at, _QUOTES)
            raise NoCall
        if quotes and (self._closed or (of_call and not (key or at_key))):
            raise NoCall
        if of_call and key not in _ARGUMENTS and rest and not (word and key and key not in _NAMES):
            self._member(rest[len(quotes) :], key, at_key=at_key, whole=False)
        raise TooShort


def _strict(token: re.Match[str], *, key: bool) -> str:
    """Write a string or a word as JSON does."""
    kind = token.lastgroup or ""
    if kind == "word" and not key:
        return _LITERALS.get(token[kind], token[kind])
    if kind in ("word", "raw"):
        return json.dumps(token[kind])
    # an escape that JSON does not know has two meanings, and so makes it no call
    return f'"{_ESCAPE.sub(lambda one: _ESCAPES.get(one[0], one[0]), token[kind])}"'


def _decoded(text: str) -> Any:
    try:
        return _READER.decode(text)
    except (ValueError, RecursionError):
        raise NoCall from None
