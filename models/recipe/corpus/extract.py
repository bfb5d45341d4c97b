"""The JSON slice: schemas to fill from a sentence; the answer is pure JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from specllama.models.recipe.corpus.base import (
    Check,
    Message,
    Sample,
    Source,
    an,
    conversation,
    turn,
)
from specllama.models.recipe.corpus.records import RECORDS, Field, Record

_SYSTEM = (
    "[Answer|Reply] [in|with] JSON only.",
    "You [extract|read] data and [answer|reply] with JSON.",
    "[Return|Output] one JSON value and nothing else.",
    "~You turn sentences into JSON. No other text.",
)
_ASK_KEYS = (
    "[Extract|Read|Get] {k} [as JSON|in JSON] from: {t}",
    "{t}\n\n[Return|Give me|Write] JSON with the keys {k}.",
    "[Fill|Return] a JSON object with {k}.\n\nText: {t}",
    "Text: {t}\nKeys: {k}\nJSON:",
    "[Here is|This is] a text: {t}\n[Turn it into|Make it] JSON with {k}.",
    "[Wanted|Keys]: {k}\n\n{t}",
    "~Write a JSON object with the keys {k} from: {t}",
)
_ASK_SCHEMA = (
    "Schema: {k}\n[Text|Sentence]: {t}",
    "[Fill this schema|Use this schema]:\n{k}\n\n{t}",
    "{t}\n\n[Answer with JSON of this form|Follow this schema]: {k}",
    "[Take|Get] what {k} asks for from this: {t}",
    "{k}\n\n{t}",
    "~Here is a schema: {k}\nFill it from this text: {t}",
)


def _spoken(value: Any) -> str:
    """Write a value as in a sentence."""
    if isinstance(value, list):
        words = [str(x) for x in value]
        return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
    return str(value)


def _phrase(src: Source, field: Field, value: Any) -> str:
    forms = field.denies if value is False else field.says
    return an(src.form(forms, v=_spoken(value)))


@dataclass
class _Filled:
    text: str
    keys: list[tuple[str, str]]
    value: dict[str, Any]


def _fill(src: Source, record: Record, n: int, missing: float) -> _Filled:
    """Fill one record: its sentence, its keys with types, and the object."""
    name = record.name(src)
    key = src.pick(record.name_key)
    keys = [(key, "string")]
    value: dict[str, Any] = {key: name}
    phrases = []
    for f in src.few(record.fields, n):
        k = src.pick(f.keys)
        if k in value:
            continue
        keys.append((k, f.type))
        if src.maybe(missing):
            value[k] = None
            continue
        value[k] = f.value(src)
        phrases.append(_phrase(src, f, value[k]))
    subject = src.spin(src.pick(record.subject), e=name)
    if not phrases:
        phrases = ["is listed here"]
    src.r.shuffle(phrases)
    return _Filled(_sentence(src, subject, phrases), keys, value)


def _sentence(src: Source, subject: str, phrases: list[str]) -> str:
    style = src.between(0, 2)
    if style == 0 or len(phrases) == 1:
        if len(phrases) == 1:
            return f"{subject} {phrases[0]}."
        return f"{subject} {', '.join(phrases[:-1])} and {phrases[-1]}."
    pronoun = "They" if subject[0].isupper() and " " in subject else "It"
    cut = src.between(1, len(phrases) - 1)
    first = f"{subject} {' and '.join(phrases[:cut])}."
    if style == 1:
        return first + " " + " ".join(f"{subject} {p}." for p in phrases[cut:])
    # A plural pronoun would need other verbs, so the second sentence names the entry plainly.
    start = "This one" if pronoun == "It" else "The same one"
    return first + " " + " ".join(f"{start} {p}." for p in phrases[cut:])


def _nest(src: Source, filled: _Filled) -> _Filled:
    """Move some keys into a nested object."""
    keys = [k for k, _ in filled.keys[1:]]
    if len(keys) < 2:
        return filled
    inner = set(src.few(keys, src.between(1, len(keys) - 1)))
    box = src.pick(["details", "info", "data", "meta", "extra"])
    outer: dict[str, Any] = {k: v for k, v in filled.value.items() if k not in inner}
    outer[box] = {k: v for k, v in filled.value.items() if k in inner}
    kept = [(k, t) for k, t in filled.keys if k not in inner]
    nested = ", ".join(f'"{k}": {t}' for k, t in filled.keys if k in inner)
    return _Filled(filled.text, [*kept, (box, "{" + nested + "}")], outer)


def _dump(value: Any, indent: bool) -> str:
    return json.dumps(value, indent=2 if indent else None, ensure_ascii=False)


def _schema(keys: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f'"{k}": {t}' for k, t in keys) + "}"


def _key_list(src: Source, keys: list[tuple[str, str]]) -> str:
    names = [k for k, _ in keys]
    if src.maybe(0.3):
        names = [f'"{k}"' for k in names]
    if src.maybe(0.5) or len(names) < 2:
        return ", ".join(names)
    return ", ".join(names[:-1]) + " and " + names[-1]


def _request(src: Source, filled: _Filled, nested: bool) -> str:
    if nested or src.maybe(0.4):
        return src.form(_ASK_SCHEMA, k=_schema(filled.keys), t=filled.text)
    return src.form(_ASK_KEYS, k=_key_list(src, filled.keys), t=filled.text)


def _many(src: Source) -> tuple[str, list[dict[str, Any]]]:
    """Make an array of objects with the same two or three keys."""
    record = src.pick(RECORDS)
    chosen = src.few(record.fields, src.between(1, 2))
    key = src.pick(record.name_key)
    names = [src.pick(f.keys) for f in chosen]
    rows, lines = [], []
    for _ in range(src.between(2, 4)):
        name = record.name(src)
        row: dict[str, Any] = {key: name}
        phrases = []
        for f, k in zip(chosen, names, strict=True):
            row[k] = f.value(src)
            phrases.append(_phrase(src, f, row[k]))
        subject = src.spin(src.pick(record.subject), e=name)
        lines.append(f"{subject} {' and '.join(phrases)}.")
        rows.append(row)
    keys = ", ".join([key, *names])
    request = src.form(
        (
            "[Return|Write|Give me] a JSON array of objects with {k}.\n\n{t}",
            "{t}\n\n[Make|Return] a JSON list, one object [each|per sentence], keys: {k}",
            "For each [sentence|line] an object with {k}, all in one JSON array:\n\n{t}",
            "~Make an array of JSON objects with the keys {k}:\n\n{t}",
        ),
        k=keys,
        t=src.pick([" ", "\n"]).join(lines),
    )
    return request, rows


def json_sample(src: Source) -> Sample:
    """Make one extraction request whose answer is pure JSON."""
    indent = src.maybe(0.2)
    if src.maybe(0.1):
        request, value = _many(src)
        answer: Any = value
    else:
        filled = _fill(src, src.pick(RECORDS), src.between(1, 4), src.pick([0.0, 0.0, 0.2]))
        nested = src.maybe(0.25)
        if nested:
            filled = _nest(src, filled)
        elif src.maybe(0.3):
            order = src.few(filled.keys, len(filled.keys))
            filled = _Filled(filled.text, order, {k: filled.value[k] for k, _ in order})
        request, answer = _request(src, filled, nested), filled.value
    if indent:
        request += src.spin(" [Indent with two spaces.|Pretty print it.|Use indentation.]")
    text = _dump(answer, indent)
    turns: list[Message] = [turn("user", request), turn("assistant", text)]
    if src.maybe(0.12):
        turns += _follow_up(src, answer, indent)
    return conversation(
        src, "json", turns, Check("json", json.loads(turns[-1]["content"])), _SYSTEM
    )


def _follow_up(src: Source, answer: Any, indent: bool) -> list[Message]:
    """Change one thing in the JSON just given."""
    if isinstance(answer, list) or len(answer) < 2 or src.maybe(0.3):
        ask = "Now on one line." if indent else "Now with two spaces of indentation."
        return [turn("user", ask), turn("assistant", _dump(answer, not indent))]
    key = src.pick(list(answer))
    if src.maybe(0.5):
        new = src.pick([src.word(), src.between(1, 500), True, False, None])
        request = src.form(
            ("Set {k} to {v}.", "Change {k} to {v}.", "~Change {k}: set it to {v}."),
            k=key,
            v=json.dumps(new),
        )
        changed = {k: (new if k == key else v) for k, v in answer.items()}
    else:
        request = src.form(("Remove {k}.", "Leave out {k}.", "~Leave {k} out."), k=key)
        changed = {k: v for k, v in answer.items() if k != key}
    return [turn("user", request), turn("assistant", _dump(changed, indent))]
