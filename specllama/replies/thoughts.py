"""A reply while it arrives, split into thought and answer.

Marks that the vocabulary has as tokens count only as these tokens; a model that spells one out in
letters, in a code block say, marks nothing. Other marks are found in the text, across the borders
of tokens. So a reply is read in *units*: a character for every byte, and one beyond those for every
token that can be part of a mark. How the units are cut into pieces changes nothing.

What is left out of the two fields, the marks and the white space around a thought, is kept as two
*seams*: ``before + thought + behind + answer`` is the reply as the model wrote it. A reply of
several thoughts has none; there a blank line joins the thoughts, and the answers.
"""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass
from typing import Self

from specllama.backend.base import Vocab
from specllama.replies.marks import Marks, first_tag
from specllama.text import decoded

_FIRST = 0x100  # units below are bytes
_SPACE = " \t\r\n"
_BLANK = re.compile(r"(?:[ \t\r]*\n)*")
_LAST_TAG = re.compile(r"<[^<>\s]+>$")

Part = tuple[bool, str]  # (whether it is thought, units)


@dataclass(frozen=True, slots=True)
class Written:
    """A reply as the model wrote it: opening, reasoning, closing, content."""

    before: str = ""
    reasoning: str = ""
    behind: str = ""
    content: str = ""


class Spelling:
    """The marks of a template in the units of a vocabulary."""

    def __init__(self, marks: Marks, vocab: Vocab) -> None:
        self._vocab = vocab
        self.tokens: set[int] = set()
        """Tokens that are units of their own."""
        self.marks = marks
        self.open, self.close = self.units(marks.open), self.units(marks.close)
        self.alone, self.lead = self.units(marks.alone.strip()), self.units(marks.lead)
        self.header, self.begin = self.units(marks.header), self.units(first_tag(marks.header))
        first = self.units(marks.ending)[:1]
        self.ending = first if first >= chr(_FIRST) else ""
        tag = _LAST_TAG.search(marks.open), _LAST_TAG.search(marks.alone)
        self.closers = tuple(self.units(found[0]) for found in tag if found)

    def units(self, text: str) -> str:
        """Convert a text of the template to units."""
        out: list[str] = []
        ids = self._vocab.tokenize(text, add_special=False, parse_special=True, after_text=True)
        raw = text.encode("utf-8", "replace")
        if b"".join(self._vocab.piece(t, special=True) for t in ids) != raw:
            return raw.decode("latin-1")  # of a vocabulary that cannot say it
        for token in ids:
            piece = self._vocab.piece(token, special=True)
            if self._vocab.special(token) is not None and piece.strip():
                self.tokens.add(token)
                out.append(chr(_FIRST + token))
            else:
                out.append(piece.decode("latin-1"))
        return "".join(out)

    def unit(self, token: int, *, special: bool = False) -> str:
        """Convert a token of a reply to units; ``special``: control tokens show, too."""
        if token in self.tokens:
            return chr(_FIRST + token)
        return self._vocab.piece(token, special=special).decode("latin-1")

    def bytes(self, units: str, *, special: bool = False) -> bytes:
        """Return the bytes that units show; with ``special`` also those of control tokens."""
        return b"".join(
            bytes((ord(u),))
            if u < chr(_FIRST)
            else self._vocab.piece(ord(u) - _FIRST, special=special)
            for u in units
        )

    def control(self, units: str) -> bool:
        """True if they begin with a token that shows as nothing."""
        return units >= chr(_FIRST) and not self.bytes(units[:1])


