"""Things are found where a newcomer looks: the map of CONTRIBUTING, checked against the code."""

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from house_table import ROOT, House

LOOKUPS = tomllib.loads((Path(__file__).parent / "lookups.toml").read_text("utf-8"))


def defined(body: list[ast.stmt], ahead: str = "") -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield ahead + node.name
        if isinstance(node, ast.ClassDef):
            yield from defined(node.body, f"{node.name}.")


@pytest.mark.parametrize("question", LOOKUPS)
def test_the_answer_lies_there(question: str) -> None:
    found = LOOKUPS[question]
    names = set(defined(ast.parse((ROOT / found["file"]).read_text("utf-8")).body))
    assert names >= set(found["names"])


def test_contributing_prints_the_map() -> None:
    page = " ".join((ROOT / ".github" / "CONTRIBUTING.md").read_text("utf-8").split())
    for question, found in LOOKUPS.items():
        names = ", ".join(f"`{name}`" for name in found["names"])
        assert f"- {question} `{found['file']}`: {names}" in page


def test_a_module_name_is_used_once() -> None:
    names = Counter(Path(module.file).stem for module in House().shipped)
    del names["__init__"], names["__main__"]
    assert [name for name, times in names.items() if times > 1] == []
