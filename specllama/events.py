"""The one output channel of the engine: frozen events, readable by every consumer.

The strip in the terminal app, ``--json``, the round log and the bench all read these.
``to_dict`` gives JSON-ready data whose ``type`` is the event's name in snake case. Times are
milliseconds in ``*_ms`` and seconds in ``*_s``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec

from specllama.rates import Payoff

FinishReason = Literal["stop_token", "stop_string", "length", "context", "cancelled", "error"]
TargetKind = Literal["recovered", "bonus", "plain"]

NO_GUESS = "no guess"  # the reason of a round for which no source had one


@dataclass(frozen=True, slots=True)
class Event:
    """An event. ``ends``: the request has no event after it; ``followed``: one comes at once."""

    type: ClassVar[str] = "event"
    ends: ClassVar[bool] = False
    followed: ClassVar[bool] = False

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready data; fields that ``unknown`` names are null, see ``Finished``."""
        out = {"type": self.type, **msgspec.to_builtins(self)}
        for name in out.pop("unknown", ()):
            out[name] = None
        return out


@dataclass(frozen=True, slots=True)
class LoadProgress(Event):
    """A model file is being loaded; fraction in 0..1."""

    type: ClassVar[str] = "load_progress"
    role: Literal["target", "draft"]
    path: str
    fraction: float

    @property
    def words(self) -> str:
        return f"loading {self.role} {100 * self.fraction:.0f}%"


@dataclass(frozen=True, slots=True)
class Measuring(Event):
    """Progress of the measurements, made once, of a model that is new on this machine.

    Attributes:
        share: of all steps together that is done.
        left_s: about how long the rest takes; None at first.
        over: it came to its end, or was stopped.
    """

    type: ClassVar[str] = "measuring"
    what: str = ""
    step: int = 1
    steps: int = 1
    share: float = 0.0
    left_s: float | None = None
    over: bool = False

    @property
    def words(self) -> str:
        left = "" if self.left_s is None else f", about {self.left_s:.0f} s"
        return f"first-use check {self.step} of {self.steps}{left}"


