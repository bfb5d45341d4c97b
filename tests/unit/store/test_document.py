"""Documents: Markdown that holds whatever was written, as text and nothing else."""

from __future__ import annotations

import re

import pytest

from specllama.store.document import (
    Raw,
    fact_list,
    folded,
    heading,
    page,
    paragraph,
    quote,
    table,
)

HOSTILE = (
    "<script>alert(1)</script>",
    "</pre></code><img src=x onerror=alert(1)>",
    "```\n# heading\n@someone #1 https://example.org ![x](https://example.org/x.png)",
    "`` ` ``",
    "a | b\n| c",
    "\x00\x1b[31m\x9b\u202e\ud800\ufffe\uffff]]>&amp;",
    "",
    "   ",
    "${x} {{ x }}\r\n\t",
)


def everything(text: str) -> str:
    return page(
        "A title",
        [
            heading("Part"),
            paragraph("Words."),
            fact_list([["name: ", Raw(text), ", done"]]),
            quote(text),
            table(("a", "b"), [("1", Raw(text))]),
            folded("More", [quote(text)]),
        ],
    )


@pytest.mark.parametrize("text", HOSTILE)
def test_markdown_keeps_text_within_its_fence(text: str) -> None:
    """Without its code, nothing of the text is left."""
    written = everything(text)
    written.encode("utf-8")
    rest = re.sub(r"(?ms)^(`{3,})text\n.*?^\1$", "", written)
    rest = re.sub(r"(?<!`)(`+)(?!`).+?(?<!`)\1(?!`)", "", rest)
    assert not re.search(r"alert|someone|example|heading|onerror|\{\{", rest)
    assert "`" not in rest
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\ud800\ufffe]", written)


@pytest.mark.parametrize("text", HOSTILE)
def test_a_table_has_a_line_a_row_and_its_own_cells(text: str) -> None:
    lines = page("T", [table(("a", "b"), [("1", Raw(text))])]).splitlines()
    (row,) = [line for line in lines if line.startswith("| 1 ")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3


def test_spaces_at_the_ends_are_seen() -> None:
    (line,) = page("T", [fact_list([[Raw(" a b ")]])]).splitlines()[2:]
    assert line == "- `␣a b␣`"