class Reader:
    """A splitter that takes a reply in units and returns its parts as soon as they are certain.

    Args:
        state: what the prompt did with a thought, see ``Marks.state``.
    """

    def __init__(self, spelling: Spelling, state: bool | None) -> None:
        self.spelling = spelling
        self._place = {True: "opened", False: "between", None: "start"}[state]
        self._held = ""
        self._seams = ["", ""]  # before the thought, after it
        self._begun = {True: 0, False: 0}  # how many thoughts and answers
        self._turned = False  # something followed an answer

    @property
    def thinking(self) -> bool:
        return self._place in ("opened", "thought")

    @property
    def undecided(self) -> bool:
        """True as long as both a thought and the answer may come."""
        return self._place in ("start", "header")

    @property
    def plain(self) -> bool:
        """True if a token that is no unit of its own is just text of the answer."""
        return self._place == "answer" and not self._held

    def feed(self, units: str) -> list[Part]:
        self._held += units
        out: list[Part] = []
        step = getattr(self, f"_{self._place}")
        while step(out):
            step = getattr(self, f"_{self._place}")
        return [part for part in out if part[1]]

    def fork(self) -> Self:
        other = copy(self)
        other._seams, other._begun = list(self._seams), dict(self._begun)
        return other

    def finish(self, cut: bool) -> list[Part]:
        """Return the text that was held back. ``cut``: the model would have gone on; then a
        beginning of a mark stays out of both fields, for a later reader to continue."""
        held, self._held = self._held, ""
        if self._place == "start" and not cut:
            return self._shown(held)
        if self.thinking and not cut:
            return [(True, held)] if held else []
        if self._place == "answer" and held and cut:
            self._turned = True  # a thought was about to begin
            return []
        if self._place == "answer":
            return self._shown(held)
        self._seams[self._seam] += held
        return []

    def resume(self, written: Written) -> None:
        """Continue a reply with this beginning."""
        self.feed(self.spelling.units(written.before))
        if written.reasoning:
            self._settle("thought")
            self._begun[True] = 1
        self.feed(self.spelling.units(written.behind))
        if written.content:
            self._settle("answer")
            self._begun[False] = 1

    @property
    def seams(self) -> tuple[str, str] | None:
        """The texts before and after the thought; None if they are not the whole reply."""
        if self._turned or self._begun[True] > 1:
            return None
        before, behind = (
            decoded(self.spelling.bytes(units, special=True)) for units in self._seams
        )
        return before, behind

    # ---- places in a reply

    @property
    def _seam(self) -> int:
        return int(self._place not in ("start", "opened"))

    def _settle(self, place: str) -> None:
        self._seams[self._seam] += self._held
        self._held, self._place = "", place

    def _shown(self, held: str) -> list[Part]:
        return [(False, held)] if held else []

    def _skip(self, n: int, seam: int, place: str) -> bool:
        self._seams[seam] += self._held[:n]
        self._held, self._place = self._held[n:], place
        return True

    def _begin(self, out: list[Part], thought: bool) -> None:
        if self._begun[thought]:
            out.append((thought, "\n\n"))
        self._begun[thought] += 1

    def _start(self, out: list[Part]) -> bool:
        """Read before anything but white space."""
        spelling, body = self.spelling, self._held.lstrip(_SPACE)
        space = len(self._held) - len(body)
        for mark, place in (
            (spelling.open, "opened"),
            (spelling.close, "between"),
            (spelling.alone, "between"),
        ):
            if mark and body.startswith(mark):
                return self._skip(space + len(mark), 0, place)
            if mark and mark.startswith(body):
                return False
        if not body:
            return False
        self._begin(out, False)
        self._place = "answer"
        return True

    def _opened(self, out: list[Part]) -> bool:
        """Read the text after the mark that opens a thought."""
        if not self._held.lstrip(_SPACE):
            return False
        self._begin(out, True)
        return self._skip(_blank(self._held), 0, "thought")

    def _thought(self, out: list[Part]) -> bool:
        close = self.spelling.close
        at = self._held.find(close)
        end = at if at >= 0 else len(self._held) - _beginning(self._held, close)
        body = self._held[:end].rstrip(_SPACE)
        out.append((True, body))
        self._held = self._held[len(body) :]
        return at >= 0 and self._skip(end - len(body) + len(close), 1, "between")

    def _between(self, out: list[Part]) -> bool:
        """Read the text after a thought, or after a prompt that closed it."""
        body, lead = self._held.lstrip(_SPACE), self.spelling.lead
        if lead and body.startswith(lead):
            return self._skip(len(self._held) - len(body) + len(lead), 1, "between")
        if not body or (lead and lead.startswith(body)):
            return False
        self._begin(out, False)
        return self._skip(_blank(self._held), 1, "answer")

    def _answer(self, out: list[Part]) -> bool:
        """Read the answer. Only a token can open a further thought: letters are the answer's
        own."""
        spelling, held = self.spelling, self._held
        first = spelling.open[:1]
        again = spelling.control(first) or (first >= chr(_FIRST) and not self._begun[True])
        at = held.find(spelling.open) if again else -1
        end = held.find(spelling.ending) if spelling.ending else -1
        if end >= 0 and not 0 <= at < end:
            out.append((False, held[:end]))
            self._held, self._place = "", "over"
            return False
        if at >= 0:
            out.append((False, held[:at]))
            self._held, self._turned = held[at:], True
            return self._skip(len(spelling.open), 0, "opened")
        keep = _beginning(held, spelling.open) if again else 0
        out.append((False, held[: len(held) - keep]))
        self._held = held[len(held) - keep :]
        return False

    def _over(self, out: list[Part]) -> bool:
        self._held = ""
        return False


