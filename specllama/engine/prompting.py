"""The tokens of a prompt, and the reader of its reply.

llama.cpp finds special tokens by their text before it merges anything, and starts the text after
one of them afresh (with a space, in SentencePiece vocabularies). So a prompt is tokenized whole, as
llama.cpp tokenizes the same text, unless a content contains the text of a marker. Only then is it
taken apart here, in the same way, and what people wrote stays ordinary text:

- control tokens are recognised in template text alone;
- user-defined tokens that mark something, which llama.cpp recognises everywhere, are cut after
  their first character if they occur in a content. They are those written ``<|so|>`` and those
  that the template names; in a reply only those that it wrote into this very prompt, so that what
  else the model can say (``<tool_call>``) stays its own text.

After the tokens of a budget for thoughts, only tokens that end the thought are allowed. That is a
constraint on the next token as a grammar is, a function of the tokens before: drafts follow it, and
the text is the same with and without them.
"""

from __future__ import annotations

import json
import re
import secrets
from bisect import bisect, bisect_left
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import cast

import numpy as np
import numpy.typing as npt

from specllama.arrays import IntArray
from specllama.backend.base import SpecialToken, Verdict, Vocab, partition
from specllama.cancel import Cancel
from specllama.engine.bounds import require_size
from specllama.errors import UsageError
from specllama.interface import Message, Prompt, ToolSyntax
from specllama.replies.marks import Marks, asks, derive, switch
from specllama.replies.segments import Rendered, Segment, render
from specllama.replies.thoughts import Reader, Spelling, reader
from specllama.replies.tool_calls import syntax_of
from specllama.settings.params import GenerateParams, template_arguments
from specllama.speculative.noise import reply_position
from specllama.speculative.sampling import Constraint
from specllama.text_history import common_prefix

_LIKE_CONTROL = re.compile(r"<[|｜].*[|｜]>")
_LONGEST = 4  # bytes of a character
_WORD = 24  # characters of the longest word that is waited for
_PROBE = "tool_that_nobody_has"


def _ended(text: str) -> int:
    """Return the end of the last word that is surely complete; in a text without spaces, a place
    some characters before its end."""
    at = max(len(text) - _WORD, 0)
    begun = re.search(r"\s+\S*\Z", text[at:])
    return at if begun is None else at + begun.start()


def _shown(segments: Sequence[Segment], hidden: Mapping[str, str]) -> list[Segment]:
    """Put back the texts that numbers stand for, each as a content."""
    if not hidden:
        return list(segments)
    numbers = re.compile(f"({'|'.join(map(re.escape, hidden))})")
    return [
        Segment(hidden.get(part, part), one.special and part not in hidden, one.reply)
        for one in segments
        for part in numbers.split(one.text)
        if part
    ]


class ThoughtLimit:
    """A constraint that closes a thought as the template would.

    Args:
        reader: at the place in the reply where the first token comes.
        limit: tokens of thoughts that may still come.
        closing: tokens that stand between a thought and its answer.

    Attributes:
        guide: a grammar that holds as well.
    """

    def __init__(self, reader: Reader, limit: int, closing: Sequence[int]) -> None:
        self._reader: Reader | None = reader.fork()
        self._left = limit
        self._closing = tuple(closing)
        self._forced: int | None = None
        self._tail = b""
        self.guide: Constraint | None = None
        self._look()

    def allowed(self, ids: IntArray) -> npt.NDArray[np.bool_]:
        found = np.ones(len(ids), np.bool_) if self.guide is None else self.guide.allowed(ids)
        return found if self._forced is None else found & (ids == self._closing[self._forced])

    def accept(self, token: int) -> None:
        if self.guide is not None:
            self.guide.accept(token)
        if self._forced is not None:
            self._forced += 1
            if self._forced == len(self._closing):
                self._forced = self._reader = None
        elif self._reader is not None:
            unit = self._reader.spelling.unit(token)
            was_thinking = self._reader.thinking
            self._reader.feed(unit)
            if self._reader.thinking:
                self._left -= was_thinking
                self._tail = (self._tail + self._reader.spelling.bytes(unit))[-_LONGEST:]
                self._look()
            elif was_thinking:
                self._reader = None  # it ended by itself

    def fork(self) -> ThoughtLimit:
        other = copy(self)
        other._reader = self._reader and self._reader.fork()
        other.guide = self.guide and self.guide.fork()
        return other

    def ahead(
        self, most: int, habits: dict[bytes, dict[bytes, float]]
    ) -> Sequence[tuple[int, float]]:
        if self._forced is None:
            return [] if self.guide is None else self.guide.ahead(most, habits)
        return [(token, 1.0) for token in self._closing[self._forced :][:most]]

    def _look(self) -> None:
        """Force the end once the budget is used up, but not within a character."""
        thinking = self._reader is not None and self._reader.thinking
        whole = self._left <= -_LONGEST or not _cut_off(self._tail)
        if thinking and self._left <= 0 and whole and self._closing:
            self._forced = 0


