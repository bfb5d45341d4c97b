"""What was measured on this machine: acceptance, draft cost and the cost of target passes.

The strip's speed-up, the playground's chart and the warning that speculation loses all come from
here. Everything is derived from ``RoundDone`` events; nothing is assumed. Speed-ups are measured
(speedup.py); ``SpeedModel`` is the textbook model the sliders play with, ``MeasuredPair`` the same
with a pair's own figures.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median

from specllama.events import RoundDone
from specllama.tui.record import depth_of
from specllama.tui.speedup import ENOUGH_PLAIN, Speedup, speedup

RECENT = 32  # rounds whose acceptance is shown
LIVE = 128  # rounds whose speed is
PLAIN = 256  # plain steps that they are compared with
STILL = 16  # rounds that show whether drafts are made now
WINDOW = 64  # costs of passes of one width
MAX_K = 16
ENOUGH = 3  # observations before a cost counts as measured


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Speculation with independent acceptance (Leviathan et al. 2023), extended by β.

    ``alpha``: a drafted token is accepted. ``c``: one draft step, in target steps. ``beta``: each
    further row of a target pass, in target steps, so a pass of n rows costs 1 + β(n - 1).
    """

    alpha: float
    c: float
    beta: float = 0.0

    def tokens(self, k: int) -> float:
        """Expected tokens per round, (1 - α^(k+1)) / (1 - α)."""
        if self.alpha >= 1.0:
            return k + 1.0
        return (1.0 - self.alpha ** (k + 1)) / (1.0 - self.alpha)

    def cost(self, k: int) -> float:
        return 1.0 + k * self.c + k * self.beta

    def speedup(self, k: int) -> float:
        return self.tokens(k) / self.cost(k)

    def best(self, limit: int = MAX_K) -> tuple[int, float]:
        """The k with the highest speed-up; 0 (plain decoding) when nothing beats it."""
        k = max(range(limit + 1), key=lambda n: (self.speedup(n), -n))
        return k, self.speedup(k)

    def collapse(self, limit: int = 64) -> int | None:
        """The first k beyond the peak that is slower than plain decoding, None within ``limit``."""
        for k in range(1, limit + 1):
            if self.speedup(k) < 1.0:
                return k
        return None

    @property
    def pays(self) -> bool:
        """Some k beats plain decoding if and only if α > c + β."""
        return self.alpha > self.c + self.beta

    @property
    def bound(self) -> float:
        """No acceptance, however high, gets past 1 / (c + β)."""
        total = self.c + self.beta
        return 1.0 / total if total > 0 else math.inf


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """The speed model with the measured costs of the user's pair.

    ``v`` maps rows of a target pass to its cost in plain steps.
    """

    alpha: float
    c: float
    beta: float
    v: Mapping[int, float]
    step_ms: float

    def cost_of_rows(self, n: int) -> float:
        """v(n): measured if seen, else interpolated, and beyond the widest by β."""
        if n in self.v:
            return self.v[n]
        below = [m for m in self.v if m < n]
        above = [m for m in self.v if m > n]
        if below and above:
            a, b = max(below), min(above)
            share = (n - a) / (b - a)
            return self.v[a] + share * (self.v[b] - self.v[a])
        if below:
            a = max(below)
            return self.v[a] + self.beta * (n - a)
        return 1.0 + self.beta * (n - 1)

    def speedup(self, k: int) -> float:
        tokens = SpeedModel(self.alpha, self.c).tokens(k)
        return tokens / (k * self.c + self.cost_of_rows(k + 1))

    def best(self, limit: int = MAX_K) -> tuple[int, float]:
        k = max(range(limit + 1), key=lambda n: (self.speedup(n), -n))
        return k, self.speedup(k)


