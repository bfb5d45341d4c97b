"""The tokens of a prompt, and the reader of its reply."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from specllama.backend.base import Vocab
from specllama.cancel import Cancel
from specllama.engine.bounds import require_going, require_size
from specllama.engine.encoding import encode_segments
from specllama.engine.thought_limit import ThoughtLimit
from specllama.errors import UsageError
from specllama.history import common_prefix
from specllama.interface import Message, Prompt, ToolSyntax
from specllama.replies.chat import Rendered, Segment, render
from specllama.replies.marks import Marks, derive, switch
from specllama.replies.thoughts import Reader, Spelling, reader
from specllama.replies.tool_calls import syntax_of
from specllama.settings.params import GenerateParams, template_arguments
from specllama.speculative.noise import reply_position

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
        require_going(cancel)
        ids = self._encoded(rendered.segments)
        begun = 0 if rendered.before is None else len(ids) - len(self._encoded(rendered.before))
        replies = [message for message in messages[:-1] if message.role == "assistant"]
        position = reply_position(len(replies), max(begun, 0))
        notices = tuple(filter(None, (rendered.notice, why)))
        if params.constrained:
            return Prepared(ids, position, notices)
        marks = rendered.marks
        if marks not in self._spellings:
            self._spellings[marks] = Spelling(marks, self.vocab)
        one = reader(self._spellings[marks], rendered.state)
        one.resume(rendered.begun)
        return Prepared(ids, position, notices, one, self._limit(rendered, one, params))

    def _encoded(self, segments: Sequence[Segment]) -> list[int]:
        return encode_segments(self.vocab, segments, bos=self.bos, template=self.template or "")

    def render(self, messages: Sequence[Message], params: GenerateParams) -> tuple[Rendered, str]:
        """Render a conversation as text; also return a wish about thoughts that it cannot grant."""
        variables, unthinking, why = self._variables(params)
        variables, hidden = self._hidden(variables)
        rendered = render(
            self.template,
            messages,
            bos=self.bos,
            eos=self.eos,
            continue_last=messages[-1].role == "assistant",
            variables=variables,
            unthinking=unthinking,
        )
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

        A grammar leaves no room for thoughts.
        """
        think = params.think
        if think == "auto" and params.constrained:
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