def _cut_off(text: bytes) -> bool:
    """True if a text ends within a character of UTF-8."""
    decoder = getincrementaldecoder("utf-8")("ignore")
    decoder.decode(text)
    return bool(decoder.getstate()[0])


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt, ready to be read.

    Attributes:
        position: of the reply's next token in the noise (see ``speculative.noise``).
        notices: about the template.
        reader: splits the reply; None where it is shown as it is.
        limit: the budget of its thoughts.
        prediction: what the caller expects the reply to be.
    """

    ids: list[int]
    position: int
    notices: tuple[str, ...] = ()
    reader: Reader | None = None
    limit: ThoughtLimit | None = None
    prediction: Sequence[int] = ()


@dataclass(frozen=True)
class Prompting:
    """The prompt format that a model's file describes.

    Attributes:
        template: Jinja chat template, or None for raw prompts.
        bos, eos: special token texts for the template.
    """

    vocab: Vocab
    template: str | None = None
    bos: str = ""
    eos: str = ""
    _spellings: dict[Marks, Spelling] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        derive(self.template)  # while the model loads, rather than in the first reply

    def encode(self, prompt: Prompt) -> tuple[list[int], str]:
        """Return the token ids of a prompt, and a notice about the template ("" if none)."""
        prepared = self.prepare(prompt, GenerateParams())
        return prepared.ids, "; ".join(prepared.notices)

    def prepare(
        self,
        prompt: Prompt,
        params: GenerateParams,
        *,
        n_ctx: int | None = None,
        cancel: Cancel | None = None,
    ) -> Prepared:
        """Return the token ids of a prompt, and the facts about its reply.

        Chat prompts are what llama.cpp makes of the same text, except that contents of messages
        cannot forge turns.

        Args:
            n_ctx: no more of a rendered conversation is read than can fit this context.

        Raises:
            UsageError: the prompt is empty or an id is outside the vocabulary.
            PromptTooLong: the conversation cannot fit the context.
            Cancelled: ``cancel`` was set.
        """
        prepared: Prepared | None = None
        if isinstance(prompt, str):
            ids = self.vocab.tokenize(prompt, add_special=True, parse_special=True)
        elif prompt and isinstance(prompt[0], Message):
            messages = [m for m in prompt if isinstance(m, Message)]
            prepared = self._chat(messages, params, n_ctx, cancel)
            ids = prepared.ids
        else:
            ids = self._mixed([part for part in prompt if not isinstance(part, Message)])
            bad = next((t for t in ids if not 0 <= t < self.vocab.n_tokens), None)
            if bad is not None:
                raise UsageError(f"token {bad} is outside the vocabulary")
        if not ids:
            raise UsageError("the prompt is empty", "give some text to continue or to answer")
        prepared = prepared or Prepared(ids, len(ids))
        expected = self._expected(params.prediction, ids, n_ctx)
        return replace(prepared, prediction=expected) if expected else prepared

    def _expected(self, text: str, ids: Sequence[int], n_ctx: int | None) -> Sequence[int]:
        """Return the expected reply to ``ids`` in tokens, as far as the context can hold it."""
        if not text:
            return ()
        if n_ctx is not None and self.vocab.longest:
            text = text[: n_ctx * self.vocab.longest]
        after_text = self.vocab.special(ids[-1]) is None
        return self.vocab.tokenize(
            text, add_special=False, parse_special=False, after_text=after_text
        )

    def stable(self, prompt: Prompt, params: GenerateParams, ids: Sequence[int]) -> int:
        """Count the tokens of a conversation that stay if its last message goes on."""
        *before, last = cast(Sequence[Message], prompt)
        ended = replace(last, content=last.content[: _ended(last.content)])
        return common_prefix(ids, self.prepare([*before, ended], params).ids)

    def _mixed(self, parts: Sequence[int | str]) -> list[int]:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids += self.vocab.tokenize(part, add_special=not ids, parse_special=True)
            else:
                ids.append(int(part))
        return ids

    def _chat(
        self,
        messages: list[Message],
        params: GenerateParams,
        n_ctx: int | None,
        cancel: Cancel | None,
    ) -> Prepared:
        rendered, why = self.render(messages, params)
        if n_ctx is not None:
            require_size(rendered.text, n_ctx, self.vocab)
        if cancel is not None:
            cancel.check()
        ids = self._encoded(rendered.segments)
        begun = 0 if rendered.before is None else len(ids) - len(self._encoded(rendered.before))
        replies = [message for message in messages[:-1] if message.role == "assistant"]
        position = reply_position(len(replies), max(begun, 0))
        notices = tuple(filter(None, (rendered.notice, why)))
        marks = rendered.marks
        if marks not in self._spellings:
            self._spellings[marks] = Spelling(marks, self.vocab)
        one = reader(self._spellings[marks], rendered.state)
        one.resume(rendered.begun)
        thinks = one.thinking or (one.undecided and marks.known and _asks_for_thought(params))
        if params.constrained and not thinks:
            return Prepared(ids, position, notices)
        return Prepared(ids, position, notices, one, self._limit(rendered, one, params))

    def _encoded(self, segments: Sequence[Segment]) -> list[int]:
        return encode_segments(self.vocab, segments, bos=self.bos, template=self.template or "")

    def render(self, messages: Sequence[Message], params: GenerateParams) -> tuple[Rendered, str]:
        """Render a conversation as text; also return a wish about thoughts that it cannot grant."""
        variables, unthinking, why = self._variables(params)
        variables, hidden = self._hidden(variables)
        rendered = render(
            self.template, messages, bos=self.bos, eos=self.eos, variables=variables,
            unthinking=unthinking
        )  # fmt: skip
        before = rendered.before and _shown(rendered.before, hidden)
        return replace(rendered, segments=_shown(rendered.segments, hidden), before=before), why

    def _hidden(self, variables: dict[str, object]) -> tuple[dict[str, object], dict[str, str]]:
        """Put numbers for the control tokens that tools hold, and return their texts as well: what
        people wrote must not become tokens in the template's text."""
        text, hidden, number = json.dumps(variables.get("tools")), {}, secrets.randbelow(10**18)
        for i, special in enumerate(self.vocab.specials if "tools" in variables else ()):
            if special.control and (written := json.dumps(special.text)[1:-1]) in text:
                hidden[f"{number:018}.{i}."] = special.text
                text = text.replace(written, f"{number:018}.{i}.")
        return {**variables, "tools": json.loads(text)} if hidden else variables, hidden

    def thinks(self) -> bool:
        """True if the template supports thoughts."""
        return derive(self.template).known

    def tool_syntax(self) -> ToolSyntax:
        """Return the template's syntax for tool calls, if it has a place for tools."""
        if self.template is None:
            return ""
        function = {"name": _PROBE, "description": "", "parameters": {"type": "object"}}
        variables = {"tools": [{"type": "function", "function": function}]}
        told = render(
            self.template, [Message("user", "")], bos=self.bos, eos=self.eos, variables=variables
        )
        if told.notice is not None or _PROBE not in told.text:
            return ""
        return syntax_of(told.text + self.template)

    def _variables(self, params: GenerateParams) -> tuple[dict[str, object], bool, str]:
        """Return the variables of the template; True if an empty thought must replace its switch;
        and the user's wishes that cannot be granted.

        What has to fit a grammar is thought about only if somebody asks for that.
        """
        think = params.think
        if params.constrained and not _asks_for_thought(params):
            think = "off"
        given = template_arguments(params.template_args)
        if self.template is None:
            return given, False, ""
        switched, why = switch(self.template, think)
        return {**switched, **given}, think == "off" and not switched, why

    def _limit(
        self, rendered: Rendered, one: Reader, params: GenerateParams
    ) -> ThoughtLimit | None:
        if params.think_budget is None:
            return None
        spent = self._tokens(rendered.begun.reasoning)
        closing = self._tokens(rendered.marks.closing)
        return ThoughtLimit(one, params.think_budget - len(spent), closing)

    def _tokens(self, text: str) -> list[int]:
        return self.vocab.tokenize(text, add_special=False, parse_special=True, after_text=True)


