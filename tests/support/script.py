"""A reply played back as the events of the engine, from a script of how each round goes.

The demonstration engine and the tests decide what is guessed and what comes through; this module
keeps the laws that the real engine keeps: round 0 is a plain step, positions grow by what was
emitted, ``len(token_ids) == draft_n_accepted + rounds - cut``, and the text is what was emitted.
"""

import math
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from thinking import TagVocab

from specllama.cancel import Cancel
from specllama.events import (
    Chance,
    Chances,
    Event,
    Finished,
    FinishReason,
    Notice,
    PrefillProgress,
    ReasoningDelta,
    RoundDone,
    Started,
    TargetKind,
    TextDelta,
    Timings,
)
from specllama.figures import SpecStats
from specllama.interface import EngineInfo, Message, Prompt, ToolSyntax
from specllama.replies.marks import USUAL
from specllama.replies.thoughts import Part, Spelling, reader
from specllama.settings.params import GenerateParams
from specllama.verdict import judge

N_VOCAB = 32_000
STOP_TOKEN = 2

Cut = Callable[[str], list[str]]


def token_id(piece: str) -> int:
    """A stable id above the special ones; the empty piece is the stop token."""
    if not piece:
        return STOP_TOKEN
    return 3 + zlib.crc32(piece.encode("utf-8", "replace")) % (N_VOCAB - 3)


def is_drafting(params: GenerateParams) -> bool:
    return params.speculate and params.draft_max != 0 and params.proposer != "none"


def count_tokens(prompt: Prompt, cut: Cut) -> int:
    """Tokens of a prompt: the pieces of its text, and four a message for the template's marks."""
    if isinstance(prompt, str):
        return len(cut(prompt))
    messages = [m for m in prompt if isinstance(m, Message)]
    if not messages:
        return len(prompt)
    return sum(len(cut(m.content)) + 4 for m in messages) + 1


@dataclass(frozen=True, slots=True)
class ScriptedGuess:
    """One node of a draft. ``parent`` is another guess of the round, -1 the pending token;
    ``right`` puts the node on the accepted path."""

    text: str
    parent: int
    right: bool
    confidence: float | None = None
    p: float | None = None
    q: float | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """How one round goes; without guesses it is a plain step."""

    guesses: Sequence[ScriptedGuess] = ()
    source: str = "none"
    draft_max: int = 0
    reason: str = "plain step"
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    other_ms: float = 0.0
    wait_ms: float = 0.0
    near_tie: bool = False
    plain_ms: float | None = None  # what a single pass takes
    balance: float | None = None  # plain steps that may be risked
    likely: Sequence[Sequence[tuple[str, float]]] = ()
    """For each token of the round: how likely it was, then the likeliest in its place."""


@dataclass(frozen=True, slots=True)
class ScriptedReading:
    """How long the prompt takes, in milliseconds, and in how many steps it is read."""

    tokenize_ms: float
    token_ms: float
    steps: int = 4
    before_step: Callable[[float], None] = lambda ms: None

    def prefill_ms(self, tokens: int) -> float:
        return self.token_ms * tokens


