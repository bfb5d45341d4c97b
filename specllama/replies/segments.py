"""Prompts: a conversation as text segments, ready to be tokenized.

What people and models wrote must never become control tokens: ``<|im_end|>`` typed by a user is
ordinary text, not the end of a turn. So the rendered prompt is a list of segments: template text
with ``special=True`` and contents with ``special=False``; ``engine/prompting.py`` makes tokens of
them. The text is always the template's own rendering. Which part of it is content is found by
rendering a second time, with fences around the contents or with their characters disguised.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from specllama.errors import UsageError
from specllama.interface import Message
from specllama.replies.marks import (
    USUAL,
    Marks,
    Variables,
    base_variables,
    derive,
    turn,
    without_tools,
)
from specllama.replies.template import TemplateFailed, render_template
from specllama.replies.thoughts import Written

_DISGUISE = 0xF0000  # first of the private characters, one per text, that disguise them
_TAG = r"<[^<>\s]*(?i:think|channel)[^<>\s]*>|\[/?THINK\]"  # what templates cut replies at
# templates look at the ends of a text for whether it is a tool's
_KEPT = re.compile(r"(\A<tool_response>|</tool_response>\Z|\s+)|\S")
_KEPT_OF_REPLIES = re.compile(rf"({_TAG}|\s+)|\S")
_DISGUISED = re.compile(rf"([\U000f0000-\U0010ffff])(?:(?:{_TAG}|\s)*\1)*")

NO_TEMPLATE = (
    "this model has no chat template: messages are joined without roles, as text to be continued"
)
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the prompt.

    Attributes:
        special: template text, whose markers are control tokens; False for contents.
        reply: a content that the model wrote.
    """

    text: str
    special: bool
    reply: bool = False


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt.

    Attributes:
        notice: for the user, if the template could not be used as it is.
        marks: how the reply to it marks thoughts.
        state: what the template did with a thought at its end, see ``Marks.state``.
        begun: the part of the reply that is in the prompt already.
        before: of a reply that goes on, the prompt that it replied to; None for a new one.
    """

    segments: list[Segment]
    notice: str | None = None
    marks: Marks = USUAL
    state: bool | None = None
    begun: Written = field(default_factory=Written)
    before: list[Segment] | None = None

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


def render(
    template: str | None,
    messages: Sequence[Message],
    *,
    bos: str,
    eos: str,
    variables: Variables | None = None,
    unthinking: bool = False,
) -> Rendered:
    """Render a conversation.

    Args:
        template: the model's Jinja template; None joins the contents with newlines and no roles,
            and a notice says so in the first turn.
        messages: the conversation, oldest first. Where the last one is the assistant's, the prompt
            ends inside it, so that the model goes on writing it.
        bos, eos: texts of the model's begin and end tokens, for templates that name them.
        variables: further variables of the template.
        unthinking: where the template leaves room for a thought, put an empty one there.

    A template that fails is never an error. It is tried again with ``tools`` undefined instead of
    None, with the system prompt at the head of the first user message, and with a question whose
    reply was empty joined to the next one. If all that fails, the prompt is written in ChatML and
    a notice says so.

    Raises:
        UsageError: no messages, or an unknown role.
    """
    if not messages:
        raise UsageError("the conversation is empty")
    for message in messages:
        if message.role not in ROLES:
            raise UsageError(f"unknown role {message.role!r}", f"choose one of {', '.join(ROLES)}")
    *before, last = messages
    going_on = last.role == "assistant"
    if template is None:
        notice = None if any(m.role == "assistant" for m in messages) else NO_TEMPLATE
        text = "\n".join(m.content for m in messages)
        rendered = Rendered(_joined([Segment(text, False)]), notice)
        if not going_on:
            return rendered
        asked = _joined([Segment("\n".join(m.content for m in before), False)])
        return replace(rendered, begun=Written(content=last.content), before=asked)
    # a reply that goes on: what the model saw when it began it, and what it wrote
    job = _Job(template, bos, eos, variables or {})
    rendered = _rendered(job, before if going_on else messages)
    marks = rendered.marks
    end = rendered.segments[-1] if rendered.segments else None
    state = marks.state(end.text) if end is not None and end.special else None
    new = _unthought(marks, state) if unthinking else Written()
    begun = _begun(marks, state, last) if going_on else new
    segments = _with(rendered.segments, begun)
    prompt = _with(rendered.segments, new) if going_on else None
    return replace(rendered, segments=segments, state=state, begun=begun, before=prompt)


def _with(segments: Sequence[Segment], begun: Written) -> list[Segment]:
    marks = Segment(begun.before, True), Segment(begun.behind, True)
    words = Segment(begun.reasoning, False, True), Segment(begun.content, False, True)
    return _joined([*segments, marks[0], words[0], marks[1], words[1]])


def _begun(marks: Marks, state: bool | None, reply: Message) -> Written:
    """Write the reply that is to be continued: as the model wrote it if that is known and has this
    model's marks, else as the template would write it."""
    reasoning, content = reply.reasoning, reply.content
    if reply.seams is not None:
        before, behind = reply.seams
        opened = not reasoning or state is True or marks.open in before
        closed = not (reasoning and content) or marks.close in behind
        if opened and closed:
            return Written(before, reasoning, behind, content)
    if reasoning:
        before = "" if state else marks.opening
        return Written(before, reasoning, marks.closing if content else "", content)
    if not content:
        return Written()
    return replace(_unthought(marks, state, forced=False), content=content)


