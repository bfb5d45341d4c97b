"""Records for the JSON slice: their keys, values, and wording in a sentence."""

from __future__ import annotations

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
    Source,
)


@dataclass(frozen=True)
class Field:
    """One key: other names for it, its JSON type, a value, and its wording in a sentence."""

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
    return [src.word() if src.maybe(0.5) else src.pick(COLOURS) for _ in range(src.between(1, 4))]


def _things(src: Source) -> list[str]:
    return src.few(THINGS, src.between(1, 4))


def _numbers(src: Source) -> list[int]:
    return [src.between(1, 99) for _ in range(src.between(2, 5))]


def _email(src: Source) -> str:
    return f"{src.word()}@{src.word()}.{src.pick(['com', 'org', 'net', 'io'])}"


def _bool(src: Source) -> bool:
    return src.maybe(0.5)


F = Field
_TAGGED = ("is tagged {v}", "bears the words {v}", "is filed under {v}", "has {v} on its label")
PERSON = (
    F(
        ("age", "years"),
        "number",
        lambda s: s.between(1, 99),
        (
            "is {v} years old",
            "has reached the age of {v}",
            "turned {v} this year",
            "was {v} on the last birthday",
            "is aged {v}",
            "~has lived for {v} years",
        ),
    ),
    F(
        ("city", "town", "home"),
        "string",
        lambda s: s.town(),
        (
            "lives in {v}",
            "has moved to {v}",
            "stays in {v} all year",
            "calls {v} home",
            "comes from {v}",
            "~has a home in {v}",
        ),
    ),
    F(
        ("job", "profession", "role"),
        "string",
        lambda s: s.pick(JOBS),
        (
            "works as a {v}",
            "is employed as a {v}",
            "makes money as a {v}",
            "has trained to be a {v}",
            "is a {v}",
            "~earns a living as a {v}",
        ),
    ),
    F(
        ("email", "mail"),
        "string",
        _email,
        (
            "can be reached at {v}",
            "gets letters at {v}",
            "writes from {v}",
            "answers mail sent to {v}",
            "uses the address {v}",
            "~reads mail at {v}",
        ),
    ),
    F(
        ("pet", "animal"),
        "string",
        lambda s: s.pick(ANIMALS),
        (
            "keeps a {v}",
            "looks after a {v}",
            "lives with a {v}",
            "owns a {v} and walks it",
            "has a {v} at home",
            "~shares the house with a {v}",
        ),
    ),
    F(
        ("phone", "extension"),
        "number",
        lambda s: s.between(100, 9999),
        (
            "answers at extension {v}",
            "can be called on {v}",
            "is on line {v} all day",
            "takes calls at {v}",
            "has {v} as a number",
            "has the phone number {v}",
            "~picks up at {v}",
        ),
    ),
    F(
        ("member", "active"),
        "boolean",
        _bool,
        (
            "is a member",
            "has joined as a member",
            "is one of the members",
            "is an active member",
            "~belongs to the members",
        ),
        (
            "is not a member",
            "has not joined as a member",
            "is not one of the members",
            "is no active member",
            "~does not belong to the members",
        ),
    ),
    F(
        ("married",),
        "boolean",
        _bool,
        (
            "is married",
            "has married",
        ),
        (
            "is not married",
            "has not married",
        ),
    ),
    F(
        ("hobbies", "likes"),
        "array",
        _things,
        (
            "collects {v}",
            "spends free time on {v}",
            "enjoys {v} most",
            "cares a lot for {v}",
            "likes {v}",
            "~is fond of {v}",
        ),
    ),
    F(
        ("height_cm", "height"),
        "number",
        lambda s: s.between(120, 210),
        (
            "is {v} cm tall",
            "stands {v} cm high",
            "has grown to {v} cm",
            "comes up to {v} cm",
            "measures {v} cm",
            "~has a height of {v} cm",
        ),
    ),
    F(
        ("scores", "points"),
        "array",
        _numbers,
        (
            "scored {v}",
            "got {v} in the tests",
            "earned {v} points in all rounds",
            "came home with {v}",
            "has the scores {v}",
            "~reached {v} in the games",
        ),
    ),
)
ORDER = (
    F(
        ("quantity", "count", "amount"),
        "number",
        lambda s: s.between(1, 500),
        (
            "contains {v} pieces",
            "needs {v} pieces in all",
            "is a bundle of {v}",
            "counts {v} units",
            "asks for {v} pieces",
            "~comes to {v} pieces",
        ),
    ),
    F(
        ("item", "product"),
        "string",
        lambda s: f"{s.pick(COLOURS)} {s.pick(THINGS)}",
        (
            "is for a {v}",
            "asks for a {v}",
            "brings a {v} to the buyer",
            "is about one {v}",
            "names a {v}",
            "~concerns a {v}",
        ),
    ),
    F(
        ("price", "total", "cost"),
        "number",
        _amount,
        (
            "costs {v}",
            "is priced at {v}",
            "sells for {v} in all",
            "adds up to {v}",
            "has a total of {v}",
            "~amounts to {v}",
        ),
    ),
    F(
        ("paid",),
        "boolean",
        _bool,
        ("is paid", "is fully paid", "has had its payment", "has been paid", "~was settled"),
        (
            "is not paid",
            "is not fully paid",
            "has had no payment",
            "has not been paid",
            "~was not settled",
        ),
    ),
    F(
        ("customer", "buyer"),
        "string",
        lambda s: s.person(),
        (
            "was placed by {v}",
            "belongs to {v}",
            "was signed by {v}",
            "was given in by {v} in person",
            "comes from {v}",
            "~was sent in by {v}",
        ),
    ),
    F(
        ("day", "delivery"),
        "string",
        lambda s: s.pick(WEEKDAYS),
        (
            "arrives on {v}",
            "is due on {v}",
            "should be there by {v}",
            "comes with the {v} post",
            "will be delivered on {v}",
            "~gets there on {v}",
        ),
    ),
    F(
        ("city", "destination"),
        "string",
        lambda s: s.town(),
        (
            "goes to {v}",
            "is on its way to {v}",
            "is bound for {v}",
            "has {v} as its goal",
            "is sent to {v}",
            "~travels to {v}",
        ),
    ),
    F(
        ("tags", "labels"),
        "array",
        _tags,
        (
            *_TAGGED,
            "carries the labels {v}",
            "~is marked {v}",
        ),
    ),
    F(
        ("items", "contents"),
        "array",
        lambda s: s.few(FRUIT, s.between(1, 4)),
        (
            "contains {v}",
            "is made up of {v}",
            "packs {v} in one box",
            "includes {v}",
            "lists {v}",
            "~holds {v}",
        ),
    ),
    F(
        ("date", "ordered_on"),
        "string",
        lambda s: s.date(),
        (
            "was made on {v}",
            "came in on {v}",
            "was written on {v}",
            "has the date {v} on top",
            "is dated {v}",
            "~goes back to {v}",
        ),
    ),
)
MODEL = (
    F(
        ("size_gb", "size"),
        "number",
        lambda s: s.between(1, 90) / 2,
        (
            "takes {v} GB",
            "needs {v} GB of disk",
            "weighs {v} GB",
            "is {v} GB large",
            "has a size of {v} GB",
            "~fills {v} GB",
        ),
    ),
    F(
        ("layers", "depth"),
        "number",
        lambda s: s.between(2, 96),
        (
            "has {v} layers",
            "stacks {v} layers",
            "counts {v} layers in all",
            "runs through {v} layers",
            "is {v} layers deep",
            "~is built from {v} layers",
        ),
    ),
    F(
        ("context", "context_length"),
        "number",
        lambda s: 256 * s.between(1, 512),
        (
            "reads {v} tokens",
            "sees {v} tokens at once",
            "can hold {v} tokens",
            "remembers up to {v} tokens",
            "has a context of {v} tokens",
            "~looks back over {v} tokens",
        ),
    ),
    F(
        ("quant", "quantisation"),
        "string",
        lambda s: f"Q{s.between(2, 8)}_{s.pick(['0', '1', 'K', 'K_M', 'K_S'])}",
        (
            "is stored as {v}",
            "is kept in {v}",
            "was packed as {v}",
            "ships in {v} form",
            "is quantised to {v}",
            "~comes in {v}",
        ),
    ),
    F(
        ("licence", "license"),
        "string",
        lambda s: s.pick(["MIT", "Apache-2.0", "BSD", "GPL-3.0"]),
        (
            "is under the {v} licence",
            "is free under {v}",
            "was published with a {v} licence",
            "is given away as {v}",
            "uses the licence {v}",
            "~is released as {v}",
        ),
    ),
    F(
        ("draft", "draft_model"),
        "string",
        lambda s: s.word(),
        (
            "is drafted by {v}",
            "listens to the draft {v}",
            "pairs with {v} as its draft",
            "lets {v} draft",
            "works with the draft {v}",
            "~follows the draft {v}",
        ),
    ),
    F(
        ("acceptance", "acceptance_rate"),
        "number",
        lambda s: s.between(1, 99) / 100,
        (
            "accepts at a rate of {v}",
            "keeps drafts at a rate of {v}",
            "agrees with its draft {v} of the time",
            "says yes at {v}",
            "has an acceptance rate of {v}",
            "~takes drafts at {v}",
        ),
    ),
    F(
        ("tokens_per_second", "speed"),
        "number",
        _amount,
        (
            "runs at {v} tokens per second",
            "writes {v} tokens per second",
            "makes {v} tokens each second",
            "has a speed of {v} tokens per second",
            "reaches {v} tokens per second",
            "~emits {v} tokens per second",
        ),
    ),
    F(
        ("multilingual", "open"),
        "boolean",
        _bool,
        ("is open", "can be used by anyone", "is there for everyone", "is open to all"),
        (
            "is not open",
            "cannot be used by anyone",
            "is not there for everyone",
            "is not open to all",
        ),
    ),
    F(
        ("author", "made_by"),
        "string",
        lambda s: s.person(),
        (
            "was made by {v}",
            "was built by {v}",
            "has {v} as its author",
            "was trained by {v} at home",
            "comes from {v}",
            "~is the work of {v}",
        ),
    ),
    F(
        ("languages", "tags"),
        "array",
        _tags,
        (
            *_TAGGED,
            "knows {v}",
            "~goes with {v}",
        ),
    ),
)
EVENT = (
    F(
        ("place", "location", "venue"),
        "string",
        lambda s: f"{s.town()} {s.pick(PLACES)}",
        (
            "takes place at {v}",
            "meets at {v}",
            "brings people to {v}",
            "has {v} as its place",
            "is held at {v}",
            "~will be at {v}",
        ),
    ),
    F(
        ("date", "day"),
        "string",
        lambda s: s.date(),
        (
            "is on {v}",
            "happens on {v}",
            "is planned for {v}",
            "opens its doors on {v}",
            "takes place on {v}",
            "~was set for {v}",
        ),
    ),
    F(
        ("guests", "visitors"),
        "number",
        lambda s: s.number(),
        (
            "expects {v} guests",
            "has seats for {v} people",
            "is made for {v} visitors",
            "counts on {v} guests",
            "is open to {v} people",
            "~has room for {v}",
        ),
    ),
    F(
        ("host", "organizer"),
        "string",
        lambda s: s.person(),
        (
            "is hosted by {v}",
            "is led by {v}",
            "was set up by {v}",
            "has {v} as its host",
            "is run by {v}",
            "~is in the hands of {v}",
        ),
    ),
    F(
        ("free", "free_entry"),
        "boolean",
        _bool,
        ("is free", "is free for all", "can be entered for nothing", "costs nothing"),
        ("is not free", "is not free for all", "cannot be entered for nothing", "costs money"),
    ),
    F(
        ("start", "time"),
        "string",
        lambda s: f"{s.between(0, 23):02d}:{s.pick(['00', '15', '30'])}",
        (
            "starts at {v}",
            "opens at {v}",
            "is on from {v}",
            "gets under way at {v}",
            "begins at {v}",
            "~gets going at {v}",
        ),
    ),
    F(
        ("speakers", "names"),
        "array",
        lambda s: [s.given() for _ in range(s.between(1, 4))],
        (
            "features {v}",
            "has {v} on stage",
            "invites {v} to speak",
            "presents {v}",
            "brings together {v}",
            "~welcomes {v}",
        ),
    ),
    F(
        ("price", "fee"),
        "number",
        _amount,
        (
            "has a fee of {v}",
            "takes {v} from each guest",
            "is sold at {v} a ticket",
            "has tickets for {v} each",
            "costs {v} per person",
            "~asks for {v} at the door",
        ),
    ),
    F(
        ("hours", "duration"),
        "number",
        lambda s: s.between(1, 12),
        (
            "lasts {v} hours",
            "runs for {v} hours",
            "is over after {v} hours",
            "fills {v} hours",
            "goes on for {v} hours",
            "~takes {v} hours",
        ),
    ),
)


@dataclass(frozen=True)
class Record:
    """A kind of record: the key of its name, the begin of its sentence, and its fields."""

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
