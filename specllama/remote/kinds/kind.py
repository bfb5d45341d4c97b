"""Kinds of engines: how to recognise, ask and read each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specllama.errors import UsageError
from specllama.events import FinishReason
from specllama.remote.address import Look
from specllama.remote.answers import Counters, Drafted, Json, Likely
from specllama.settings.params import GenerateParams, SamplingParams


def same(*names: str, **others: str) -> dict[str, str]:
    """Return an engine's names for our fields: those that are the same there, and others."""
    return {name: name for name in names} | others


@dataclass(frozen=True, slots=True)
class Served:
    """A model that a server has; ``n_ctx`` is 0 and ``loaded`` None if it does not report them."""

    id: str
    n_ctx: int = 0
    loaded: bool | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """A server's report of itself.

    Attributes:
        flags: how it was started, as far as it reports that.
        speculates: whether it drafts, None where it does not report it.
    """

    version: str = ""
    flags: str = ""
    models: tuple[Served, ...] = ()
    speculates: bool | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """One request. ``messages`` is None for a raw text; ``speculate`` None leaves it as it is."""

    params: GenerateParams
    model: str
    messages: list[dict[str, str]] | None
    text: str = ""
    stream: bool = True
    speculate: bool | None = None

    @property
    def continues(self) -> bool:
        """True if the last turn is a reply that is to be continued."""
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"  # type: ignore[index]


@dataclass(slots=True)
class Heard:
    """One reply so far.

    Attributes:
        finish: the server's own word for its end, "" before.
        tokens: by its own count. cached_n: tokens of the prompt that its cache held.
        first_s: until the first text of a stream came, None of one that was not streamed.
    """

    text: str = ""
    reasoning: str = ""
    finish: str = ""
    stop: str | None = None
    tokens: int | None = None
    prompt_n: int | None = None
    cached_n: int | None = None
    draft: Drafted | None = None
    logprobs: list[Likely] = field(default_factory=list)
    fingerprint: str = ""
    first_s: float | None = None
    seconds: float = 0.0

    @property
    def reason(self) -> FinishReason:
        if self.finish == "length":
            return "length"
        if self.finish in ("abort", "error"):
            return "error"
        return "stop_token" if self.stop is None else "stop_string"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One engine.

    Attributes:
        name: what ``--remote-kind`` takes. title: what people call it.
        recognise: its report of itself, None where the server is another engine.
        chat, raw: where a conversation and a text are asked for; raw "" where a text is not taken.
        body: the request. read: adds one object of the answer, gives new (thought, text).
        fields: our sampling fields that it takes, with its names for them.
        constraints: of "json_schema", "grammar", "regex", those that it takes, and the body fields
            for them; a dot leads into an object, "" is what OpenAI's dialect has for it.
        always: body fields of every request. longest: tokens that it is told to write at most,
            where a caller sets no limit and it would end a reply early; None leaves it out.
        continues: body fields for going on with a reply; None where it cannot.
        switches: whether a request can turn its speculation on and off.
        off: body fields for no speculation.
        pieces: a stream that drafts counts its pieces as tokens, so its count is not taken.
        counters: what it counts for all clients, where it reports that.
        figures_hint: how a server is started that reports its counters.
        refuses: sampling fields that it refuses while it drafts.
        thinks: whether it can be told whether to think.
        version_of: its version, from what a reply calls ``system_fingerprint``.
    """

    name: str
    title: str
    recognise: Callable[[Look], Found | None]
    body: Callable[[Kind, Question], Json]
    read: Callable[[Json, Heard], tuple[str, str]]
    chat: str = "/v1/chat/completions"
    raw: str = "/v1/completions"
    fields: Mapping[str, str]
    constraints: Mapping[str, str] = field(default_factory=lambda: {"json_schema": ""})
    always: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None
    continues: Mapping[str, Any] | None = None
    switches: bool = False
    off: Mapping[str, Any] = field(default_factory=dict)
    pieces: bool = False
    counters: Callable[[Look], Counters | None] | None = None
    figures_hint: str = ""
    refuses: tuple[str, ...] = ()
    thinks: bool = False
    version_of: Callable[[str], str] = lambda fingerprint: ""

    def settings(self, params: GenerateParams) -> Json:
        """Return the sampling fields that the caller chose, in its names."""
        chosen = {name: getattr(params.sampling, name) for name in self.chosen(params)}
        out = {self.fields[name]: value for name, value in chosen.items() if name in self.fields}
        if (bias := params.sampling.logit_bias) and "logit_bias" in self.fields:
            out["logit_bias"] = {str(id): max(value, -100.0) for id, value in bias.items()}
        return out

    def chosen(self, params: GenerateParams) -> list[str]:
        """List the sampling fields that a caller chose, except those that change nothing."""
        usual = SamplingParams()
        return [
            name
            for name in SamplingParams.__dataclass_fields__
            if name != "logit_bias"
            and name not in params.from_card
            and (name in _LAW or getattr(params.sampling, name) != getattr(usual, name))
        ]

    def unknown(self, params: GenerateParams) -> list[str]:
        """List the caller's choices that this engine has no field for."""
        out = [
            name
            for name in self.chosen(params)
            if name not in self.fields and getattr(params.sampling, name) != _OFF.get(name, ())
        ]
        if params.sampling.logit_bias and "logit_bias" not in self.fields:
            out.append("logit_bias")
        if params.ignore_eos and "ignore_eos" not in self.fields:
            out.append("ignore_eos")
        if params.think != "auto" and not self.thinks:
            out.append("think")
        usual = GenerateParams()
        out += [name for name in ("think_budget", "proposer", "draft_max", "verify", "window")
                if getattr(params, name) != getattr(usual, name)]  # fmt: skip
        if params.template_args and not self.thinks:
            out.append("template_arg")
        return [name.replace("_", "-") for name in out]

    def check(self, asked: Question, drafts: bool | None) -> None:
        """Raise UsageError if this engine would refuse or ignore part of the request."""
        params = asked.params
        for name in {"json_schema", "grammar", "regex"} - self.constraints.keys():
            if getattr(params, name) is None:
                continue
            what = name.replace("_", " ")
            raise UsageError(f"{self.title} cannot be given a {what}", "leave it out")
        if asked.messages is None and not self.raw:
            raise UsageError(f"{self.title} takes conversations only", "leave out --raw")
        if asked.continues and self.continues is None:
            raise UsageError(
                f"{self.title} cannot continue a reply", "ask again instead: /retry, or Ctrl+R"
            )
        for name in self.refuses if drafts else ():
            if getattr(params.sampling, name) and name not in params.from_card:
                flag = name.replace("_", "-")
                raise UsageError(
                    f"{self.title} refuses --{flag} while it speculates, as this server does",
                    f"leave out --{flag}",
                )


# sent even at their default, since the server's may be another
_LAW = ("temperature", "top_k", "top_p", "min_p")
# values that switch a field off: where an engine lacks the field, nothing is lost
_OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0}
