"""JSON schemas against the published suite (``make schemas``): nothing that it calls invalid is let
through. SPECLLAMA_SCHEMA_SUITE names its folder, the one that holds ``draft7``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spelling import guide, takes

from specllama.errors import UsageError

SUITE = Path(os.environ.get("SPECLLAMA_SCHEMA_SUITE") or "")
# since draft 2019-09 what stands beside a reference counts; llguidance reads all drafts so
OTHERWISE = ("$ref prevents a sibling $id from changing the base uri",)
DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")


def suite() -> Iterator[tuple[Path, dict[str, Any]]]:
    for draft in DRAFTS:
        for file in sorted((SUITE / draft).glob("*.json")):
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


def test_nothing_that_the_suite_calls_invalid_is_let_through() -> None:
    passed = rejected = narrower = refused = 0
    wrong: list[tuple[str, ...]] = []
    for file, group in suite():
        if not isinstance(group["schema"], dict | bool):
            continue
        try:
            g = guide("schema", json.dumps(group["schema"]))
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
    assert passed, "SPECLLAMA_SCHEMA_SUITE names the folder that holds draft7"
    assert not wrong, "\n".join(map(" / ".join, wrong))
    assert passed > 3 * narrower
