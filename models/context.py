"""The context length when the user sets none: as much as fits, up to the trained length.

Lengths double from 8192 on. In steps that wide, the same machine takes the same length from one day
to the next, and what was measured at one length stays of use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specllama.errors import CannotLoad
from specllama.models import memory

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

LEAST = memory.DEFAULT_CTX  # asked for even where it does not fit: that is said when it is loaded
SHARE = 0.5  # of the memory that the weights leave free; the rest is for other programs


@dataclass(frozen=True, slots=True)
class Length:
    """A context length and the reason for it.

    Attributes:
        limit: why it is not the trained length, "" if it is or was asked for.
    """

    tokens: int
    trained: int
    asked: bool = False
    limit: str = ""

    def line(self) -> str:
        """Describe it, for ``-v`` and ``doctor``."""
        if self.asked:
            longer = 0 < self.trained < self.tokens
            beyond = f"; it was trained for {self.trained:,}" if longer else ""
            return f"context: {self.tokens:,} tokens, as asked{beyond}"
        if not self.limit:
            return f"context: {self.tokens:,} tokens, the trained length"
        return f"context: {self.tokens:,} of {self.trained:,} tokens: {self.limit} (-c N chooses)"


LEAST_LENGTH = Length(LEAST, LEAST)


def choose(
    asked: int | None, header: GgufHeader, fits: Callable[[int], bool], limit: str
) -> Length:
    """Choose the length to load a target with.

    Args:
        asked: the user's choice; 0 is the trained length, None leaves it to us.
        fits: whether a length is within what a context may take.
        limit: why it ends where ``fits`` does.

    Raises:
        CannotLoad: neither the file nor the caller gives the trained length.
    """
    trained = header.context_length
    if asked:
        return Length(asked, trained, asked=True)
    if trained <= 0:
        raise CannotLoad(
            f"{header.path.name} does not say how long a context it was trained for",
            "choose one with --ctx-size",
        )
    if asked == 0 or trained <= LEAST or fits(trained):
        return Length(trained, trained, asked=asked == 0)
    tokens = LEAST
    while tokens * 2 < trained and fits(tokens * 2):
        tokens *= 2
    return Length(tokens, trained, limit=limit)


def usual(header: GgufHeader, need: Callable[[int], int]) -> int:
    """Return the length that a target is loaded with in RAM if the user sets none; ``need`` as in
    ``within_share``."""
    if header.context_length <= LEAST:
        return memory.context_length(header)
    return choose(None, header, within_share(need, memory.available_memory()), "").tokens


def within_share(need: Callable[[int], int], available: int) -> Callable[[int], bool]:
    """Return a test: a context takes no more than its share of the memory left by the weights.

    Args:
        need: bytes that cannot be given back, by context length.
        available: bytes that are free; 0 if unknown: then nothing is known to fit.
    """
    bare = need(memory.CTX_PADDING)
    room = SHARE * (available * memory.MARGIN - bare)
    return lambda tokens: need(tokens) - bare <= room
