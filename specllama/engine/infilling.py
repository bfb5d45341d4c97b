"""A gap in a text as a prompt, for models that have tokens to mark one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from specllama.backend.base import Vocab
from specllama.errors import UsageError

_AFTER = 4  # of what there is room for around a gap, one part in so many is after it
_UNNAMED = "file"  # the file with the gap
_MOST_FILES = 1000
_LONGEST_NAME = 1000  # characters
_SNIPPET = "\n\n--- snippet ---\n\n"  # before another text, where a model has no token for files


def infilled(
    vocab: Vocab,
    before: str,
    after: str,
    others: Sequence[tuple[str, str]],
    *,
    room: int,
    near: int,
) -> list[int]:
    """Return the tokens of a prompt whose reply fills the gap.

    Args:
        others: (name, text) of what else may be looked at, the nearest last.
        room: most tokens of the prompt.
        near: of these, for the text around the gap where there are others.

    Raises:
        UsageError: the model has no such tokens.
    """
    marks = vocab.gap
    if marks is None:
        raise UsageError("this model has no tokens for a gap in a text")
    if most := room * vocab.longest:  # what is farther from the gap cannot have a place
        before, after, others = before[-most:], after[:most], _nearest(others, most)

    def tokens(text: str) -> list[int]:
        return vocab.tokenize(text, add_special=False, parse_special=False)

    frame = vocab.tokenize("", add_special=True, parse_special=False)
    begin = frame[: int(vocab.adds_bos)]
    around = (min(room, near) if others else room) - len(begin) - 3
    behind = tokens(after)[: max(0, around // _AFTER)]
    ahead = tokens(before)
    ahead = ahead[max(0, len(ahead) - max(0, around - len(behind))) :]
    prompt = [*begin, marks.before, *ahead, marks.after, *behind, marks.gap]
    if not others:
        return prompt
    if marks.file is None:
        parts = [tokens(_SNIPPET) + tokens(text) for _, text in others]
    else:
        parts = [[marks.file, *tokens(f"{name}\n{text}")] for name, text in others]
        parts.append([marks.file, *tokens(f"{_UNNAMED}\n")])
    context = list(chain.from_iterable(parts))
    return context[max(0, len(context) - max(0, room - len(prompt))) :] + prompt


def _nearest(others: Sequence[tuple[str, str]], most: int) -> list[tuple[str, str]]:
    """Return the last of the files, up to the one that reaches ``most`` characters."""
    found: list[tuple[str, str]] = []
    for name, text in reversed(others):
        if most <= 0 or len(found) >= _MOST_FILES:
            break
        found.append((name[:_LONGEST_NAME], text[-most:]))
        most -= len(text)
    return found[::-1]
