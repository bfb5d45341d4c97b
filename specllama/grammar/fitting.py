"""A check that a value fits a JSON schema: the arguments of a call, as a client described them.

A model wrote the value and a client the schema, so the work is bounded: no validator does that.
What is malformed or not known here says nothing. Patterns and formats are llguidance's to judge.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

from specllama.grammar.guide import matches
from specllama.grammar.source import as_list, at

_MOST = 100_000  # schemas that are looked into for one value
_PATTERN = 5000  # of these that a pattern or a format takes as long as, beside a character's one


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_KINDS: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": _is_number,
    "integer": lambda value: _is_number(value) and value % 1 == 0,
}
_SIZED = {"Length": "string", "Items": "array", "Properties": "object", "imum": "number"}
_WORDS = {"pattern", "format"}
_SIDES: dict[str, Callable[[Any, Any], bool]] = {
    "min": operator.ge,
    "max": operator.le,
    "exclusiveMin": operator.gt,
    "exclusiveMax": operator.lt,
}


def fits(value: Any, schema: Any, root: Any = None) -> bool:
    """True if nothing in a schema speaks against a value.

    Args:
        root: the document that references lead into; None: the schema itself.
    """
    root, left = schema if root is None else root, _MOST

    def fit(value: Any, schema: Any) -> bool:
        nonlocal left
        left -= 1
        if not isinstance(schema, dict) or left < 0:
            return schema is not False
        if isinstance(value, str) and not _WORDS.isdisjoint(schema):
            left -= _PATTERN + len(value)
        known, others = schema.get("properties"), schema.get("additionalProperties")
        known = known if isinstance(known, dict) else {}
        others = None if "patternProperties" in schema else others
        members = value.items() if isinstance(value, dict) else ()
        first = as_list(schema.get("prefixItems"))
        either = [some for key in ("anyOf", "oneOf") if (some := as_list(schema.get(key)))]
        return (
            _fits_alone(value, schema)
            and all(fit(value, one) for one in as_list(schema.get("allOf")))
            and fit(value, at(root, schema.get("$ref")))
            and all(any(fit(value, one) for one in some) for some in either)
            and all(fit(one, known.get(key, others)) for key, one in members)
            and all(map(fit, as_list(value), first))
            and all(fit(one, schema.get("items")) for one in as_list(value)[len(first) :])
        )

    try:
        return fit(value, schema)
    except RecursionError:
        return True


def _fits_alone(value: Any, schema: dict[str, Any]) -> bool:
    """True if it fits without regard to what is in it."""
    named = schema.get("type")
    kinds = [_KINDS[one] for one in (*as_list(named), str(named)) if str(one) in _KINDS]
    listed = [schema["const"]] if "const" in schema else as_list(schema.get("enum"))
    same = [isinstance(value, bool) == isinstance(one, bool) and value == one for one in listed]
    if (kinds and not any(kind(value) for kind in kinds)) or (listed and not any(same)):
        return False
    for (side, holds), (what, kind) in product(_SIDES.items(), _SIZED.items()):
        limit = schema.get(side + what)
        applies = _is_number(limit) and _KINDS[kind](value)
        if applies and not holds(value if kind == "number" else len(value), limit):
            return False
    step: Any = schema.get("multipleOf")
    if _is_number(value) and _is_number(step) and step > 0 and abs(value) < math.inf:
        return Fraction(str(value)) % Fraction(str(step)) == 0
    if isinstance(value, str):
        words = {key: schema[key] for key in _WORDS if isinstance(schema.get(key), str)}
        return all(matches(key, word, value) for key, word in words.items())
    if isinstance(value, list) and schema.get("uniqueItems") is True:
        return len({json.dumps(one, sort_keys=True) for one in value}) == len(value)
    return not isinstance(value, dict) or all(
        key in value for key in as_list(schema.get("required"))
    )
