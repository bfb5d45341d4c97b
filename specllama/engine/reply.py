"""One reply while it is written: its text, and the stop strings and tokens that end it.

    stream = TextStream(stops=["\\nUser:"])
    for piece in token_pieces:          # bytes of one token each
        show(stream.feed(piece))
        if stream.stopped:              # this token completed a stop string
            break
    show(stream.finish())

What is shown does not depend on how the bytes are cut into pieces, so plain and speculative
decoding agree even if a stop string begins in one round and ends in the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.backend.base import Vocab
from specllama.events import FinishReason
from specllama.replies.thoughts import Part, Reader
from specllama.settings.params import GenerateParams
from specllama.text import Utf8Stream


class _Stop:
    """A search for one stop string in a text in pieces, which reads each character once.

    Attributes:
        begun: length of the longest end of the text so far that begins the stop string.
    """

    __slots__ = ("_shorter", "begun", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        # for every length, that of the longest shorter beginning which is also an end of it
        self._shorter = [0, 0]
        for char in text[1:]:
            n = self._shorter[-1]
            while n and text[n] != char:
                n = self._shorter[n]
            self._shorter.append(n + (text[n] == char))

    def feed(self, piece: str) -> int | None:
        """Return how many characters of the piece completed the stop string; None if it is not
        complete."""
        text, n = self.text, self.begun
        if not n and text[0] not in piece:
            return None
        for i, char in enumerate(piece, 1):
            while n and text[n] != char:
                n = self._shorter[n]
            n += text[n] == char
            if n == len(text):
                return i
        self.begun = n
        return None


class _Outdent:
    """Finder of a line that is indented by fewer than ``least`` blanks or tabs; see ``_Stop``.

    The first line goes on from another text. An empty line is indented by none.
    """

    begun = 0
    text = ""  # the first character behind the indentation is cut, whatever it is

    def __init__(self, least: int) -> None:
        self._least = least
        self._indent: int | None = None  # of a line of which no more came yet

    def feed(self, piece: str) -> int | None:
        for i, char in enumerate(piece, 1):
            if self._indent is not None and char in " \t":
                self._indent += 1
                continue
            if self._indent is not None and self._indent < self._least:
                return i
            self._indent = 0 if char == "\n" else None
        return None


class TextStream:
    """Detokenised text with stop strings, fed one token at a time.

    A stop string is never shown, nor anything after it. Text that may turn out to begin a stop
    string is held back until the next pieces decide. The stop string that is complete first
    counts; of several complete at the same character, the longest.

    Args:
        lines: stop strings too. One that lacks only a line break at the end of the text counts.
        indent: the text ends in a line that is indented less, before its first character.

    Attributes:
        stop: the stop string that was met; "" where the indentation ended the text.
    """

    __slots__ = ("_held", "_lines", "_shown", "_stops", "_utf8", "stop")

    def __init__(
        self, stops: Sequence[str] = (), lines: Sequence[str] = (), indent: int = 0
    ) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._lines = [_Stop(line) for line in lines]
        self._stops: list[_Stop | _Outdent] = [_Outdent(indent)] if indent > 0 else []
        self._stops += [*map(_Stop, dict.fromkeys(stops)), *self._lines]
        self._utf8 = Utf8Stream()
        self._held = ""
        self._shown: list[str] = []
        self.stop: str | None = None

    @property
    def stopped(self) -> bool:
        """True if a stop string is complete; the token fed last completed it."""
        return self.stop is not None

    @property
    def text(self) -> str:
        """The text that was shown so far."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    def feed(self, piece: bytes) -> str:
        """Take the bytes of one token; return the text that may be shown now ('' if held back).

        After a stop nothing more comes out.
        """
        if self.stopped:
            return ""
        new = self._utf8.feed(piece)
        before = len(self._held)
        self._held += new
        if not self._stops:
            return self._show(len(self._held))
        met = [
            (before + at, before + at - (len(stop.text) or 1), stop.text)
            for stop in self._stops
            if (at := stop.feed(new)) is not None
        ]
        if not met:
            return self._show(len(self._held) - max(stop.begun for stop in self._stops))
        _, start, self.stop = min(met)
        out = self._show(start)
        self._held = ""
        return out

    def finish(self) -> str:
        """End the text: return what was held back, without a character left incomplete."""
        if self.stopped:
            return ""
        begun = (one.begun for one in self._lines if one.text[one.begun :] == "\n")
        return self._show(len(self._held) - max(begun, default=0))

    def _show(self, n: int) -> str:
        out, self._held = self._held[:n], self._held[n:]
        if out:
            self._shown.append(out)
        return out


class ReplyBuilder:
    """A collector of emitted tokens until one of them ends the reply.

    A stop token is kept in ``token_ids`` but never shown; a stop string is cut from the text, and
    the token that completed it is the last one kept. Stop strings are not looked for in thoughts.

    Args:
        reader: tells thoughts from the answer; None shows the tokens as they are.

    Attributes:
        reason: why the reply ended, None while it goes on.
        new: (thought, text) that the tokens accepted last made.
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
        self.reason: FinishReason | None = None
        self.new = "", ""

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

    def accept(self, tokens: Sequence[int], *, late: bool = False) -> int:
        """Take tokens in order until one ends the reply; return how many of them it has.

        Args:
            late: one that ends a line ends the reply, too.
        """
        text: list[str] = []
        thoughts: list[str] = []
        reader = self._reader
        kept = 0
        for token in tokens:
            kept += 1
            self.token_ids.append(token)
            if self.is_stop(token):
                self.reason = "stop_token"
            elif reader is None or (reader.plain and token not in reader.spelling.tokens):
                text.append(self._stream.feed(self._vocab.piece(token, special=self._spelled)))
            else:
                unit = reader.spelling.unit(token, special=self._spelled)
                self._sort(reader.feed(unit), thoughts, text)
            if self.reason is None and self._stream.stopped:
                self.reason = "stop_string" if self._stream.stop else "length"
            elif self.reason is None and (
                self.remaining <= 0 or (late and b"\n" in self._vocab.piece(token))
            ):
                self.reason = "length"
            if self.reason is not None:
                break
        self.new = "".join(thoughts), "".join(text)
        return kept

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
