"""OpenAI's ``/v1/completions``: prompts as they are, without a chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from specllama.interface import Prompt
from specllama.server.chat_completions import ChoicesDialect, StreamOptions, limit_of, replies_of
from specllama.server.dialect import Frame, Job, Piece, Reply
from specllama.server.figures import finish_reason, metrics, timings
from specllama.server.likelihood import chances_of, in_completions
from specllama.server.refusals import not_offered, wrong
from specllama.server.sampling import Sampling, most_chances, params_of
from specllama.settings.params import GenerateParams

MOST_PROMPTS = 64


class Spoken(msgspec.Struct):
    """A prompt in llama-server's third way."""

    prompt_string: str
    multimodal_data: Any = None


Given = str | list[int | str | list[int | str] | Spoken] | Spoken


class CompletionRequest(Sampling, kw_only=True):
    prompt: Given
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    n_predict: int | None = None  # llama-server's name for it
    logprobs: int | bool | None = None
    echo: bool | None = None
    suffix: str | None = None


def prompts_of(given: Given) -> tuple[Prompt, ...]:
    """Read the prompts: a list with token ids in it is a single prompt.

    Raises:
        Refusal: there are none or too many, or they hold something other than text.
    """
    if not isinstance(given, list) or any(isinstance(part, int) for part in given):
        return (_prompt(given),)
    if not 0 < len(given) <= MOST_PROMPTS:
        raise wrong("prompt", f"prompt: token ids, or from 1 to {MOST_PROMPTS} prompts")
    return tuple(map(_prompt, given))


def _prompt(one: Any) -> Prompt:
    if isinstance(one, Spoken):
        if one.multimodal_data:
            raise not_offered("multimodal_data", "models here read text only", "prompt")
        return one.prompt_string
    if isinstance(one, list):
        if not all(isinstance(part, int | str) for part in one):
            raise wrong("prompt", "prompt: token ids and texts only stand beside each other")
        return tuple(one)
    return str(one)


def logprobs_of(body: CompletionRequest) -> int | None:
    """Return the number of alternatives that are requested; true counts as 1."""
    return None if body.logprobs is None or body.logprobs is False else int(body.logprobs)


def parse(body: CompletionRequest, base: GenerateParams) -> Job:
    """Read a request; raise Refusal or UsageError if a field is wrong."""
    n = replies_of(body)
    if body.best_of not in (None, n):
        raise not_offered("best_of", "every reply that is written is returned", "best_of")
    if body.suffix and not isinstance(body.prompt, str):
        raise wrong("suffix", "suffix: it goes with one prompt, which is a text")
    if body.echo and body.logprobs:
        raise not_offered("echo with logprobs", "prompts are read without their rows", "echo")
    prompts = prompts_of(body.prompt)
    if body.echo and not all(isinstance(one, str) for one in prompts):
        raise not_offered("echo of token ids", "their text is what was sent", "echo")
    limit = limit_of(body.max_tokens, body.n_predict, 16)
    chances = most_chances("logprobs", logprobs_of(body))
    params = params_of(body, base, chances=chances, max_tokens=limit or 1)
    return Job(prompts, params, n=n, stream=bool(body.stream), silent=limit == 0)


class CompletionDialect(ChoicesDialect):
    """One answer in the words of OpenAI."""

    kind = chunk = "text_completion"
    mark = "cmpl"

    def __init__(self, body: CompletionRequest, model: str) -> None:
        super().__init__(body, model)
        self._logprobs = logprobs_of(body) is not None
        self._prompts = prompts_of(body.prompt) if body.echo else ()
        self._written: dict[int, int] = {}

    def _echo(self, reply: Reply) -> str:
        return str(self._prompts[reply.index // self._n]) if self._prompts else ""

    def begun(self, replies: list[Reply]) -> Iterable[Frame]:
        for reply in replies if self._prompts else ():
            choice = {"index": reply.index, "text": self._echo(reply), "finish_reason": None}
            yield self._chunk([choice])

    def news(self, replies: list[Reply]) -> Iterable[Frame]:
        yield self._chunk([{"index": 0, "text": "", "finish_reason": None}])

    def said(self, piece: Piece) -> Iterable[Frame]:
        index, text = piece.reply.index, piece.reasoning + piece.text
        chances = chances_of(piece.rounds)
        if not text and not chances:
            return
        choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": None}
        if self._logprobs:
            choice["logprobs"] = in_completions(chances, self._written.get(index, 0))
        self._written[index] = self._written.get(index, 0) + len(text)
        yield self._chunk([choice], **self._spent(piece.reply))

    def finished(self, reply: Reply) -> Iterable[Frame]:
        choice = {"index": reply.index, "text": "", "finish_reason": finish_reason(reply)}
        yield self._chunk([choice], timings=timings([reply]), metrics=metrics([reply]))

    def whole(self, replies: list[Reply]) -> Mapping[str, Any]:
        choices = []
        for reply in replies:
            echo = self._echo(reply)
            choice: dict[str, Any] = {
                "index": reply.index,
                "text": echo + reply.reasoning + reply.text,
                "logprobs": None,
                "finish_reason": finish_reason(reply),
            }
            if self._logprobs:
                choice["logprobs"] = in_completions(chances_of(reply.rounds), len(echo))
            choices.append(choice)
        return self._whole(choices, replies)
