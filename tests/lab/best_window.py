"""The best that a window could do: it knows what passes cost and what guesses are worth.

It knows the outcomes of no guess. ``Known`` is the calibration of all guesses of some replies: the
acceptance of each, told from what its source says of it, and how guesses follow each other.
``BestWindow`` stops drafting where the expected tokens of the round, less what its time gives
elsewhere, are the most (the renewal-reward rule: the rate is that of the window itself, found by
repetition in ``best``). With ``foresees`` it knows even how sure the draft will be of every guess
ahead, before a step is paid for: more than any window can know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np
from replay import Replay, Spot, VirtualClock, _Model, replay

from specllama.arrays import FloatArray
from specllama.backend.base import Shared
from specllama.events import RoundDone
from specllama.speculative.budget import Bid
from specllama.speculative.drafting.drafter import Drafter
from specllama.speculative.drafting.mixed import MixedDrafter
from specllama.speculative.effects import Offer
from specllama.speculative.policy.learned import (
    Features,
    draft_features,
    match_features,
    sigmoid,
)
from specllama.speculative.types import Booking, DraftJudge, Guess
from specllama.speculative.window import Plan, Window

CLASSES = 12  # of acceptance, between which guesses go from one to the next
_LEVELS = np.concatenate([[0.0], np.geomspace(1e-3, 1.0, 48)])  # of what is still likely reached
_ROUNDS = 4  # after so many the rate stands


def fitted(lessons: Sequence[tuple[Features, bool]]) -> Callable[[Features], float]:
    """A logistic regression by Newton's method; a weak prior holds what is never tested."""
    if not lessons:
        return lambda features: 0.5
    x = np.array([(1.0, *features) for features, _ in lessons])
    y = np.array([hit for _, hit in lessons], np.float64)
    theta = np.zeros(x.shape[1])
    for _ in range(25):
        a = 1.0 / (1.0 + np.exp(-np.clip(x @ theta, -30.0, 30.0)))
        slope = x.T @ (y - a) - 0.1 * theta
        bend = (x * (a * (1.0 - a))[:, None]).T @ x + 0.1 * np.eye(len(theta))
        theta += np.linalg.solve(bend, slope)

    def tell(features: Features) -> float:
        z = float(theta @ np.array((1.0, *features)))
        return sigmoid(min(max(z, -30.0), 30.0))

    return tell


@dataclass(frozen=True, slots=True)
class Text:
    """A reply to replay: the tokens of its prompt, or how many, and what was seen at each place."""

    prompt: int | Sequence[int]
    spots: Sequence[Spot]

    @property
    def start(self) -> int:
        return max(self.prompt, 1) if isinstance(self.prompt, int) else len(self.prompt)


Copiers = Callable[[Text], list[Drafter]]


def no_copies(text: Text) -> list[Drafter]:
    return []


