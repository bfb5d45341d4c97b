"""Grammars and JSON schemas as constraints on the next token, by llguidance.

A guide is a place in the tree of texts that were tried, drafted ones among them; the matchers of a
request go to whichever place is asked about.

Where a grammar leaves one way on, the text that must come next is known in the vocabulary's tokens.
llguidance tells the bytes that alone can follow. White space that may stand in between is guessed
as the text was laid out so far. What is guessed is never more than that: every token is verified.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from specllama.arrays import IntArray
from specllama.errors import UsageError, as_ours
from specllama.grammar.json_layout import WHITE, Habits, JsonLayout
from specllama.grammar.source import Kind, Source, source_of
from specllama.paths import cannot_import
from specllama.text import size

Ahead = list[tuple[int, float]]
"""Tokens, and how likely each is after the others."""
END = -1  # in place of a token: the text ends here
_SPACE = ord(" ")
_DIGIT = ord("0")  # a number may go on
_FREE = ord("~")  # stands only where any text may
_LAST = 0.5  # a token that may hold more than what is known
_ALONE = 32  # up to one token in so many is looked at by itself, more of them by a mask of all
_BACK = 16  # tokens
_MASKS = 8  # kept: of the places that drafts and the target ask about in turn
_NO_TEXT = b"\xff"  # never in a text; llguidance marks special tokens with it
_STACK = 256 << 20  # reserved, not used
_TAIL = 48  # bytes of a text that decide how what follows is cut into tokens
_WORD = 8  # bytes of text that a token may stand for, on average
_MOST = 64  # bytes that are looked ahead: each takes time
# readings that are open at a time: of a grammar each character is a step, of JSON each lexeme
_OPEN = {"grammar": 1000, "schema": 5000, "regex": 1000}
_LIMITS: dict[str, Any] = {
    "step_max_items": 50_000,
    "step_lexer_fuel": 200_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}


@dataclass(eq=False, slots=True)
class _Place:
    """A position in the grammar after a text; the root is that of the empty text."""

    depth: int = 0
    before: _Place | None = None
    token: int = -1
    after: dict[int, _Place] = field(default_factory=dict)
    stuck: str = ""  # why it cannot be told what may follow


def require(kind: Kind, text: str) -> None:
    """Compile a grammar to check it; raise UsageError if it fails. No vocabulary is needed."""
    _bytes().matcher(source_of(kind, text))


@lru_cache(maxsize=64)
def _judge(key: str, asked: str) -> Any:
    """Compile a keyword of JSON Schema for texts; return None where that fails."""
    with suppress(UsageError):
        return _bytes().matcher(source_of("schema", json.dumps({"type": "string", key: asked})))
    return None


def matches(key: str, asked: str, text: str) -> bool:
    """True if a text fits a pattern or a format, or it cannot be told whether it does."""
    if (fresh := _judge(key, asked)) is None:
        return True
    matcher = fresh.deep_copy()
    written = [*json.dumps(text, ensure_ascii=False).encode("utf-8", "replace")]
    n = matcher.validate_tokens(written)
    if not matcher.consume_tokens(written[: n or 1]):  # too large to be told, also later ones
        _judge.cache_clear()
        return True
    return n == len(written) and bool(matcher.is_accepting())


def _library() -> Any:
    """Import llguidance, and raise SpecllamaError if that fails."""
    try:
        import llguidance
    except (ImportError, MemoryError) as error:
        said = "grammars and JSON schemas need llguidance"
        raise cannot_import(error, said, "llguidance") from None
    return llguidance


@cache
def _bytes() -> Guides:
    return Guides([bytes([i]) for i in range(256)], [])


class Guides:
    """A maker of guides over one vocabulary.

    Args:
        pieces: the bytes of every token; a token without any is never allowed.
        ends: tokens that end a text.
        tokenize: a text in the middle of another one; None: ``ahead`` returns nothing.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        ends: Iterable[int],
        tokenize: Callable[[str], Sequence[int]] | None = None,
    ) -> None:
        self._library = _library()
        self.n_tokens = len(pieces)
        self.pieces = pieces
        self.tokenize = tokenize
        self.ends = np.zeros(self.n_tokens, np.bool_)
        self.ends[list(ends)] = True
        tokens = [
            b"" if end or _NO_TEXT in piece else piece
            for piece, end in zip(pieces, self.ends.tolist(), strict=True)
        ]
        # a token of its own that ends texts: whether a text may end is asked of the matcher
        single = [bytes((value,)) for value in range(255)]  # a byte fits if its token does
        words: Any = _Words([*tokens, b"", *single, b""], self.n_tokens)
        self._tokenizer = self._library.LLTokenizer(words, eos_token=[self.n_tokens])

    def guide(self, source: Source) -> Guide:
        """Make a guide, and raise UsageError if the grammar does not compile."""
        walk = _Walk(self, source)
        return Guide(walk, walk.root)

    def matcher(self, source: Source) -> Any:
        """Compile a grammar, and raise UsageError if that fails."""
        made = self._compiled(source)
        if made.is_error():
            raise source.refused(made.get_error(), self._why_not)
        return made

    def _compiled(self, source: Source) -> Any:
        library = self._library
        made: list[Any] = []

        def make() -> None:
            limits = library.LLParserLimits(max_items_in_row=_OPEN[source.kind], **_LIMITS)
            made.append(library.LLMatcher(self._tokenizer, source.lark, log_level=0, limits=limits))

        _deep(make)
        return made[0]

    def _why_not(self, schema: Any) -> str:
        """Return why a schema by itself does not compile; "" if it does."""
        error: str = self._compiled(source_of("schema", json.dumps(schema))).get_error()
        return error

    def tokens(self, before: bytes, text: Forced, most: int) -> Ahead:
        """Return at most ``most`` tokens of a text that follows another one."""
        found: Ahead = []
        at = 0
        for token in self._cut(before, text.data):
            piece = self.pieces[token]
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
        assert self.tokenize is not None
        whole = before + text
        begin = next((i for i, byte in enumerate(whole) if byte & 0xC0 != 0x80), 0)
        ids = self.tokenize(whole[begin:].decode("utf-8", "ignore"))
        ends = np.cumsum([len(self.pieces[token]) for token in ids]).tolist()
        cut = bisect_right(ends, len(before) - begin)
        if not ids or (ends[cut - 1] if cut else 0) != len(before) - begin:
            return self.tokenize(text.decode("utf-8", "ignore"))
        return ids[cut:]


