"""JSON schemas: what is let through satisfies the schema, the rest is refused by name.

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

import numpy as np
import pytest
from schema_cases import INT, REFUSED, STR, TABLE
from spelling import END, ends, guide, takes

from specllama.errors import UsageError
from specllama.grammar.guide import Guide


def schema(of: Any) -> Guide:
    return guide("schema", json.dumps(of))


@pytest.mark.parametrize(("of", "good", "bad"), [t[1:] for t in TABLE], ids=[t[0] for t in TABLE])
def test_what_passes_and_what_does_not(of: Any, good: list[Any], bad: list[Any]) -> None:
    g = schema(of)
    for value in good:
        assert takes(g, json.dumps(value, ensure_ascii=False)), value
        assert takes(g, json.dumps(value, ensure_ascii=False, indent=2)), value
    for value in bad:
        assert not takes(g, json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize(("of", "says"), REFUSED, ids=lambda v: json.dumps(v)[:50])
def test_what_cannot_be_enforced_is_refused_by_name(of: Any, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        schema(of)
    assert says in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("part", "place"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "format": "odd"}, "format"),
        ({"type": "string", "pattern": "(?=a)"}, "pattern"),
        ({"$ref": "#/$defs/nothing"}, "$ref"),
        ({"anyOf": [{"type": "null"}, {"contains": {}}]}, "anyOf[1].contains"),
    ],
)
def test_what_is_refused_is_named_with_its_place(part: Any, place: str) -> None:
    # names of properties and values are no keywords
    listed = {"enum": ["not", {"uniqueItems": True, "contains": 1}]}
    of = {
        "properties": {"contains": listed, "not": {"type": "array", "items": part}},
        "type": "object",
    }
    with pytest.raises(UsageError, match=re.escape(f"(at properties.not.items.{place})")):
        schema(of)
    with pytest.raises(UsageError, match=r"uniqueItems \(at the top"):
        schema({"type": "array", "uniqueItems": True})


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({**INT, "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3) (at {}.min"),
        ({"type": "string", "minLength": 5, "maxLength": 2}, "(at {}.minLength)"),
        ({"type": "string", "pattern": "^a$", "minLength": 3}, "(at {}.pattern)"),
        ({"allOf": [{"type": "string"}, INT]}, "incompatible types (at {})"),
        ({"anyOf": [{**INT, "minimum": 5, "maximum": 3}]}, "(at {}.anyOf[0].minimum)"),
        ({"$ref": "#/$defs/none"}, "minItems (3) is greater than maxItems (1) (at $defs.none."),
    ],
)
@pytest.mark.parametrize("place", ["properties.a.properties.b", "items.properties.a"])
def test_a_part_without_a_value_is_named_with_its_place(part: Any, says: str, place: str) -> None:
    of = part
    for step in reversed(place.replace("properties.", "").split(".")):
        if step == "items":
            of = {"type": "array", "items": of, "minItems": 1}
        else:
            of = {"type": "object", "properties": {"z": part, step: of}, "required": [step]}
    of["$defs"] = {"none": {"type": "array", "minItems": 3, "maxItems": 1}}
    with pytest.raises(UsageError, match=re.escape(says.format(place))):
        schema(of)


def test_an_integer_ends() -> None:
    for of in (INT, {"type": ["integer", "null"]}, {**INT, "multipleOf": 5}, {**INT, "minimum": 0}):
        g = schema(of)
        assert takes(g, "9" * 17 + "5"[: "multipleOf" in of]), of
        assert not takes(g, "1" + "0" * 30), of
        assert not takes(g, "-1" + "0" * 30), of
    within = schema(
        {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}, "$defs": {"n": INT}}
    )
    assert takes(within, '{"n": 12}')
    assert not takes(within, '{"n": 1' + "0" * 30 + "}")
    # what says its size keeps it
    assert takes(schema({"enum": [10**18], **INT}), str(10**18))
    assert not takes(schema({**INT, "maximum": 99}), "100")


@pytest.mark.parametrize("text", ["{", "3", "[]", '{"minimum": NaN}', "[" * 100_000, "false"])
def test_what_is_no_schema(text: str) -> None:
    with pytest.raises(UsageError):
        guide("schema", text)


def test_a_schema_may_be_true() -> None:
    for value in ("1", '"x"', "[null]", '{"a": {}}'):
        assert takes(guide("schema", "true"), value)


def test_a_schema_cannot_loosen_how_it_is_read() -> None:
    g = schema({"type": "array", "x-guidance": {"whitespace_pattern": "[ x]*", "lenient": True}})
    assert not takes(g, "[x]")
    with pytest.raises(UsageError, match="uniqueItems"):
        schema({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}})


def test_white_space_ends() -> None:
    g = schema({"type": "array"})
    assert takes(g, "[ 1,\n" + " " * 20 + "2 ]")
    for text in ("[  1]", "[\n\n1]", "[\n" + " " * 21 + "1]", "[1] ", " [1]"):
        assert not takes(g, text), text


def test_control_characters_and_half_pairs_are_no_part_of_a_string() -> None:
    g = schema(STR)
    for text in ('"a\nb"', '"\t"', '"\x01"', '"\\x"', '"\\ud800"', '"\\u00g0"', '"a'):
        assert not takes(g, text), text
    for text in ('"a\\nb"', '"\\u00e9"', '"\\ud7ff"', '"\\ud83d\\ude00"', '"é😀"', '"\\\\"'):
        assert takes(g, text), text


@pytest.mark.parametrize(("least", "most"), [(0, 63), (64, 64), (63, 4097), (0, 9000)])
def test_lengths_are_counted_exactly(least: int, most: int) -> None:
    g = schema({**STR, "minLength": least, "maxLength": most})
    near = {least - 1, least, least + 1, most - 1, most, most + 1}
    for n in sorted(n for n in near if n >= 0):
        assert takes(g, '"' + "x" * n + '"') is (least <= n <= most), n


def test_items_are_counted_exactly() -> None:
    g = schema({"type": "array", "items": {"const": 1}, "minItems": 65, "maxItems": 130})
    for n in (0, 1, 64, 65, 66, 129, 130, 131):
        assert takes(g, json.dumps([1] * n)) is (65 <= n <= 130), n


# ---- everything that can be written is right

BYTES = np.arange(END, dtype=np.int32)
CLOSING = tuple(b'"]}')


def written(g: Guide, rng: random.Random) -> str | None:
    """A random text; None if it does not end soon."""
    g, text = g.fork(), bytearray()
    for _ in range(400):
        if ends(g) and rng.random() < 0.5:
            return text.decode()
        allowed = np.flatnonzero(g.allowed(BYTES)).tolist()
        if not allowed:
            return text.decode() if ends(g) else None
        soon = [b for b in CLOSING if b in allowed]
        plain = [b for b in allowed if b < 128] or allowed
        byte = rng.choice(soon if soon and rng.random() < 0.4 else plain)
        g.accept(byte)
        text.append(byte)
    return None


@pytest.mark.parametrize("of", [t[1] for t in TABLE], ids=[t[0] for t in TABLE])
def test_what_is_written_satisfies_the_schema(of: Any) -> None:
    validator = pytest.importorskip("jsonschema")
    if isinstance(of.get("exclusiveMinimum"), bool):
        check = validator.Draft4Validator(of)
    elif isinstance(of.get("items"), list):
        check = validator.Draft7Validator(of)
    else:
        check = validator.Draft202012Validator(
            of, format_checker=validator.FormatChecker(["uuid", "ipv4"])
        )
    g, rng, n = schema(of), random.Random(1), 0
    for _ in range(40):
        text = written(g, rng)
        if text is not None:
            check.validate(json.loads(text))
            n += 1
    assert n > 1


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


def test_broken_schemas_are_usage_errors_or_are_followed() -> None:
    """More of them: SPECLLAMA_FUZZ_SCHEMAS=100000."""
    rng = random.Random(1)
    made = refused = 0
    for _ in range(BROKEN):
        try:
            schema(_mutated(rng.choice(TABLE)[1], rng)).allowed(BYTES)
        except UsageError:
            refused += 1
        else:
            made += 1
    assert made > 40
    assert refused > 40


# ---- the published suite

SUITE = os.environ.get("SPECLLAMA_SCHEMA_SUITE")
# since draft 2019-09 what stands beside a reference counts; llguidance reads all drafts so
OTHERWISE = ("$ref prevents a sibling $id from changing the base uri",)
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
    wrong: list[tuple[str, ...]] = []
    for file, group in suite():
        if not isinstance(group["schema"], dict | bool):
            continue
        try:
            g = schema(group["schema"])
        except UsageError:
            refused += len(group["tests"])
            continue
        for case in group["tests"]:
            text = json.dumps(in_order(case["data"], group["schema"]), ensure_ascii=False)
            accepted = takes(g, text)
            where = (file.parent.name, file.name, group["description"], case["description"])
            if accepted and not case["valid"] and group["description"] not in OTHERWISE:
                wrong.append(where)
            passed += accepted and case["valid"]
            rejected += not case["valid"] and not accepted
            narrower += case["valid"] and not accepted
    print(f"passed {passed}, rejected {rejected}, narrower {narrower}, refused {refused}")
    assert not wrong, "\n".join(map(" / ".join, wrong))
    assert passed > 3 * narrower
