"""Small Python functions and classes before they are printed, and names for them."""

from __future__ import annotations

from dataclasses import dataclass

from specllama.models.recipe.corpus.base import Source, words


@dataclass(frozen=True)
class Param:
    """One parameter: name, annotation and optional default (source text)."""

    name: str
    type: str
    default: str | None = None


@dataclass(frozen=True)
class Function:
    """A function before it is printed; `body` lines carry their own indentation."""

    name: str
    params: tuple[Param, ...]
    returns: str
    purpose: str
    body: tuple[str, ...]
    imports: tuple[str, ...] = ()

    def render(self, *, typed: bool = False, doc: str | None = None) -> str:
        """Return the source text, with or without annotations and a docstring."""
        parts = []
        for p in self.params:
            text = f"{p.name}: {p.type}" if typed else p.name
            if p.default is not None:
                text += f" = {p.default}" if typed else f"={p.default}"
            parts.append(text)
        arrow = f" -> {self.returns}" if typed else ""
        lines = [*self.imports, *(["", ""] if self.imports else [])]
        lines.append(f"def {self.name}({', '.join(parts)}){arrow}:")
        if doc:
            lines.append(f'    """{doc}"""')
        lines += [f"    {line}" if line else "" for line in self.body]
        return "\n".join(lines)


NOUNS = words(
    "price weight score order item user name token row line value size length count height speed "
    "page word file path key point time day level rate age cost area depth width error event task "
    "step node edge batch draft model layer query result record field"
)
LISTS = words("items values numbers xs data rows elements entries things")
TEXTS = words("text line word s name message sentence phrase")


def noun(src: Source) -> str:
    """Choose a noun for identifiers, made up one time in three."""
    return src.word(2, 2) if src.maybe(0.33) else src.pick(NOUNS)


def two(src: Source) -> tuple[str, str]:
    """Choose two different nouns."""
    a = noun(src)
    b = noun(src)
    while b == a:
        b = noun(src)
    return a, b


def var(src: Source, *taken: str) -> str:
    """Choose a loop variable that is not in `taken`."""
    names = [x for x in ("x", "item", "value", "n", "v", "entry") if x not in taken]
    return src.pick(names)


def fn(
    name: str, params: list[Param], returns: str, purpose: str, body: str, *imports: str
) -> Function:
    """Make a function whose body is one string."""
    return Function(name, tuple(params), returns, purpose, tuple(body.split("\n")), imports)


def dataclass_source(src: Source) -> tuple[str, str, str]:
    """Make a dataclass: its name, the spoken list of fields, and its source."""
    name = src.proper()
    fields: list[tuple[str, str]] = []
    for _ in range(src.between(2, 5)):
        n = noun(src)
        if n not in [f for f, _ in fields]:
            fields.append((n, src.pick(["int", "str", "float", "bool", "list[str]"])))
    spoken = ", ".join(f"{n} ({t})" for n, t in fields)
    lines = ["from dataclasses import dataclass", "", "", "@dataclass", f"class {name}:"]
    lines += [f"    {n}: {t}" for n, t in fields]
    return name, spoken, "\n".join(lines)


def class_source(src: Source) -> tuple[str, str, str]:
    """Make a small class: its name, its purpose, and its source."""
    name = src.proper()
    a = noun(src)
    kind = src.between(0, 2)
    if kind == 0:
        return (
            name,
            f"keeps a list of {a}s with `add` and `total`",
            (
                f"class {name}:\n    def __init__(self):\n        self.{a}s = []\n\n"
                f"    def add(self, {a}):\n        self.{a}s.append({a})\n\n"
                f"    def total(self):\n        return sum(self.{a}s)"
            ),
        )
    if kind == 1:
        b = noun(src) + "_id"
        return (
            name,
            f"stores {a} and {b}",
            (
                f"class {name}:\n    def __init__(self, {a}, {b}):\n        self.{a} = {a}\n"
                f"        self.{b} = {b}"
            ),
        )
    return (
        name,
        f"counts {a}s with `step` and `reset`",
        (
            f"class {name}:\n    def __init__(self):\n        self.{a}s = 0\n\n"
            f"    def step(self):\n        self.{a}s += 1\n        return self.{a}s\n\n"
            f"    def reset(self):\n        self.{a}s = 0"
        ),
    )