@dataclass(slots=True)
class Meter:
    """Running measurement over one loaded pair. ``clear()`` when the pair changes, ``restart()``
    when only the way of drafting does: plain steps cost what they did."""

    recent: deque[RoundDone] = field(default_factory=lambda: deque(maxlen=RECENT))
    _live: deque[RoundDone] = field(default_factory=lambda: deque(maxlen=LIVE))
    _plain: deque[float] = field(default_factory=lambda: deque(maxlen=PLAIN))
    _by_length: dict[int, deque[RoundDone]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=LIVE))
    )
    _verify: dict[int, deque[float]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=WINDOW))
    )
    _draft_step: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _tested: int = 0
    _kept: int = 0

    def clear(self) -> None:
        self.restart()
        for values in (self._plain, self._verify, self._draft_step):
            values.clear()

    def restart(self) -> None:
        for values in (self.recent, self._live, self._by_length):
            values.clear()
        self._tested = self._kept = 0

    def observe(self, done: RoundDone) -> None:
        self.recent.append(done)
        if done.index == 0:
            return  # its row came with the prompt
        self._live.append(done)
        drafted = len(done.drafted)
        self._verify[drafted + 1].append(done.verify_ms)
        if drafted == 0:
            self._plain.append(plain_step_ms(done))
            return
        self._by_length[max(depth_of(done))].append(done)
        self._draft_step.append(done.draft_ms / drafted)
        # α is a property of tokens the target really judged: the tail after the first rejection
        # was never tested.
        rejected = done.target_kind == "recovered"
        self._tested += done.accepted + rejected
        self._kept += done.accepted

    def observe_plain(self, ms_per_token: float) -> None:
        """A plain-decoding measurement made on purpose."""
        if math.isfinite(ms_per_token) and ms_per_token > 0:
            self._plain.append(ms_per_token)
            self._verify[1].append(ms_per_token)

    @property
    def plain_ms(self) -> float | None:
        """Milliseconds per token without speculation, None until plain rounds were seen."""
        return fmean(self._plain) if len(self._plain) >= ENOUGH_PLAIN else None

    @property
    def tokens_per_s(self) -> float | None:
        """Speed over the rounds that ``speedup`` judges. Round 0 belongs to the time to the first
        token."""
        ms = sum(took_ms(r) for r in self._live)
        return 1000.0 * sum(len(r.emitted) for r in self._live) / ms if ms > 0 else None

    @property
    def drafting(self) -> float:
        """The share of the newest rounds that drafted, 0..1: a window that has given up is not
        judged by what it did before."""
        newest = list(self._live)[-STILL:]
        return fmean(bool(r.drafted) for r in newest) if newest else 0.0

    @property
    def speedup(self) -> Speedup | None:
        """All recent rounds, plain ones too, against plain decoding; None if nothing is drafted or
        too little was seen."""
        return _against(self._plain, self._live) if self.drafting > 0 else None

    def speedup_by_length(self) -> dict[int, Speedup]:
        """Of the rounds that drafted exactly this far (to this depth, in a tree), if enough were
        seen."""
        found = {k: _against(self._plain, rounds) for k, rounds in sorted(self._by_length.items())}
        return {k: speed for k, speed in found.items() if speed is not None}

    @property
    def acceptance(self) -> float | None:
        """Accepted ÷ drafted over the recent rounds."""
        drafted = sum(len(r.drafted) for r in self.recent)
        return sum(r.accepted for r in self.recent) / drafted if drafted else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Accepted ÷ drafted at each depth, over the same rounds: ``acceptance`` is its mean,
        weighted by what was drafted."""
        drafted: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        for done in self.recent:
            drafted.update(depth_of(done))
            accepted.update(range(1, done.accepted + 1))
        return [accepted[depth] / drafted[depth] for depth in sorted(drafted)]

    @property
    def mean_length(self) -> float | None:
        """Mean acceptance length over the recent rounds: 1 + accepted ÷ rounds."""
        rounds = len(self.recent)
        return 1.0 + sum(r.accepted for r in self.recent) / rounds if rounds else None

    @property
    def alpha(self) -> float | None:
        """Acceptance of a drafted token that was tested."""
        return self._kept / self._tested if self._tested else None

    def pair(self) -> MeasuredPair | None:
        """The figures of the speed model; None until plain steps, draft steps and a wider target
        pass were all seen. Medians: they are typical costs, no totals."""
        alpha = self.alpha
        known = {n: times for n, times in sorted(self._verify.items()) if len(times) >= ENOUGH}
        if alpha is None or len(self._draft_step) < ENOUGH or len(known) < 2 or 1 not in known:
            return None
        base = median(known[1])
        if base <= 0:
            return None
        # No pass gets cheaper with more rows. If it looks so, the machine was busy while the
        # narrower passes were timed.
        v = {n: max(1.0, median(times) / base) for n, times in known.items()}
        v[1] = 1.0
        wider = [(n - 1, cost - 1.0) for n, cost in v.items() if n > 1]
        beta = sum(x * y for x, y in wider) / sum(x * x for x, _ in wider) if wider else 0.0
        return MeasuredPair(alpha, median(self._draft_step) / base, max(0.0, beta), v, base)


def plain_step_ms(done: RoundDone) -> float:
    """Of a round without a draft; the cost of a search that found none is left out."""
    return done.verify_ms + done.other_ms


def took_ms(done: RoundDone) -> float:
    return done.draft_ms + done.verify_ms + done.other_ms


def _against(plain_ms: Iterable[float], rounds: Iterable[RoundDone]) -> Speedup | None:
    return speedup(list(plain_ms), [(len(r.emitted), took_ms(r)) for r in rounds])
