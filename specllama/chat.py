"""From a conversation to text segments, ready to be tokenised.

What people and models wrote must never turn into control tokens: ``<|im_end|>`` typed by a user is
seven ordinary characters and a pipe, not the end of a turn. So the rendered prompt is a list of
segments: template text with ``special=True`` (control tokens are recognised) and contents with
``special=False`` (they are not). Which is which is found by rendering with markers around each
content and checking that the template gives the same text without them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specllama.errors import UsageError
from specllama.interface import Message
from specllama.template import TemplateFailed, render_template

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the prompt; ``special`` says whether control tokens are recognised in it."""

    text: str
    special: bool


@dataclass(frozen=True, slots=True)
class Rendered:
    """The prompt, and a sentence for the user when the template could not be used as it is."""

    segments: list[Segment]
    notice: str | None = None

    @property
    def text(self) -> str:
        return "".join(segment.text for segment in self.segments)


def render(
    template: str | None,
    messages: Sequence[Message],
    *,
    bos: str,
    eos: str,
    add_generation_prompt: bool = True,
    continue_last: bool = False,
) -> Rendered:
    """Render a conversation.

    Args:
        template: the model's Jinja template; None joins the contents with newlines and no roles.
        messages: the conversation, oldest first.
        bos, eos: texts of the model's begin and end tokens, for templates that name them.
        add_generation_prompt: end with the header of the assistant's turn.
        continue_last: end inside the last message, which is the assistant's, so that the model
            goes on writing it. Ignored when the last message is not the assistant's.

    A template that fails is never an error: without a system role the system prompt joins the
    first user message; after any other failure the prompt is written in ChatML and a notice says
    so.

    Raises:
        UsageError: no messages, or an unknown role.
    """
    if not messages:
        raise UsageError("the conversation is empty")
    for message in messages:
        if message.role not in ROLES:
            raise UsageError(f"unknown role {message.role!r}", f"choose one of {', '.join(ROLES)}")
    continue_last = continue_last and messages[-1].role == "assistant"
    if template is None:
        return Rendered(_raw(messages))
    job = _Job(template, bos, eos, add_generation_prompt and not continue_last, continue_last)
    try:
        return Rendered(job.segments(messages))
    except TemplateFailed as first:
        failure = first
    if messages[0].role == "system" and len(messages) > 1 and not failure.refused:
        try:
            return Rendered(job.segments(_without_system(messages)))
        except TemplateFailed:
            pass
    return Rendered(
        _chatml(messages, job.add_generation_prompt, continue_last),
        f"the model's chat template failed ({failure}); using ChatML instead",
    )


def _raw(messages: Sequence[Message]) -> list[Segment]:
    return _joined([Segment("\n".join(m.content for m in messages), False)])


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """Models without a system role read the system prompt at the head of the first question."""
    system, first, *rest = messages
    return [Message(first.role, f"{system.content}\n\n{first.content}"), *rest]


def _chatml(
    messages: Sequence[Message], add_generation_prompt: bool, continue_last: bool
) -> list[Segment]:
    out: list[Segment] = []
    for message in messages:
        out += [
            Segment(f"<|im_start|>{message.role}\n", True),
            Segment(message.content, False),
            Segment("<|im_end|>\n", True),
        ]
    if continue_last:
        out.pop()
    elif add_generation_prompt:
        out.append(Segment("<|im_start|>assistant\n", True))
    return _joined(out)


def _joined(segments: Sequence[Segment]) -> list[Segment]:
    """Join neighbours of one kind and drop empty ones, so that only borders split merges."""
    out: list[Segment] = []
    for segment in segments:
        if not segment.text:
            continue
        if out and out[-1].special == segment.special:
            out[-1] = Segment(out[-1].text + segment.text, segment.special)
        else:
            out.append(segment)
    return out


def _answer_only(text: str) -> str:
    """The reply without its thinking, as templates show earlier replies to the model."""
    return text.rsplit("</think>", 1)[-1].lstrip("\n")