@dataclass
class Known:
    """What there is to know of the guesses of some replies.

    Attributes:
        peek: a drafted token's lead is seen before it goes.
        first, after: how likely each class is at the beginning of a round, and after an accepted
            guess of a class.
        worth: acceptance of a class.
    """

    peek: bool
    draft: Callable[[Features], float]
    copies: dict[str, Callable[[Features], float]]
    first: FloatArray = field(init=False)
    after: FloatArray = field(init=False)
    worth: FloatArray = field(init=False)
    edges: FloatArray = field(init=False)

    @staticmethod
    def of(texts: Sequence[Text], *, peek: bool, copiers: Copiers = no_copies) -> Known:
        lead = (lambda spot: spot.lead) if peek else (lambda spot: None)
        draft = fitted(
            [
                (draft_features(spot.confidence, lead(spot)), spot.hit)
                for text in texts
                for spot in text.spots
            ]
        )
        lessons: dict[str, list[tuple[Features, bool]]] = {}
        for text in texts:
            copied = copiers(text)
            if copied:
                window = _Watching(text, lessons)
                replayed(text, window, VirtualClock(), (1.0, 1.0, 1.0), 0.0, peek, copied)
        known = Known(peek, draft, {name: fitted(told) for name, told in lessons.items()})
        known._follow(texts)
        return known

    def acceptance(self, spot: Spot) -> float:
        return self.draft(draft_features(spot.confidence, spot.lead if self.peek else None))

    def copied(self, guess: Guess) -> list[float]:
        """Acceptance of each token of a copy, where those before it were right."""
        tell = self.copies.get(guess.source)
        return [tell(f) if tell else 0.5 for f in copy_features(guess)]

    def _follow(self, texts: Sequence[Text]) -> None:
        told = [[self.acceptance(spot) for spot in text.spots] for text in texts]
        every = np.array([a for one in told for a in one])
        self.edges = np.unique(np.quantile(every, np.arange(1, CLASSES) / CLASSES))
        n = len(self.edges) + 1
        classes = np.searchsorted(self.edges, every)
        self.worth = np.array(
            [every[classes == c].mean() if (classes == c).any() else 0.5 for c in range(n)]
        )
        overall = np.bincount(classes, minlength=n) / len(every)
        self.first, self.after = 4.0 * overall, np.tile(4.0 * overall, (n, 1))
        for text, one in zip(texts, told, strict=True):
            of = np.searchsorted(self.edges, np.array(one))
            for (spot, a), b in zip(zip(text.spots, of, strict=True), of[1:], strict=False):
                if spot.hit:
                    self.after[a, b] += 1.0
                else:  # the target said something else: a round begins
                    self.first[b] += 1.0
        self.first /= self.first.sum()
        self.after /= self.after.sum(axis=1, keepdims=True)

    def class_of(self, a: float) -> int:
        return int(np.searchsorted(self.edges, a))


def copy_features(guess: Guess) -> list[Features]:
    n = len(guess.tokens)
    shares = guess.shares or (1.0,) * n
    return [match_features(guess.match_length, i, share) for i, share in enumerate(shares)]


class _Watching(Window):
    """Sees every copy that is offered, sends none, and learns what each was worth."""

    def __init__(self, text: Text, lessons: dict[str, list[tuple[Features, bool]]]) -> None:
        super().__init__(16)
        self._truth = [spot.truth for spot in text.spots]
        self._lessons = lessons
        self._at = 0

    def plan(self, room: int) -> Plan:
        return Plan(min(16, room), "", _Refusing(self._see))

    def observe(self, done: RoundDone, verify_ms: float, shared: Shared | None = None) -> None:
        self._at += len(done.emitted)

    def _see(self, guesses: Sequence[Guess]) -> None:
        for guess in guesses:
            told = self._lessons.setdefault(guess.source, [])
            ahead = self._truth[self._at :]
            for features, token, truth in zip(
                copy_features(guess), guess.tokens, ahead, strict=False
            ):
                told.append((features, token == truth))
                if token != truth:
                    break


class _Refusing(DraftJudge):
    weighs = True

    def __init__(self, see: Callable[[Sequence[Guess]], None]) -> None:
        self._see = see

    def read(self, source: str, tokens: int) -> int:
        return 0

    def row(self, likely: float, *, keep: bool = True) -> bool:
        return False

    def pick(self, guesses: Sequence[Guess]) -> tuple[int, int]:
        self._see(guesses)
        return 0, 0