def play(
    text: str,
    choose: Callable[[int, Sequence[str]], Move],
    *,
    info: EngineInfo,
    params: GenerateParams,
    cut: Cut,
    prompt_n: int,
    seed: int,
    reading: ScriptedReading,
    reason: FinishReason = "stop_token",
    notices: Iterable[Notice] = (),
    cancel: threading.Event | None = None,
) -> Iterator[Event]:
    """The events of one request that is answered with ``text``, in which thoughts are tagged.

    Args:
        choose: told the index of a round and the pieces still to say, decides the round; it may
            sleep, or raise what the engine would raise.
        cut: cuts a text into pieces that join to it again.
        reason: why the reply ends where the text does; a stop string, ``max_tokens`` or the
            context may end it before.
    """
    drafting = is_drafting(params)
    proposer = params.proposer.replace("auto", "mixed") if drafting else "none"
    n_ctx = info.target.n_ctx
    yield _started(info, params, proposer, prompt_n, seed, reading.tokenize_ms)
    yield from notices
    prefill_ms = reading.prefill_ms(prompt_n)
    yield from _read(reading, prompt_n, prefill_ms)
    todo, reason = _to_say(text, reason, params, cut, room=n_ctx - prompt_n)
    stats, rounds, ids = SpecStats(), list[RoundDone](), list[int]()
    clock_ms = reading.tokenize_ms + prefill_ms
    reply = reader(Spelling(USUAL, TagVocab()), None)
    said = {True: "", False: ""}

    def tell(parts: Sequence[Part]) -> Iterator[Event]:
        for thought, units in parts:
            new = units.encode("latin-1").decode("utf-8", "replace")
            said[thought] += new
            yield ReasoningDelta(new) if thought else TextDelta(new)

    while todo and not (cancel is not None and cancel.is_set()):
        move = choose(stats.rounds, todo)
        clock_ms += move.draft_ms + move.verify_ms + move.other_ms + move.wait_ms
        done = _round(move, stats.rounds, prompt_n + len(ids) - 1, todo, clock_ms / 1000)
        stats.observe(done)
        rounds.append(done)
        ids.extend(done.emitted)
        todo = todo[len(done.emitted) :]
        yield done
        new = "".join(done.emitted_text)
        yield from tell(reply.feed(new.encode("utf-8", "replace").decode("latin-1")))
    yield from tell(reply.finish(cut=False))
    yield Finished(
        reason="cancelled" if todo else reason,
        text=said[False],
        reasoning=said[True],
        seams=reply.seams if said[True] else None,
        token_ids=tuple(ids),
        seed=seed,
        rounds=stats.rounds,
        draft_n=stats.drafted,
        draft_n_accepted=stats.accepted,
        cut=stats.cut,
        prompt_n=prompt_n,
        cached_n=0,
        n_ctx=n_ctx,
        proposer=proposer,
        verify=params.verify,
        exactness=info.exactness,
        acceptance_rate=stats.acceptance_rate,
        mean_acceptance_length=stats.mean_acceptance_length,
        accepted_per_position=tuple(stats.accepted_at),
        drafted_per_position=tuple(stats.drafted_at),
        near_ties=stats.near_ties,
        verdict=judge(rounds[1:]) if drafting else None,
        timings=_timings(rounds, stats, info.load_ms, reading.tokenize_ms, prefill_ms),
    )


def _started(
    info: EngineInfo,
    params: GenerateParams,
    proposer: str,
    prompt_n: int,
    seed: int,
    tokenize_ms: float,
) -> Started:
    return Started(
        prompt_n=prompt_n,
        cached_n=0,
        n_ctx=info.target.n_ctx,
        seed=seed,
        proposer=proposer,
        verify=params.verify,
        draft_max=params.draft_limit(info.exact_rows) if is_drafting(params) else 0,
        exactness=info.exactness,
        tokenize_ms=tokenize_ms,
    )