# What templates do to contents, most frequent first. Each is tried until the marked rendering
# agrees with the plain one.
_VARIANTS: tuple[Callable[[Message], str], ...] = (
    lambda m: m.content,
    lambda m: m.content.strip(),
    lambda m: _answer_only(m.content) if m.role == "assistant" else m.content,
    lambda m: (_answer_only(m.content) if m.role == "assistant" else m.content).strip(),
)


@dataclass(frozen=True, slots=True)
class _Job:
    template: str
    bos: str
    eos: str
    add_generation_prompt: bool
    continue_last: bool

    def segments(self, messages: Sequence[Message]) -> list[Segment]:
        plain = self._render(messages, [m.content for m in messages])
        # Digits survive whatever a template does to the case of a text, and a fresh number
        # cannot stand in a content already.
        marks = _Marks(str(secrets.randbelow(10**18)))
        for variant in _VARIANTS:
            contents = [variant(m) for m in messages]
            marked = self._render(
                messages, [marks.around(i, text) for i, text in enumerate(contents)]
            )
            parts = marks.parse(marked)
            if parts is not None and "".join(text for text, _ in parts) == plain:
                return self._finish(messages, parts)
        # The template looks into the contents (or changes them): hide them completely.
        hidden = self._render(messages, [marks.around(i, "") for i in range(len(messages))])
        parts = marks.parse(hidden)
        if parts is None:
            raise TemplateFailed("it takes the messages apart")
        contents = [m.content if m.content in plain else m.content.strip() for m in messages]
        filled = [(text if i is None else contents[i], i) for text, i in parts]
        return self._finish(messages, filled)

    def _finish(
        self, messages: Sequence[Message], parts: list[tuple[str, int | None]]
    ) -> list[Segment]:
        if self.continue_last:
            last = len(messages) - 1
            at = max((n for n, (_, i) in enumerate(parts) if i == last), default=None)
            if at is None:
                raise TemplateFailed("it leaves out the reply to be continued")
            # Templates trim; the end of a partial reply must stay as the model wrote it.
            content = messages[last].content
            text = parts[at][0]
            tail = content[len(content.rstrip()) :]
            parts = [*parts[:at], (text.rstrip() + tail, last)]
        return _joined([Segment(text, i is None) for text, i in parts])

    def _render(self, messages: Sequence[Message], contents: Sequence[str]) -> str:
        variables: dict[str, Any] = {
            "messages": [
                {"role": m.role, "content": text}
                for m, text in zip(messages, contents, strict=True)
            ],
            "bos_token": self.bos,
            "eos_token": self.eos,
            "add_generation_prompt": self.add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        max_chars = 1_000_000 + 4 * sum(map(len, contents))
        return render_template(self.template, variables, max_chars=max_chars)


class _Marks:
    """Begin and end marks around contents, in private-use characters and a one-time number."""

    def __init__(self, number: str) -> None:
        self._number = number
        self._pattern = re.compile(f"([\ue000\ue001]){number}:(\\d+)\ue002")

    def around(self, index: int, text: str) -> str:
        return f"\ue000{self._number}:{index}\ue002{text}\ue001{self._number}:{index}\ue002"

    def parse(self, marked: str) -> list[tuple[str, int | None]] | None:
        """Split into (text, message index or None for template text).

        None when the marks do not come in pairs: the template cut a content at some place.
        """
        parts: list[tuple[str, int | None]] = []
        inside: int | None = None
        end = 0
        for match in self._pattern.finditer(marked):
            index = int(match[2])
            if match[1] == "\ue000":
                if inside is not None:
                    return None
                parts.append((marked[end : match.start()], None))
                inside = index
            else:
                if inside != index:
                    return None
                parts.append((marked[end : match.start()], index))
                inside = None
            end = match.end()
        if inside is not None or self._number in marked[end:]:
            return None
        parts.append((marked[end:], None))
        return parts
