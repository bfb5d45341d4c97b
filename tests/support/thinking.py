"""Replies with thoughts, told to a reader in every way: for unit tests and ``make families``.

``TagVocab`` is a vocabulary of bytes in which some texts are tokens; ``replies`` are what a model
with some marks may write; ``check`` says what a reader of ours makes wrong of one.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from specllama.backend.base import SpecialToken
from specllama.interface import Message
from specllama.replies.marks import Marks, Variables, derive
from specllama.replies.segments import Rendered, render
from specllama.replies.thoughts import Reader, Spelling, reader

_MARK = re.compile(r"<[^<>\s]+>|\[/?[A-Z]+\]")
QUESTION = [Message("user", "Which?")]


class TagVocab:
    """Bytes, and the given texts as tokens; control tokens show as nothing."""

    def __init__(self, specials: Sequence[str] = (), *, control: bool = True) -> None:
        self.texts = sorted(set(specials), key=len, reverse=True)
        self._control = control

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool, after_text: bool = False
    ) -> list[int]:
        if not self.texts or not parse_special:
            return list(text.encode())
        out: list[int] = []
        for piece in re.split(f"({'|'.join(map(re.escape, self.texts))})", text):
            out += [256 + self.texts.index(piece)] if piece in self.texts else piece.encode()
        return out

    def piece(self, token: int, *, special: bool = False) -> bytes:
        if token < 256:
            return bytes((token,))
        return self.texts[token - 256].encode() if special or not self._control else b""

    def special(self, token: int) -> SpecialToken | None:
        return SpecialToken(token, self.texts[token - 256], self._control) if token > 255 else None


def vocabularies(marks: Marks) -> list[TagVocab]:
    """In which every mark is a control token, a user-defined one, or ordinary text."""
    text = "".join((marks.opening, marks.closing, marks.alone, marks.header, marks.ending))
    found = _MARK.findall(text)
    return [TagVocab(found), TagVocab(found, control=False), TagVocab()]


@dataclass(frozen=True)
class Told:
    """What a model wrote, and what it means."""

    name: str
    written: str
    reasoning: str
    content: str


THOUGHT, ANSWER = "Hm, <b>so</b> it is é.\n\nWell:  two ✓.", "Yes & no.\n\n    code  \n"


def replies(marks: Marks, state: bool | None) -> Iterator[Told]:
    """What a model may write behind a prompt that left a thought in this state."""
    opening = "" if state else marks.opening
    fence = f"Close it:\n```\n{marks.close}\n```\n"
    if state is False:
        yield Told("no thought", ANSWER, "", ANSWER)
        return
    yield Told("thinks and answers", opening + THOUGHT + marks.closing + ANSWER, THOUGHT, ANSWER)
    yield Told("never closes", opening + THOUGHT, THOUGHT, "")
    empty = marks.closing if marks.header else marks.closing.lstrip()
    yield Told("thinks nothing", opening + empty + ANSWER, "", ANSWER)
    if not marks.header:
        quoting = opening + THOUGHT + marks.closing + fence
        yield Told("quotes the mark in its answer", quoting, THOUGHT, fence)
        other = f"{opening}\n\n{THOUGHT} \n{marks.close}\n\n\n{marks.lead}{ANSWER}"
        yield Told("writes other white space", other, THOUGHT, ANSWER)
    if state is None:
        yield Told("does not think", marks.alone + ANSWER, "", ANSWER)
        if not marks.alone:
            late = f"First.\n{marks.opening.lstrip()}{THOUGHT}"
            yield Told("text before the thought", late, THOUGHT, "First.\n")


def tell(one: Reader, ids: Sequence[int], cuts: Sequence[int] = ()) -> tuple[str, str]:
    """Feed tokens in pieces that end at the cuts; returns thought and answer so far."""
    said = {True: b"", False: b""}
    start = 0
    for end in [*cuts, len(ids)]:
        for thought, part in one.feed("".join(map(one.spelling.unit, ids[start:end]))):
            said[thought] += one.spelling.bytes(part)
        start = end
    return said[True].decode(), said[False].decode()


def end(one: Reader, *, cut: bool) -> tuple[str, str]:
    said = {True: b"", False: b""}
    for thought, part in one.finish(cut):
        said[thought] += one.spelling.bytes(part)
    return said[True].decode("utf-8", "replace"), said[False].decode("utf-8", "replace")


def check(
    template: str | None,
    vocab: TagVocab,
    told: Told,
    rng: random.Random,
    places: int = 12,
    variables: Variables | None = None,
) -> list[str]:
    """What is wrong; [] if nothing.

    Args:
        places: at how many of them it is cut and continued.
        variables: of the template.
    """
    ask = partial(render, template, bos="", eos="", variables=variables)
    asked = ask(QUESTION)
    ids = vocab.tokenize(told.written, add_special=False, parse_special=True)
    if told.name.startswith("quotes") and vocab.texts:  # spelled out, it is no token
        head = told.written.index(told.content)
        ids = vocab.tokenize(told.written[:head], add_special=False, parse_special=True)
        ids += list(told.content.encode())
    if told.name.startswith("text before") and not vocab.texts:
        return []  # in letters, a mark counts only at the beginning
    wrong: list[str] = []
    for n in (0, 1, 5, len(ids) - 1):
        cuts = sorted(rng.sample(range(1, len(ids)), min(n, len(ids) - 1)))
        one = _reader(asked, vocab)
        fields = tell(one, ids, cuts)
        rest = end(one, cut=False)
        found = fields[0] + rest[0], fields[1] + rest[1]
        if found != (told.reasoning, told.content):
            wrong.append(f"{told.name}: {found} of {told.written!r} cut at {cuts}")
    return wrong + _goes_on(ask, vocab, asked, told, ids, rng, places)


def _goes_on(
    ask: Callable[..., Rendered],
    vocab: TagVocab,
    asked: Rendered,
    told: Told,
    ids: Sequence[int],
    rng: random.Random,
    places: int,
) -> list[str]:
    """Cut anywhere between two characters and continued, it is the same text and prompt."""
    wrong: list[str] = []
    for k in sorted(rng.sample(range(1, len(ids)), min(places, len(ids) - 1))):
        if ids[k] < 256 and 0x80 <= ids[k] < 0xC0:
            continue
        one = _reader(asked, vocab)
        first, rest = tell(one, ids[:k]), end(one, cut=True)
        seams = one.seams
        if seams is None:
            continue
        begun = Message("assistant", first[1] + rest[1], first[0] + rest[0], seams)
        written = b"".join(vocab.piece(t, special=True) for t in ids[:k]).decode()
        if begun.content or begun.reasoning:
            prompt = ask([*QUESTION, begun])
            if prompt.text != asked.text + written:
                was, now = (asked.text + written)[-60:], prompt.text[-60:]
                wrong.append(f"{told.name}: continued at {k} from {now!r}, not {was!r}")
            again = _reader(prompt, vocab)
            more, last = tell(again, ids[k:]), end(again, cut=False)
            found = begun.reasoning + more[0] + last[0], begun.content + more[1] + last[1]
            if found != (told.reasoning, told.content):
                wrong.append(f"{told.name}: cut at {k}, continued to {found}")
        if wrong:
            break
    return wrong


def _reader(rendered: Rendered, vocab: TagVocab) -> Reader:
    one = reader(Spelling(rendered.marks, vocab), rendered.state)
    one.resume(rendered.begun)
    return one


def kept(template: str) -> tuple[bool, bool]:
    """Whether a chat's second prompt begins with its first and the reply, and whether it holds the
    thought."""
    marks = derive(template)
    asked = render(template, QUESTION, bos="", eos="")
    opening = marks.opening
    if asked.state:  # of which the prompt has the greater part
        opening = opening.partition(marks.open)[2].removeprefix(
            asked.text.rpartition(marks.open)[2]
        )
    thought = "" if asked.state is False else f"{opening}Hm.{marks.closing}"
    written = f"{asked.text}{thought}{ANSWER.strip()}"
    reply = Message("assistant", ANSWER.strip(), "" if asked.state is False else "Hm.")
    again = render(template, [*QUESTION, reply, Message("user", "Why?")], bos="", eos="").text
    return again.startswith(written), "Hm." in again
