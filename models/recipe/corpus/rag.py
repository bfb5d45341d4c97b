"""The passage slice: questions on retrieved text; the answer quotes the asked value."""

from __future__ import annotations

from dataclasses import dataclass

from specllama.models.recipe.corpus.attributes import Attribute, Kind
from specllama.models.recipe.corpus.base import Check, Message, Sample, Source, conversation, turn
from specllama.models.recipe.corpus.facts import FILLERS, KINDS

_SYSTEM = (
    "Answer from the [passage|text|context] only.",
    "Use [only the passage|the passage only] to answer. [Be brief.|Quote the value.|]",
    "You answer questions about [a text|documents|notes]. [Say so if the text has no answer.|]",
    "~Read the documents and answer with what they say.",
)
_LAYOUTS = (
    "[Passage|Context|Text|Notes]:\n{p}\n\n[Question|Q]: {q}",
    "{p}\n\n{q}",
    "[Question|Q]: {q}\n\n[Passage|Context|Text]:\n{p}",
    "[Read this|Here is a text|Use this text]:\n\n{p}\n\n[Now answer:|Question:|] {q}",
    "<context>\n{p}\n</context>\n{q}",
    "~Background:\n{p}\n\nPlease answer: {q}",
)
_ASKS = (
    "What is the {a} of {e}?",
    "[Tell me|Give me|Name] the {a} of {e}.",
    "[What|Which] {a} does the [text|passage] give for {e}?",
    "{e}: [what|which] {a}?",
    "[I need|Look up|Find] the {a} of {e}.",
    "~What does the [text|passage] give as the {a} of {e}?",
    "~[Find|Name] the {a} that the text gives for {e}.",
)
_MISSING_ANSWERS = (
    "The text does not say.",
    "The text does not say that.",
)


@dataclass(frozen=True)
class Fact:
    """One attribute of one entity with its value."""

    kind: Kind
    entity: str
    attribute: Attribute
    value: str
    text: str


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]


def _entity(src: Source, kind: Kind, n: int) -> list[Fact]:
    name = kind.name(src)
    facts = []
    for a in src.few(kind.attributes, n):
        value = a.value(src)
        # A sentence nobody has seen is the hardest part; most held-out passages are spared it.
        text = src.mostly_seen(a.says, e=name, v=value, d=src.date(), p=src.word())
        facts.append(Fact(kind, name, a, value, _upper(text)))
    return facts


def _paragraph(src: Source, facts: list[Fact], filler: float) -> str:
    lines = [f.text for f in facts]
    if src.maybe(filler):
        lines.insert(src.between(0, len(lines)), src.spin(src.pick(FILLERS)))
    if src.maybe(filler):
        kind = facts[0].kind
        lines.insert(0, _upper(src.form(kind.intros, e=facts[0].entity, n=src.between(1, 9))))
    return " ".join(lines)


def _ask(src: Source, fact: Fact) -> str:
    if src.maybe(0.4):
        return _upper(src.form(_ASKS, a=fact.attribute.label, e=fact.entity))
    return src.form(fact.attribute.asks, e=fact.entity)


def _tell(src: Source, fact: Fact) -> str:
    # Mostly the sentence itself is quoted.
    if src.maybe(0.9):
        return fact.text
    text = src.form(fact.attribute.answers, e=fact.entity, v=fact.value)
    return text if text.startswith(fact.value) else _upper(text)


def _passages(src: Source, groups: list[list[Fact]]) -> str:
    filler = src.pick([0.0, 0.2, 0.6])
    paragraphs = [_paragraph(src, g, filler) for g in groups]
    style = src.between(0, 4) if len(groups) > 1 else 0
    if style == 0:
        return src.pick(["\n", "\n\n", " "]).join(paragraphs)
    if style == 1:
        return "\n".join(f"[{i}] {p}" for i, p in enumerate(paragraphs, 1))
    if style == 2:
        return "\n".join(f'<doc id="{i}">{p}</doc>' for i, p in enumerate(paragraphs, 1))
    if style == 3:
        return "\n\n".join(f"Passage {i}: {p}" for i, p in enumerate(paragraphs, 1))
    return "\n".join(f"- {p}" for p in paragraphs)


