"""The step from the segments of a prompt to token ids.

llama.cpp finds special tokens by their text before it merges anything, and starts the text after
one of them afresh (with a space, in SentencePiece vocabularies). So a prompt is tokenized whole, as
llama.cpp tokenizes the same text, unless a content contains the text of a marker. Only then is it
taken apart here, in the same way, and what people wrote stays ordinary text:

- control tokens are recognised in template text alone;
- user-defined tokens that mark something, which llama.cpp recognises everywhere, are cut after
  their first character if they occur in a content. They are those written ``<|so|>`` and those
  that the template names; in a reply only those that it wrote into this very prompt, so that what
  else the model can say (``<tool_call>``) stays its own text.
"""

from __future__ import annotations

import re
from bisect import bisect, bisect_left
from collections.abc import Sequence
from itertools import accumulate

from specllama.backend.base import SpecialToken, Vocab
from specllama.backend.specials import Verdict, partition
from specllama.replies.chat import Segment

_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>")


def encode_segments(
    vocab: Vocab, segments: Sequence[Segment], *, bos: str, template: str
) -> list[int]:
    """Return the token ids of a chat prompt.

    Args:
        bos: text of the begin token; it is not doubled where the template writes it as well.
        template: source of the chat template, "" if there is none.
    """
    first, *rest = segments or [Segment("", True)]
    if first.special and vocab.adds_bos:
        segments = [Segment(first.text.removeprefix(bos), True), *rest]
    text = "".join(segment.text for segment in segments)
    ids = vocab.tokenize(text, add_special=True, parse_special=True)
    forgery = _Forgery(segments, template)
    present = [special for t in set(ids) if (special := vocab.special(t)) is not None]
    if not any(forgery.anywhere(special, text) for special in present):
        return ids
    frame = vocab.tokenize("", add_special=True, parse_special=False)
    n_begin = int(vocab.adds_bos)
    ids = frame[:n_begin]
    after_text = False
    for piece in partition(text, vocab.specials, forgery.judge):
        if isinstance(piece, int):
            ids.append(piece)
        else:
            ids += vocab.tokenize(
                piece, add_special=False, parse_special=False, after_text=after_text
            )
        after_text = isinstance(piece, str)
    return ids + frame[n_begin:]


class _Forgery:
    """A judge of special tokens' texts in a prompt: markers, or text of people."""

    def __init__(self, segments: Sequence[Segment], template: str) -> None:
        self._segments = segments
        self._starts = list(accumulate((len(s.text) for s in segments[:-1]), initial=0))
        # no marker can arise from two pieces that were never next to each other
        self._written = "\0".join(s.text for s in segments if s.special)
        self._template = template

    def judge(self, special: SpecialToken, start: int, end: int) -> Verdict:
        first, beyond = bisect(self._starts, start) - 1, bisect_left(self._starts, end)
        contents = [s for s in self._segments[first:beyond] if not s.special]
        if not contents:
            return "token"
        if special.control:
            return "text"
        return "cut" if self._marks(special, all(s.reply for s in contents)) else "token"

    def anywhere(self, special: SpecialToken, text: str) -> bool:
        """True if its text must be split, instead of becoming a token, at any place."""
        if not special.control and not self._marks(special, reply=False):
            return False
        at = text.find(special.text)
        while at >= 0:
            if self.judge(special, at, at + len(special.text)) != "token":
                return True
            at = text.find(special.text, at + 1)
        return False

    def _marks(self, special: SpecialToken, reply: bool) -> bool:
        """True if a user-defined token is a marker, in the text of people or of models."""
        text = special.text
        if len(text.strip()) < 2:  # spaces; and a single character could not be cut
            return False
        return (
            _LIKE_CONTROL.fullmatch(text) is not None
            or text in self._written
            or (text in self._template and not reply)
        )
