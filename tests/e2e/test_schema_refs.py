"""JSON schemas that refer to themselves: what the grammar lets through is what the schema says."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from spelling import guide, lets_through

from specllama.backend.llama import LlamaModel

pytestmark = pytest.mark.e2e

TREE = {
    "type": "object",
    "properties": {
        "name": {"enum": ["a", "b"]},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    },
    "required": ["name", "children"],
    "additionalProperties": False,
}
CHAIN = {
    "$ref": "#/$defs/link",
    "$defs": {
        "link": {
            "type": "object",
            "properties": {
                "n": {"enum": [0, 1]},
                "next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]},
            },
            "required": ["n", "next"],
            "additionalProperties": False,
        }
    },
}
# a sum holds products, a product holds sums; the names need escapes
SUMS = {
    "$ref": "#/$defs/a~1sum",
    "$defs": {
        "a/sum": {
            "anyOf": [
                {"enum": [1, 2]},
                {
                    "type": "object",
                    "properties": {"add": {"type": "array", "items": {"$ref": "#/$defs/p%20~0"}}},
                    "required": ["add"],
                    "additionalProperties": False,
                },
            ]
        },
        "p ~": {
            "type": "object",
            "properties": {"times": {"type": "array", "items": {"$ref": "#/$defs/a~1sum"}}},
            "required": ["times"],
            "additionalProperties": False,
        },
    },
}


def tree(rng: random.Random, depth: int) -> Any:
    n = rng.randint(0, 2) if depth else 0
    return {"name": rng.choice("ab"), "children": [tree(rng, depth - 1) for _ in range(n)]}


def chain(rng: random.Random, depth: int) -> Any:
    ends = not depth or rng.random() < 0.2
    return {"n": rng.randint(0, 1), "next": None if ends else chain(rng, depth - 1)}


def sums(rng: random.Random, depth: int) -> Any:
    if not depth or rng.random() < 0.3:
        return rng.randint(1, 2)
    n = rng.randint(0, 2)
    return {"add": [{"times": [sums(rng, depth - 1) for _ in range(n)]} for _ in range(n)]}


def is_tree(v: Any) -> bool:
    return (
        isinstance(v, dict)
        and set(v) == {"name", "children"}
        and v["name"] in ("a", "b")
        and isinstance(v["children"], list)
        and len(v["children"]) <= 2
        and all(map(is_tree, v["children"]))
    )


def is_chain(v: Any) -> bool:
    return (
        isinstance(v, dict)
        and set(v) == {"n", "next"}
        and v["n"] in (0, 1)
        and v["n"] is not True
        and (v["next"] is None or is_chain(v["next"]))
    )


def is_sum(v: Any) -> bool:
    if type(v) is int:
        return v in (1, 2)
    if not isinstance(v, dict) or set(v) != {"add"} or not isinstance(v["add"], list):
        return False
    return all(
        isinstance(p, dict)
        and set(p) == {"times"}
        and isinstance(p["times"], list)
        and all(map(is_sum, p["times"]))
        for p in v["add"]
    )


CASES = [
    pytest.param(TREE, tree, is_tree, id="itself"),
    pytest.param(CHAIN, chain, is_chain, id="by name"),
    pytest.param(SUMS, sums, is_sum, id="each other"),
]


def broken(value: Any, rng: random.Random) -> Any:
    """The same document with one inner place replaced by something else."""
    copy = json.loads(json.dumps(value))
    place: Any = copy
    while True:
        key = rng.choice(list(place) if isinstance(place, dict) else list(range(len(place))))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.3:
            place[key] = rng.choice(["x", True, {"y": 1}, [None]])
            return copy
        place = inner


@pytest.mark.parametrize(("schema", "make", "check"), CASES)
def test_generated_documents_pass_and_damaged_ones_do_not(
    llama: LlamaModel, schema: Any, make: Any, check: Any
) -> None:
    grammar = guide("schema", json.dumps(schema), llama.vocab)
    rng = random.Random(1)
    refused = 0
    for _ in range(60):
        value = make(rng, rng.randint(0, 5))
        assert check(value)
        assert lets_through(llama, grammar, json.dumps(value)), value
        if isinstance(value, dict):
            other = broken(value, rng)
            assert lets_through(llama, grammar, json.dumps(other)) is check(other), other
            refused += not check(other)
    assert refused > 20


def test_references_of_one_name_in_two_places_and_odd_names(llama: LlamaModel) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"$ref": "#/$defs/one/x"},
            "ref-x": {"$ref": "#/$defs/two/x"},
            "": {"$ref": "#/$defs/string"},
            "$ref": {"type": "null"},
        },
        "required": ["a", "ref-x", "", "$ref"],
        "$defs": {
            "one": {"x": {"type": "integer"}},
            "two": {"x": {"type": "boolean"}},
            "string": {"enum": ["only"]},
        },
    }
    grammar = guide("schema", json.dumps(schema), llama.vocab)
    good = {"a": 3, "ref-x": True, "": "only", "$ref": None}
    assert lets_through(llama, grammar, json.dumps(good))
    for key, value in (("a", True), ("ref-x", 3), ("", "other"), ("$ref", 1)):
        assert not lets_through(llama, grammar, json.dumps({**good, key: value}))