def _read(reading: ScriptedReading, prompt_n: int, prefill_ms: float) -> Iterator[PrefillProgress]:
    for step in range(1, reading.steps + 1):
        reading.before_step(prefill_ms / reading.steps)
        yield PrefillProgress(prompt_n * step // reading.steps, prompt_n, 0)


def _timings(
    rounds: Sequence[RoundDone],
    stats: SpecStats,
    load_ms: float,
    tokenize_ms: float,
    prefill_ms: float,
) -> Timings:
    """Where the time of these rounds went; the first one belongs to the first token."""
    first_ms = rounds[0].took_ms if rounds else 0.0
    decode_ms = sum(done.took_ms for done in rounds[1:])
    draft_ms = sum(done.draft_ms for done in rounds[1:])
    verify_ms = sum(done.verify_ms for done in rounds[1:])
    return Timings(
        load_ms=load_ms,
        tokenize_ms=tokenize_ms,
        prefill_ms=prefill_ms,
        first_decode_ms=first_ms,
        ttft_ms=tokenize_ms + prefill_ms + first_ms if rounds else 0.0,
        decode_ms=decode_ms,
        draft_ms=draft_ms,
        verify_ms=verify_ms,
        waiting_ms=decode_ms - draft_ms - verify_ms,
        other_ms=stats.other_ms,
        tok_per_s=1000 * (stats.emitted - 1) / decode_ms if decode_ms else None,
    )


def _to_say(
    text: str, reason: FinishReason, params: GenerateParams, cut: Cut, room: int
) -> tuple[list[str], FinishReason]:
    """The pieces of the reply, the empty one for a stop token included, and why it ends there."""
    for stop in params.stop:
        if (at := text.find(stop)) >= 0:
            text, reason = text[:at], "stop_string"
    todo = cut(text)
    if reason == "stop_token":
        todo.append("")  # emitted, never shown
    if params.max_tokens is not None and params.max_tokens < min(len(todo), room):
        return todo[: params.max_tokens], "length"
    return (todo[:room], "context") if room < len(todo) else (todo, reason)


def _chance(piece: str, probability: float) -> tuple[int, float, tuple[int, ...]]:
    return token_id(piece), math.log(probability), tuple(piece.encode("utf-8", "replace"))


def _round(move: Move, index: int, n_past: int, todo: Sequence[str], t_s: float) -> RoundDone:
    guesses = move.guesses
    path = [i for i, guess in enumerate(guesses) if guess.right]
    accepted = len(path)
    cut = int(0 < accepted == len(todo))
    emitted = todo[: accepted + 1 - cut]
    end = path[-1] if path else -1
    kind: TargetKind = "recovered" if any(g.parent == end for g in guesses) else "bonus"
    # After a cut the target's token is judged but unused: any will do.
    target = todo[accepted] if accepted < len(todo) else ""
    return RoundDone(
        index=index,
        t_s=t_s,
        n_past=n_past,
        source=move.source,
        draft_max=move.draft_max,
        window_reason=move.reason,
        drafted=tuple(token_id(g.text) for g in guesses),
        parents=tuple(g.parent for g in guesses),
        drafted_text=tuple(g.text for g in guesses),
        confidence=tuple(g.confidence for g in guesses),
        p=tuple(g.p for g in guesses),
        q=tuple(g.q for g in guesses),
        accepted=accepted,
        accepted_path=tuple(path),
        target_token=token_id(target),
        target_text=target,
        target_kind=kind if guesses else "plain",
        emitted=tuple(token_id(piece) for piece in emitted),
        emitted_text=tuple(emitted),
        cut=cut,
        draft_ms=move.draft_ms,
        verify_ms=move.verify_ms,
        other_ms=move.other_ms,
        wait_ms=move.wait_ms,
        near_tie=move.near_tie,
        plain_ms=move.plain_ms if guesses else None,
        balance=move.balance,
        chances=tuple(
            Chances(*_chance(*own), top=tuple(Chance(*_chance(*one)) for one in top))
            for own, *top in move.likely
        ),
        sources=(move.source,) * len(guesses),
    )


# -- engines that only generate, as a host process drives them --


class OneAtATime:
    """``begin`` and ``step`` for an engine that only generates."""

    _id = 0
    _events: Iterator[Event] | None = None
    patience_s = 30.0

    def watched(self, beat: Callable[[], object]) -> None:
        """Every step is watched."""

    @property
    def free(self) -> bool:
        return self._events is None

    def keep(self) -> None:
        """It has nothing to keep."""

    unmeasured = False

    def measure(
        self, report: object = None, *, cancel: Cancel | None = None, times: bool = True
    ) -> bool:
        return True

    def slot(self, action: str, index: int, path: Path | None = None) -> tuple[int, int]:
        raise NotImplementedError

    def tool_syntax(self) -> ToolSyntax:
        return ""

    def thinks(self) -> bool:
        return False

    def prepare(
        self, prompt: Prompt, params: GenerateParams, *, cancel: Cancel | None = None
    ) -> tuple[Prompt, GenerateParams]:
        return prompt, params

    def begin(self, ready: tuple[Prompt, GenerateParams], *, cancel: Cancel | None = None) -> int:
        self._events = self.generate(*ready, cancel=cancel)
        self._id += 1
        return self._id

    def step(self) -> list[tuple[int, Event | Exception]]:
        if self._events is None:
            return []
        said: Event | Exception
        try:
            said = next(self._events)
        except StopIteration:
            self._events = None
            return []
        except Exception as error:
            said = error
        if isinstance(said, Exception) or said.ends:
            self._events = None
        return [(self._id, said)]

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: Cancel | None = None
    ) -> Iterator[Event]:
        raise NotImplementedError
