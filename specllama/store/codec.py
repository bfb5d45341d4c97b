"""JSON for the stores: parameters in and out, and numbers that JSON lacks."""

from __future__ import annotations

import dataclasses
import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from specllama.errors import UsageError
from specllama.events import Event, ReasoningDelta, RoundDone, TextDelta
from specllama.settings.params import GenerateParams, SamplingParams


def json_ready(value: Any) -> Any:
    """Convert to plain data: no dataclasses or tuples, paths, infinities and NaN as text, keys as
    strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(k): json_ready(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(v) for v in value]
    if isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


def encode(value: Any) -> bytes:
    """Return one JSON document without a newline in it; lone surrogates become question marks."""
    ready = json_ready(value)
    try:
        return msgspec.json.encode(ready)
    except UnicodeEncodeError:
        text = json.dumps(ready, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")


_EVERY_ROUND = frozenset((RoundDone, TextDelta, ReasoningDelta))  # what comes again and again


def encode_event(event: Event, name: str = "", **more: int) -> bytes:
    """Return ``encode({**event.to_dict(), **more})``, with ``name`` in place of the event's own.

    An event of every round is encoded as it lies in memory: between passes that have emptied the
    processor's caches, going through its fields one by one takes longer than all else.
    """
    global _newest
    name = name or event.type
    of, fields = _newest
    if of is not event:
        fields = _fields_of(event)
        _newest = event, fields
    if not fields:
        return encode({**event.to_dict(), "type": name, **more})
    end = b"".join([b',"%s":%d' % (key.encode(), value) for key, value in more.items()])
    return b'{"type":"%s",%s%s}' % (name.encode(), fields, end)


_newest: tuple[Event | None, bytes] = (None, b"")  # its fields: log and printer say them in turn


def _fields_of(event: Event) -> bytes:
    """Encode an event that every round sends; return b"" for one that needs more care."""
    if type(event) not in _EVERY_ROUND or not _finite(event):
        return b""
    try:
        return msgspec.json.encode(event)[1:-1]
    except UnicodeEncodeError:
        return b""


def _finite(event: Event) -> bool:
    """True if all numbers of the event are certainly valid in JSON."""
    if type(event) is not RoundDone:
        return True
    numbers = (event.balance, event.plain_ms, event.plain_spread)
    known = filter(None, (*numbers, *event.confidence, *event.p, *event.q))
    return not event.chances and all(map(math.isfinite, known))


def params_to_dict(params: GenerateParams) -> dict[str, Any]:
    ready: dict[str, Any] = json_ready(params)
    for name in ("owner", "slot"):  # no log and no other machine needs them
        del ready[name]
    return ready


def params_from_dict(data: Any) -> GenerateParams:
    """Read parameters leniently: drop unknown keys, wrong types and values out of range."""
    if not isinstance(data, dict):
        return GenerateParams()
    sampling = keep_valid(SamplingParams(), data.get("sampling"))
    params: GenerateParams = keep_valid(GenerateParams(sampling=sampling), data, skip="sampling")
    return params


def changed(before: GenerateParams, after: GenerateParams) -> dict[str, Any]:
    """Return the fields of ``after`` that differ from ``before``, ready for JSON. A sampling field
    that is left to the model's card is None."""
    was, now = _fields(before), _fields(after)
    return {name: value for name, value in now.items() if value != was[name]}


def with_changes(params: GenerateParams, changes: dict[str, Any]) -> GenerateParams:
    """Return the parameters with the valid ones of these changes."""
    sampling = {name: value for name, value in changes.items() if name in _SAMPLING}
    valid = keep_valid(params.sampling, {k: v for k, v in sampling.items() if v is not None})
    params = keep_valid(params, {k: v for k, v in changes.items() if k not in sampling})
    for name, value in sampling.items():
        params = params.choose(name, None if value is None else getattr(valid, name))
    return params


_SAMPLING = frozenset(field.name for field in dataclasses.fields(SamplingParams))


def _fields(params: GenerateParams) -> dict[str, Any]:
    """Return every setting by its name, those of the sampler included."""
    fields = params_to_dict(params)
    left = fields.pop("from_card")
    sampling = fields.pop("sampling")
    return fields | {name: None if name in left else value for name, value in sampling.items()}


def keep_valid(base: Any, data: Any, skip: str = "") -> Any:
    """Return a dataclass with the valid ones of these fields; drop all others."""
    if not isinstance(data, dict):
        return base
    for name, kind in get_type_hints(type(base)).items():
        if name not in data or name == skip:
            continue
        with suppress(UsageError, msgspec.ValidationError):
            value = msgspec.convert(data[name], kind, strict=False)
            base = dataclasses.replace(base, **{name: value})
    return base
