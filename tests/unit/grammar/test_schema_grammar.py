"""JSON schemas: what is let through satisfies the schema, the rest is refused by name."""

import json
import os
import random
import re
import time
from typing import Any

import jsonschema
import numpy as np
import pytest
from schema_cases import INT, REFUSED, STR, TABLE
from spelling import END, ends, guide, takes

from specllama.errors import UsageError
from specllama.grammar.fitting import fits
from specllama.grammar.guide import Guide, Guides
from specllama.grammar.source import source_of


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


# -- fits: what jsonschema says, and never for long --


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


# -- regular expressions as constraints --


PIECES = [bytes([i]) for i in range(256)]
END = len(PIECES)


def matches(regex: str, text: str) -> bool:
    """Whether a text can be written and then end."""
    guide = Guides([*PIECES, b""], [END]).guide(source_of("regex", regex))
    for byte in (*text.encode(), END):
        try:
            guide.accept(byte)
        except UsageError:
            return False
    return True


@pytest.mark.parametrize(
    ("regex", "texts"),
    [
        ("[0-9]{2}", ("12", "1", "123", "1a")),
        ("^a+$", ("a", "aaa", "", "ab")),
        ("a/b", ("a/b", "a", "a\\/b")),
        (r"a\/b", ("a/b", "a\\/b")),
        (r"a\\/b", (r"a\/b", "a/b")),
        ("a\nb", ("a\nb", "a", "anb")),
        ("a\\\nb", ("a\nb", "a")),
        (r"a\nb", ("a\nb", r"a\nb")),
        ("yes|no", ("yes", "no", "yesno")),
        ("é.", ("éa", "é", "e")),
        ("", ("", "a")),
    ],
)
def test_the_whole_text_matches(regex: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        assert matches(regex, text) == (re.fullmatch(regex, text) is not None), text


@pytest.mark.parametrize("regex", ["[", "(?=a)b", r"(x)\1", "a" * 20_000])
def test_what_cannot_be_enforced_is_refused(regex: str) -> None:
    with pytest.raises(UsageError, match="the regular expression"):
        Guides([*PIECES, b""], [END]).guide(source_of("regex", regex))
