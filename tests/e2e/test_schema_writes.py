"""JSON schemas over the tokens of a model: models write JSON that satisfies them."""

from __future__ import annotations

import json

import pytest

from specllama.engine.engine import Engine
from specllama.events import Finished
from specllama.settings.params import GenerateParams, SamplingParams

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
        year, month, day = map(int, card["when"].split("-"))
        assert year >= 0
        assert 1 <= month <= 12
        assert 1 <= day <= 31
        assert len(card["tags"]) <= 3
        assert set(card["tags"]) <= {"fast", "small"}
        assert card["note"] is None or len(card["note"]) <= 40
