"""The printer of one reply's events: text to stdout, everything else to stderr, thoughts too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from specllama.cli import diagnostics, output
from specllama.cli.output import WordWrap
from specllama.events import Event, Finished, RoundDone
from specllama.figures import Figures, rounding
from specllama.store.codec import encode_event
from specllama.text import number_of, rate
from specllama.told import news
from specllama.verdict import lead, words

MEASURE = "specllama bench run measures it"

_ENDINGS = {
    "length": "token limit",
    "context": "context full",
    "cancelled": "stopped",
    "error": "failed",
}


@dataclass(kw_only=True)
class Printer:
    """A printer of one request's events.

    Args:
        as_json: print every event as a JSON line instead of the text.
        quiet: print warnings, but no other notices and no statistics.
        close_line: end the text with a newline if it has none.
        thoughts: "show" dims them on stderr, "hide" is silent.
        known: None, or for a chat the notes that it has shown: each is shown once, words are
            wrapped on a terminal, and the figures take one short line.
    """

    as_json: bool = False
    quiet: bool = False
    close_line: bool = True
    thoughts: str = "show"
    known: set[str] | None = None

    def __post_init__(self) -> None:
        if self.as_json or self.quiet:
            self.thoughts = "hide"
        self.finished: Finished | None = None
        self._last = ""
        wraps, columns = self.known is not None, diagnostics.width()
        self._text = WordWrap(output.width()) if wraps and output.is_terminal() else None
        self._thought = WordWrap(columns) if wraps and columns else None
        self._thinking = self._tells_rounds = False  # the engine tells them after each text at once
        self._lines: list[bytes] = []  # to be written with the next

    def show(self, events: Iterator[Event]) -> None:
        """Print until the events end; close the last line even if they end with an error."""
        try:
            for event in events:
                self._one(event)
        finally:
            self._flush()
            self._end_thought()
            if self._text is not None:
                output.write(self._text.finish())
            if self._last and not self._last.endswith("\n") and self.close_line:
                output.write("\n")
        if self.finished is None or self.quiet:
            return
        if self.known is not None:
            diagnostics.note(short_line(self.finished))
        else:
            diagnostics.note(statistics_line(self.finished))
            if (verdict := self.finished.verdict) is not None:
                colour = {"slower": diagnostics.YELLOW, "faster": diagnostics.GREEN}
                diagnostics.say(
                    words(verdict, MEASURE), colour.get(verdict.answer, diagnostics.DIM)
                )

    def _one(self, event: Event) -> None:
        if self.as_json:
            self._lines.append(encode_event(event))
            if not (event.followed and self._tells_rounds):
                self._flush()
            if event.followed:
                return
            if type(event) is RoundDone:
                self._tells_rounds = True
                return
        new = news(event)
        if new.reasoning:
            self._think(new.reasoning)
        if new.text:
            self._end_thought()
            if not self.as_json:
                output.write(new.text if self._text is None else self._text.feed(new.text))
                self._last = new.text
        for notice in new.notices:
            if self.known is not None:
                if notice.message in self.known:
                    continue
                self.known.add(notice.message)
            self._end_thought()
            if notice.level == "warning":
                diagnostics.warn(notice.message)
            elif not self.quiet:
                diagnostics.note(notice.message)
        if (end := new.finished) is not None:
            self.finished = end
            if end.reason == "context" and not self.quiet:
                diagnostics.warn(end.message or "the context is full; the reply ends here")

    def _flush(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
            output.write_bytes(b"\n".join([*lines, b""]))

    def _think(self, text: str) -> None:
        if self.thoughts == "show":
            self._thinking = True
            shown = text if self._thought is None else self._thought.feed(text)
            diagnostics.write(shown, diagnostics.DIM)

    def _end_thought(self) -> None:
        if not self._thinking:
            return
        self._thinking = False
        if self._thought is not None:
            diagnostics.write(self._thought.finish(), diagnostics.DIM)
        diagnostics.write("\n\n")


def statistics_line(end: Finished) -> str:
    """Write one line for people: speed, latency, and the end of the reply if it was cut short."""
    times = end.timings
    parts = ["– tokens" if end.tokens is None else number_of(end.tokens, "token")]
    if times.tok_per_s is not None:
        parts.append(f"{rate(times.tok_per_s)} tok/s")
    if end.tokens != 0 or end.engine:
        parts.append(f"first token {times.ttft_ms:.0f} ms")
    if end.engine and (figures := Figures.of(None, (), end)) is not None:
        parts += [f"guesses kept: {figures.kept_words}", end.engine]
    else:
        parts.append(number_of(end.rounds, "round"))
        if end.proposer != "none" and not end.draft_n:
            parts.append("nothing was guessed")
    if "seed" not in end.unknown:
        parts.append(f"seed {end.seed}")
    words, seen = rounding(end)
    if words:
        parts.append(f"{words} (--exact: none)" if seen else words)
    if end.reason in _ENDINGS:
        parts.append(_ENDINGS[end.reason])
    if end.reason == "stop_token" and not (end.text or end.reasoning):
        parts.append("the model ended at once")
    if end.reasoning and not end.text:
        parts.append("ended within its thought (see --think-budget)")
    return " · ".join(parts)


def short_line(end: Finished) -> str:
    """Return the figures that a chat shows: length, speed, and the gain if it is sure."""
    parts = ["– tokens" if end.tokens is None else number_of(end.tokens, "token")]
    if end.timings.tok_per_s is not None:
        parts.append(f"{rate(end.timings.tok_per_s)} tok/s")
    if end.verdict is not None and end.verdict.answer in ("faster", "slower"):
        parts.append(lead(end.verdict, MEASURE))
    if end.reason in _ENDINGS or not (end.text or end.reasoning):
        parts.append(_ENDINGS.get(end.reason, "the model ended at once"))
    return " · ".join(parts)


def round_glyphs(done: RoundDone) -> str:
    """Draw a round in signs: ``■`` accepted, ``□`` rejected, ``+`` target token (absent if cut)."""
    return "■" * done.accepted + "□" * (len(done.drafted) - done.accepted) + "+" * (1 - done.cut)
