"""The marks that a model puts around its thoughts, found by rendering its chat template.

A reply is read back as two fields, thought and answer. What stands around them is the template's
business, so it is asked: an assistant's turn with a known thought and a known answer is rendered,
and the texts before, between and after them are the marks. Three kinds of families come out:

- *tags* around the thought: ``<think>Hm.</think>Yes.``, ``[THINK]``, ``<|START_THINKING|>``;
- *messages*, each with a header, the last one the answer (gpt-oss's channels, Solar, Muse);
- *words* between thought and answer, where the prompt itself begins the thought.

Templates that do not render thoughts give their marks away in the header of the next turn (open, or
opened and closed at once), or in their source, where they cut replies at a tag.

Every family has a switch of its own for thoughts, a variable of the template, so each is tried: a
template that renders another prompt for it reads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from time import thread_time
from typing import Any

from specllama.replies.template import MAX_SECONDS, TemplateFailed, render_template
from specllama.settings.params import EFFORTS

Variables = Mapping[str, Any]

# names under which templates read the thoughts of earlier turns; "parts" is a list as content
SHAPES = ("reasoning_content", "reasoning", "thinking", "parts")
_ALSO: tuple[Variables, ...] = ({}, {"thinking": True}, {"enable_thinking": False})
_QUESTION, _THOUGHT, _ANSWER = "qv7wkz", "tv3hxk", "av9wmp"
_TAG = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")
_NAMED = r"</?[^<>\s/'\"]*(?i:think|thought|reason)[^<>\s'\"]*>|\[/?THINK\]|<\|channel>thought"
_THINKING = re.compile(_NAMED)
_CLOSES = re.compile(r"/|END|end|close")
_BEGIN_AND_END = (
    ("START", "END"), ("BEGIN", "END"), ("start", "end"), ("begin", "end"), ("open", "close"),
)  # fmt: skip
_CUT_AT = re.compile(rf"""['"]({_NAMED})['"]""")  # in the source of a template


@dataclass(frozen=True, slots=True)
class Marks:
    """The marks of one template, as text.

    Attributes:
        open, close: around a thought, without white space; ``close`` also ends a thought that the
            prompt began.
        opening: what the model writes before a thought, as the template writes it.
        closing: what stands between thought and answer.
        alone: what a reply without a thought begins with, "" for most.
        header: begins a further message of the same reply; "" for families without messages.
        ending: the mark after an answer, where that is not the end of the turn.
        shape: one of SHAPES.
        known: whether the template shows them; else they are a guess.
    """

    open: str = "<think>"
    close: str = "</think>"
    opening: str = "<think>\n"
    closing: str = "\n</think>\n\n"
    alone: str = ""
    header: str = ""
    ending: str = ""
    shape: str = SHAPES[0]
    known: bool = True

    @property
    def lead(self) -> str:
        """The mark that begins an answer after ``close``, "" for most."""
        return self.closing.partition(self.close)[2].strip()

    def rules(self, opened: bool, spell: Callable[[str], str]) -> str:
        """Write in Lark, as ``before``, what may stand before an answer that has to fit a grammar:
        a thought of any words, the marks around it, empty lines.

        Args:
            opened: the thought has begun already.
            spell: writes a text of the template in Lark.
        """
        names = ("open", "close", "header", "alone", "lead")
        open, close, header, alone, lead = (spell(getattr(self, name).strip()) for name in names)
        shut = re.sub(r"[!-/:;=?@\[-`{-~]", r"\\\g<0>", self.close).replace("\n", r"\n")
        words, ended = f"/(?s:.*)/ & ~/(?s:.*){shut}(?s:.*)/", "WORDS"
        if close.startswith("<["):
            ended = f"(WORDS? {close})"
        else:
            words = f"({words}) {close}"
        if self.header:
            thought = f"{ended} {header}"
            rest = f"({open} {thought})* {alone}"
            before = f"{thought} {rest}" if opened else rest
        else:
            before = f"{ended} gap {f'({lead} gap)?' if self.lead else ''}"
            if not opened:
                before = f"({open} {before}{f' | {alone} gap' if self.alone.strip() else ''})?"
        return f'before: {before}\nWORDS: {words}\ngap: line{{0,4}}\nline: /[ \\t\\r]/{{0,8}} "\\n"'

    def state(self, tail: str) -> bool | None:
        """Return whether the text at a prompt's end opened a thought (True), closed it (False) or
        did nothing (None)."""
        if self.header:
            return None
        opened, closed = tail.rfind(self.open), tail.rfind(self.close)
        return None if opened < 0 and closed < 0 else opened > closed