_starting = threading.Lock()


def _deep(run: Callable[[], None]) -> None:
    """Run on a stack that holds the longest accepted chains of rules: they are compiled by
    recursion."""
    with _starting:
        usual = threading.stack_size(_STACK)
        try:
            thread = threading.Thread(target=run, name="specllama-grammar", daemon=True)
            thread.start()
        except RuntimeError as error:
            raise as_ours(error, f"a grammar is compiled on a stack of {size(_STACK)}") from None
        finally:
            threading.stack_size(usual)
    thread.join()


class Guide:
    """A ``Constraint``; its forks share the matcher. For one thread at a time."""

    def __init__(self, walk: _Walk, place: _Place) -> None:
        self._walk, self._place = walk, place

    def allowed(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        """Return which ids are allowed, and raise UsageError if that takes too much work."""
        n = self._walk.guides.n_tokens
        if len(ids) * _ALONE > n:
            inside = (ids >= 0) & (ids < n)
            mask = self._walk.mask(self._place)
            return np.where(inside, mask[np.where(inside, ids, 0)], False)
        return self._walk.some(self._place, ids.tolist())

    def accept(self, token: int) -> None:
        """Move past a token, and raise UsageError if it does not fit."""
        self._place = self._walk.next(self._place, token)

    def fork(self) -> Guide:
        return Guide(self._walk, self._place)

    def ahead(self, most: int, habits: Habits) -> Ahead:
        return self._walk.ahead(self._place, most, habits)


class _Walk:
    """The matchers of a request: one at the last place that was used, one some tokens before it,
    from which it goes to other places.

    llguidance can take tokens back, but may then say of what follows what is not so (1.9.1, after
    a mask): nothing is taken back here.
    """

    def __init__(self, guides: Guides, source: Source) -> None:
        self.guides, self.root = guides, _Place()
        self._source = source
        self._fresh = guides.matcher(source)
        self._anchor, self._behind = self._fresh.deep_copy(), self.root
        self._matcher, self._at = self._fresh.deep_copy(), self.root
        self._masks: OrderedDict[_Place, npt.NDArray[np.bool_]] = OrderedDict()
        self._read, self._layout, self._tail = self.root, JsonLayout(), b""  # of the text to there

    def some(self, place: _Place, tokens: Sequence[int]) -> npt.NDArray[np.bool_]:
        matcher, ends, n = self._go(place), self.guides.ends, self.guides.n_tokens
        fits = matcher.validate_tokens
        may_end: bool = matcher.is_accepting()
        found = [0 <= t < n and (may_end if ends[t] else fits([t]) == 1) for t in tokens]
        self._check(place)
        return np.array(found, np.bool_)

    def mask(self, place: _Place) -> npt.NDArray[np.bool_]:
        """Return the mask of all tokens."""
        if place in self._masks:
            self._masks.move_to_end(place)
            return self._masks[place]
        matcher, n = self._go(place), self.guides.n_tokens
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        self._check(place)
        mask = np.unpackbits(bits, count=n, bitorder="little").view(np.bool_)
        if matcher.is_accepting():
            mask |= self.guides.ends
        self._masks[place] = mask
        if len(self._masks) > _MASKS:
            self._masks.popitem(last=False)
        return mask

    def next(self, place: _Place, token: int) -> _Place:
        """Return the place after one more token. A token that ends the text leaves it as it is."""
        found = place.after.get(token)
        if found is None:
            if not self.some(place, [token])[0]:
                raise UsageError(f"token {token} does not fit the grammar here")
            if self.guides.ends[token]:
                return place
            found = place.after[token] = _Place(place.depth + 1, place, token)
        return found

    def ahead(self, place: _Place, most: int, habits: Habits) -> Ahead:
        if place.stuck or self.guides.tokenize is None:
            return []
        matcher = self._go(place).deep_copy()  # what fails in it is no reason to end the reply
        read = _between(self._read, place)
        if read is None:
            self._layout, self._tail = JsonLayout(), b""
            read = _between(self.root, place) or []
        for token in read:
            piece = self.guides.pieces[token]
            self._layout.read(piece, habits)
            self._tail = (self._tail + piece)[-_TAIL:]
        self._read = place
        single = self.guides.n_tokens + 1
        text = text_ahead(matcher, single, self._layout.copy(), habits, min(_WORD * most, _MOST))
        if not text.data and not text.over:
            return []
        return self.guides.tokens(self._tail, text, most)

    def _go(self, place: _Place) -> Any:
        """Return the matcher, at this place."""
        if place.stuck:
            raise self._source.stuck(place.stuck)
        ahead = _between(self._at, place)
        if ahead is None:
            ahead = _between(self._behind, place)
            if ahead is None:
                self._anchor, self._behind = self._fresh.deep_copy(), self.root
                ahead = _between(self.root, place)
            self._matcher = self._anchor.deep_copy()
        if ahead:
            self._matcher.consume_tokens(ahead)
        self._at = place
        self._check(place)
        self._follow()
        return self._matcher

    def _follow(self) -> None:
        """Keep the second matcher near the first, but earlier than drafts usually reach back."""
        if self._at.depth - self._behind.depth < 2 * _BACK:
            return
        there = self._at
        for _ in range(_BACK):
            assert there.before is not None
            there = there.before
        self._anchor.consume_tokens(_between(self._behind, there))
        self._behind = there

    def _check(self, place: _Place) -> None:
        """Refuse a matcher that ran into a limit: a draft's must not end the reply."""
        if not self._matcher.is_error():
            return
        place.stuck = self._matcher.get_error()
        self._matcher, self._at = self._anchor.deep_copy(), self._behind
        raise self._source.stuck(place.stuck)


def _between(before: _Place, place: _Place) -> list[int] | None:
    """Return the tokens from one place to another; None if they do not lead there."""
    tokens: list[int] = []
    here: _Place | None = place
    while here is not None and here.depth > before.depth:
        tokens.append(here.token)
        here = here.before
    return tokens[::-1] if here is before else None


class _Words:
    """Tokens in llguidance's form. Nothing is tokenized: texts are judged by their bytes."""

    is_tokenizer_wrapper = True

    def __init__(self, tokens: list[bytes], end: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.bos_token_id = None
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError


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
        new, token, _ = matcher.compute_ff_bytes().partition(_NO_TEXT)
        if not new:
            if token or matcher.validate_tokens([single + _FREE]):
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
