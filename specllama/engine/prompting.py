"""A prompt as tokens, and how the reply to it is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specllama.backend.base import Vocab
from specllama.chat import render
from specllama.engine.encoding import encode_segments
from specllama.errors import UsageError
from specllama.interface import Message, Prompt
from specllama.params import GenerateParams
from specllama.thoughts import Reader, reader

_TAIL = 16  # tokens at the end of a prompt, where a tag may be open


@dataclass(frozen=True, slots=True)
class Prompting:
    """What a model's file says about prompts.

    Attributes:
        template: Jinja chat template, or None for raw prompts.
        bos, eos: special token texts for the template.
    """

    vocab: Vocab
    template: str | None = None
    bos: str = ""
    eos: str = ""

    def encode(self, prompt: Prompt) -> tuple[list[int], str]:
        """Token ids of a prompt, and a notice about the template ('' if none).

        Chat prompts are what llama.cpp makes of the same text, except that contents of messages
        cannot forge turns.

        Raises:
            UsageError: the prompt is empty or an id is outside the vocabulary.
        """
        notice = ""
        if isinstance(prompt, str):
            ids = self.vocab.tokenize(prompt, add_special=True, parse_special=True)
        elif prompt and isinstance(prompt[0], Message):
            messages = [m for m in prompt if isinstance(m, Message)]
            rendered = render(
                self.template,
                messages,
                bos=self.bos,
                eos=self.eos,
                continue_last=messages[-1].role == "assistant",
            )
            notice = rendered.notice or ""
            ids = encode_segments(
                self.vocab, rendered.segments, bos=self.bos, template=self.template or ""
            )
        else:
            ids = [int(t) for t in prompt if not isinstance(t, Message)]
            bad = next((t for t in ids if not 0 <= t < self.vocab.n_tokens), None)
            if bad is not None:
                raise UsageError(f"token {bad} is outside the vocabulary")
        if not ids:
            raise UsageError("the prompt is empty", "give some text to continue or to answer")
        return ids, notice

    def reader(
        self,
        prompt: Prompt,
        ids: Sequence[int],
        params: GenerateParams,
    ) -> Reader | None:
        """How to read the reply to a chat prompt of these tokens; None if it is shown as it is."""
        last = prompt[-1] if prompt else None
        constrained = params.grammar is not None or params.json_schema is not None
        if not isinstance(last, Message) or constrained:
            return None
        end = b"".join(self.vocab.piece(t, special=True) for t in ids[-_TAIL:])
        return reader(
            self.template,
            end.decode("utf-8", "replace"),
            last.content if last.role == "assistant" else "",
        )
