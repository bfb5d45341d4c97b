"""The special tokens in a text: llama.cpp's way of finding them, with a say in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from specllama.backend.base import SpecialToken

Verdict = Literal["token", "text", "cut"]
_SPACE = " \t\n\v\f\r"


def partition(
    text: str,
    specials: Sequence[SpecialToken],
    judge: Callable[[SpecialToken, int, int], Verdict],
) -> list[int | str]:
    """Split a text into special tokens and the texts between them.

    Each special token in turn, the longest first, takes its occurrences in what is left, from the
    left to the right, and the white space next to them if it is of that kind.

    Args:
        specials: longest text first.
        judge: called with (special, start, end) for an occurrence: a "token", ordinary "text", or
            a "cut" after its first character, which leaves two neighbouring texts.
    """
    pieces: list[int | tuple[int, int]] = [(0, len(text))]
    for special in specials:
        if special.text not in text:
            continue
        out: list[int | tuple[int, int]] = []
        for piece in pieces:
            if isinstance(piece, int):
                out.append(piece)
                continue
            start, end = search, _ = piece
            while (at := text.find(special.text, search, end)) >= 0:
                after = at + len(special.text)
                verdict = judge(special, at, after)
                search = at + 1
                if verdict == "cut":
                    out.append((start, search))
                    start = search
                elif verdict == "token":
                    left = at
                    while special.strips_left and left > start and text[left - 1] in _SPACE:
                        left -= 1
                    out += [(start, left), special.id]
                    start = after
                    while special.strips_right and start < end and text[start] in _SPACE:
                        start += 1
                    search = start
            out.append((start, end))
        pieces = [p for p in out if isinstance(p, int) or p[0] < p[1]]
    return [p if isinstance(p, int) else text[p[0] : p[1]] for p in pieces if p != (0, 0)]
