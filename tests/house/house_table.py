"""Counts the house: what ships, by package, and the shapes that should stay small.

    python tests/house/house_table.py [CHECKOUT...] [--names]

One column for each checkout (default: this one), so that two can be compared. Only the standard
library is used. A *code line* has code on it: blank lines, comments and docstrings are not counted.
*Shipped* is what the wheel holds: the packages that ``pyproject.toml`` lists.
"""

import argparse
import ast
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONG_FUNCTION, LONG_CLASS = 80, 400  # lines, those of docstrings included
POLICY = "specllama.speculative.policy"
# what replies count and take: who divides by one of them derives a rate of its own
REPLY = frozenset({"drafted", "draft_n", "drafts", "rounds", "passes", "judged", "tokens",
                   "seconds", "decode_s", "decode_ms", "predicted_ms"})  # fmt: skip
DECIDES = ("specllama.engine", "specllama.speculative")  # by rates of passes, which nobody reads
PLAIN = frozenset({0, 1, 2, 0.5, 100, 1000})  # numbers that tune nothing: signs, halves, units


@dataclass(frozen=True)
class Module:
    """A source file of a package.

    Attributes:
        name: dotted, as it is imported.
        file: below the checkout.
    """

    name: str
    file: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def package(self) -> str:
        """The folder of ``specllama`` that it is in; "specllama" for the root itself."""
        parts = self.name.split(".")
        return ".".join(parts[:2]) if len(parts) > 2 or self._is_package else parts[0]

    @property
    def _is_package(self) -> bool:
        return self.file.endswith("__init__.py") and "." in self.name

    @cached_property
    def code_lines(self) -> int:
        """Lines with code on them."""
        strings: set[int] = set()
        for node in self.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[0] if node.body else None
                if ast.get_docstring(node, clean=False) is not None and first is not None:
                    strings.update(range(first.lineno, (first.end_lineno or 0) + 1))
        return sum(
            number not in strings and bool(line.strip()) and not line.lstrip().startswith("#")
            for number, line in enumerate(self.text.splitlines(), 1)
        )

    def classes(self) -> Iterator[ast.ClassDef]:
        return (node for node in self.nodes if isinstance(node, ast.ClassDef))

    def long_parts(self) -> Iterator[tuple[str, int]]:
        """Functions and classes that are too long, with their lines."""
        for node in self.nodes:
            if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > (LONG_CLASS if isinstance(node, ast.ClassDef) else LONG_FUNCTION):
                yield f"{self.name}.{node.name}", lines