USUAL = Marks(known=False)
USUAL_GAP = "\n\n"


def base_variables(bos: str, eos: str, *, think: bool = True) -> dict[str, Any]:
    """Return the variables that every chat template gets unless the user sets others."""
    today = datetime.now()
    return {
        "bos_token": bos,
        "eos_token": eos,
        "functions": "",
        "date_string": f"{today:%d %b %Y}",
        "datetime": f"{today:%b %d %Y}",
        "enable_thinking": think,
        "tools": None,
        "documents": None,
    }


def without_tools(variables: Variables) -> dict[str, Any]:
    """Leave out the None values of tools and documents, which some templates do not take."""
    return {
        name: value
        for name, value in variables.items()
        if value is not None or name not in ("tools", "documents")
    }


def turn(role: str, content: str, reasoning: str, shape: str) -> dict[str, Any]:
    """Return a message as a template takes it."""
    if not reasoning:
        return {"role": role, "content": content}
    if shape == "parts":
        parts = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": content}]
        return {"role": role, "content": parts}
    return {"role": role, "content": content, shape: reasoning}


@lru_cache(maxsize=16)
def derive(template: str | None) -> Marks:
    """Find the marks of a chat template; return USUAL if it shows no thoughts."""
    if template is None:
        return USUAL
    probe = MarkProbe(template)
    for variables in _ALSO[:2]:
        for shape in SHAPES:
            if found := probe.rendered(shape, variables):
                return found
    return probe.given_away() or USUAL


class MarkProbe:
    """Renderings of a question and its answer in every way that may show a mark.

    A template that is refused, or takes long, is not rendered again.
    """

    def __init__(self, template: str) -> None:
        self._template = template
        self._until = thread_time() + MAX_SECONDS

    def whole(self, variables: Variables, reply: Sequence[Any] = (), prompt: bool = True) -> str:
        """Render the conversation; return "" if that fails."""
        given = {
            **base_variables("", ""),
            **variables,
            "messages": [{"role": "user", "content": _QUESTION}, *reply],
            "add_generation_prompt": prompt,
        }
        for told in (given, without_tools(given)):
            if thread_time() > self._until:
                break
            try:
                return render_template(self._template, told, max_chars=1_000_000)
            except TemplateFailed as failed:
                if failed.refused:
                    self._until = 0.0
        return ""

    def prompt(self, variables: Variables) -> str:
        """Return the end of the question's turn and the header of the reply's."""
        return self.whole(variables).rpartition(_QUESTION)[2]

    def answered(self, variables: Variables, reasoning: str = "", shape: str = SHAPES[0]) -> str:
        reply = [turn("assistant", _ANSWER, reasoning, shape)]
        return self.whole(variables, reply, False).rpartition(_QUESTION)[2]

    def rendered(self, shape: str, variables: Variables) -> Marks | None:
        """Find the marks around a thought that the template shows."""
        text = self.answered(variables, _THOUGHT, shape)
        before, thought, rest = text.partition(_THOUGHT)
        between, answer, after = rest.partition(_ANSWER)
        if not (thought and answer and between.strip()) or _THOUGHT in rest or "type" in between:
            return None  # not shown, or a list printed as it is
        prompt = self.prompt(variables)
        written = before.removeprefix(prompt) if before.startswith(prompt) else ""
        ending = first_tag(after)
        for tail in _tails(before):
            close = next((c for c in _closings(tail.strip()) if c in between), None)
            if close is not None:
                opening = written if tail.strip() in written else tail
                alone = self._alone(variables, prompt, close)
                return Marks(tail.strip(), close, opening, between, alone, "", ending, shape)
        for tail in reversed(list(_tails(prompt))):
            if (at := between.find(tail)) >= 0:
                end = at + len(tail)
                close, alone = first_tag(between), between[end:]
                header = between[:end].removeprefix(close)
                return Marks(written.strip(), close, written, between, alone, header, ending, shape)
        opening = prompt.removeprefix(before) if prompt.startswith(before) else written
        words = between.strip()
        return Marks(opening.strip(), words, opening, between, ending=ending, shape=shape)

    def _alone(self, variables: Variables, prompt: str, close: str) -> str:
        """Return the text before an answer without a thought, beyond the header."""
        before = self.answered(variables).partition(_ANSWER)[0]
        beyond = before.removeprefix(prompt).strip() if before.startswith(prompt) else ""
        return "" if close in beyond else beyond

    def given_away(self) -> Marks | None:
        """Find the marks in an empty thought, an open thought, or a tag that cuts replies."""
        prompts = [self.prompt(variables) for variables in _ALSO]
        shown = [self.answered(variables).partition(_ANSWER)[0] for variables in _ALSO]
        for text in (*prompts, *shown):
            for at in _THINKING.finditer(text):
                for close in _closings(at[0]):
                    inside, closed, behind = text[at.end() :].partition(close)
                    if closed and not inside.strip():
                        return _given(at[0], close, inside, behind if behind.isspace() else "")
        for text in prompts:
            for tag in _THINKING.findall(text):
                closings = [close for close in _closings(tag) if close in self._template]
                # the prompt may end in a thought that the template itself never closes
                if text.rstrip().endswith(tag) and not _CLOSES.search(tag):
                    closings += _closings(tag)
                if closings:
                    return _given(tag, closings[0], "\n", "")
        for tag in _CUT_AT.findall(self._template):
            if tag.startswith(("</", "[/")):
                return _given(tag.replace("/", "", 1), tag, "\n", "")
        return None


