"""Schemas within a schema document: where they are, what refers to them, what they say together.

A *place* is a schema with its pointer. What a value has to satisfy is a set of places at once
(a schema, what it refers to, its ``allOf``); ``alternatives`` resolves the ``anyOf`` and ``oneOf``
among them, so that only plain keywords are left in each alternative.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from specllama.errors import UsageError

MAX_ALTERNATIVES = 300
_ELSEWHERE = {
    "$dynamicRef": "$ref",
    "$recursiveRef": "$ref",
    "disallow": "anyOf",
    "divisibleBy": "multipleOf",
    "extends": "allOf",
}
HINT = "leave it out, or express it differently"


_NUMBER = ("a number", (int, float))
_TEXT = ("text", (str,))
_LIST = ("a list", (list,))
_SCHEMA = ("a schema", (dict, bool))
_SCHEMAS = ("an object of schemas", (dict,))
_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    **dict.fromkeys(("minimum", "maximum", "multipleOf"), _NUMBER),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), ("a number", (int, float, bool))),
    **dict.fromkeys(("pattern", "format"), _TEXT),
    **dict.fromkeys(("enum", "required", "prefixItems", "allOf", "anyOf", "oneOf"), _LIST),
    **dict.fromkeys(("additionalProperties", "additionalItems", "propertyNames"), _SCHEMA),
    **dict.fromkeys(("properties", "patternProperties"), _SCHEMAS),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), _SCHEMAS),
    "items": ("a schema", (dict, bool, list)),
    "type": ("text", (str, list)),
}


class Place(NamedTuple):
    pointer: str
    schema: Any

    def __truediv__(self, key: str | int) -> Place:
        """The schema under a key of this one."""
        name = str(key).replace("~", "~0").replace("/", "~1")
        return Place(f"{self.pointer}/{name}", self.schema[key])

    def has(self, key: str) -> bool:
        return isinstance(self.schema, dict) and key in self.schema


Leaves = tuple[Place, ...]  # all of them hold; their anyOf, allOf, ... are resolved


def cannot(place: Place, key: str, why: str) -> UsageError:
    """The error for a keyword that a grammar cannot enforce."""
    return UsageError(
        f"{key} at {place.pointer} of the JSON schema cannot be enforced: {why}", HINT
    )


def wrong(place: Place, key: str, why: str) -> UsageError:
    """The error for a keyword with a value that it cannot have."""
    return UsageError(f"{key} at {place.pointer} of the JSON schema {why}")


class Places:
    """The places of one document.

    Attributes:
        exclusive: every ``oneOf`` with more than one member that was found.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = Place("#", root)
        self.exclusive: dict[str, Place] = {}
        self._anchors: dict[str, Place] = {}
        self._known: dict[tuple[str, int], tuple[Place, list[Leaves]]] = {}
        self._embedded: Place | None = None  # a document within this one
        self._look_around()

    def _look_around(self) -> None:
        todo = [self.root]
        while todo:
            place = todo.pop()
            if isinstance(place.schema, dict):
                if isinstance(anchor := place.schema.get("$anchor"), str):
                    self._anchors.setdefault(anchor, place)
                nested = place.schema.get("$id")
                if isinstance(nested, str) and not nested.startswith("#") and place != self.root:
                    self._embedded = place
                todo += [place / key for key in place.schema]
            elif isinstance(place.schema, list):
                todo += [place / i for i in range(len(place.schema))]

    def resolve(self, ref: Any) -> Place:
        """The place that a reference leads to."""
        if not isinstance(ref, str):
            raise UsageError("a $ref in the JSON schema is not text")
        own = self.root.schema.get("$id")
        if isinstance(own, str) and own and ref.startswith(own.rstrip("#")):
            ref = "#" + ref.removeprefix(own.rstrip("#")).removeprefix("#")
        if not ref.startswith("#"):
            raise UsageError(
                f"the JSON schema refers to another document: {ref}",
                "nothing is fetched: copy that schema under $defs and refer to #/$defs/NAME",
            )
        if self._embedded is not None:
            raise cannot(self._embedded, "$id", "references inside it may mean that part")
        if ref[1:] in self._anchors:
            return self._anchors[ref[1:]]
        place = self.root
        for part in unquote(ref).removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            inside = place.schema
            if isinstance(inside, list) and key.isdecimal() and int(key) < len(inside):
                place = place / int(key)
            elif isinstance(inside, dict) and key in inside:
                place = place / key
            else:
                raise UsageError(
                    f"the JSON schema has no {ref}", "references look like #/$defs/NAME"
                )
        if not (ref == "#" or ref.startswith("#/")) or not isinstance(place.schema, dict | bool):
            raise UsageError(
                f"the reference {ref} leads to no schema", "references look like #/$defs/NAME"
            )
        return place

    def alternatives(self, conjunction: Iterable[Place]) -> list[Leaves]:
        """Sets of plain schemas, one of which a value must satisfy as a whole."""
        found: list[Leaves] = [()]
        for place in conjunction:
            found = _each_with_each(found, self._leaves(place, ()))
        return found

    def _leaves(self, place: Place, trail: tuple[str, ...]) -> list[Leaves]:
        """What a place says, worked out once: references may lead to it any number of times."""
        key = (place.pointer, id(place.schema))  # what is kept keeps the schema, so ids are good
        if key not in self._known:
            self._known[key] = place, self._worked_out(place, trail)
        return self._known[key][1]

    def _worked_out(self, place: Place, trail: tuple[str, ...]) -> list[Leaves]:
        schema = place.schema
        if schema is True:
            return [()]
        if schema is False:
            return []
        if not isinstance(schema, dict):
            raise UsageError(f"in the JSON schema, {place.pointer} must be an object")
        if place.pointer in trail:
            raise UsageError(
                f"the JSON schema defines {place.pointer} only by itself",
                "put an array or an object in between",
            )
        trail = (*trail, place.pointer)
        if len(trail) > 100:
            raise UsageError("the JSON schema is too big for a grammar", "at most 100 levels")
        _refuse(place)
        found: list[Leaves] = [(place,)]
        if "$ref" in schema:
            found = _each_with_each(found, self._leaves(self.resolve(schema["$ref"]), trail))
        for member in members(place, "allOf"):
            found = _each_with_each(found, self._leaves(member, trail))
        for key in ("anyOf", "oneOf"):
            if key not in schema:
                continue
            options = list(members(place, key))
            if key == "oneOf" and len(options) > 1:
                self.exclusive[place.pointer] = place
            union = [leaves for option in options for leaves in self._leaves(option, trail)]
            found = _each_with_each(found, union)
        for name, needs in _dependents(place):
            absent = Place(f"{place.pointer}!{name}", {"properties": {name: False}})
            present = Place(f"{place.pointer}?{name}", {"required": [name]})
            with_it = _each_with_each([(present,)], self._leaves(needs, trail))
            found = _each_with_each(found, [(absent,), *with_it])
        return found


