"""Whether a value fits a schema: as jsonschema says, and never for long."""

from __future__ import annotations

import random
import time
from typing import Any

import jsonschema
import pytest

from specllama.grammar.fitting import fits

VALUES: list[Any] = [
    *(None, True, False, 0, 1, -3, 5.0, 2.5, 10**30, "", "a", "long text", [], [1], ["a", 2], {}),
    *("ü", [1, 1], [[1, 1]], ["2024-02-20", "2024-13-40"], "127.0.0.1", "1.2.3", -2.5),
    *({"a": 1}, {"a": "x", "b": [1]}, {"b": None}, [[1], {"a": 1}], {"a": {"a": {"a": 2}}}),
]
PARTS: list[Any] = [
    *({"type": t} for t in ("object", "array", "string", "boolean", "null", "number", "integer")),
    {"type": ["string", "null"]},
    {"enum": ["a", 1, None]},
    {"const": True},
    {"const": 1},
    {"minimum": 1, "maximum": 4},
    {"minLength": 1, "maxLength": 3},
    {"exclusiveMinimum": 1, "exclusiveMaximum": 5},
    {"multipleOf": 2.5},
    {"minItems": 1, "maxItems": 1},
    {"items": {"uniqueItems": True}, "uniqueItems": True},
    {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
    {"pattern": "a"},
    {"pattern": "^[a-z]+$"},
    {"items": {"format": "date"}},
    {"format": "ipv4"},
    {"minProperties": 1},
    {"required": ["a"]},
    {"properties": {"a": {"type": "integer"}}},
    {"properties": {"a": {"$ref": "#"}}, "type": ["object", "integer"]},
    {"properties": {"a": True}, "additionalProperties": False},
    {"additionalProperties": {"type": "array"}},
    {"items": {"type": "integer"}},
    {"anyOf": [{"type": "string"}, {"required": ["b"]}]},
    {"allOf": [{"type": "object"}, {"required": ["a"]}]},
    {"oneOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer"}}]},
    {"$defs": {"x": {"type": "string"}}, "$ref": "#/$defs/x"},
]


@pytest.mark.parametrize("seed", range(72))
def test_it_says_what_jsonschema_says(seed: int) -> None:
    rng = random.Random(seed)
    schema = rng.choice(PARTS)
    if seed >= len(PARTS):
        schema = {"allOf": rng.sample([p for p in PARTS if "#" not in str(p)], 2)}
    else:
        schema = PARTS[seed]
    formats = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
    for value in VALUES:
        assert fits(value, schema) is validator.is_valid(value), (value, schema)


def test_a_pattern_ends_with_the_text() -> None:
    # a line break behind it is no end in JSON Schema, though it is one for Python
    assert not fits("a\n", {"pattern": "^[a-z]+$"})
    assert fits("a\n", {"pattern": "^[a-z]+\\n$"})


def test_what_is_malformed_says_nothing() -> None:
    odd: list[Any] = [5, None, {"type": "str"}, {"required": True, "properties": []}, {"enum": 5}]
    odd += [{"multipleOf": 0}, {"exclusiveMinimum": True}, {"prefixItems": 5}]
    for schema in (*odd, {"minimum": "5"}, {"$ref": "#/nothing"}, {"anyOf": {}}, {"$ref": "#"}):
        assert fits(7, schema), schema
    assert not fits({}, False)
    assert fits("b", {"pattern": "(?=a)"})  # nothing here can judge it
    assert fits("b", {"format": "of nobody"})


def test_a_text_that_is_too_much_for_a_pattern_says_nothing_and_spoils_nothing() -> None:
    counts = {"pattern": "^(a{1,50}){1,50}$"}
    assert fits("a" * 100, counts)
    assert fits("a" * 1000, counts)  # llguidance gives up
    assert fits("a" * 100, counts)
    assert not fits("b", counts)


def test_no_schema_keeps_it_busy() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(72):
        deep = {"allOf": [deep, deep]}
    begin = time.process_time()
    assert fits(1, deep)
    assert not fits("a" * 20_000 + "!", {"pattern": "^(a+)+$"})
    many = {"allOf": [{"pattern": f"^(x{i}|a|aa)*$"} for i in range(1000)]}
    assert not fits("a" * 1000 + "!", many)
    assert fits("a" * 1000, many)
    assert fits(10**400, {"multipleOf": 10})
    assert time.process_time() - begin < 5
