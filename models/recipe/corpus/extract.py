"""The JSON slice: fill a schema from a sentence; the answer is pure JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specllama.models.recipe.corpus.base import (
    ANIMALS,
    COLOURS,
    FRUIT,
    JOBS,
    PLACES,
    THINGS,
    WEEKDAYS,
    Check,
    Message,
    Sample,
    Source,
    an,
    conversation,
    turn,
)


@dataclass(frozen=True)
class Field:
    """One key: other names for it, its JSON type, a value, and how a sentence says it."""

    keys: tuple[str, ...]
    type: str
    value: Callable[[Source], Any]
    says: tuple[str, ...]
    # What the text says when a boolean is false.
    denies: tuple[str, ...] = ()


def _amount(src: Source) -> float | int:
    n = src.number()
    return n if src.maybe(0.5) else round(n + src.between(1, 99) / 100, 2)


def _tags(src: Source) -> list[str]:
    return [src.word() if src.maybe(0.5) else src.listed(COLOURS) for _ in range(src.between(1, 4))]


def _things(src: Source) -> list[str]:
    return src.few(src.pool(THINGS), src.between(1, 4))


def _numbers(src: Source) -> list[int]:
    return [src.between(1, 99) for _ in range(src.between(2, 5))]


def _email(src: Source) -> str:
    return f"{src.word()}@{src.word()}.{src.pick(['com', 'org', 'net', 'io'])}"


def _bool(src: Source) -> bool:
    return src.maybe(0.5)


F = Field
PERSON = (
    F(
        ("age", "years"),
        "number",
        lambda s: s.between(1, 99),
        ("is {v} years old", "is aged {v}", "~has lived for {v} years"),
    ),
    F(
        ("city", "town", "home"),
        "string",
        lambda s: s.town(),
        ("lives in {v}", "comes from {v}", "~has a home in {v}"),
    ),
    F(
        ("job", "profession", "role"),
        "string",
        lambda s: s.listed(JOBS),
        ("works as a {v}", "is a {v}", "~earns a living as a {v}"),
    ),
    F(
        ("email", "mail"),
        "string",
        _email,
        ("can be reached at {v}", "uses the address {v}", "~reads mail at {v}"),
    ),
    F(
        ("pet", "animal"),
        "string",
        lambda s: s.listed(ANIMALS),
        ("keeps a {v}", "has a {v} at home", "~shares the house with a {v}"),
    ),
    F(
        ("phone", "extension"),
        "number",
        lambda s: s.between(100, 9999),
        ("answers at extension {v}", "has the phone number {v}", "~picks up at {v}"),
    ),
    F(
        ("member", "active"),
        "boolean",
        _bool,
        ("is a member", "is an active member", "~belongs to the members"),
        ("is not a member", "is no active member", "~does not belong to the members"),
    ),
    F(("married",), "boolean", _bool, ("is married",), ("is not married",)),
    F(("hobbies", "likes"), "array", _things, ("collects {v}", "likes {v}", "~is fond of {v}")),
    F(
        ("height_cm", "height"),
        "number",
        lambda s: s.between(120, 210),
        ("is {v} cm tall", "measures {v} cm", "~has a height of {v} cm"),
    ),
    F(
        ("scores", "points"),
        "array",
        _numbers,
        ("scored {v}", "has the scores {v}", "~reached {v} in the games"),
    ),
)
ORDER = (
    F(
        ("quantity", "count", "amount"),
        "number",
        lambda s: s.between(1, 500),
        ("contains {v} pieces", "asks for {v} pieces", "~comes to {v} pieces"),
    ),
    F(
        ("item", "product"),
        "string",
        lambda s: f"{s.listed(COLOURS)} {s.listed(THINGS)}",
        ("is for a {v}", "names a {v}", "~concerns a {v}"),
    ),
    F(
        ("price", "total", "cost"),
        "number",
        _amount,
        ("costs {v}", "has a total of {v}", "~amounts to {v}"),
    ),
    F(
        ("paid",),
        "boolean",
        _bool,
        ("is paid", "has been paid", "~was settled"),
        ("is not paid", "has not been paid", "~was not settled"),
    ),
    F(
        ("customer", "buyer"),
        "string",
        lambda s: s.person(),
        ("was placed by {v}", "comes from {v}", "~was sent in by {v}"),
    ),
    F(
        ("day", "delivery"),
        "string",
        lambda s: s.pick(WEEKDAYS),
        ("arrives on {v}", "will be delivered on {v}", "~gets there on {v}"),
    ),
    F(
        ("city", "destination"),
        "string",
        lambda s: s.town(),
        ("goes to {v}", "is sent to {v}", "~travels to {v}"),
    ),
    F(
        ("tags", "labels"),
        "array",
        _tags,
        ("is tagged {v}", "carries the labels {v}", "~is marked {v}"),
    ),
    F(
        ("items", "contents"),
        "array",
        lambda s: s.few(s.pool(FRUIT), s.between(1, 4)),
        ("contains {v}", "lists {v}", "~holds {v}"),
    ),
    F(
        ("date", "ordered_on"),
        "string",
        lambda s: s.date(),
        ("was made on {v}", "is dated {v}", "~goes back to {v}"),
    ),
)
MODEL = (
    F(
        ("size_gb", "size"),
        "number",
        lambda s: s.between(1, 90) / 2,
        ("takes {v} GB", "has a size of {v} GB", "~fills {v} GB"),
    ),
    F(
        ("layers", "depth"),
        "number",
        lambda s: s.between(2, 96),
        ("has {v} layers", "is {v} layers deep", "~is built from {v} layers"),
    ),
    F(
        ("context", "context_length"),
        "number",
        lambda s: 256 * s.between(1, 512),
        ("reads {v} tokens", "has a context of {v} tokens", "~looks back over {v} tokens"),
    ),
    F(
        ("quant", "quantisation"),
        "string",
        lambda s: f"Q{s.between(2, 8)}_{s.pick(['0', '1', 'K', 'K_M', 'K_S'])}",
        ("is stored as {v}", "is quantised to {v}", "~comes in {v}"),
    ),
    F(
        ("licence", "license"),
        "string",
        lambda s: s.pick(["MIT", "Apache-2.0", "BSD", "GPL-3.0"]),
        ("is under the {v} licence", "uses the licence {v}", "~is released as {v}"),
    ),
    F(
        ("draft", "draft_model"),
        "string",
        lambda s: s.word(),
        ("is drafted by {v}", "works with the draft {v}", "~follows the draft {v}"),
    ),
    F(
        ("acceptance", "acceptance_rate"),
        "number",
        lambda s: s.between(1, 99) / 100,
        ("accepts at a rate of {v}", "has an acceptance rate of {v}", "~takes drafts at {v}"),
    ),
    F(
        ("tokens_per_second", "speed"),
        "number",
        _amount,
        (
            "runs at {v} tokens per second",
            "reaches {v} tokens per second",
            "~emits {v} tokens per second",
        ),
    ),
    F(
        ("multilingual", "open"),
        "boolean",
        _bool,
        ("is open", "is open to all"),
        ("is not open", "is not open to all"),
    ),
    F(
        ("author", "made_by"),
        "string",
        lambda s: s.person(),
        ("was made by {v}", "comes from {v}", "~is the work of {v}"),
    ),
    F(("languages", "tags"), "array", _tags, ("is tagged {v}", "knows {v}", "~goes with {v}")),
)
EVENT = (
    F(
        ("place", "location", "venue"),
        "string",
        lambda s: f"{s.town()} {s.listed(PLACES)}",
        ("takes place at {v}", "is held at {v}", "~will be at {v}"),
    ),
    F(
        ("date", "day"),
        "string",
        lambda s: s.date(),
        ("is on {v}", "takes place on {v}", "~was set for {v}"),
    ),
    F(
        ("guests", "visitors"),
        "number",
        lambda s: s.number(),
        ("expects {v} guests", "is open to {v} people", "~has room for {v}"),
    ),
    F(
        ("host", "organizer"),
        "string",
        lambda s: s.person(),
        ("is hosted by {v}", "is run by {v}", "~is in the hands of {v}"),
    ),
    F(
        ("free", "free_entry"),
        "boolean",
        _bool,
        ("is free", "costs nothing"),
        ("is not free", "costs money"),
    ),
    F(
        ("start", "time"),
        "string",
        lambda s: f"{s.between(0, 23):02d}:{s.pick(['00', '15', '30'])}",
        ("starts at {v}", "begins at {v}", "~gets going at {v}"),
    ),
    F(
        ("speakers", "names"),
        "array",
        lambda s: [s.given() for _ in range(s.between(1, 4))],
        ("features {v}", "brings together {v}", "~welcomes {v}"),
    ),
    F(
        ("price", "fee"),
        "number",
        _amount,
        ("has a fee of {v}", "costs {v} per person", "~asks for {v} at the door"),
    ),
    F(
        ("hours", "duration"),
        "number",
        lambda s: s.between(1, 12),
        ("lasts {v} hours", "goes on for {v} hours", "~takes {v} hours"),
    ),
)


@dataclass(frozen=True)
class Record:
    """A kind of record: the key of its name, how the sentence begins, and its fields."""

    label: str
    name_key: tuple[str, ...]
    name: Callable[[Source], str]
    subject: tuple[str, ...]
    fields: tuple[Field, ...]


RECORDS = (
    Record("person", ("name", "full_name"), lambda s: s.person(), ("{e}",), PERSON),
    Record(
        "order",
        ("id", "order_id", "number"),
        lambda s: s.code_id(),
        ("Order {e}", "The order {e}"),
        ORDER,
    ),
    Record(
        "model",
        ("name", "model", "id"),
        lambda s: s.word(2, 3),
        ("The model {e}", "Model {e}"),
        MODEL,
    ),
    Record(
        "event",
        ("title", "name", "event"),
        lambda s: f"{s.proper()} {s.pick(['Fair', 'Race', 'Meeting', 'Concert'])}",
        ("The {e}", "{e}"),
        EVENT,
    ),
)

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
    "~Turn this into JSON with the keys {k}: {t}",
)
_ASK_SCHEMA = (
    "Schema: {k}\n[Text|Sentence]: {t}",
    "[Fill this schema|Use this schema]:\n{k}\n\n{t}",
    "{t}\n\n[Answer with JSON of this form|Follow this schema]: {k}",
    "~Here is a schema: {k}\nFill it from this text: {t}",
)


def _spoken(value: Any) -> str:
    """A value as a sentence says it."""
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
    """One record: its sentence, its keys with types, and the object."""
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
    """An array of objects with the same two or three keys."""
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
            "~List these as JSON objects with {k}: {t}",
        ),
        k=keys,
        t=src.pick([" ", "\n"]).join(lines),
    )
    return request, rows


def json_sample(src: Source) -> Sample:
    """One extraction request whose answer is pure JSON."""
    indent = src.maybe(0.2)
    if src.maybe(0.15):
        request, value = _many(src)
        answer: Any = value
    else:
        filled = _fill(src, src.pick(RECORDS), src.between(1, 5), src.pick([0.0, 0.0, 0.2]))
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
            ("Set {k} to {v}.", "Change {k} to {v}.", "~Make {k} equal to {v}."),
            k=key,
            v=json.dumps(new),
        )
        changed = {k: (new if k == key else v) for k, v in answer.items()}
    else:
        request = src.form(("Remove {k}.", "Leave out {k}.", "~Drop {k}."), k=key)
        changed = {k: v for k, v in answer.items() if k != key}
    return [turn("user", request), turn("assistant", _dump(changed, indent))]
