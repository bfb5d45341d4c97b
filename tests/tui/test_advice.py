"""What an error advises is said in keys of the app."""

from __future__ import annotations

import pytest

from specllama.errors import SpecllamaError
from specllama.tui import advice


@pytest.mark.parametrize(
    ("hint", "here"),
    [
        ("shorten it, or raise --ctx-size", "shorten it, or raise “context size” (F8)"),
        (
            "give a part of it, or a larger context with -c",
            "give a part of it, or a larger context with “context size” (F8)",
        ),
        ("use --verify match", "use “verification: match” (F8)"),
        (
            "draft with --proposer ngram, suffix or a draft model",
            "draft with “method: ngram” (F8), suffix or a draft model",
        ),
        ("get it with: specllama hub pull qwen3:Q4_0", "get it with: F6 (qwen3:Q4_0)"),
        (
            "specllama hub ls shows what is here, specllama hub pairs what can be pulled",
            "F6 shows what is here, F6 what can be pulled",
        ),
        ("see also: specllama hub pairs --fits", "see also: F6"),
        ("list them: /sessions", "list them: F7"),
        # what the app has no key for stays as it is
        ("check it with: specllama hub verify", "check it with: specllama hub verify"),
        ("give it with --head FILE", "give it with --head FILE"),
        (None, ""),
    ],
)
def test_a_hint_in_keys(hint: str | None, here: str) -> None:
    assert advice.hint(SpecllamaError("no", hint)) == here


def test_what_a_server_was_started_with_is_not_the_apps() -> None:
    error = SpecllamaError("no", "raise --ctx-size, or use --on-full shift")
    assert advice.hint(error, server=True) == "raise --ctx-size, or use “when full: shift” (F8)"
    assert advice.said(error, server=True).startswith("no: raise --ctx-size")
