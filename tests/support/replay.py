"""Replay a trace through real rounds without a model: what a window decides, and its loss.

A trace says, position by position, whether a drafted token would have been right, how sure the
draft was, and what a copy from the text would have guessed. Costs are in plain steps and the clock
is virtual, so a window is compared with plain decoding exactly, and within milliseconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specllama.events import RoundDone
from specllama.settings.params import SamplingParams
from specllama.speculative.drafting.drafter import Copier, Drafter, Request
from specllama.speculative.drafting.mixed import MixedDrafter
from specllama.speculative.effects import Effect, Offer, Pass, Steps, run_alone
from specllama.speculative.round import Rounds
from specllama.speculative.rules import RandomCoins, rule_of
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.types import EMPTY_DRAFT, Draft, Guess, Room, Verdict
from specllama.speculative.window import Window

_GUESS, _TRUTH = 1, 2  # token ids: a wrong guess and what the target wrote


@dataclass(frozen=True, slots=True)
class Spot:
    """One position of the output.

    ``copy`` is (match length, tokens offered, how many of them are right) of a copy that could
    start here, None without a match. ``truth`` is what the target wrote, ``guess`` what a draft
    that is wrong here says.
    """

    hit: bool
    confidence: float | None = None
    lead: float | None = None
    copy: tuple[int, int, int] | None = None
    truth: int = _TRUTH
    guess: int = _GUESS

    @property
    def token(self) -> int:
        """The drafted one."""
        return self.truth if self.hit else self.guess


@dataclass(slots=True)
class Replay:
    """The result of a trace. Times are in plain steps; ``progress`` is (tokens, time) by round."""

    tokens: int = 0
    time: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    progress: list[tuple[int, float]] = field(default_factory=lambda: [(0, 0.0)])

    @property
    def speed(self) -> float:
        return self.tokens / self.time if self.time else 1.0

    def worst_loss(self, allowance: float) -> float:
        """Largest ``time - (1 + allowance) * tokens`` at any time."""
        return max(time - (1.0 + allowance) * tokens for tokens, time in self.progress)

    def slowest(self, tokens: int) -> float:
        """Lowest speed over any stretch of at least this many tokens."""
        points = self.progress
        slowest, start = float("inf"), 0
        for end in range(len(points)):
            while start + 1 < end and points[end][0] - points[start + 1][0] >= tokens:
                start += 1
            n = points[end][0] - points[start][0]
            if n >= tokens:
                slowest = min(slowest, n / (points[end][1] - points[start][1]))
        return slowest

    def add(self, emitted: int, time: float) -> None:
        self.tokens += emitted
        self.time += time
        self.rounds += 1
        self.progress.append((self.tokens, self.time))


class VirtualClock:
    """A clock that advances only when told to; one plain step is one millisecond."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def steps(self, n: float) -> None:
        self.now += n / 1e3


@dataclass(slots=True)
class _Lane:
    """A place where nothing is kept: passes are answered from the recording."""

    n_ctx: int = 1 << 30
    n_vocab: int = 3
    n_batch: int = 1 << 30
    tokens: list[int] = field(default_factory=list)

    def reusable_prefix(self, keep_len: int) -> int:
        return keep_len


class Recorded(Drafter):
    """Drafts from a trace.

    Args:
        start: tokens of the text before the first spot.
    """

    name = "draft"

    def __init__(self, trace: Sequence[Spot], start: int) -> None:
        self._trace = trace
        self._start = start

    def spots(self, tokens: Sequence[int], n: int) -> Sequence[Spot]:
        """The ``n`` spots behind ``tokens``."""
        at = len(tokens) - self._start
        return self._trace[at : at + n]


class _Model(Recorded):
    """A draft model. ``peek``: it tells its drawn tokens (rule ``match``)."""

    def __init__(self, trace: Sequence[Spot], start: int, *, peek: bool) -> None:
        super().__init__(trace, start)
        self._peek = peek
        self._lane = _Lane()
        self._known = self._fed = 0  # tokens of the text that it has read; and guesses behind it

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        read = room.judge.read(self.name, len(tokens) - self._known)
        if not read:
            return EMPTY_DRAFT
        self._known, self._fed = len(tokens), 0
        yield Pass(self._lane, tokens[-read:])
        guesses: list[int] = []
        confidence: list[float | None] = []
        for spot in self.spots(tokens, room.n):
            token = spot.token
            seen = (spot.lead, token) if self._peek else (None, None)
            if not room.judge.take(spot.confidence, *seen):
                break
            guesses.append(token)
            confidence.append(spot.confidence)
            if len(guesses) == room.n or not room.judge.further():
                break
            yield Pass(self._lane, [token])
            self._fed += 1
        return Draft.chain(guesses, self.name, confidence=confidence)

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        self._known += min(len(verdict.path), self._fed)
        self._fed = 0