class House:
    """A checkout, read once."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        setup = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
        self.shipped = [
            module
            for package in setup["packages"]
            for module in self._package(package, _folder(root, package, setup["package-dir"]))
        ]

    def _package(self, package: str, folder: Path) -> Iterator[Module]:
        for path in sorted(folder.glob("*.py")):
            name = package if path.stem == "__init__" else f"{package}.{path.stem}"
            yield Module(name, str(path.relative_to(self.root)), path.read_text("utf-8"))

    @cached_property
    def code_by_package(self) -> dict[str, int]:
        lines: Counter[str] = Counter()
        for module in self.shipped:
            lines[module.package] += module.code_lines
        return dict(sorted(lines.items()))

    @property
    def code(self) -> int:
        """Code lines that ship."""
        return sum(self.code_by_package.values())

    @cached_property
    def tests(self) -> int:
        """Code lines of the tests, without the programs of the lab."""
        folder = self.root / "tests"
        files = (path for path in folder.rglob("*.py") if folder / "lab" not in path.parents)
        return sum(Module("", "", path.read_text("utf-8")).code_lines for path in files)

    @cached_property
    def doubles(self) -> dict[str, list[str]]:
        """Class names that more than one shipped module defines, and which."""
        homes: dict[str, set[str]] = defaultdict(set)
        for module in self.shipped:
            for node in module.classes():
                homes[node.name].add(module.name)
        return {name: sorted(found) for name, found in sorted(homes.items()) if len(found) > 1}

    @cached_property
    def folds(self) -> dict[str, int]:
        """Places that ask which event one is, by module."""
        (home,) = (module for module in self.shipped if module.name == "specllama.events")
        events = {node.name for node in home.classes()}
        found: Counter[str] = Counter()
        for module in self.shipped:
            for node in module.nodes:
                if _asks(node) & events:
                    found[module.name] += 1
        return dict(found)

    @cached_property
    def constants(self) -> dict[str, list[str]]:
        """The numbers of the draft policy: those with a name, and those within a function."""
        named: list[str] = []
        inline: list[str] = []
        for module in self.shipped:
            if not f"{module.name}.".startswith(f"{POLICY}."):
                continue
            for statement in module.tree.body:
                if isinstance(statement, ast.Assign | ast.AnnAssign) and _numbers(statement):
                    named.append(f"{module.name}:{statement.lineno}")
            for node in module.nodes:
                if isinstance(node, ast.FunctionDef):
                    inline += [
                        f"{module.name}:{number.lineno} {number.value}"
                        for statement in node.body
                        for number in _numbers(statement)
                        if number.value not in PLAIN
                    ]
        return {"named": named, "inline": inline}

    @cached_property
    def rates(self) -> dict[str, list[str]]:
        """Divisions by what a reply counts or takes, by module."""
        found: dict[str, list[str]] = defaultdict(list)
        for module in self.shipped:
            for node in module.nodes:
                divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)
                if divides and _divisor(node.right) in REPLY and module.package not in DECIDES:
                    found[module.name].append(ast.unparse(node))
        return dict(found)

    @cached_property
    def long_functions(self) -> dict[str, int]:
        return {n: k for m in self.shipped for n, k in m.long_parts() if _is_function(n)}

    @cached_property
    def long_classes(self) -> dict[str, int]:
        return {n: k for m in self.shipped for n, k in m.long_parts() if not _is_function(n)}

    @property
    def root_modules(self) -> list[str]:
        return [m.name for m in self.shipped if m.package == "specllama" and "." in m.name]

    def rows(self) -> dict[str, int]:
        """The table: what is counted, and how many."""
        return {
            **{f"code: {name}": lines for name, lines in self.code_by_package.items()},
            "code that ships": self.code,
            "code of tests": self.tests,
            "class names defined twice": len(self.doubles),
            "isinstance of events": sum(self.folds.values()),
            "modules that fold events": len(self.folds),
            "modules that derive rates of replies": len(self.rates),
            "policy constants, named": len(self.constants["named"]),
            "policy constants, inline": len(self.constants["inline"]),
            f"functions over {LONG_FUNCTION} lines": len(self.long_functions),
            f"classes over {LONG_CLASS} lines": len(self.long_classes),
            "modules in the root": len(self.root_modules),
        }

    def names(self) -> Iterator[tuple[str, list[str]]]:
        """What stands behind the counts."""
        yield "class names defined twice", [f"{n}: {', '.join(w)}" for n, w in self.doubles.items()]
        yield "isinstance of events", [f"{n}: {k}" for n, k in self.folds.items()]
        yield "rates of replies", [f"{n}: {', '.join(w)}" for n, w in self.rates.items()]
        yield "policy constants, inline", self.constants["inline"]
        yield "long functions", [f"{n}: {k}" for n, k in self.long_functions.items()]
        yield "long classes", [f"{n}: {k}" for n, k in self.long_classes.items()]
        yield "modules in the root", self.root_modules


def _folder(root: Path, package: str, places: Mapping[str, str]) -> Path:
    """The folder of a package, by the longest of the mapped names that it begins with."""
    for name in sorted(places, key=len, reverse=True):
        if package == name or package.startswith(f"{name}."):
            return root / places[name] / package.removeprefix(name).strip(".").replace(".", "/")
    raise ValueError(f"pyproject.toml maps no folder to {package}")


def _is_function(name: str) -> bool:
    return not name.rpartition(".")[2].lstrip("_")[:1].isupper()


def _asks(node: ast.AST) -> set[str]:
    """The names of the classes that a test of a type asks for."""
    if isinstance(node, ast.MatchClass):
        return _named(node.cls)
    asked = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    if asked and node.func.id == "isinstance" and len(node.args) == 2:
        return _named(node.args[1])
    return set()


def _divisor(node: ast.AST) -> str:
    """The last name of a divisor, or of what is counted there."""
    if isinstance(node, ast.Call) and node.args:
        return _divisor(node.args[0])
    return getattr(node, "attr", getattr(node, "id", ""))


def _named(node: ast.AST) -> set[str]:
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def _numbers(node: ast.AST) -> list[ast.Constant]:
    return [
        inner
        for inner in ast.walk(node)
        if isinstance(inner, ast.Constant) and type(inner.value) in (int, float)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT])
    parser.add_argument("--names", action="store_true", help="of the last one: what was counted")
    given = parser.parse_args()
    houses = [House(path.resolve()) for path in given.checkouts]
    columns = [house.rows() for house in houses]
    for row in dict.fromkeys(name for column in columns for name in column):
        figures = "".join(f"{column.get(row, 0):>9,}" for column in columns)
        print(f"{row:36}{figures}")
    for title, names in houses[-1].names() if given.names else ():
        print(f"\n{title}\n" + "\n".join(f"  {name}" for name in names))


if __name__ == "__main__":
    main()
