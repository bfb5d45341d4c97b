"""The text that must come next where a grammar leaves one way on, in the vocabulary's tokens.

llguidance tells the bytes that alone can follow. White space that may stand in between is guessed
as the text was laid out so far. What is guessed is never more than that: every token is verified.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specllama.grammar.layout import WHITE, Habits, JsonLayout

Ahead = list[tuple[int, float]]
"""Tokens, and how likely each is after the others."""

END = -1  # in place of a token: the text ends here
_SPACE = ord(" ")
_DIGIT = ord("0")  # a number may go on
_FREE = ord("~")  # stands only where any text may
_LAST = 0.5  # a token that may hold more than what is known


@dataclass(slots=True)
class Forced:
    """Text that must follow, certain but for the white space in it.

    Attributes:
        doubts: places of it up to which it is the less likely, ascending, and how likely.
        over: nothing follows it.
    """

    data: bytes = b""
    doubts: list[tuple[int, float]] = field(default_factory=list)
    over: bool = False

    def likely(self, begin: int, end: int) -> float:
        """Return the probability of the text between two places."""
        found = 1.0
        for at, likely in self.doubts:
            if begin <= at < end:
                found *= likely
        return found


def text_ahead(matcher: Any, single: int, layout: JsonLayout, habits: Habits, most: int) -> Forced:
    """Return about ``most`` bytes that must follow.

    Args:
        matcher: at the place, to go on with.
        single: the first of 256 tokens of a byte each.
        layout: of the text before.
    """
    text = Forced()
    while len(text.data) < most and not matcher.is_error():
        new: bytes = matcher.compute_ff_bytes()
        if not new:
            if matcher.validate_tokens([single + _FREE]):
                break
            visible, white = _next(matcher, single)
            if not visible and not white:
                text.over = bool(matcher.is_accepting())
                break
            one = visible[0] if len(visible) == 1 else None
            guess = layout.guess(one, habits) if white and visible else None
            if guess is None:
                break
            space, likely = guess
            text.doubts.append((len(text.data), likely))
            new = space if one is None else space + bytes((one,))
            if not new:
                break
        text.data += new
        layout.read(new)
        matcher.consume_tokens([single + byte for byte in new])
    return text


def _next(matcher: Any, single: int) -> tuple[bytes, bytes]:
    """Return the bytes that may come next: visible ones, and white space."""
    fits = matcher.validate_tokens
    if fits([single + _SPACE]) and not fits([single + _DIGIT]):  # a mask of all takes longer
        spaced = matcher.deep_copy()
        spaced.consume_tokens([single + _SPACE])
        if forced := spaced.compute_ff_bytes():
            return forced[:1], b" "
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)[single >> 3 :]
    bits = np.unpackbits(mask, bitorder="little")[single & 7 :][:256]
    found = bytes(bits.nonzero()[0].tolist())
    return found.translate(None, WHITE), bytes(byte for byte in found if byte in WHITE)


class Cutter:
    """A cutter of texts into tokens, as the vocabulary itself does it.

    Args:
        pieces: the bytes of every token.
        tokenize: of a text in the middle of another one.
    """

    def __init__(self, pieces: Sequence[bytes], tokenize: Callable[[str], Sequence[int]]) -> None:
        self._pieces, self._tokenize = pieces, tokenize

    def tokens(self, before: bytes, text: Forced, most: int) -> Ahead:
        """Return at most ``most`` tokens of a text that follows another one."""
        found: Ahead = []
        at = 0
        for token in self._cut(before, text.data):
            piece = self._pieces[token]
            end = at + len(piece)
            if not piece or text.data[at:end] != piece:
                break
            last = end == len(text.data) and not text.over
            found.append((token, text.likely(at, end) * (_LAST if last else 1.0)))
            at = end
        if text.over and at == len(text.data):
            found.append((END, 1.0))
        return found[:most]

    def _cut(self, before: bytes, text: bytes) -> Sequence[int]:
        """Return the tokens of ``text``, cut as after ``before`` if none reaches back into it."""
        whole = before + text
        begin = next((i for i, byte in enumerate(whole) if byte & 0xC0 != 0x80), 0)
        ids = self._tokenize(whole[begin:].decode("utf-8", "ignore"))
        ends = np.cumsum([len(self._pieces[token]) for token in ids]).tolist()
        cut = bisect_right(ends, len(before) - begin)
        if not ids or (ends[cut - 1] if cut else 0) != len(before) - begin:
            return self._tokenize(text.decode("utf-8", "ignore"))
        return ids[cut:]