def _asks_for_thought(params: GenerateParams) -> bool:
    """True if a request wants thoughts, in its own field or in variables of the template."""
    if params.think == "auto":
        return asks(template_arguments(params.template_args))
    return params.think != "off"


def encode_segments(
    vocab: Vocab, segments: Sequence[Segment], *, bos: str, template: str
) -> list[int]:
    """Return the token ids of a chat prompt.

    Args:
        bos: text of the begin token; it is not doubled where the template writes it as well.
        template: source of the chat template, "" if there is none.
    """
    first, *rest = segments or [Segment("", True)]
    if first.special and vocab.adds_bos:
        segments = [Segment(first.text.removeprefix(bos), True), *rest]
    text = "".join(segment.text for segment in segments)
    ids = vocab.tokenize(text, add_special=True, parse_special=True)
    forgery = _Forgery(segments, template)
    present = [special for t in set(ids) if (special := vocab.special(t)) is not None]
    if not any(forgery.anywhere(special, text) for special in present):
        return ids
    frame = vocab.tokenize("", add_special=True, parse_special=False)
    n_begin = int(vocab.adds_bos)
    ids = frame[:n_begin]
    after_text = False
    for piece in partition(text, vocab.specials, forgery.judge):
        if isinstance(piece, int):
            ids.append(piece)
        else:
            ids += vocab.tokenize(
                piece, add_special=False, parse_special=False, after_text=after_text
            )
        after_text = isinstance(piece, str)
    return ids + frame[n_begin:]