def _given(open: str, close: str, inside: str, behind: str) -> Marks:
    """Return the marks of an empty thought, with the white space that models write around a longer
    one."""
    if not close.startswith("</"):
        return Marks(open, close, open + inside, close)
    if not inside:
        return Marks(open, close, open, close + behind)
    return Marks(open, close, f"{open}\n", f"\n{close}{behind or USUAL_GAP}")


def first_tag(text: str) -> str:
    """Return the mark that a text begins with, "" if it begins with words."""
    found = _TAG.match(text.lstrip())
    return found[0] if found else ""


def _tails(text: str) -> Iterator[str]:
    """Yield the ends of a text that begin with a tag, the shortest first; three at most."""
    starts = [found.start() for found in _TAG.finditer(text)]
    for start in starts[:-4:-1]:
        yield text[start:]


def _closings(open: str) -> Iterator[str]:
    """Yield the marks that may close a thought opened like this, the likeliest first."""
    if open.startswith("["):
        yield "[/" + open[1:]
        return
    if not open.startswith("<"):
        return
    for begin, end in _BEGIN_AND_END:
        if begin in open:
            yield open.replace(begin, end, 1)
    if match := re.match(r"<\|(\w+)>", open):
        yield f"<{match[1]}|>"
    if open.startswith("<|"):
        yield open.replace("<|", "<|/", 1)
    yield "</" + open[1:]


_SWITCHES: tuple[tuple[str, Any, Any], ...] = (  # name, on, off
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("thinking_mode", "enabled", "disabled"),
    ("thinking_budget", -1, 0),
    ("reasoning_effort", "high", "none"),
    ("reasoning_effort", "high", "no_think"),
)
_STRENGTHS = ("reasoning_effort", "thinking_effort", "reasoning_strength")


def asks(variables: Variables) -> bool:
    """True if variables of a template turn its thoughts on."""
    off = {False, None, "", *(off for _, _, off in _SWITCHES)}
    names = {*_STRENGTHS, *(name for name, _, _ in _SWITCHES)} & variables.keys()
    return any(isinstance(variables[n], str | int) and variables[n] not in off for n in names)


@lru_cache(maxsize=64)
def switch(template: str, think: str) -> tuple[dict[str, Any], str]:
    """Return the variables for a value of THINK, and a note for the user if it has no effect.

    "off" gives no variables where the template has no switch.
    """
    if think == "auto":
        return {}, ""
    probe, marks = MarkProbe(template), derive(template)

    def turns(name: str, value: Any, other: Any, state: bool) -> bool:
        """True if a variable turns thoughts on (``state`` True) or off; an effort has to show
        it."""
        shown = probe.whole({name: value})
        if not shown or shown == probe.whole({name: other}):
            return False
        left = marks.state(probe.prompt({name: value}))
        return left is state or (left is None and name != "reasoning_effort")

    if think == "off":
        return next(({n: off} for n, on, off in _SWITCHES if turns(n, off, on, False)), {}), ""
    said = next(({n: on} for n, on, off in _SWITCHES if turns(n, on, off, True)), {})
    if think == "on":
        return said, ""
    for name in _STRENGTHS:
        shown = {level: probe.whole({**said, name: level}) for level in EFFORTS}
        if len(set(filter(None, shown.values()))) > 1:
            level = next((one for one in EFFORTS[EFFORTS.index(think) :] if shown[one]), "high")
            return {**said, name: level}, "" if level == think else f"this model thinks at {level}"
    return said, "this model's template knows no effort: it thinks as it always does"