def _single(src: Source, fact: Fact) -> tuple[str, str, list[str]]:
    return _ask(src, fact), _tell(src, fact), [fact.value]


def _double(src: Source, one: Fact, two: Fact) -> tuple[str, str, list[str]]:
    question = f"{_ask(src, one)} {src.spin('[And|Also,|And also:]')} {_ask(src, two)}"
    return question, f"{_tell(src, one)} {_tell(src, two)}", [one.value, two.value]


def _summary(src: Source, facts: list[Fact]) -> tuple[str, str, list[str]]:
    e = facts[0].entity
    question = src.form(
        (
            "What does the text say about {e}?",
            "[List|Give] [all|the] facts about {e}.",
            "Quote what the [text|passage] says about {e}.",
            "Tell me about {e}.",
            "~What do we learn about {e}?",
        ),
        e=e,
    )
    return question, " ".join(f.text for f in facts), [f.value for f in facts]


def _reverse(src: Source, fact: Fact) -> tuple[str, str, list[str]]:
    label = fact.kind.label
    question = src.form(
        (
            "Which {k} in the text goes with {v}?",
            "[Whose|Of which {k} is the] {a}: {v}?",
            "To which {k} does the {a} {v} belong?",
            "~For which {k} is the {a} given as {v}?",
        ),
        k=label,
        a=fact.attribute.label,
        v=fact.value,
    )
    return question, fact.text, [fact.entity.removeprefix("the ")]


def _missing(src: Source, fact: Fact, used: list[Fact]) -> tuple[str, str, list[str]]:
    kind = fact.kind
    taken = {f.attribute.label for f in used if f.entity == fact.entity}
    free = [a for a in kind.attributes if a.label not in taken]
    attribute = src.pick(free)
    return src.form(attribute.asks, e=fact.entity), src.pick(_MISSING_ANSWERS), ["does not say"]


def _question(src: Source, groups: list[list[Fact]]) -> tuple[str, str, list[str]]:
    facts = src.pick(groups)
    fact = src.pick(facts)
    flat = [f for g in groups for f in g]
    # The rarer forms are the harder ones: training meets them more often than evaluation.
    single, double, summary, reverse = (79, 87, 93, 97) if src.held else (62, 74, 83, 92)
    form = src.between(0, 99)
    if form < single:
        return _single(src, fact)
    if form < double and len(flat) > 1:
        one, two = src.few(flat, 2)
        return _double(src, one, two)
    if form < summary and len(facts) > 1:
        return _summary(src, facts)
    if form < reverse and sum(f.value == fact.value for f in flat) == 1:
        return _reverse(src, fact)
    if len(facts) < len(fact.kind.attributes):
        return _missing(src, fact, flat)
    return _single(src, fact)


def _groups(src: Source, entities: int, most: int) -> list[list[Fact]]:
    # Half of the time all entities are of one kind: then only the name tells them apart.
    same = src.pick(KINDS) if src.maybe(0.5) else None
    return [
        _entity(src, same or src.pick(KINDS), src.between(1, most)) for _ in range(max(1, entities))
    ]


SIZES = {"one": (1, 1), "two": (2, 2), "short": (1, 2), "medium": (3, 5), "long": (12, 38)}
"""How many passages a conversation is about."""


def rag_sample(src: Source, size: str = "mixed") -> Sample:
    """Make one conversation about one or more passages; `size` is one of `SIZES` or mixed."""
    if size == "mixed":
        size = src.pick(["short"] * 34 + ["medium"] * 5 + ["long"])
    groups = _groups(src, src.between(*SIZES[size]), 3)
    text = _passages(src, groups)
    question, answer, spans = _question(src, groups)
    turns: list[Message] = [
        turn("user", src.form(_LAYOUTS, p=text, q=question)),
        turn("assistant", answer),
    ]
    # Training asks more often: a passage costs far more tokens than a further question about it.
    more = src.between(1, 2 + min(4, len(groups))) if not src.held else src.pick([0, 0, 0, 0, 0, 1])
    for _ in range(more):
        question, answer, spans = _question(src, groups)
        turns += [turn("user", question), turn("assistant", answer)]
    return conversation(src, "rag", turns, Check("span", spans), _SYSTEM)