@dataclass(frozen=True, slots=True)
class Notice(Event):
    """A decision in words: speculation skipped, draft refused, log disabled, near-tie met."""

    type: ClassVar[str] = "notice"
    message: str
    level: Literal["info", "warning"] = "info"
    topic: str = ""


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The start of an accepted request: its models and their exactness.

    ``tokenize_ms`` is what it took to render and tokenize the prompt, ``queue_ms`` what it then
    waited until the prompt was read. ``position`` is that of the first token in the noise (see
    ``speculative.noise``). ``slot`` is the engine's place that writes it. For ``unknown`` see
    ``Finished``.
    """

    type: ClassVar[str] = "started"
    prompt_n: int
    cached_n: int
    n_ctx: int
    seed: int
    proposer: str
    verify: str
    draft_max: int
    exactness: str
    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    position: int = 0
    slot: int = -1
    unknown: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PrefillProgress(Event):
    """Progress of reading a prompt.

    Attributes:
        done: tokens of it that are in the KV cache now, the ``cached`` ones among them.
        total: of the whole prompt.
        cached: those that were there before: ``total - cached`` have to be read, of which
            ``done - cached`` were so far.
        left_ms: what the rest takes at the present pace; None before that is known.
    """

    type: ClassVar[str] = "prefill_progress"
    done: int
    total: int
    cached: int
    left_ms: float | None = None


@dataclass(frozen=True, slots=True)
class TextDelta(Event):
    """New text. Held back while a stop string or a UTF-8 sequence may still complete."""

    type: ClassVar[str] = "text_delta"
    followed: ClassVar[bool] = True
    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta(Event):
    """New text of the thought that comes before the answer; held back in the same way."""

    type: ClassVar[str] = "reasoning_delta"
    followed: ClassVar[bool] = True
    text: str


@dataclass(frozen=True, slots=True)
class Chance:
    """The probability of a token before any sampler, as a logarithm."""

    token: int
    logprob: float
    bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chances(Chance):
    """The probability of an emitted token, and the likeliest in its place."""

    top: tuple[Chance, ...] = ()


@dataclass(frozen=True, slots=True)
class RoundDone(Event):
    """One propose, verify, commit. Positions are absolute token indices in the context.

    ``parents[i] == -1`` hangs a drafted node on the pending token, so a chain is -1, 0, 1, ...
    ``accepted_path`` are the indices of accepted nodes, in order. ``emitted`` are the token ids
    this round added to the output: accepted drafts, then the target token unless it was cut.
    ``cut`` is 1 when a stop inside the accepted run left the target token unused.
    ``target_token`` is None when the rule ended on an accepted stop token and never drew one.
    ``p`` and ``q`` are the target's and the draft's probability of each drafted token, None if not
    computed (untested tail, point masses). ``read`` counts the tokens of the text that a source
    with its own cache read before its first guess. ``plain_ms`` is what a plain step at this place
    takes in these minutes, of rounds that drafted and where it was measured, last
    ``plain_age_s`` ago; ``plain_n`` forecasts of plain steps by those as long before them were off
    by ``plain_spread`` (a standard deviation of logarithms). ``chances`` are those of ``emitted``,
    where they were asked for. ``balance`` is what the window may risk in the next
    round, in plain steps; None where it weighs nothing. ``wait_ms`` went by between the round
    before, or the end of the prompt, and this one: time of the caller, of pipes and of other
    conversations. So
    ``t_s`` grows by the sum of a round's times.
    """

    type: ClassVar[str] = "round_done"
    index: int
    t_s: float
    n_past: int
    source: str
    draft_max: int
    window_reason: str
    drafted: tuple[int, ...]
    parents: tuple[int, ...]
    drafted_text: tuple[str, ...]
    confidence: tuple[float | None, ...]
    p: tuple[float | None, ...]
    q: tuple[float | None, ...]
    accepted: int
    accepted_path: tuple[int, ...]
    target_token: int | None
    target_text: str
    target_kind: TargetKind
    emitted: tuple[int, ...]
    emitted_text: tuple[str, ...]
    cut: int
    draft_ms: float
    verify_ms: float
    other_ms: float
    near_tie: bool = False
    sources: tuple[str, ...] = ()
    read: int = 0
    plain_ms: float | None = None
    chances: tuple[Chances, ...] = ()
    balance: float | None = None
    wait_ms: float = 0.0
    plain_age_s: float | None = None
    plain_n: int = 0
    plain_spread: float | None = None

    @property
    def judged(self) -> int:
        """The number of guesses on which the target gave a verdict; after a rejection none is."""
        return self.accepted + (bool(self.drafted) and self.target_kind == "recovered")

    @property
    def declined(self) -> bool:
        """True if drafting was not worth it."""
        return not self.drafted and self.draft_max == 0 and self.window_reason != NO_GUESS

    @property
    def is_chain(self) -> bool:
        return all(parent == i - 1 for i, parent in enumerate(self.parents))

    @property
    def waiting_ms(self) -> float:
        """The time that was neither drafting nor verifying."""
        return self.other_ms + self.wait_ms

    @property
    def pass_ms(self) -> float:
        """The time of the target, and what went by before it, by the wall clock."""
        return self.verify_ms + self.waiting_ms

    @property
    def took_ms(self) -> float:
        """The time since the round before, by the wall clock."""
        return self.draft_ms + self.pass_ms


@dataclass(frozen=True, slots=True)
class Timings:
    """Parts of a request's time, by one wall clock: ``ttft_ms`` until the first token, which is
    ``tokenize_ms + queue_ms + prefill_ms + first_decode_ms``, and ``decode_ms`` from there to the
    end, in which all other tokens were written: ``draft_ms + verify_ms + waiting_ms``.

    ``other_ms`` is the part of all rounds' own time that neither model took; ``deliver_ms`` of it
    went into handing the events to the caller (round log, JSON, screen).
    """

    load_ms: float = 0.0
    tokenize_ms: float = 0.0
    prefill_ms: float = 0.0
    first_decode_ms: float = 0.0
    ttft_ms: float = 0.0
    queue_ms: float = 0.0
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    waiting_ms: float = 0.0
    other_ms: float = 0.0
    deliver_ms: float = 0.0
    tok_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The last event of every request.

    Law: ``len(token_ids) == draft_n_accepted + rounds - cut``. The first token comes from round 0,
    drawn from the row that the prompt's own last pass leaves: nothing is evaluated for it.
    ``token_ids`` includes a stop token; ``text`` never shows it, nor the bytes of a character that
    the last tokens left incomplete. ``reasoning`` is the thought of
    the reply, ``seams`` what the model wrote before and behind it, None where that is nothing or
    not the whole (see ``thoughts``). Of a reply that was continued, ``text`` and ``reasoning`` are
    what is new, ``seams`` are those of the whole. ``stop`` is the stop string that ended it, if one
    did. ``verdict`` is None of plain decoding.

    Another engine reports less: ``engine`` names it, ``token_ids`` is empty, ``counted`` is its own
    count of the tokens, and ``unknown`` names the fields whose 0 means unreported: they are null
    in JSON. ``draft_at_most``: ``draft_n`` is an upper bound.
    """

    type: ClassVar[str] = "finish"
    ends: ClassVar[bool] = True
    reason: FinishReason
    text: str = ""
    token_ids: tuple[int, ...] = ()
    seed: int = 0
    rounds: int = 0
    draft_n: int = 0
    draft_n_accepted: int = 0
    cut: int = 0
    prompt_n: int = 0
    cached_n: int = 0
    n_ctx: int = 0
    proposer: str = "none"
    verify: str = ""
    exactness: str = ""
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    accepted_per_position: tuple[int, ...] = ()
    drafted_per_position: tuple[int, ...] = ()
    near_ties: int = 0
    timings: Timings = field(default_factory=Timings)
    message: str | None = None
    reasoning: str = ""
    seams: tuple[str, str] | None = None
    stop: str | None = None
    verdict: Payoff | None = None
    engine: str = ""
    counted: int | None = None
    draft_at_most: bool = False
    unknown: frozenset[str] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        out = Event.to_dict(self)
        if self.engine:  # it tells of none of the others
            times = out["timings"].items()
            out["timings"] = {k: v if v or k == "tok_per_s" else None for k, v in times}
        return out

    @property
    def tokens(self) -> int | None:
        """The number of its tokens; None if the engine does not report it."""
        return self.counted if self.engine else len(self.token_ids)

    @property
    def used(self) -> int | None:
        """The context tokens that prompt and reply take; None if the engine does not report
        them."""
        prompt, written = self.known("prompt_n"), self.tokens
        return None if prompt is None or written is None else prompt + written

    def known(self, name: str) -> int | None:
        """Return one of the counts; None if the engine does not report it."""
        return None if name in self.unknown else getattr(self, name)


