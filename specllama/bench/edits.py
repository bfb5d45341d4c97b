"""Replies as they were before an edit: what a caller expects of them."""

from __future__ import annotations


def edited(text: str, every: int = 16) -> str:
    """A text with one of ``every`` words replaced, and one at least."""
    words = text.split(" ")
    for at in range(min(every, len(words)) // 2, len(words), every):
        words[at] = "otherwise"
    return " ".join(words)