def members(place: Place, key: str) -> Iterator[Place]:
    """The schemas in a list under a keyword."""
    if key in place.schema:
        inside = place.schema[key]
        if not inside:
            raise wrong(place, key, "must not be empty")
        for i in range(len(inside)):
            yield place / key / i


def _each_with_each(a: Sequence[Leaves], b: Sequence[Leaves]) -> list[Leaves]:
    if len(a) * len(b) > MAX_ALTERNATIVES:
        raise UsageError(
            "the JSON schema is too big for a grammar",
            f"its anyOf and oneOf combine to more than {MAX_ALTERNATIVES} alternatives",
        )
    return [tuple({place.pointer: place for place in (*x, *y)}.values()) for x in a for y in b]


def _dependents(place: Place) -> Iterator[tuple[str, Place]]:
    """What a property brings with it: (its name, a schema)."""
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name, needs in place.schema.get(key, {}).items():
            where = place / key / name
            yield (
                name,
                Place(where.pointer, {"required": needs}) if isinstance(needs, list) else where,
            )


def _refuse(place: Place) -> None:
    """Raise for values of the wrong kind, and for keywords that no grammar can express."""
    schema = place.schema
    for key, value in schema.items():
        what, kinds = _KINDS.get(key, ("", (object,)))
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds and what):
            raise wrong(place, key, f"must be {what}")
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise wrong(place, "required", "must be a list of property names")
    if isinstance(schema.get("propertyNames"), dict):
        _refuse(place / "propertyNames")
    negated = schema.get("not", False)
    if negated is not False:
        raise cannot(place, "not", "a grammar says what is allowed, not what is forbidden")
    if "if" in schema and ("then" in schema or "else" in schema):
        raise cannot(place, "if", "use anyOf with both cases spelled out")
    for key, instead in _ELSEWHERE.items():
        if key in schema:
            raise cannot(place, key, f"use {instead}")
