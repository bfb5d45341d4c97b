"""One reply while it is written: text, stop conditions, and the cut at a stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specllama.backend.base import Vocab
from specllama.events import FinishReason
from specllama.replies.thoughts import Part, Reader
from specllama.settings.params import GenerateParams
from specllama.text import TextStream


@dataclass(frozen=True, slots=True)
class RoundFate:
    """The fate of a round's tokens: the first ``kept`` were emitted."""

    kept: int
    reasoning: str
    text: str
    reason: FinishReason | None


class ReplyBuilder:
    """A collector of emitted tokens until one of them ends the reply.

    A stop token is kept in ``token_ids`` but never shown; a stop string is cut from the text, and
    the token that completed it is the last one kept. Stop strings are not looked for in thoughts.

    Args:
        reader: tells thoughts from the answer; None shows the tokens as they are.
    """

    def __init__(self, params: GenerateParams, vocab: Vocab, reader: Reader | None = None) -> None:
        self._params = params
        self._vocab = vocab
        # under a grammar an end token comes only where nothing else may (see SamplerChain)
        self._ends = not params.ignore_eos or params.constrained
        self._reader = reader
        self._spelled = params.spelled
        self._thoughts = TextStream()
        self._stream = TextStream(params.stop, params.repeats, params.indent)
        self.token_ids: list[int] = []

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def reasoning(self) -> str:
        return self._thoughts.text

    @property
    def stop(self) -> str | None:
        """The stop string that ended the reply, if one did."""
        return self._stream.stop or None

    @property
    def seams(self) -> tuple[str, str] | None:
        """The seams of the reply, see ``thoughts``; None also if there are none."""
        seams = None if self._reader is None else self._reader.seams
        return seams if seams and any(seams) else None

    def thinking(self) -> bool:
        """True if the next text is part of a thought, as far as is known."""
        return self._reader is not None and self._reader.thinking

    @property
    def remaining(self) -> float:
        limit = self._params.max_tokens
        return float("inf") if limit is None else limit - len(self.token_ids)

    def is_stop(self, token: int) -> bool:
        return self._ends and self._vocab.is_eog(token)

    def take(self, tokens: Sequence[int], *, late: bool = False) -> RoundFate:
        """Emit tokens in order until one ends the reply; ``late``: so does one that ends a line."""
        text: list[str] = []
        thoughts: list[str] = []
        reader = self._reader
        reason: FinishReason | None = None
        kept = 0
        for token in tokens:
            kept += 1
            self.token_ids.append(token)
            if self.is_stop(token):
                reason = "stop_token"
            elif reader is None or (reader.plain and token not in reader.spelling.tokens):
                text.append(self._stream.feed(self._vocab.piece(token, special=self._spelled)))
            else:
                unit = reader.spelling.unit(token, special=self._spelled)
                self._sort(reader.feed(unit), thoughts, text)
            if reason is None and self._stream.stopped:
                reason = "stop_string" if self._stream.stop else "length"
            elif reason is None and (
                self.remaining <= 0 or (late and b"\n" in self._vocab.piece(token))
            ):
                reason = "length"
            if reason is not None:
                break
        return RoundFate(kept, "".join(thoughts), "".join(text), reason)

    def finish(self, reason: FinishReason | None) -> tuple[str, str]:
        """Return thought and text that were held back for a mark or a stop string."""
        text: list[str] = []
        thoughts: list[str] = []
        if self._reader is not None:
            self._sort(self._reader.finish(cut=reason != "stop_token"), thoughts, text)
        return "".join([*thoughts, self._thoughts.finish()]), "".join(
            [*text, self._stream.finish()]
        )

    def _sort(self, parts: Sequence[Part], thoughts: list[str], text: list[str]) -> None:
        assert self._reader is not None
        for thought, units in parts:
            piece = self._reader.spelling.bytes(units)
            if thought:
                thoughts.append(self._thoughts.feed(piece))
            else:
                text.append(self._stream.feed(piece))