class _Copies(Recorded, Copier):
    name = "ngram"

    def guesses(self, tokens: Sequence[int], chain: SamplerChain, most: int) -> Sequence[Guess]:
        (spot,) = self.spots(tokens, 1)
        if spot.copy is None:
            return ()
        length, offered, right = spot.copy
        guess = [_TRUTH if i < right else _GUESS for i in range(min(offered, most))]
        return (Guess(self.name, tuple(guess), length),)

    def send(self, guess: Guess, length: int, room: Room) -> Draft:
        return Draft.chain(guess.tokens[:length], self.name)


class Blind(Recorded):
    """A drafter that asks for rows only, and sends as many as it gets: some of them scouts."""

    name = "lookahead"

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        yield from ()
        spots = self.spots(tokens, room.judge.read("", room.n))
        return Draft.chain([_TRUTH if spot.hit else _GUESS for spot in spots], self.name)


def replay(
    trace: Sequence[Spot],
    window: Window,
    clock: VirtualClock,
    *,
    verify: Sequence[float],
    draft: Sequence[float] | float,
    prompt: int | Sequence[int] = 0,
    peek: bool = True,
    use_model: bool = True,
    drafter: Drafter | None = None,
) -> Replay:
    """The rounds of a trace with a window that was made with ``clock``; passes only take time.

    Args:
        verify: cost of a pass of n rows, ``verify[1] == 1``.
        draft: cost of a draft step, or of a draft pass by tokens.
        prompt: tokens that the draft has to read before its first guess, or how many.
        peek: whether the draft tells its drawn token (rule ``match``).
        use_model: False replays copies only.
        drafter: drafts instead of the recorded copies and the recorded model.
    """
    table = None if isinstance(draft, (int, float)) else draft
    step = float(draft) if isinstance(draft, (int, float)) else draft[1]

    def reading(n: int) -> float:
        if table is None:
            return step * (1.0 + 0.35 * (n - 1))
        return table[n] if n < len(table) else table[-1] * n / (len(table) - 1)

    out = Replay()
    tokens = [_TRUTH] * max(prompt, 1) if isinstance(prompt, int) else list(prompt)
    start, last = len(tokens), len(trace) - 1
    target = _Lane(n_vocab=1 + max(2, *(spot.truth for spot in trace)))

    def answer(ask: Effect) -> object:
        if isinstance(ask, Pass):
            n = len(ask.tokens)
            out.steps += ask.lane is not target
            clock.steps(verify[n] if ask.lane is target else reading(n))
            rows = np.zeros((n, target.n_vocab), np.float32)
            at = len(tokens) - start
            for row, spot in zip(rows, trace[at : at + n], strict=False):
                row[spot.truth] = 1.0
            ask.rows = rows
            return ask
        return ask.size if isinstance(ask, Offer) else None

    model = [_Model(trace, start, peek=peek)] if use_model else []
    drafter = drafter or MixedDrafter([_Copies(trace, start), *model])
    chain = SamplerChain(SamplingParams(temperature=0.0), tokens=tokens)
    rule, coins = rule_of("match", greedy=True), RandomCoins(0)
    drafter.start(Request(seed=0, rule=rule, coins=coins, is_eog=_never))
    rounds = Rounds(
        target=target,
        drafter=drafter,
        tokens=tokens,
        chain=chain,
        window=window,
        rule=rule,
        seed=0,
        coins=coins,
        is_stop=_never,
        clock=clock,
    )
    while (left := last - (len(tokens) - start)) > 0:
        begin = clock.now
        done = run_alone(rounds.round(min(left, len(verify) - 2)), answer)
        reason = done.window_reason
        out.reasons[reason] = out.reasons.get(reason, 0) + 1
        out.drafted += len(done.drafted)
        out.accepted += len(done.accepted_path)
        out.add(len(done.emitted), (clock.now - begin) * 1e3)
    return out


def _never(token: int) -> bool:
    return False


def trace_of_rounds(rounds: Iterable[RoundDone]) -> list[Spot]:
    """A trace from rounds, played or logged.

    Tested guesses are known; a position that no guess was tested on (a plain step, a bonus token)
    takes the outcome of the last tested one.
    """
    spots: list[Spot] = []
    last = Spot(False, 0.5)
    for done in rounds:
        for i in range(len(done.emitted)):
            if i < len(done.drafted) and i <= done.accepted:
                last = Spot(i < done.accepted, done.confidence[i])
            spots.append(last)
    return spots