Report = Callable[[Event], object] | None  # hears of events, where somebody does
Loading = LoadProgress | Measuring
EVENT_TYPES: dict[str, type[Event]] = {
    cls.type: cls
    for cls in (
        LoadProgress, Measuring, Notice, Started, PrefillProgress, TextDelta, ReasoningDelta,
        RoundDone, Finished
    )
}  # fmt: skip


def with_unknown(cls: type[Event], data: dict[str, Any]) -> dict[str, Any]:
    """Move the counts that are null in JSON to the field ``unknown``."""
    unknown = frozenset(
        f.name
        for f in dataclasses.fields(cls)
        if f.type == "int" and f.name in data and data[f.name] is None
    )
    if isinstance(timings := data.get("timings"), dict):
        told = {name: value for name, value in timings.items() if value is not None}
        data = {**data, "timings": told}
    return {**data, **dict.fromkeys(unknown, 0), "unknown": unknown} if unknown else data


def event_from_dict(data: dict[str, Any]) -> Event:
    """Convert back from ``to_dict``; ignore unknown keys, so that newer writers stay readable.

    Raises:
        KeyError: the type is unknown or a required field is missing.
    """
    cls = EVENT_TYPES[data["type"]]
    try:
        event: Event = msgspec.convert(with_unknown(cls, data), cls)
    except msgspec.ValidationError as error:
        raise KeyError(str(error)) from None
    return event
