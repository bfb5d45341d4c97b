"""The source of a constraint, a GBNF grammar or a JSON schema, in llguidance's form."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import islice
from typing import Any, Literal
from urllib.parse import unquote

from specllama.errors import UsageError
from specllama.grammar.gbnf import lark_of

Kind = Literal["grammar", "schema", "regex"]
Alone = Callable[[Any], str]  # why a schema is refused by itself; "" if it is not

MOST_BYTES = 1 << 20  # of a schema
MOST_REGEX = 16 << 10
MOST_PARTS = 50_000  # values in it
MOST_LEVELS = 100
MOST_STEP = 10_000  # of multipleOf, without its decimal point
MOST_PATTERNS = 12  # that hold for one place together: the work doubles with each
# of what takes more than time in proportion
MOST_IN = {"properties": 1000, "patternProperties": 100, "required": 2000}
_LOOKED = 100  # parts that may be the one without a value
MOST_LISTED = 1000  # arrays and objects of one enum: each is compared with each
_HEAD = '%llguidance {"no_forcing": true}\n'
# a line break and its indentation, or a space: what models write, and not without end
_STYLE = {
    "whitespace_pattern": "( |\\n[ \\t]{0,20})?",
    "whitespace_flexible": True,
    "json_allow_general_unicode_escapes": True,
}
_ENDS = re.compile(r"\\.|[/\n]", re.DOTALL)
_BARE = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_PLACE = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?")
# of an object or array that has no value: the part that has none; and a part that is referred to
_EMPTY = re.compile(r"required (?:property '(?P<name>.*)'|item) is unsatisfiable")
_REFERRED = re.compile(r" while processing json-schema:///#(\S*)")
_KEYS = re.compile(r"Unimplemented keys: \[(.*)\]")
PLACE = "x-place"  # how messages name a schema, whatever it is part of
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples", "required")
_SIDES = (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
_BITS = 2**63 - 1024  # the largest that is exact in JSON's numbers and fits 64 bits
_NOTES = {"type", "title", "description", "default", "examples"}
_INTEGER, _WHOLE = "x-integer", {"type": "integer", "minimum": -_BITS, "maximum": _BITS}
_SMALLER = "write a smaller one"


@dataclass(frozen=True, slots=True)
class Source:
    """A grammar.

    Attributes:
        text: as it was given.
    """

    kind: Kind
    lark: str
    text: str = ""

    def refused(self, why: str, alone: Alone) -> UsageError:
        """Return the error for a grammar that does not compile, and the place that is wrong."""
        place = ""
        if self.kind == "schema":
            why, place = _cause(json.loads(self.text), _cut(why), alone)
        return UsageError(
            f"{self._name} cannot be enforced: {_said(why)}{place}", _KINDS[self.kind][1]
        )

    def stuck(self, why: str) -> UsageError:
        return UsageError(
            f"{self._name} takes too much work to follow here: {_said(why)}",
            "write it with fewer optional and repeated parts beside each other",
        )

    def behind(self, rules: str) -> Source:
        """Return this grammar for a text that follows another one, by the rule ``before``."""
        answer = self.lark.removeprefix(f"{_HEAD}start")
        return replace(self, lark=f"{_HEAD}start: before answer\n{rules}\nanswer{answer}")

    def beside(self, calls: str, spell: Callable[[str], str], *, loose: bool = False) -> Source:
        """Return this grammar for a text that may be calls of tools instead.

        Args:
            calls: see ``GenerateParams.calls``.
            spell: writes a text of the template in Lark.
            loose: what a call is given needs to fit no schema.
        """
        told = json.loads(calls)
        rules = [
            rule if rule[:1].isupper() else _QUOTED.sub(lambda one: spell(json.loads(one[0])), rule)
            for rule in told["rules"]
        ]
        for name, schema in told["schemas"].items():
            if loose:
                schema = {"type": "object"} if name.startswith("args") else {}
            rules.append(f"{name}{_json(json.dumps(schema)).removeprefix('start')}")
        text = self.lark.removeprefix(f"{_HEAD}start")
        return replace(self, lark="\n".join([f"{_HEAD}start: text | calls", *rules, f"text{text}"]))

    @property
    def _name(self) -> str:
        return _KINDS[self.kind][0]


def source_of(kind: Kind, text: str) -> Source:
    """Convert the text, and raise UsageError if it does not parse or is too large."""
    return Source(kind, _HEAD + _KINDS[kind][2](text), text)


def _regex(text: str) -> str:
    if len(text) > MOST_REGEX:
        raise UsageError(f"the regular expression has more than {MOST_REGEX >> 10} Ki characters")
    # Lark ends it at a bare slash, and at the end of a line
    bare = _ENDS.sub(lambda found: _BARE.get(found[0], found[0]), text)
    return f"start: TEXT\nTEXT: /{bare}/"


def _json(text: str) -> str:
    if len(text) > MOST_BYTES:
        raise UsageError(f"the JSON schema has more than {MOST_BYTES >> 10} Ki characters")
    try:
        schema = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"the JSON schema is not JSON: {error}", "give the schema itself, or @FILE"
        ) from None
    if schema is True:
        schema = {}
    if schema is False:
        raise UsageError("no value satisfies the JSON schema false")
    if not isinstance(schema, dict):
        raise UsageError("a JSON schema is an object", 'for example {"type": "object"}')
    _measure(schema)
    for _, part in schemas(schema):
        part.pop(PLACE, None)
        _bound(part)
    schema["x-guidance"] = _STYLE
    if f'"#/{_INTEGER}"' in json.dumps(schema):  # llguidance keeps a long enum apart if it is alone
        schema[_INTEGER] = _WHOLE
    return f"start: %json {json.dumps(schema)}"


def schemas(root: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema, which has this place, and all that are in it, each with its place."""
    todo = [(path, root)]
    for path, schema in todo:
        if not isinstance(schema, dict):
            continue
        path = schema.get(PLACE, path)
        yield path, schema
        for key, value in schema.items():
            if isinstance(value, list):
                inner = {f"{key}[{i}]": one for i, one in enumerate(value)}
            elif isinstance(value, dict) and key in _MAPS:
                inner = {f"{key}.{name}": one for name, one in value.items()}
            else:
                inner = {key: value}
            if key not in _VALUES:
                todo += [(f"{path}.{name}".lstrip("."), one) for name, one in inner.items()]


