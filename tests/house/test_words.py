"""The first paragraph of a docstring says in plain English who does what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from house_table import House, Module

# "N" is plainer than "so many", "after" than "behind", and an actor has a name
MARKS = re.compile(
    r"\b(somebody|nobody|anybody|whoever|so many|behind|beside|becomes? of|became of)\b", re.I
)


def translated(module: Module) -> Iterator[str]:
    """The first paragraphs of a module that carry one of the marks."""
    for node in module.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n\n")[0]
            if MARKS.search(first):
                yield f"{module.file}: {first}"


@pytest.mark.parametrize(
    "text", ["Nobody asked.", "A pass of\n    so many rows.", "What becomes of it."]
)
def test_a_mark_is_found(text: str) -> None:
    assert list(translated(Module("m", "m.py", f'def f():\n    """{text}"""\n')))


def test_only_the_first_paragraph_counts() -> None:
    assert not list(translated(Module("m", "m.py", '"""Plain.\n\nThe row behind it.\n"""\n')))


def test_docstrings_begin_in_plain_words() -> None:
    found = [text for module in House().shipped for text in translated(module)]
    assert found == []