class _Forgery:
    """A judge of special tokens' texts in a prompt: markers, or text of people."""

    def __init__(self, segments: Sequence[Segment], template: str) -> None:
        self._segments = segments
        self._starts = list(accumulate((len(s.text) for s in segments[:-1]), initial=0))
        # no marker can arise from two pieces that were never next to each other
        self._written = "\0".join(s.text for s in segments if s.special)
        self._template = template

    def judge(self, special: SpecialToken, start: int, end: int) -> Verdict:
        first, beyond = bisect(self._starts, start) - 1, bisect_left(self._starts, end)
        contents = [s for s in self._segments[first:beyond] if not s.special]
        if not contents:
            return "token"
        if special.control:
            return "text"
        return "cut" if self._marks(special, all(s.reply for s in contents)) else "token"

    def anywhere(self, special: SpecialToken, text: str) -> bool:
        """True if its text must be split, instead of becoming a token, at any place."""
        if not special.control and not self._marks(special, reply=False):
            return False
        at = text.find(special.text)
        while at >= 0:
            if self.judge(special, at, at + len(special.text)) != "token":
                return True
            at = text.find(special.text, at + 1)
        return False

    def _marks(self, special: SpecialToken, reply: bool) -> bool:
        """True if a user-defined token is a marker, in the text of people or of models."""
        text = special.text
        if len(text.strip()) < 2:  # spaces; and a single character could not be cut
            return False
        return (
            _LIKE_CONTROL.fullmatch(text) is not None
            or text in self._written
            or (text in self._template and not reply)
        )