def at(root: Any, pointer: Any) -> Any:
    """Return the target of a reference within a document; None if it leads elsewhere."""
    found = root
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    for name in pointer[1:].split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            return None
    return found


def _bound(schema: dict[str, Any]) -> None:
    """Leave an integer no more digits than 64 bits have, where it says nothing of its size: a
    model may write zeros without end."""
    kinds = schema.get("type")
    if kinds == "integer" and not schema.keys() - _NOTES:  # one for all: each takes room
        schema.clear()
        schema["$ref"] = f"#/{_INTEGER}"
    whole = "integer" in (kinds if isinstance(kinds, list) else [kinds]) and "$ref" not in schema
    low, high = ([schema[key] for key in keys if key in schema] for keys in _SIDES)
    inside = all(isinstance(one, int | float) and abs(one) < _BITS for one in low + high)
    if whole and inside:
        schema.update({} if low else {"minimum": -_BITS})
        schema.update({} if high else {"maximum": _BITS})


def _cause(root: Any, why: str, alone: Alone) -> tuple[str, str]:
    """Return why a schema is refused, and where, as far as the reason tells; of a schema without a
    value, these of the innermost part that has none."""
    path, part = "", root
    while True:
        leads = _REFERRED.search(why)
        if leads and isinstance(there := at(root, f"#{leads[1]}"), dict):
            why, path, part = why[: leads.start()], leads[1].strip("/").replace("/", "."), there
        if (empty := _EMPTY.search(why)) is None:
            break
        ends = ("items", "]") if empty["name"] is None else (f"properties.{empty['name']}",)
        inside = (one for one in schemas(part, path) if one[0] != path and one[0].endswith(ends))
        shared = {key: root[key] for key in ("$defs", "definitions") if key in root}
        told = ((alone({**shared, **one}), to, one) for to, one in islice(inside, _LOOKED))
        found = next((one for one in told if "Unsatisfiable" in one[0]), None)
        if found is None:
            break
        why, path, part = _cut(found[0]), found[1], found[2]
    words = set(re.findall(r"[\w$]+", why))
    for to, one in schemas(part, path):
        for key, value in one.items():
            named = value.lstrip("#") in why if isinstance(value, str) else key in words
            if named and (key in words or key in ("pattern", "$ref")):
                return why, f" (at {to}.{key})" if to else " (at the top)"
    return why, f" (at {path})" if path else ""


