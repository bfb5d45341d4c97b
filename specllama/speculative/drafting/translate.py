"""Draft models with another vocabulary. Both ways are lossless: target tokens are sent.

shared tokens   Tokens are matched by their text. The draft's law is restricted to the tokens that
                both know and renormalised, so q is the law of the token that is really sent and
                every rule and proposer works unchanged (token-level intersection, Timor et al.
                2025). Needs nearly all of the draft's tokens to be known to the target.
new tokens      The draft model writes greedily in its own tokens, and its text is tokenised again
                for the target. Then no probabilities of the target's tokens are known: they are
                point masses (assisted generation across tokenizers, universal assisted decoding).

How the text is spelled for the draft model can only change the guesses, never what is emitted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specllama.arrays import IntArray, Rows
from specllama.backend.base import Context, Outputs, Part, Vocab
from specllama.errors import ContextFull, EngineError, PairIncompatible
from specllama.settings.params import SamplingParams
from specllama.speculative.drafting.draft_model import ChainDrafter
from specllama.speculative.drafting.drafter import Request
from specllama.speculative.effects import Steps
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT, Draft, Room
from specllama.text_history import Follower, History

SHARED_MIN = 0.9  # of the draft's tokens, for the first way
_LOOK_BACK = 32  # bytes before the end that are cut into draft tokens again
_ANCHOR = 4  # target tokens before the end that help to cut the guess as the target would

_Key = tuple[bool, bytes]  # (is a control token, its text)


def _key(vocab: Vocab, token: int) -> _Key | None:
    piece = vocab.piece(token)
    if piece:
        return False, piece
    special = vocab.piece(token, special=True)
    return (True, special) if special else None


def _table(vocab: Vocab) -> dict[_Key, int]:
    """Map each text to its token id; of equal texts, to the lowest id."""
    found: dict[_Key, int] = {}
    for token in range(vocab.n_tokens):
        key = _key(vocab, token)
        if key is not None:
            found.setdefault(key, token)
    return found


class Speller:
    """A converter of bytes into tokens by the longest fitting piece, without a tokenizer."""

    def __init__(self, table: dict[_Key, int]) -> None:
        self._pieces = {text: token for (control, text), token in table.items() if not control}
        self._longest = max(map(len, self._pieces), default=0)

    def can_write_text(self) -> bool:
        """True if every printable ASCII character and the newline can be written."""
        return all(bytes([b]) in self._pieces for b in (10, *range(32, 127)))

    def spell(self, data: bytes) -> list[int] | None:
        """Return tokens whose bytes are ``data``; None if there are none."""
        tokens: list[int] = []
        at = 0
        while at < len(data):
            for n in range(min(self._longest, len(data) - at), 0, -1):
                token = self._pieces.get(data[at : at + n])
                if token is not None:
                    tokens.append(token)
                    at += n
                    break
            else:
                return None
        return tokens


class TokenMap:
    """The target's tokens in a draft model's vocabulary.

    ``target_ids[i]`` and ``draft_ids[i]`` mean the same text; ``shared`` is the fraction of the
    draft's tokens that the target knows.
    """

    def __init__(self, target: Vocab, draft: Vocab) -> None:
        ours, theirs = _table(target), _table(draft)
        both = [(token, theirs[key]) for key, token in ours.items() if key in theirs]
        self.target_ids: IntArray = np.array([t for t, _ in both], np.int32)
        self.draft_ids: IntArray = np.array([d for _, d in both], np.int32)
        self.shared = len(both) / max(len(theirs), 1)
        self.n_target = target.n_tokens
        self.target_speller, self.draft_speller = Speller(ours), Speller(theirs)
        self._target = target
        self._known = dict(both)
        self._blank = theirs.get((False, b" "), theirs.get((False, b"\n"), 0))
        self._spelled: dict[int, tuple[int, ...]] = {}

    def spell(self, token: int) -> tuple[int, ...]:
        """Spell one target token in draft tokens, at least one: a blank if it cannot be written."""
        if token not in self._spelled:
            known = [self._known[token]] if token in self._known else None
            spelled = known or self.draft_speller.spell(self._target.piece(token))
            self._spelled[token] = tuple(spelled or [self._blank])
        return self._spelled[token]


class TranslatedContext:
    """A draft model's KV cache with an interface in target tokens, and rows over target ids.

    Ids that the draft model does not share have logit -inf. It takes chains and returns one row.
    """

    pool = None
    max_rows = 1
    max_leaves = 1

    def __init__(self, inner: Context, tokens: TokenMap) -> None:
        self._inner = inner
        self.n_vocab, self.n_batch = tokens.n_target, inner.n_batch
        self._map = tokens
        self._tokens: list[int] = []
        self._ends: list[int] = []  # draft tokens up to and including each target token
        self._row: Rows = np.full((1, tokens.n_target), -np.inf, np.float32)

    @property
    def n_ctx(self) -> int:
        """Target tokens that fit when those still to come need one draft token each."""
        return self._inner.n_ctx - (len(self._inner.tokens) - len(self._tokens))

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    @property
    def n_past(self) -> int:
        return len(self._tokens)

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        if parents is not None or (outputs == "all" and len(tokens) > 1):
            raise EngineError("a translated context takes chains and returns one row")
        spelled: list[int] = []
        ends: list[int] = []
        past = len(self._inner.tokens)
        for token in tokens:
            spelled += self._map.spell(token)
            ends.append(past + len(spelled))
        if past + len(spelled) > self._inner.n_ctx:
            raise ContextFull(f"the draft model's context of {self._inner.n_ctx} tokens is full")
        batch = self._inner.n_batch
        for i in range(0, len(spelled), batch):
            last = outputs != "none" and i + batch >= len(spelled)
            rows = self._inner.forward(spelled[i : i + batch], outputs="last" if last else "none")
        self._tokens += tokens
        self._ends += ends
        if outputs == "none":
            return self._row[:0]
        self._row[0, self._map.target_ids] = rows[0, self._map.draft_ids]
        return self._row

    def run(self, parts: Sequence[Part]) -> None:
        (part,) = parts
        part.rows = self.forward(part.tokens, outputs=part.outputs, parents=part.parents)

    def reopen(self, n: int) -> None:
        raise EngineError("a translated context takes chains only")

    def keep_path(self, path: Sequence[int]) -> None:
        raise EngineError("a translated context takes chains only")

    def reusable_prefix(self, keep_len: int) -> int:
        ends = self._ends[:keep_len]
        return bisect_right(ends, self._inner.reusable_prefix(ends[-1])) if ends else 0

    def rollback(self, keep_len: int) -> None:
        if not 0 <= keep_len <= len(self._tokens):
            raise ValueError(f"cannot roll back to {keep_len} of {len(self._tokens)} tokens")
        self._inner.rollback(self._ends[keep_len - 1] if keep_len else 0)
        del self._tokens[keep_len:], self._ends[keep_len:]

    def close(self) -> None:
        self._inner.close()


class RetokenizingDrafter(ChainDrafter):
    """A drafter with a model of any vocabulary: its text is cut into target tokens.

    Args:
        lane: the draft model's, in its own tokens.
    """

    foreign = True

    def __init__(self, lane: Context, target: Vocab, draft: Vocab, tokens: TokenMap) -> None:
        super().__init__(lane, n_vocab=draft.n_tokens)
        self._target = target
        self._draft = draft
        self._speller = tokens.target_speller
        self._draft_speller = tokens.draft_speller
        self._heard = Follower()  # the text in the target's tokens
        self._ends: list[int] = []  # bytes of the text up to and including each
        self._text = bytearray()
        self._ids = History()  # the text in draft tokens
        self._id_ends: list[int] = []
        self._greedy = SamplerChain(SamplingParams(temperature=0.0))

    def start(self, request: Request) -> None:
        super().start(replace(request, is_eog=self._stops))

    def _stops(self, token: int) -> bool:
        """True if a token of the draft model has no text."""
        return self._draft.is_eog(token) or not self._draft.piece(token)

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        if not self._follow(tokens) or not self._ids:
            return EMPTY_DRAFT
        guess = yield from super().draft(self._ids, self._greedy, room)
        written = b"".join(map(self._draft.piece, guess.tokens))
        cut = self._cut(tokens, written)[: room.n]
        scores = [guess.confidence[min(i, len(guess) - 1)] for i in range(len(cut))]
        return Draft.chain(cut, self.name, confidence=scores)

    def _follow(self, tokens: Sequence[int]) -> bool:
        """Update the text in draft tokens; return False if it cannot be written now."""
        keep, _ = self._heard.follow(tokens)
        del self._ends[keep:]
        del self._text[self._ends[-1] if self._ends else 0 :]
        stable = len(self._text) - _LOOK_BACK
        for token in tokens[keep:]:
            self._text += self._target.piece(token)
            self._ends.append(len(self._text))
        # cut again from a draft token's start, shortly before what is new, at a blank: there
        # tokenizers agree best with what they make of the whole
        at = len(self._ids)
        while at and (
            self._id_ends[at - 1] > stable or self._text[self._id_ends[at - 1]] not in b" \n"
        ):
            at -= 1
        self._ids.cut(at)
        del self._id_ends[at:]
        start = self._id_ends[-1] if at else 0
        try:
            rest = self._text[start:].decode()
            ids = self._draft.tokenize(rest, add_special=not at, parse_special=False)
            if at and rest.startswith(" "):
                bare = self._draft.tokenize(rest[1:], add_special=False, parse_special=False)
                if bare and self._draft.piece(bare[0]).startswith(b" "):
                    ids = bare  # this tokenizer puts a blank before every text by itself
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data":
                return False  # inside a character: the next token completes it
            spelled = self._draft_speller.spell(bytes(self._text[start:]))
            if spelled is None:
                return False
            ids = spelled
        except EngineError:
            return False  # the draft model's vocabulary cannot write this
        for token in ids:
            start += len(self._draft.piece(token))
            self._ids.append(token)
            self._id_ends.append(min(start, len(self._text)))
        return True

    def _cut(self, tokens: Sequence[int], written: bytes) -> list[int]:
        """Return target tokens whose bytes are ``written``, as far as characters are whole."""
        try:
            data = written.decode().encode()
        except UnicodeDecodeError as error:
            data = written[: error.start]
        if not data:
            return []
        before = [t for t in tokens[-_ANCHOR:] if self._target.piece(t)]
        anchor = b"".join(self._target.piece(t) for t in before)
        try:
            both = self._target.tokenize(
                (anchor + data).decode(), add_special=False, parse_special=False
            )
        except (UnicodeDecodeError, EngineError):
            both = []
        if both[: len(before)] == before:
            rest = both[len(before) :]
            if b"".join(self._target.piece(t) for t in rest) == data:
                return rest
        return self._speller.spell(data) or []


def join_vocabularies(
    context: Context, target: Vocab, draft: Vocab
) -> TranslatedContext | RetokenizingDrafter:
    """Return the better of the two ways for a draft model's cache.

    Raises:
        PairIncompatible: neither applies.
    """
    tokens = TokenMap(target, draft)
    if tokens.shared >= SHARED_MIN:
        return TranslatedContext(context, tokens)
    if tokens.target_speller.can_write_text() and tokens.draft_speller.can_write_text():
        return RetokenizingDrafter(context, target, draft, tokens)
    raise PairIncompatible(
        f"the two vocabularies share {tokens.shared:.0%} of the draft's tokens, and one of them "
        "cannot write plain text letter by letter",
        "choose a draft model of the target's family",
    )
