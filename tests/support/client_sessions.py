"""Sessions of real clients, as `tests/lab/client_transcript.py` kept them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "data" / "clients"
GAP = re.compile(r"<(\d+) ([0-9a-f]{6})>")


def filled(value: Any) -> Any:
    """Put our own words where a vendor's text was, as many characters, the same for the same."""
    if isinstance(value, dict):
        return {name: filled(one) for name, one in value.items()}
    if isinstance(value, list):
        return [filled(one) for one in value]
    gap = GAP.fullmatch(value) if isinstance(value, str) else None
    if gap is None:
        return value
    size = int(gap[1])
    return (f"{gap[2]} rain falls " * size)[:size]


def session(name: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    bodies: list[dict[str, Any]] = []
    for exchange in told["exchanges"]:
        if "body" not in exchange:
            continue
        body = exchange["body"] = filled(exchange["body"])
        for field, value in body.items():
            if isinstance(value, dict) and value.keys() == {"of", "first", "more"}:
                body[field] = [*bodies[value["of"]][field][: value["first"]], *value["more"]]
        bodies.append(body)
    return told
