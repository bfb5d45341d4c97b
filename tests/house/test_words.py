"""The first paragraph of a docstring says in plain English who does what."""

import ast
import re
from collections.abc import Iterator

import pytest
from docstrings import actors, docstrings, faults
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
    assert [text for module in House().shipped for text in translated(module)] == []


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """The text of a reply."""\n',
        'def f():\n    """Size of a file."""\n',
        'def f():\n    """Returns the text."""\n',
        'class A:\n    def _f(self):\n        """Whether it fits."""\n',
        'class A:\n    """What a pass needs."""\n',
        'class A:\n    @property\n    def f(self):\n        """None of the tokens."""\n',
        '"""Where drafts come from."""\n',
    ],
)
def test_a_poor_beginning_is_found(source: str) -> None:
    assert [one for one in docstrings(Module("m", "m.py", source)) if one.fault]


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Return the text of a reply."""\n',
        'def f():\n    """True if it fits."""\n',
        'def f():\n    """Raises:\n    ValueError: it is empty.\n    """\n',
        'class A:\n    @property\n    def f(self):\n        """The text of a reply."""\n',
        '"""Drafts of a small model."""\n',
    ],
)
def test_a_good_beginning_is_not(source: str) -> None:
    assert not [one for one in docstrings(Module("m", "m.py", source)) if one.fault]


# Docstrings with a poor beginning, by package (none elsewhere), and classes and modules that begin
# with a verb: upper bounds, and they only go down.
CLASSES = 0
POOR = {"specllama.cli": 1}


def test_poor_beginnings_do_not_grow() -> None:
    grown = {
        package: found
        for package, found in faults(House()).items()
        if len(found) > POOR.get(package, 0)
    }
    assert not grown


@pytest.mark.parametrize(
    ("text", "acts"),
    [("Reads a text.", True), ("Copies its cells.", True), ("Copies of a state.", False)],
)
def test_a_class_that_begins_with_a_verb_is_found(text: str, acts: bool) -> None:
    (one,) = docstrings(Module("m", "m.py", f'class A:\n    """{text}"""\n'))
    assert one.acts == acts


def test_classes_and_modules_begin_with_a_noun() -> None:
    assert len(found := actors(House())) <= CLASSES, found
