"""JSON schemas and llama.cpp: its sampler reads the grammars as meant, and models write JSON."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from schema_cases import STR, TABLE
from spelling import lets_through

from specllama.backend.llama import LlamaModel
from specllama.backend.llama_grammar import LlamaGrammar
from specllama.engine.engine import Engine
from specllama.events import Finished
from specllama.params import GenerateParams, SamplingParams

pytestmark = pytest.mark.e2e

CARD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 3, "maxLength": 30},
        "id": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "age": {"type": "integer", "minimum": 18, "maximum": 120},
        "score": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        "when": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": ["fast", "small"]}, "maxItems": 3},
        "note": {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 40}]},
    },
    "required": ["name", "id", "age", "score", "when", "tags", "note"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"), [t[1:] for t in TABLE], ids=[t[0] for t in TABLE]
)
def test_llama_reads_the_grammars_as_meant(
    llama: LlamaModel, schema: Any, good: list[Any], bad: list[Any]
) -> None:
    grammar = LlamaGrammar.from_json_schema(llama.vocab, json.dumps(schema))
    for value in good:
        assert lets_through(llama, grammar, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not lets_through(llama, grammar, json.dumps(value, ensure_ascii=False)), value


def test_control_characters_and_half_pairs_are_no_part_of_a_string(llama: LlamaModel) -> None:
    grammar = LlamaGrammar.from_json_schema(llama.vocab, json.dumps(STR))
    for text in ('"a\nb"', '"\t"', '"\x01"', '"\\x"', '"\\ud800"', '"\\u00g0"', '"a'):
        assert not lets_through(llama, grammar, text), text
    for text in ('"a\\nb"', '"\\u00e9"', '"\\ud7ff"', '"é😀"', '"\\\\"'):
        assert lets_through(llama, grammar, text), text


def test_lengths_in_the_thousands(llama: LlamaModel) -> None:
    schema = {**STR, "minLength": 2500, "maxLength": 5000}
    grammar = LlamaGrammar.from_json_schema(llama.vocab, json.dumps(schema))
    for n, fine in ((2499, False), (2500, True), (4999, True), (5000, True), (5001, False)):
        assert (
            lets_through(llama, grammar, '"' + "word " * (n // 5) + "x" * (n % 5) + '"') is fine
        ), n


def test_the_bundled_target_writes_what_the_schema_says(tiny: Engine) -> None:
    params = GenerateParams(
        sampling=SamplingParams(temperature=1.0),
        max_tokens=400,
        json_schema=json.dumps(CARD),
        proposer="mixed",
        window="fixed",
    )
    for seed in range(16):
        *_, last = tiny.generate("A person, as JSON: ", params.replace(seed=seed))
        assert isinstance(last, Finished)
        assert last.reason == "stop_token", last.text
        card = json.loads(last.text)
        assert list(card) == CARD["required"]
        assert 3 <= len(card["name"]) <= 30
        assert card["id"][:2].isupper()
        assert card["id"][2] == "-"
        assert card["id"][3:].isdecimal()
        assert type(card["age"]) is int
        assert 18 <= card["age"] <= 120
        assert 0 <= card["score"] < 1
        time.strptime(card["when"], "%Y-%m-%d")
        assert len(card["tags"]) <= 3
        assert set(card["tags"]) <= {"fast", "small"}
        assert card["note"] is None or len(card["note"]) <= 40