def _unthought(marks: Marks, state: bool | None, *, forced: bool = True) -> Written:
    """Write the marks before an answer without a thought; ``forced``: a thought may come there."""
    if state is True:
        return Written(behind=marks.closing.lstrip())
    if state is False:
        return Written()
    if marks.alone:
        return Written(before=marks.alone)
    if forced and marks.known:
        return Written(before=marks.opening, behind=marks.closing.lstrip())
    return Written()


def _rendered(job: _Job, messages: Sequence[Message]) -> Rendered:
    failure: TemplateFailed | None = None
    for turns, attempt in product(_forms(messages), (job, replace(job, tools=False))):
        try:
            return Rendered(attempt.segments(turns), marks=derive(job.template))
        except TemplateFailed as failed:
            failure = failure or failed
            if failed.refused:
                break
    notice = f"the model's chat template failed ({failure}); using ChatML instead"
    return Rendered(_chatml(messages), notice)


def _forms(messages: Sequence[Message]) -> list[Sequence[Message]]:
    """List the conversation as it is, then in forms for templates that lack something."""
    answered = _without_empty_replies(messages)
    forms: list[Sequence[Message]] = []
    for turns in (messages, answered) if len(answered) < len(messages) else (messages,):
        forms.append(turns)
        if len(turns) > 1 and turns[0].role == "system":
            forms.append(_without_system(turns))
    return forms


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Put the system prompt above the first question, for models without a system role."""
    system, first, *rest = messages
    return [Message(first.role, f"{system.content}\n{first.content}"), *rest]


def _without_empty_replies(messages: Sequence[Message]) -> list[Message]:
    """Join the questions around an empty reply, for templates that refuse empty replies."""
    out: list[Message] = []
    for message in messages:
        if message.role == "assistant" and not message.content.strip():
            continue
        if out and out[-1].role == message.role == "user":
            message = Message("user", f"{out.pop().content}\n\n{message.content}")
        out.append(message)
    return out


def _chatml(messages: Sequence[Message]) -> list[Segment]:
    out: list[Segment] = []
    for message in messages:
        out += [
            Segment(f"<|im_start|>{message.role}\n", True),
            Segment(message.content, False, message.role == "assistant"),
            Segment("<|im_end|>\n", True),
        ]
    return _joined([*out, Segment("<|im_start|>assistant\n", True)])


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Join neighbours of the same kind and drop empty ones."""
    out: list[Segment] = []
    for segment in segments:
        if not segment.text:
            continue
        if out and (out[-1].special, out[-1].reply) == (segment.special, segment.reply):
            out[-1] = replace(segment, text=out[-1].text + segment.text)
        else:
            out.append(segment)
    return out