class Stopping:
    """When to stop, for every state of a round: by how many guesses go, how likely all of them are
    accepted, and the class of the last. Values are tokens over a plain step at the same rate."""

    def __init__(
        self, known: Known, v: Sequence[float], step: float, rate: float, most: int
    ) -> None:
        self.known, self.v, self.step, self.rate, self.most = known, v, step, rate, most
        n = len(known.worth)
        # of stopping or going on, best: [guesses, levels, classes]
        self.best = np.zeros((most + 1, len(_LEVELS), n))
        self.goes = np.zeros((most + 1, len(_LEVELS), n), np.bool_)
        self.best[most] = self.stop(most)
        for sent in range(most - 1, 0, -1):
            looked = self._look(sent, known.after)
            self.goes[sent] = looked > self.stop(sent)
            self.best[sent] = np.maximum(looked, self.stop(sent))
        self.look = float(self._look(0, known.first[None])[-1, 0])  # of asking in the first place

    def stop(self, sent: int) -> float:
        return -self.rate * (self.v[sent + 1] - self.v[1])

    def joined(self, sent: int, reach: FloatArray, of: int) -> FloatArray:
        """What is gained where guess number ``sent`` joins, reached with these probabilities."""
        return reach + np.interp(reach, _LEVELS, self.best[sent, :, of])

    def _look(self, sent: int, likely: FloatArray) -> FloatArray:
        """[levels, classes of the last guess]"""
        seen = np.stack(
            [
                np.maximum(self.joined(sent + 1, _LEVELS * a, c), self.stop(sent))
                for c, a in enumerate(self.known.worth)
            ]
        )  # [class seen, levels]
        found: FloatArray = (likely @ seen).T - self.rate * self.step
        return found

    def takes(self, sent: int, reach: float, a: float) -> bool:
        """Whether a guess that was seen goes behind ``sent`` others."""
        after = float(self.joined(sent + 1, np.array(reach * a), self.known.class_of(a)))
        return after > self.stop(sent)

    def goes_on(self, sent: int, reach: float, a: float) -> bool:
        at = int(np.abs(_LEVELS - reach).argmin())
        return bool(self.goes[sent, at, self.known.class_of(a)])


class _Judge(DraftJudge):
    """The answers of one round."""

    weighs = True

    def __init__(self, window: BestWindow, most: int) -> None:
        self._window, self._most = window, most
        self._sent, self._reach, self._last = 0, 1.0, 1.0
        self._ahead: Sequence[float] | None = None  # how sure the draft will be
        self._will = 0
        self._asked = False  # whether the copies were picked from

    def read(self, source: str, tokens: int) -> int:
        if not source:
            return 0
        window, table = self._window, self._window.table
        late = table.rate * (window.reading(tokens) - table.step)
        late /= max(window.left / 4.0, 1.0)  # a backlog is read for the rounds that come, too
        worth = table.look
        if window.ahead is not None:
            self._will, worth = self._best(window.ahead())
        return tokens if window.model and worth > late else 0

    def _best(self, ahead: Sequence[float]) -> tuple[int, float]:
        table, found = self._window.table, (0, 0.0)
        total = 0.0
        for n, survival in enumerate(accumulate(ahead[: self._most], mul), 1):
            total += survival
            worth = total + table.stop(n) - table.rate * n * table.step
            if worth > found[1]:
                found = n, worth
        return found

    def take(self, confidence: float | None, lead: float | None, token: int | None) -> bool:
        window, table = self._window, self._window.table
        a = window.known.draft(draft_features(confidence, lead if window.known.peek else None))
        if self._sent >= self._most:
            return False
        if window.ahead is not None:
            wanted = self._sent < self._will
        else:
            wanted = table.takes(self._sent, self._reach, a)
        if wanted:
            self._sent, self._reach, self._last = self._sent + 1, self._reach * a, a
        return wanted

    def further(self, likely: float | None = None, rows: int = 0) -> bool:
        if self._sent >= self._most or likely is not None:
            return False
        if self._window.ahead is not None:
            return self._sent < self._will
        return self._window.table.goes_on(self._sent, self._reach, self._last)

    def row(self, likely: float, *, keep: bool = True) -> bool:
        return False

    def pick(self, guesses: Sequence[Guess]) -> tuple[int, int]:
        window, table = self._window, self._window.table
        which, length, best = 0, 0, 0.0
        for i, guess in enumerate(guesses):
            total = 0.0
            for n, s in enumerate(accumulate(window.known.copied(guess)[: self._most], mul), 1):
                total += s
                if total + table.stop(n) > best:
                    which, length, best = i, n, total + table.stop(n)
        asked, self._asked = self._asked, True
        other = table.look if window.ahead is None else self._best(window.ahead())[1]
        if not asked and window.model and other > best:
            return which, 0
        return which, length


