"""Whether a value satisfies schemas: for what is listed in ``enum`` and ``const``."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable
from typing import Any

from specllama.errors import UsageError
from specllama.grammar.places import Leaves, Place, Places, wrong
from specllama.grammar.strings import naming, regular, whole_number
from specllama.grammar.strings import pattern as compiled_pattern

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def type_of(value: Any) -> str:
    """The JSON type; ``integer`` for whole numbers however they are written."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "integer" if value == value // 1 else "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def same_as(value: Any) -> Hashable:
    """Equal for values that JSON calls equal (1 is 1.0 and not true), and for no others."""
    if isinstance(value, list):
        return ("array", *map(same_as, value))
    if isinstance(value, dict):
        return ("object", frozenset((key, same_as(inside)) for key, inside in value.items()))
    return type(value) is bool, value


def json_text(value: Any) -> str:
    """How a value is written; escapes only where they are needed."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        return json.dumps(value)
    except ValueError:
        raise UsageError("a number in the JSON schema is too large") from None
    return text


def listed(leaves: Leaves) -> list[Any] | None:
    """The values that ``enum`` and ``const`` leave, None if there are neither."""
    found: list[Any] | None = None
    for place in leaves:
        for key in ("enum", "const"):
            if not place.has(key):
                continue
            values = place.schema[key] if key == "enum" else [place.schema[key]]
            if found is None:
                found = values
            else:
                known = {same_as(other) for other in values}
                found = [v for v in found if same_as(v) in known]
    return found


def types_of(place: Place) -> set[str]:
    """What ``type`` says; ``number`` brings ``integer`` with it."""
    said = place.schema["type"]
    names = said if isinstance(said, list) else [said]
    for name in names:
        if name not in TYPES:
            raise wrong(place, "type", f"must be one of {', '.join(TYPES)}, not {name!r}")
    return {*names, "integer"} if "number" in names else set(names)


class Validator:
    """Values against places of one document."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._listed: dict[int, tuple[Place, set[Hashable] | None]] = {}

    def fits(self, value: Any, leaves: Leaves) -> bool:
        """Whether a value satisfies all of these plain schemas."""
        return all(self._satisfies(value, place) for place in leaves)

    def valid(self, value: Any, *places: Place) -> bool:
        """Whether a value satisfies the schemas at all of these places."""
        return any(self.fits(value, leaves) for leaves in self._places.alternatives(places))

    def _satisfies(self, value: Any, place: Place) -> bool:
        kind = type_of(value)
        if place.has("type") and kind not in types_of(place):
            return False
        known = self._values(place)
        if known is not None and same_as(value) not in known:
            return False
        if kind in ("integer", "number"):
            return self._number(value, place)
        if kind == "string":
            return self._string(value, place)
        if kind == "array":
            return self._array(value, place)
        return kind != "object" or self._object(value, place)

    def _values(self, place: Place) -> set[Hashable] | None:
        """Those of ``enum`` and ``const``, made once; the kept place keeps its id its own."""
        key = id(place.schema)
        if key not in self._listed:
            options = listed((place,))
            self._listed[key] = place, None if options is None else {*map(same_as, options)}
        return self._listed[key][1]

    def _number(self, value: float, place: Place) -> bool:
        schema = place.schema
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        # before draft 6 these were flags of minimum and maximum
        above = low if above is True else -math.inf if above in (None, False) else above
        below = high if below is True else math.inf if below in (None, False) else below
        step = schema.get("multipleOf", 0)
        fits = low <= value <= high and above < value < below
        return bool(fits and (not step or value / step == value / step // 1))

    def _string(self, value: str, place: Place) -> bool:
        if not _counted(len(value), place, "minLength", "maxLength"):
            return False
        dfa = regular((place,), 0, None)
        return dfa is None or dfa.accepts(value)

    def _array(self, value: list[Any], place: Place) -> bool:
        if not _counted(len(value), place, "minItems", "maxItems"):
            return False
        if place.schema.get("uniqueItems") is True and len({*map(same_as, value)}) < len(value):
            return False
        first, rest = items(place)
        for i, item in enumerate(value):
            where = first[i] if i < len(first) else rest
            if where is not None and not self.valid(item, where):
                return False
        return True

    def _object(self, value: dict[str, Any], place: Place) -> bool:
        if not _counted(len(value), place, "minProperties", "maxProperties"):
            return False
        if not set(place.schema.get("required", ())) <= value.keys():
            return False
        if place.has("propertyNames") and not all(
            self.valid(name, place / "propertyNames") for name in value
        ):
            return False
        return all(self.valid(inner, *of_property(place, name)) for name, inner in value.items())


def _counted(n: int, place: Place, least_key: str, most_key: str) -> bool:
    least, most = whole_number(place, least_key), whole_number(place, most_key)
    return (least or 0) <= n and (most is None or n <= most)


def items(place: Place) -> tuple[list[Place], Place | None]:
    """The schema of each of the first items, and that of all further ones."""
    schema = place.schema
    key = "prefixItems" if "prefixItems" in schema else "items"
    if key in schema and isinstance(schema[key], list):
        first = [place / key / i for i in range(len(schema[key]))]
        more = "items" if key == "prefixItems" else "additionalItems"
        return first, place / more if more in schema else None
    return [], place / "items" if "items" in schema else None


def of_property(place: Place, name: str) -> list[Place]:
    """The schemas that one place has for a property of this name."""
    found = []
    if name in mapping(place, "properties"):
        found.append(place / "properties" / name)
    for text in mapping(place, "patternProperties"):
        with naming(place, "patternProperties"):
            if compiled_pattern(text).accepts(name):
                found.append(place / "patternProperties" / text)
    if not found and place.has("additionalProperties"):
        found.append(place / "additionalProperties")
    return found


def mapping(place: Place, key: str) -> dict[str, Any]:
    """An object of schemas under a keyword, empty if it is not there."""
    inside: dict[str, Any] = place.schema.get(key, {})
    return inside
