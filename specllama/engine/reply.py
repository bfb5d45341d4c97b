"""One reply while it is written: text, stop conditions, and what a stop cuts off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specllama.backend.base import Vocab
from specllama.events import FinishReason
from specllama.params import GenerateParams
from specllama.text import TextStream
from specllama.thoughts import Reader


@dataclass(frozen=True, slots=True)
class Taken:
    """The fate of a round's tokens: the first ``kept`` were emitted."""

    kept: int
    text: str
    reason: FinishReason | None


class Reply:
    """Collects emitted tokens until one of them ends the reply.

    A stop token is kept in ``token_ids`` but never shown; a stop string is cut from the text, and
    the token that completed it is the last one kept.

    Args:
        reader: what is shown of the tokens; None shows them as they are.
    """

    def __init__(self, params: GenerateParams, vocab: Vocab, reader: Reader | None = None) -> None:
        self._params = params
        self._vocab = vocab
        # under a grammar an end token comes only where nothing else may (see SamplerChain)
        self._ends = not params.ignore_eos or params.constrained
        self._reader = reader
        self._stream = TextStream(params.stop)
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def remaining(self) -> float:
        limit = self._params.max_tokens
        return float("inf") if limit is None else limit - len(self.token_ids)

    def is_stop(self, token: int) -> bool:
        return self._ends and self._vocab.is_eog(token)

    def take(self, tokens: Sequence[int]) -> Taken:
        """Emit tokens in order until one ends the reply."""
        text: list[str] = []
        for i, token in enumerate(tokens):
            self.token_ids.append(token)
            if self.is_stop(token):
                return Taken(i + 1, "".join(text), "stop_token")
            piece = self._vocab.piece(token)
            if self._reader is not None:
                piece = self._reader.feed(piece)
            text.append(self._stream.feed(piece))
            if self._stream.stopped:
                return Taken(i + 1, "".join(text), "stop_string")
            if self.remaining <= 0:
                return Taken(i + 1, "".join(text), "length")
        return Taken(len(tokens), "".join(text), None)

    def finish(self) -> str:
        """Text that was held back for a stop string or a character that never completed."""
        held = b"" if self._reader is None else self._reader.finish()
        return self._stream.feed(held) + self._stream.finish()