class BestWindow(Window):
    """The rounds of one reply.

    Args:
        table: when to stop. model: the draft model is asked at all.
        reading: of that many tokens by it, in plain steps.
        left: tokens of the reply.
        foreseen: acceptance of every guess of the reply, where they are known in advance.
    """

    def __init__(
        self,
        known: Known,
        table: Stopping,
        *,
        model: bool,
        reading: Callable[[int], float],
        left: int,
        foreseen: Sequence[float] | None = None,
    ) -> None:
        super().__init__(table.most)
        self.known, self.table, self.model, self.reading = known, table, model, reading
        self.left, self._at = left, 0
        self.ahead = None if foreseen is None else lambda: foreseen[self._at :]

    def drafts_with(self, booking: Booking) -> None:
        pass

    def plan(self, room: int) -> Plan:
        most = min(self.table.most, room)
        return Plan(most, "best", _Judge(self, most)) if most > 0 else Plan(0, "last token")

    def explain(self, n: int) -> str:
        return ""

    def observe(self, done: RoundDone, verify_ms: float, shared: Shared | None = None) -> None:
        self._at += len(done.emitted)
        self.left -= len(done.emitted)

    def bid(self, offer: Offer) -> Bid:
        raise NotImplementedError


def replayed(
    text: Text,
    window: Window,
    clock: VirtualClock,
    v: Sequence[float],
    step: float,
    peek: bool,
    copied: list[Drafter],
) -> Replay:
    drafter = MixedDrafter([*copied, _Model(text.spots, text.start, peek=peek)])
    return replay(
        text.spots, window, clock, verify=v, draft=step, prompt=text.prompt, peek=peek,
        drafter=drafter,
    )  # fmt: skip


@dataclass
class Taken:
    """What some replies took: tokens, and plain steps."""

    tokens: int = 0
    time: float = 0.0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def add(self, done: Replay) -> None:
        self.tokens += done.tokens
        self.time += done.time
        self.rounds += done.rounds
        self.drafted += done.drafted
        self.accepted += done.accepted
        for reason, n in done.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + n

    @property
    def speed(self) -> float:
        return self.tokens / self.time


def best(
    texts: Sequence[Text],
    known: Known,
    v: Sequence[float],
    step: float,
    *,
    most: int = 15,
    copiers: Copiers = no_copies,
    foresees: bool = False,
) -> Taken:
    """What the best window takes, with the draft model or without it."""
    ways = [_settled(texts, known, v, step, most, copiers, foresees, on) for on in (True, False)]
    return max(ways, key=lambda taken: taken.speed)


def _settled(
    texts: Sequence[Text], known: Known, v: Sequence[float], step: float, most: int,
    copiers: Copiers, foresees: bool, model: bool,
) -> Taken:  # fmt: skip
    rate, found = 1.0, Taken()
    foreseen = [[known.acceptance(spot) for spot in text.spots] for text in texts]
    for _ in range(_ROUNDS):
        taken = Taken()
        table = Stopping(known, v, step, rate, min(most, len(v) - 2))
        for text, ahead in zip(texts, foreseen, strict=True):
            window = BestWindow(
                known, table, model=model, left=len(text.spots),
                reading=lambda n: step * (1.0 + 0.35 * (n - 1)),
                foreseen=ahead if foresees else None,
            )  # fmt: skip
            taken.add(replayed(text, window, VirtualClock(), v, step, known.peek, copiers(text)))
        if not found.tokens or taken.speed > found.speed:
            found = taken
        if abs(rate - taken.speed) < 0.005 * rate:
            break
        rate = max(taken.speed, 1.0)
    return found