class Messages(Reader):
    """A reply of several messages. All but those with the answer's header count as thoughts: notes
    to the user before a tool call, and tool calls, too."""

    def __init__(self, spelling: Spelling, state: bool | None) -> None:
        super().__init__(spelling, state)
        self._place = "header"
        self._ends = (spelling.close, spelling.begin)
        self._stem = spelling.alone
        for closer in spelling.closers:
            self._stem = self._stem.removesuffix(closer)

    @property
    def plain(self) -> bool:
        return False

    @property
    def _seam(self) -> int:
        return int(self._begun[True] > 0)

    def finish(self, cut: bool) -> list[Part]:
        held, self._held = self._held, ""
        if self._place == "answer" or (self._place == "thought" and not cut):
            return [(self._place == "thought", held)] if held else []
        if cut or any(self._begun.values()):
            self._seams[self._seam] += held
            return []
        return self._shown(held)  # no message ever began

    def _header(self, out: list[Part]) -> bool:
        ends = [(at, c) for c in self.spelling.closers if (at := self._held.find(c)) >= 0]
        if not ends:
            return False
        at, closer = min(ends)
        name = self._held[:at]
        own = name.rpartition(self.spelling.header)[2].lstrip(_SPACE)
        answers = self.spelling.alone.endswith(closer) and own.startswith(self._stem)
        seam = self._seam
        self._turned = self._turned or self._begun[False] > 0
        self._begin(out, not answers)
        return self._skip(at + len(closer), seam, "answer" if answers else "thought")

    def _message(self, out: list[Part], thought: bool) -> bool:
        ends = [at for mark in self._ends if mark and (at := self._held.find(mark)) >= 0]
        keep = 0 if ends else max(_beginning(self._held, mark) for mark in self._ends)
        end = min(ends) if ends else len(self._held) - keep
        out.append((thought, self._held[:end]))
        self._held = self._held[end:]
        if ends:
            self._place = "header"
        return bool(ends)

    def _thought(self, out: list[Part]) -> bool:
        return self._message(out, True)

    def _answer(self, out: list[Part]) -> bool:
        return self._message(out, False)


def reader(spelling: Spelling, state: bool | None) -> Reader:
    return (Messages if spelling.header else Reader)(spelling, state)


def _blank(text: str) -> int:
    """Return the length of the empty lines that a text begins with."""
    found = _BLANK.match(text)
    return found.end() if found else 0


def _beginning(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is the beginning of a mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if mark.startswith(text[-n:])), 0)
