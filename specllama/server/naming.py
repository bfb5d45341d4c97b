"""The fields that name a model and its time to stay loaded, in every family's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from specllama.errors import UsageError
from specllama.server.refusals import wrong
from specllama.settings import duration

FIELDS = frozenset({"model", "keep_alive", "ttl", "draft_model", "stream"})
_OFF = ("none", "")  # no draft model


@dataclass(frozen=True, slots=True)
class Naming:
    """The wishes of a request about its model.

    Attributes:
        model: None if it names none.
        keep_s: seconds that the model may stay loaded unused after this request, which is Ollama's
            ``keep_alive`` and LM Studio's ``ttl``; None if it sets none.
        undrafted: it wants no draft model.
        stream: it wants the text as it comes.
    """

    model: str | None = None
    keep_s: float | None = None
    undrafted: bool = False
    stream: bool = False


def naming_of(fields: Mapping[str, msgspec.Raw]) -> Naming:
    """Read these fields; raise Refusal if a value is wrong."""
    given = {name: msgspec.json.decode(fields[name]) for name in FIELDS & fields.keys()}
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise wrong("model", "model: a name is wanted")
    keep_s = _seconds("keep_alive", given.get("keep_alive"))
    if keep_s is None:
        keep_s = _seconds("ttl", given.get("ttl"))
    draft = given.get("draft_model")
    undrafted = isinstance(draft, str) and draft.lower() in _OFF
    return Naming(model, keep_s, undrafted, given.get("stream") is True)


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise wrong(name, f'{name}: a duration is wanted, such as "5m" or 300')
    try:
        return duration.seconds(value)
    except UsageError as error:
        raise wrong(name, f"{name}: {error.message}") from None