@dataclass(frozen=True, slots=True)
class _Job:
    template: str
    bos: str
    eos: str
    variables: Variables
    tools: bool = True  # pass tools=None; some templates take that for a list

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        texts = [m.content for m in messages] + [m.reasoning for m in messages]
        plain = self._render(messages, texts)
        # Digits survive whatever a template does to the case of a text, and a fresh number
        # cannot stand in a content already.
        fences = _Fences(str(secrets.randbelow(10**18)))
        fenced = [fences.around(i, text) for i, text in enumerate(texts)]
        parts = fences.parse(self._render(messages, fenced))
        if parts is None or "".join(text for text, _ in parts) != plain:
            # The template trims contents, or drops the thoughts in them.
            replies = [m.role == "assistant" for m in messages] * 2
            disguised = [
                _disguised(i, *it) for i, it in enumerate(zip(texts, replies, strict=True))
            ]
            parts = _parts(plain, self._render(messages, disguised))
        if parts is None:
            # Its text depends on the contents: put them where it puts empty ones.
            hidden = [fences.around(i, "") for i in range(len(texts))]
            parts = fences.parse(self._render(messages, hidden))
            if parts is None:
                raise TemplateFailed("it takes the messages apart")
            parts = [(text if i is None else texts[i].strip(), i) for text, i in parts]
        n = len(messages)
        return _joined(
            [
                Segment(text, i is None, i is not None and messages[i % n].role == "assistant")
                for text, i in parts
            ]
        )

    def _render(self, messages: Sequence[Message], texts: Sequence[str]) -> str:
        """Render with other texts: those of every content, then of every thought that there is."""
        n = len(messages)
        shape = derive(self.template).shape if any(m.reasoning for m in messages) else ""
        turns = [
            turn(m.role, texts[i], texts[n + i] if m.reasoning else "", shape)
            for i, m in enumerate(messages)
        ]
        # thoughts only where they can be told apart from the answer
        think = re.search(_TAG, self.template) is not None
        variables = {
            **base_variables(self.bos, self.eos, think=think),
            "add_generation_prompt": True,
            **self.variables,
            "messages": turns,
        }
        max_chars = 1_000_000 + 4 * sum(map(len, texts))
        told = variables if self.tools else without_tools(variables)
        return render_template(self.template, told, max_chars=max_chars)


def _disguised(index: int, text: str, reply: bool) -> str:
    """Replace every character of a text by the private character of its number.

    Spaces are kept, and so are the tags of thoughts in a reply: templates trim contents and cut
    replies at such tags.
    """
    kept = _KEPT_OF_REPLIES if reply else _KEPT
    return kept.sub(lambda m: m[1] or chr(_DISGUISE + index), text)


def _parts(plain: str, disguised: str) -> list[tuple[str, int | None]] | None:
    """Split a rendering into (text, its number or None for template text).

    None if the renderings differ in more than the disguise.
    """
    parts: list[tuple[str, int | None]] = []
    end = 0
    for match in _DISGUISED.finditer(disguised):
        start = match.start()
        if plain[end:start] != disguised[end:start]:
            return None
        parts.append((plain[end:start], None))
        end = match.end()
        parts.append((plain[start:end], ord(match[1]) - _DISGUISE))
    parts.append((plain[end:], None))
    return parts if plain[end:] == disguised[end:] else None


class _Fences:
    """Fences around contents, in private-use characters and a one-time number."""

    def __init__(self, number: str) -> None:
        self._number = number
        self._pattern = re.compile(
            f"\ue000{number}:(\\d+)\ue002([^\ue001]*)\ue001{number}:\\1\ue002"
        )

    def around(self, index: int, text: str) -> str:
        return f"\ue000{self._number}:{index}\ue002{text}\ue001{self._number}:{index}\ue002"

    def parse(self, fenced: str) -> list[tuple[str, int | None]] | None:
        """Split into (text, its number or None for template text).

        None if the fences do not come in pairs: the template cut a content somewhere.
        """
        said, *rest = self._pattern.split(fenced)
        if any(self._number in text for text in (said, *rest)):
            return None
        parts: list[tuple[str, int | None]] = [(said, None)]
        for index, content, after in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
            parts += [(content, int(index)), (after, None)]
        return parts
