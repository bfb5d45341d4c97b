"""Docstrings that begin otherwise than they should.

    python tests/house/docstrings.py [FOLDER or FILE...]

A function's docstring begins with a verb in the imperative or "True if", that of a class, a module
or a property with a noun; none begins with one of ``BANNED``. A verb that is missing is added to
verbs.txt, in the same folder.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from house_table import House, Module

BANNED = re.compile(
    r"(Of|What|Whatever|Who|Whose|Whoever|Whether|Where|Which|How|However|The same|It|That|Those"
    r"|None)\b"
)
SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:", "Yields:")
ACTS = re.compile(r"([A-Z]\w*)s (the|an?|its?|one|each|every|all|what|this|them)\b")
VERBS = frozenset(Path(__file__).with_name("verbs.txt").read_text("utf-8").split())


@dataclass(frozen=True)
class Docstring:
    """A docstring and the thing that it describes."""

    place: str  # file:line and name
    kind: str  # "module", "class", "property" or "function"
    text: str

    @property
    def fault(self) -> str:
        """The reason why its beginning is refused; "" for a good one."""
        banned = BANNED.match(self.text)
        if banned is not None:
            return f"begins with {banned[0]}"
        if self.kind != "function" or self.text.startswith((*SECTIONS, "True if ")):
            return ""
        first, *rest = re.split(r"[\s,:;.]+", self.text, maxsplit=2)
        if first in VERBS and rest[:1] != ["of"]:
            return ""
        return f"begins with no verb: {first}"

    @property
    def acts(self) -> bool:
        """True if a class or a module begins with its verb: "Reads a text", not "A reader"."""
        found = ACTS.match(self.text)
        return self.kind in ("class", "module") and found is not None and _verb(found[1])


def _verb(stem: str) -> bool:
    """True if a word without its last "s" is a verb."""
    return bool(VERBS & {stem, stem.removesuffix("e"), f"{stem.removesuffix('ie')}y"})


def docstrings(module: Module) -> Iterator[Docstring]:
    """Yield every docstring of a module."""
    yield from _below(module.tree, module.file, "")


def _below(node: ast.AST, file: str, name: str) -> Iterator[Docstring]:
    """Yield the docstring of a node, then those of the nodes inside it."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            line = node.body[0].lineno
            yield Docstring(f"{file}:{line} {name}".rstrip(), _kind(node), text)
    for inner in ast.iter_child_nodes(node):
        yield from _below(inner, file, f"{name}.{getattr(inner, 'name', '')}".strip("."))


def _kind(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """Return "module", "class", "property" or "function"."""
    if isinstance(node, ast.Module | ast.ClassDef):
        return "module" if isinstance(node, ast.Module) else "class"
    marks = {ast.unparse(mark).rpartition(".")[2] for mark in node.decorator_list}
    return "property" if marks & {"property", "cached_property"} else "function"


def faults(house: House) -> dict[str, list[str]]:
    """Return the docstrings with a fault, by package, each with its place and its fault."""
    found: dict[str, list[str]] = {}
    for module in house.shipped:
        for one in docstrings(module):
            if one.fault:
                first = one.text.partition("\n")[0]
                found.setdefault(module.package, []).append(f"{one.place}: {one.fault}: {first}")
    return found


def actors(house: House) -> list[str]:
    """Return the classes and modules that begin with a verb, each with its place."""
    every = (one for module in house.shipped for one in docstrings(module))
    return [f"{one.place}: {one.text.partition(chr(10))[0]}" for one in every if one.acts]


if __name__ == "__main__":
    house, wanted = House(), tuple(sys.argv[1:] or [""])
    counted = {**faults(house), "classes that begin with a verb": actors(house)}
    for line in (line for lines in counted.values() for line in lines if line.startswith(wanted)):
        print(line)
    print({package: len(lines) for package, lines in counted.items()})