def _measure(schema: Any) -> None:
    """Raise UsageError if a schema has more parts or levels than are accepted."""
    n, level = 0, [schema]
    for _ in range(MOST_LEVELS):
        n += len(level)
        if n > MOST_PARTS:
            raise UsageError(f"the JSON schema has more than {MOST_PARTS} parts", _SMALLER)
        inner: list[Any] = []
        for whole in level:
            if isinstance(whole, dict):
                _measure_keys(whole)
                inner += whole.values()
            elif isinstance(whole, list):
                inner += whole
        level = inner
        if not level:
            break
    else:
        raise UsageError(f"the JSON schema nests more than {MOST_LEVELS} levels", _SMALLER)
    try:
        _measure_patterns(schema)
    except RecursionError:
        raise UsageError("references of the JSON schema form too long a chain", _SMALLER) from None


def _measure_keys(schema: dict[str, Any]) -> None:
    for key, most in MOST_IN.items():
        own = schema.get(key)
        if isinstance(own, dict | list) and len(own) > most:
            raise UsageError(f"the JSON schema has more than {most} {key} in one place", _SMALLER)
    if sum(isinstance(one, dict | list) for one in as_list(schema.get("enum"))) > MOST_LISTED:
        raise UsageError(
            f"an enum of the JSON schema lists more than {MOST_LISTED} arrays and objects", _SMALLER
        )
    step = schema.get("multipleOf")
    if isinstance(step, int | float) and not isinstance(step, bool):
        digits = Decimal(repr(step)).normalize().as_tuple()
        if len(digits.digits) > 4 or Decimal(repr(step)).copy_abs() > MOST_STEP:
            raise UsageError(
                f"multipleOf of the JSON schema takes up to four digits, and {MOST_STEP}", _SMALLER
            )


def _values(root: Any) -> Iterator[Any]:
    """Yield a value and all that are in it."""
    todo = [root]
    for value in todo:
        yield value
        todo += value.values() if isinstance(value, dict) else as_list(value)


def _measure_patterns(root: Any) -> None:
    """Raise UsageError if too many patterns hold for one place: its own, and those it refers to."""
    known: dict[int, int] = {}

    def patterns(schema: Any) -> int:
        if not isinstance(schema, dict):
            return 0
        if id(schema) not in known:
            known[id(schema)] = 0  # where it refers to itself it says nothing more
            parts = [*as_list(schema.get("allOf")), at(root, schema.get("$ref"))]
            own = "pattern" in schema or "format" in schema
            known[id(schema)] = min(own + sum(map(patterns, parts)), MOST_PATTERNS + 1)
        return known[id(schema)]

    if any(patterns(one) > MOST_PATTERNS for one in _values(root)):
        raise UsageError(
            f"more than {MOST_PATTERNS} patterns of the JSON schema meet in one place", _SMALLER
        )


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _cut(why: str) -> str:
    return re.split(r"<backtrace>|\s1 \| ", _PLACE.sub("", why))[0]


def _said(why: str) -> str:
    """Return the reason of an error, without the place in our version of the schema or its text."""
    line = " ".join(_cut(why).split())
    if line.startswith("panic"):
        return "it is too large"
    line = line.removesuffix("<non-verbose/>").rstrip()
    if found := _KEYS.match(line):
        return f"it has {found[1].replace(chr(34), '')}"
    if line.startswith("oneOf "):
        return "members of its oneOf cannot be told apart; use anyOf"
    return line if len(line) <= 200 else line[:199] + "…"


# how messages call it, what helps, what reads it
_KINDS: dict[Kind, tuple[str, str, Callable[[str], str]]] = {
    "grammar": ("the grammar", "GBNF is described in llama.cpp's grammars/README.md", lark_of),
    "schema": ("the JSON schema", "limits.md lists what of JSON Schema can be enforced", _json),
    "regex": (
        "the regular expression",
        "it has no look-around and no references to groups",
        _regex,
    ),
}
