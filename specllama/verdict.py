"""The verdict on drafting and its certainty: one estimator and one wording for every screen.

The unit is the *plain step*: what a single pass of the target takes then and there. A round is
booked at the plain steps that it took and at the tokens that it wrote, each of which would have
taken one; a round without a draft is a plain step itself. The speed-up is tokens over plain steps:
that of the text that was written, so only times are uncertain, not how much was accepted.

It is a figure of typical passes. Other work of the machine slows plain and drafted passes in
proportion: it changes no ratio, and would drown it. So no pass counts for more than ``OUTLIER``
times what passes of its width take, and drafting is relieved of the same share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from specllama.events import RoundDone
from specllama.rates import Answer, Payoff, Remedy, share

OUTLIER = 1.35  # times the usual; the cost tables believe no more of a pass either
NEIGHBOURS = 15  # passes about as wide, whose median is the usual
SINGLES = 4  # plain steps from which their cost is known
FORECASTS = 4  # of plain steps, from which it is known how well they foretell
ASSUMED_STEPS = 8  # plain steps that a figure of an engine is worth that does not say so
MIN_ROUNDS = 8  # rounds that drafted, before they are judged
BATCHES = 16  # of neighbouring rounds, which a busy moment slows together
STRETCH_S = 1.0  # and a batch lasts so long, where that leaves enough of them
MIN_BATCHES = 4
ROUNDS_UNTIL_OFF = 16  # rounds without a draft, after which drafting is off
MEMORY_S = 5.0  # after which plain steps are other plain steps
WIDE = 4.0  # an interval of so many times its low end is no figure
STALE_S = 120.0  # after the last plain step, a machine may have changed
LONG_READ = 16  # more than this is a text to be read: it takes long, and is no hiccup


def passes_of(rounds: Iterable[RoundDone]) -> list[RoundDone]:
    """Return the rounds after the first token."""
    return [done for done in rounds if done.index]


@dataclass(frozen=True, slots=True)
class _Plain:
    """Plain steps for comparison: one's milliseconds at each round that drafted; the variance of
    that, as a logarithm, from ``n`` forecasts or else from ``n`` steps."""

    ms: list[float]
    n: float
    variance: float | None = None


@dataclass(frozen=True, slots=True)
class Interval:
    """A speed over plain decoding, with an interval for 19 of 20 cases where one is known."""

    ratio: float
    low: float | None
    high: float | None

    @property
    def answer(self) -> Answer:
        if self.low is None or self.high is None:
            return "unknown"
        if self.low > 1.0 or self.high < 1.0:
            return "faster" if self.low > 1.0 else "slower"
        return "unknown" if is_wide(self) else "unsure"


@dataclass(frozen=True, slots=True)
class _Speed(Interval):
    """The speed of rounds; ``lost_ms`` is the loss of drafting per token of those that drafted."""

    lost_ms: float


def is_wide(speed: Interval | Payoff) -> bool:
    """True if an interval is too wide for a figure."""
    return speed.low is not None and speed.high is not None and speed.high > WIDE * speed.low


def judge(passes: Sequence[RoundDone], singles: Sequence[float] = ()) -> Payoff:
    """Judge a stretch of rounds.

    Args:
        singles: milliseconds of plain steps that were measured for it. Without them the engine's
            own figure counts, or the plain steps among the rounds.
    """
    speed = _speed(passes, singles)
    found = payoff(passes, speed)
    answer, age = found.answer, None
    if not singles:
        age = max((one.plain_age_s or 0.0 for one in passes if one.plain_n), default=None)
    if age is not None and age > STALE_S and answer in ("faster", "slower"):
        answer = "unknown" if is_wide(found) else "unsure"
    lost_ms = speed.lost_ms if speed else None
    return replace(found, answer=answer, lost_ms=lost_ms, plain_age_s=age)


def payoff(
    passes: Sequence[RoundDone], speed: Interval | None, newest: Sequence[RoundDone] | None = None
) -> Payoff:
    """Return the verdict on rounds of this speed, with their tokens and guesses.

    Args:
        newest: of these, those of the last run, where there are several.
    """
    answer: Answer = "unknown" if speed is None else speed.answer
    last = (passes if newest is None else newest)[-ROUNDS_UNTIL_OFF:]
    off = len(last) == ROUNDS_UNTIL_OFF and all(one.declined for one in last)
    ratio, low, high = (speed.ratio, speed.low, speed.high) if speed else (None, None, None)
    return Payoff(
        "off" if off and answer != "faster" else answer, ratio, low, high,
        tokens=sum(len(one.emitted) for one in passes), passes=len(passes),
        drafted=sum(len(one.drafted) for one in passes),
        accepted=sum(one.accepted for one in passes), judged=sum(one.judged for one in passes),
    )  # fmt: skip


def by_source(passes: Sequence[RoundDone]) -> dict[str, Payoff]:
    """Judge the rounds of each source alone, in order of appearance."""
    singles = [] if any(one.plain_ms for one in passes) else singles_of(passes)
    sources = dict.fromkeys(one.source for one in passes if one.drafted)
    return {
        source: judge([one for one in passes if one.drafted and one.source == source], singles)
        for source in sources
    }


def singles_of(passes: Iterable[RoundDone]) -> list[float]:
    """Return the milliseconds of the plain steps among these rounds."""
    return [one.pass_ms for one in passes if not one.drafted]


def _speed(passes: Sequence[RoundDone], singles: Sequence[float]) -> _Speed | None:
    """Compute the speed; return None if too little was seen."""
    drafted = [one for one in passes if one.drafted]
    known = _plain(drafted, singles or singles_of(passes), measured=bool(singles))
    if len(drafted) < MIN_ROUNDS or known is None:
        return None
    plain = known.ms
    costs = [one.pass_ms / ms for one, ms in zip(drafted, plain, strict=True)]
    drafts = [one.draft_ms / ms for one, ms in zip(drafted, plain, strict=True)]
    usual, mean = _usual(drafted, costs, drafts)
    believed = [min(cost, OUTLIER * u) for cost, u in zip(costs, usual, strict=True)]
    part = sum(believed) / sum(costs)
    step_ms = fmean(plain)
    looking = sum(one.draft_ms for one in passes if not one.drafted) / step_ms
    took = sum(believed) + part * sum(drafts)
    tokens = sum(len(one.emitted) for one in drafted)
    lost_ms = (share(took - tokens, tokens) or 0.0) * step_ms
    rest = len(passes) - len(drafted)
    ratio = (tokens + rest) / (took + rest + part * looking)
    errors = [
        b - u + part * (d - m) for b, u, d, m in zip(believed, usual, drafts, mean, strict=True)
    ]
    noise = fmean((b / u - 1.0) ** 2 for b, u in zip(believed, usual, strict=True))
    seconds = sum(one.took_ms for one in drafted) / 1e3
    own, batches = _variance(errors, seconds)
    mine, theirs = own / took**2, noise / known.n if known.variance is None else known.variance
    variance, free = mine + theirs, float(min(batches, known.n) - 1)
    if known.variance:  # as many degrees of freedom as both together have (Welch, Satterthwaite)
        free = variance**2 / (mine**2 / (batches - 1) + theirs**2 / known.n)
    spread = math.sqrt(variance) * took / (took + rest)
    factor = math.exp(min((1.96 + 2.4 / free + 2.8 / free**2) * spread, 9.0))  # Student's t
    return _Speed(ratio, ratio / factor, ratio * factor, lost_ms)


def _plain(
    drafted: Sequence[RoundDone], singles: Sequence[float], *, measured: bool
) -> _Plain | None:
    """Compute the milliseconds of a plain step; return None if unknown."""
    known = [one.plain_ms for one in drafted]
    newest = next((ms for ms in reversed(known) if ms), None)
    if newest is None or measured:
        if len(singles) < SINGLES:
            return None
        usual = median(singles)
        one = fmean(min(ms, OUTLIER * usual) for ms in singles)
        return _Plain([one] * len(drafted), len(singles))
    told = [one for one in drafted if one.plain_spread is not None]
    each = [ms or newest for ms in known]
    if not told:
        return None if any(one.plain_n for one in drafted) else _Plain(each, ASSUMED_STEPS)
    forecasts = median(one.plain_n for one in told)
    if forecasts < FORECASTS:
        return None
    variance = fmean((one.plain_spread or 0.0) ** 2 for one in told)
    times = _renewed(drafted)
    return _Plain(each, forecasts, variance / times)


def _renewed(drafted: Sequence[RoundDone]) -> int:
    """Count the distinct times of the plain steps that the rounds were compared with."""
    now = counted = 0.0
    times = 1
    for one in drafted:
        now += one.took_ms / 1e3
        newest = now - (one.plain_age_s or 0.0)
        if newest - counted >= MEMORY_S:
            times, counted = times + 1, newest
    return times


def _usual(
    rounds: Sequence[RoundDone], costs: Sequence[float], drafts: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return for each round the usual cost of its pass and draft, from rounds about as wide; a
    round that read a text counts with its own cost."""
    order = sorted(range(len(rounds)), key=lambda i: len(rounds[i].drafted))
    most = max(len(rounds) - NEIGHBOURS, 0)
    usual, mean = [0.0] * len(rounds), list(drafts)
    for place, i in enumerate(order):
        begin = min(max(place - NEIGHBOURS // 2, 0), most)
        near = order[begin : begin + NEIGHBOURS]
        usual[i] = median([costs[j] for j in near])
        if rounds[i].read <= LONG_READ:
            mean[i] = fmean([drafts[j] for j in near if rounds[j].read <= LONG_READ])
    return usual, mean


def _variance(errors: Sequence[float], seconds: float) -> tuple[float, int]:
    """Return the variance of the sum of errors, and its number of batches: the larger of an
    estimate from many short batches and one from long ones, as neighbours' errors are alike."""
    found = [_of_batches(errors, BATCHES)]
    if (n := int(seconds / STRETCH_S)) >= MIN_BATCHES:
        found.append(_of_batches(errors, min(n, BATCHES)))
    return max(found)


def _of_batches(errors: Sequence[float], n: int) -> tuple[float, int]:
    mean, size = fmean(errors), math.ceil(len(errors) / n)
    batches = [errors[i : i + size] for i in range(0, len(errors), size)]
    sums = [sum(batch) - mean * len(batch) for batch in batches]
    return len(sums) / (len(sums) - 1) * sum(s * s for s in sums), len(sums)


# ---- in words


def lead(verdict: Payoff, measure: str) -> str:
    """Return the words that a reader needs first; ``measure`` says how to find out."""
    match verdict.answer:
        case "unknown":
            return f"Not known yet: {lacking(verdict)}; {measure}"
        case "off":
            lost = verdict.lost_ms or 0.0
            figure = f" (it lost {lost:.1f} ms a token)" if lost >= 0.05 else ""
            return f"Drafting is off: it would be slower here{figure}"
        case "faster":
            return f"{_times(verdict.ratio)}× faster ({interval(verdict)})"
        case "slower":
            return f"{_times(1.0 / (verdict.ratio or 1.0))}× slower ({interval(verdict)})"
    found = f"{_times(verdict.ratio)}× ({interval(verdict)})"
    if is_stale(verdict):
        return f"Plain was measured {_ago(verdict.plain_age_s)} earlier: {found} then"
    return f"Unsure: {found}"


def lacking(verdict: Payoff) -> str:
    """Return the reason why it is not known if drafting pays."""
    if not verdict.drafted:
        return "nothing was guessed in this text"
    if verdict.low is None:
        return "too few passes to tell a gain"
    return "times too uneven to tell a gain"


def brief(verdict: Payoff, measure: str) -> str:
    """Write it as a word and a ratio to plain decoding: "LOSES 0.25× (0.14–0.36)". A caller may cut
    it at a colon or a bracket."""
    match verdict.answer:
        case "unknown":
            return f"Not known yet: if drafting pays ({measure})"
        case "off":
            return "Drafting off: it would be slower here"
    word = {"faster": "PAYS", "slower": "LOSES"}.get(verdict.answer, "UNSURE")
    low, high = _times(verdict.low), _times(verdict.high)
    found = f"{word} {_times(verdict.ratio)}× ({low}–{high})"
    if word == "UNSURE" and is_stale(verdict):
        found += f", plain was measured {_ago(verdict.plain_age_s)} earlier"
    return found


def is_stale(verdict: Payoff) -> bool:
    """True if the machine may have changed since the plain steps that drafting is compared with."""
    return verdict.plain_age_s is not None and verdict.plain_age_s > STALE_S


def interval(verdict: Payoff) -> str:
    """Format "1.21–1.37": from low to high; for a loss, how many times slower."""
    low, high = verdict.low or 1.0, verdict.high or 1.0
    if verdict.answer == "slower":
        low, high = 1.0 / high, 1.0 / low
    return f"{_times(low)}–{_times(high)}"


def _times(ratio: float | None) -> str:
    """Format a factor, which is positive: never as zero, nor larger than can be measured."""
    value = min(max(ratio or 1.0, 0.01), 99.0)
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _ago(seconds: float | None) -> str:
    s = seconds or 0.0
    if s < 100:
        return f"{s:.0f} s"
    return f"{s / 60:.0f} min" if s < 5400 else f"{s / 3600:.0f} h" if s < 2e5 else "days"


def details(verdict: Payoff, *, both: bool = False) -> list[str]:
    """Return tokens per pass and the kept share of guesses: of all sent, and with ``both`` of those
    that were judged, and the age of the plain steps."""
    if verdict.answer == "off" or not verdict.drafted:
        return []
    kept = f"{verdict.acceptance_rate:.0%} of guesses kept"
    if both and verdict.judged:
        kept += f", {verdict.checked:.0%} of those checked"
    found = [f"{verdict.per_pass:.1f} tokens a pass", kept]
    if both and verdict.plain_age_s is not None and not is_stale(verdict):
        found.append(f"plain measured within {_ago(math.ceil(verdict.plain_age_s))}")
    return found


def words(verdict: Payoff, measure: str, *, both: bool = False) -> str:
    """Write the verdict in a line."""
    loses = verdict.answer in ("off", "slower")
    # without a figure, only where drafting loses
    shown = [one for one in verdict.remedies if one.speed is not None or loses]
    better = [remedy_words(one) for one in shown[:1]]
    return " · ".join([lead(verdict, measure), *details(verdict, both=both), *better])


def remedy_words(one: Remedy) -> str:
    """Write "-t 1 would write 1.20×"."""
    gain = "" if one.speed is None else f" would write {_times(one.speed)}×"
    return f"{one.change}{gain}" + (f"{'; ' if gain else ': '}{one.then}" if one.then else "")
