"""JSON schemas as grammars: what is let through satisfies the schema, the rest is refused by name.

``schema_cases`` says for each schema which documents pass and which do not; the published test
suite runs as well where SPECLLAMA_SCHEMA_SUITE names its folder (the one that holds ``draft7``).
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gbnf import Gbnf
from schema_cases import INT, NUM, STR, TABLE, obj

from specllama.errors import UsageError
from specllama.grammar import values
from specllama.grammar.convert import schema_to_gbnf
from specllama.grammar.values import same_as


def grammar(schema: Any) -> Gbnf:
    return Gbnf(schema_to_gbnf(json.dumps(schema)))


@pytest.mark.parametrize(
    ("schema", "good", "bad"), [t[1:] for t in TABLE], ids=[t[0] for t in TABLE]
)
def test_what_passes_and_what_does_not(schema: Any, good: list[Any], bad: list[Any]) -> None:
    g = grammar(schema)
    for value in good:
        assert g.accepts(json.dumps(value, ensure_ascii=False)), value
        if not {"enum", "const"} & schema.keys():  # listed values are written in one way
            assert g.accepts(json.dumps(value, ensure_ascii=False, indent=2)), value
    for value in bad:
        assert not g.accepts(json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array", "items": INT, "uniqueItems": True}, "uniqueItems at #"),
        (obj({"a": {"contains": INT, "type": "array"}}), "contains at #/properties/a"),
        ({"not": INT}, "not at #"),
        ({"if": INT, "then": {"minimum": 1}}, "if at #"),
        (obj({"a": INT}, unevaluatedProperties=False), "unevaluatedProperties at #"),
        ({"type": "array", "unevaluatedItems": False}, "unevaluatedItems at #"),
        ({**STR, "format": "regex"}, "format at #"),
        ({**STR, "pattern": "(?=a)b"}, "pattern at #"),
        ({**STR, "pattern": r"(a)\1"}, "pattern at #"),
        ({**STR, "pattern": "["}, "pattern at #"),
        ({**STR, "pattern": "^(a{1,2000}b{1,2000}){5}$"}, "pattern at #"),
        ({**NUM, "multipleOf": 0.01}, "multipleOf at #"),
        ({**INT, "multipleOf": 10007}, "multipleOf at #"),
        ({**INT, "multipleOf": 0}, "multipleOf at #"),
        ({"oneOf": [INT, NUM]}, "oneOf at #"),
        ({"oneOf": [obj({"a": INT}, "a"), obj({"a": INT, "b": INT}, "a")]}, "oneOf at #"),
        ({"type": "object", "minProperties": 2}, "minProperties at #"),
        ({**STR, "maxLength": 10**9}, "maxLength at #"),
        ({**STR, "minLength": 10**9}, "minLength at #"),
        ({"type": "array", "maxItems": 10**12}, "maxItems at #"),
        ({**INT, "maximum": 1e301}, "maximum at #"),
        ({**STR, "minLength": 3, "maxLength": 2}, "minLength at # of the JSON schema (3) is above"),
        ({**INT, "minimum": 3, "maximum": 2}, "minimum at # of the JSON schema (3) is above"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "minItems at #"),
        (obj({"a": INT}, minProperties=3, maxProperties=2), "minProperties at #"),
        ({**STR, "minLength": -1}, "minLength at #"),
        ({**STR, "minLength": "3"}, "minLength at #"),
        ({**INT, "minimum": "3"}, "minimum at #"),
        (obj({"a": {**INT, "required": True}}), "required at #/properties/a"),
        ({"type": "object", "required": [1]}, "required at #"),
        ({**STR, "pattern": 3}, "pattern at #"),
        ({"items": 3}, "items at #"),
        ({"properties": [INT]}, "properties at #"),
        ({"type": "banana"}, "type at #"),
        ({"type": "integer", "enum": ["a"]}, "no finite value"),
        ({"enum": []}, "no finite value"),
        ({"allOf": [INT, STR]}, "types at #"),
        ({"allOf": [{**INT, "minimum": 3}, {"maximum": 2}]}, "no number lies between 3 and 2"),
        ({**INT, "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "no number"),
        (obj({"a": False}, "a"), "'a' is required"),
        ({"type": "object", "required": ["a"], "maxProperties": 0}, "at most 0"),
        (obj({"a": {"$ref": "#"}}, "a"), "no finite value"),
        ({"$ref": "#", "minimum": 1}, "only by itself"),
        ({"disallow": INT}, "disallow at #"),
        ({"$dynamicRef": "#x"}, "$dynamicRef at #"),
    ],
    ids=lambda v: json.dumps(v)[:50],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        grammar(schema)
    assert says in caught.value.message
    assert len(caught.value.message) < 400


@pytest.mark.parametrize("text", ["{", "3", "true", "[]", '{"minimum": NaN}', "[" * 100_000])
def test_what_is_no_schema(text: str) -> None:
    with pytest.raises(UsageError):
        schema_to_gbnf(text)


# ---- lengths in the thousands


@pytest.mark.parametrize(
    ("least", "most"),
    [(0, 63), (0, 64), (1, 65), (0, 129), (70, 200), (64, 64), (63, 4097), (4095, 4096), (0, 9000)],
)
def test_lengths_are_counted_exactly(least: int, most: int) -> None:
    text = schema_to_gbnf(json.dumps({**STR, "minLength": least, "maxLength": most}))
    assert len(text) < 2_000
    assert text.count("(") < 10
    g = Gbnf(text)
    near = {least - 1, least, least + 1, (least + most) // 2, most - 1, most, most + 1}
    for n in sorted(n for n in near if n >= 0):
        assert g.accepts('"' + "x" * n + '"') is (least <= n <= most), n


def test_items_are_counted_exactly() -> None:
    g = grammar({"type": "array", "items": {"const": 1}, "minItems": 65, "maxItems": 130})
    for n in (0, 1, 64, 65, 66, 129, 130, 131):
        assert g.accepts(json.dumps([1] * n)) is (65 <= n <= 130), n


def test_a_million_costs_little() -> None:
    text = schema_to_gbnf(json.dumps({**STR, "minLength": 10**6, "maxLength": 10**7}))
    assert len(text) < 4_000
    assert all(int(n) <= 64 for n in re.findall(r"[{,](\d+)(?=[,}])", text))


# ---- everything that can be written is right


class Writer:
    """Random texts of a grammar."""

    def __init__(self, g: Gbnf, rng: random.Random) -> None:
        self._rules = g.rules
        self._rng = rng
        self._steps = 0

    def text(self) -> str | None:
        """None if it does not end soon."""
        self._steps = 0
        try:
            return "".join(self._walk(("name", "root"), 0))
        except RecursionError:
            return None

    def _walk(self, part: Any, depth: int) -> Iterator[str]:
        rng = self._rng
        self._steps += 1
        if self._steps > 3_000 or depth > 400:
            raise RecursionError
        kind = part[0]
        if kind == "literal":
            yield part[1]
        elif kind == "set":
            negated, ranges = part[1:]
            if negated:
                yield rng.choice("aZ09 é{}[]:,😀'/")
            else:
                low, high = rng.choice(ranges)
                yield chr(rng.randint(low, min(high, low + 300)))
        elif kind == "name":
            yield from self._walk(self._rules[part[1]], depth + 1)
        elif kind == "alt":
            yield from self._walk(rng.choice(part[1]), depth)
        elif kind == "seq":
            for inner in part[1]:
                yield from self._walk(inner, depth)
        else:
            _, inner, low, high = part
            for _ in range(rng.randint(low, min(low + 3, high if high is not None else low + 3))):
                yield from self._walk(inner, depth)


@pytest.mark.parametrize("schema", [t[1] for t in TABLE], ids=[t[0] for t in TABLE])
def test_what_is_written_satisfies_the_schema(schema: Any) -> None:
    validator = pytest.importorskip("jsonschema")
    dated = schema
    if isinstance(schema.get("exclusiveMinimum"), bool):
        check = validator.Draft4Validator(dated)
    elif isinstance(schema.get("items"), list):
        check = validator.Draft7Validator(dated)
    else:
        check = validator.Draft202012Validator(
            dated, format_checker=validator.FormatChecker(["date", "uuid", "ipv4"])
        )
    writer = Writer(grammar(schema), random.Random(1))
    written = 0
    for _ in range(150):
        text = writer.text()
        if text is not None:
            check.validate(json.loads(text))
            written += 1
    assert written > 20


# ---- schemas with something broken in them

BROKEN = int(os.environ.get("SPECLLAMA_FUZZ_SCHEMAS", "400"))  # tests see no SPECLLAMA_* variable


def _mutated(schema: Any, rng: random.Random) -> Any:
    """The schema with a value somewhere in it replaced."""
    copy = json.loads(json.dumps(schema))
    places: list[tuple[Any, Any]] = []
    todo = [copy]
    while todo:
        inside = todo.pop()
        for key in inside if isinstance(inside, dict) else range(len(inside)):
            places.append((inside, key))
            if isinstance(inside[key], dict | list):
                todo.append(inside[key])
    if places:
        inside, key = rng.choice(places)
        other = rng.choice([t[1] for t in TABLE])
        junk = [None, True, False, -1, 0.5, 10**9, 1e300, "", "^(", [], {}, [1], [{}], [[]], other]
        inside[key] = json.loads(json.dumps(rng.choice(junk)))
    return copy


def test_broken_schemas_are_usage_errors_or_grammars() -> None:
    """More of them: SPECLLAMA_FUZZ_SCHEMAS=100000."""
    rng = random.Random(1)
    made = refused = 0
    for _ in range(BROKEN):
        schema = _mutated(rng.choice(TABLE)[1], rng)
        try:
            text = schema_to_gbnf(json.dumps(schema))
        except UsageError:
            refused += 1
        else:
            assert len(text) < 200_000
            made += 1
    assert made > 40
    assert refused > 40


# ---- the published suite

SUITE = os.environ.get("SPECLLAMA_SCHEMA_SUITE")
DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")


def suite() -> Iterator[tuple[Path, dict[str, Any]]]:
    for draft in DRAFTS if SUITE else ():
        for file in sorted(Path(SUITE or "", draft).glob("*.json")):
            if file.name != "format.json":  # there formats are remarks; here they are kept
                yield from ((file, group) for group in json.loads(file.read_text("utf-8")))


def in_order(value: Any, schema: Any) -> Any:
    """As the grammar writes it: properties in the order of the schema, whole numbers as such."""
    if isinstance(value, float) and value == value // 1 and abs(value) < 1e15:
        return int(value)
    if isinstance(value, list):
        return [in_order(item, None) for item in value]
    if isinstance(value, dict):
        own = schema.get("properties", {}) if isinstance(schema, dict) else {}
        names = [n for n in own if n in value] + [n for n in value if n not in own]
        return {name: in_order(value[name], own.get(name)) for name in names}
    return value


@pytest.mark.skipif(not SUITE, reason="SPECLLAMA_SCHEMA_SUITE is not set")
def test_nothing_that_the_suite_calls_invalid_is_let_through() -> None:
    passed = rejected = narrower = refused = 0
    for file, group in suite():
        schema = group["schema"]
        if not isinstance(schema, dict):
            continue
        try:
            g = grammar(schema)
        except UsageError:
            refused += len(group["tests"])
            continue
        for case in group["tests"]:
            text = json.dumps(in_order(case["data"], schema), ensure_ascii=False)
            accepted = g.accepts(text)
            where = (file.parent.name, file.name, group["description"], case["description"])
            assert case["valid"] or not accepted, where
            passed += accepted
            rejected += not case["valid"]
            narrower += case["valid"] and not accepted
    print(f"passed {passed}, rejected {rejected}, narrower {narrower}, refused {refused}")
    assert passed > 3 * narrower


def test_a_place_is_worked_out_once_however_often_it_is_referred_to() -> None:
    # visits would be 2^60 otherwise, and the test would never end
    defs: dict[str, Any] = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)
    }
    text = schema_to_gbnf(json.dumps({"$defs": {**defs, "d30": STR}, "$ref": "#/$defs/d0"}))
    assert text == schema_to_gbnf(json.dumps(STR))


def test_values_of_a_list_are_compared_by_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0

    def counted(value: Any) -> Any:
        nonlocal asked
        asked += 1
        return same_as(value)

    monkeypatch.setattr(values, "same_as", counted)
    schema_to_gbnf(json.dumps({"enum": [f"v{i}" for i in range(2000)]}))
    assert 0 < asked <= 10_000


def test_equal_values() -> None:
    equal = [(1, 1.0), ([1, {"a": 2}], [1.0, {"a": 2.0}]), ({"a": 1, "b": 2}, {"b": 2, "a": 1})]
    different = [(1, True), (0, False), ([1], [True]), ({"a": 1}, {"a": True}), ("1", 1), ([], {})]
    assert all(same_as(a) == same_as(b) for a, b in equal)
    assert not any(same_as(a) == same_as(b) for a, b in different)
