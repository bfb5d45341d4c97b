"""Regular expressions as constraints: the whole text matches, whatever their signs mean in Lark."""

from __future__ import annotations

import re

import pytest

from specllama.errors import UsageError
from specllama.grammar.guide import Guides
from specllama.grammar.source import source_of

PIECES = [bytes([i]) for i in range(256)]
END = len(PIECES)


def fits(regex: str, text: str) -> bool:
    """Whether a text can be written and then end."""
    guide = Guides([*PIECES, b""], [END]).guide(source_of("regex", regex))
    for byte in (*text.encode(), END):
        try:
            guide.accept(byte)
        except UsageError:
            return False
    return True


@pytest.mark.parametrize(
    ("regex", "texts"),
    [
        ("[0-9]{2}", ("12", "1", "123", "1a")),
        ("^a+$", ("a", "aaa", "", "ab")),
        ("a/b", ("a/b", "a", "a\\/b")),
        (r"a\/b", ("a/b", "a\\/b")),
        (r"a\\/b", (r"a\/b", "a/b")),
        ("a\nb", ("a\nb", "a", "anb")),
        ("a\\\nb", ("a\nb", "a")),
        (r"a\nb", ("a\nb", r"a\nb")),
        ("yes|no", ("yes", "no", "yesno")),
        ("é.", ("éa", "é", "e")),
        ("", ("", "a")),
    ],
)
def test_the_whole_text_matches(regex: str, texts: tuple[str, ...]) -> None:
    for text in texts:
        assert fits(regex, text) == (re.fullmatch(regex, text) is not None), text


@pytest.mark.parametrize("regex", ["[", "(?=a)b", r"(x)\1", "a" * 20_000])
def test_what_cannot_be_enforced_is_refused(regex: str) -> None:
    with pytest.raises(UsageError, match="the regular expression"):
        Guides([*PIECES, b""], [END]).guide(source_of("regex", regex))
