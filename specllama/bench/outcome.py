"""The results of comparisons by the clock, in numbers and in words: one judgement for every table.

Runs come in pairs that differ in nothing but the way. The ratio is the geometric mean of the
ratios of their speeds, and the speeds that are shown are geometric means of the same runs: what two
columns say is what the verdict says. How sure it is follows from how much the pairs of a row
differ, pooled over the rows of a table (Student's t on logarithms).

``SpeedModel`` is the textbook's, for the sliders; a pair's own figures can be put into it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, geometric_mean, median
from typing import TypeVar

from specllama.bench.experiment import PLAIN, Run
from specllama.events import RoundDone
from specllama.rates import Payoff, fixed_speeds, pays_above, share, steady
from specllama.text import number_of
from specllama.verdict import Interval, is_wide, payoff, singles_of

MAX_K = 16
ENOUGH = 3  # passes of a width before their cost counts as measured


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """Speculation with independent acceptance (Leviathan et al. 2023), extended by β.

    ``alpha``: a drafted token is accepted. ``c``: one draft step, in target steps. ``beta``: each
    further row of a target pass, in target steps, so a pass of n rows costs 1 + β(n - 1).
    """

    alpha: float
    c: float
    beta: float = 0.0

    def speedups(self, limit: int = MAX_K) -> list[float]:
        """Return the speed-up of every k from 0, which is plain decoding."""
        passes = [1.0 + self.beta * (n - 1) for n in range(limit + 2)]
        return [1.0, *fixed_speeds(steady(self.alpha, limit), self.c, passes).values()]

    def cost(self, k: int) -> float:
        return 1.0 + k * self.c + k * self.beta

    def best(self, limit: int = MAX_K) -> tuple[int, float]:
        """Return the k with the highest speed-up; 0 (plain decoding) if nothing beats it."""
        speedups = self.speedups(limit)
        return speedups.index(max(speedups)), max(speedups)

    def collapse(self, limit: int = 64) -> int | None:
        """Return the first k that is slower than plain decoding, None if none is within
        ``limit``."""
        return next((k for k, one in enumerate(self.speedups(limit)) if one < 1.0), None)

    @property
    def pays(self) -> bool:
        """True if some k beats plain decoding: exactly if α > c + β."""
        return self.alpha > pays_above(self.c, 1.0, self.beta)

    @property
    def bound(self) -> float:
        """The limit, 1 / (c + β), of the speed-up at any acceptance."""
        total = self.c + self.beta
        return 1.0 / total if total > 0 else math.inf

    @staticmethod
    def of(passes: Sequence[RoundDone], singles: Sequence[float] = ()) -> SpeedModel | None:
        """Return the pair's own figures; None until some rounds drafted and a plain step is known.

        α is a property of guesses that the target judged. Costs are medians: typical, no totals.

        Args:
            passes: of drafted runs. singles: steps of plain runs, in milliseconds.
        """
        drafted = [one for one in passes if one.drafted]
        step = median(singles) if singles else None
        known = [(one, ms) for one in drafted if (ms := one.plain_ms or step)]
        alpha = payoff(drafted, None).checked
        if len(known) < ENOUGH or alpha is None:
            return None
        by_rows: dict[int, list[float]] = defaultdict(list)
        for one, ms in known:
            by_rows[len(one.drafted)].append(one.pass_ms / ms)
        # A pass that seems to cost less than a single one was timed on a quieter machine.
        wider = [
            (n, max(0.0, median(costs) - 1.0))
            for n, costs in by_rows.items()
            if len(costs) >= ENOUGH
        ]
        return SpeedModel(
            alpha=alpha,
            c=median((share(one.draft_ms, len(one.drafted)) or 0.0) / ms for one, ms in known),
            beta=share(sum(n * cost for n, cost in wider), sum(n * n for n, _ in wider)) or 0.0,
        )


LEVEL = 0.05  # 1 in 20 intervals misses the truth
# After every pair of a race the interval is looked at, and the best of several methods is looked
# for: eight looks at this level miss as seldom.
LOOKED_AT = 0.01
TOO_SHORT = "not known yet: the reply was too short"
TOO_FEW = "not known yet: one pair of runs proves nothing"
TOO_WIDE = "not known yet: the runs differ too much"
IDLY = "hardly anything was guessed in this text"
LEAST, MOST = 3, 10  # pairs of a race: before it may end, and at most
MORE = 5  # pairs, on request
IDLE = 2  # pairs, after which a race ends in which hardly anything is guessed
FEW = 0.05  # guesses for each token, that are hardly any

T = TypeVar("T")
Pairs = Sequence[tuple[float, float]]
"""Speeds, plainly and the other way."""
Row = list[tuple[Run, Run]]
"""Of every lap, what ran plainly and what ran the other way."""
Laps = dict[int, dict[str, Run]]
"""By number of the lap, and in it by way: what is compared."""


def pairs(beside: Iterable[tuple[T, T]], figure: Callable[[T], float | None]) -> Pairs:
    """Return a figure of what ran side by side, where both have it."""
    both = ((figure(one), figure(other)) for one, other in beside)
    return [(one, other) for one, other in both if one and other]


@dataclass(frozen=True, slots=True)
class Compared(Interval):
    """A comparison; ``low`` and ``high`` are None if no row has a second pair."""

    plain: float
    pairs: int

    @property
    def speed(self) -> float:
        return self.plain * self.ratio


def as_one(rows: Sequence[Pairs], table: Sequence[Pairs] = ()) -> Compared | None:
    """Combine rows into one figure, such as prompts with different gains. Its certainty follows
    from the differences between the pairs of each row, so it holds for these prompts.

    Args:
        table: the rows that say how much pairs differ; these unless given.
    """
    return _compared([pair for row in rows for pair in row], *_noise(table or rows), LEVEL)


def _noise(rows: Sequence[Pairs]) -> tuple[float, float]:
    """Return the standard deviation of a pair's logarithm, and its degrees of freedom."""
    logs = [_logs(row) for row in rows if row]
    free = float(sum(len(row) - 1 for row in logs))
    squares = sum((one - fmean(row)) ** 2 for row in logs for one in row)
    return math.sqrt(squares / free) if free else 0.0, free


def _compared(row: Pairs, spread: float, free: float, level: float) -> Compared | None:
    if not row:
        return None
    mean = fmean(_logs(row))
    low = high = None
    if free >= 1:
        reach = student(level, int(free)) * spread / math.sqrt(len(row))
        low, high = math.exp(mean - reach), math.exp(mean + reach)
    plain = geometric_mean([plain for plain, _ in row])
    return Compared(math.exp(mean), low, high, plain, len(row))


def _logs(row: Pairs) -> list[float]:
    return [math.log(way / plain) for plain, way in row]


def student(level: float, free: int) -> float:
    """Return the value that Student's t exceeds, in size, with probability ``level``."""
    if free == 1:
        return 1 / math.tan(level * math.pi / 2)
    if free == 2:
        return math.sqrt(2 / (level * (2 - level)) - 2)
    z = NormalDist().inv_cdf(1 - level / 2)  # and the Cornish-Fisher expansion from there
    return (
        z
        + (z**3 + z) / (4 * free)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * free**4)
    )


@dataclass(slots=True)
class RaceBoard:
    """The races of the loaded pair, by tab; they outlive the page."""

    runs: dict[str, list[Run]] = field(default_factory=dict)

    def laps(self, tab: str) -> Laps:
        """Return the laps in which every run came to its end."""
        found: Laps = {}
        for run in self.runs.get(tab, ()):
            found.setdefault(run.lap, {})[run.name] = run
        return {lap: ways for lap, ways in found.items() if all(r.whole for r in ways.values())}

    def free_lap(self, tab: str) -> int:
        """Return the number of the next lap."""
        return max((run.lap for run in self.runs.get(tab, ())), default=-1) + 1

    def drop_halves(self, tab: str) -> None:
        """Forget the laps that did not come to their end."""
        self.runs[tab] = [run for ways in self.laps(tab).values() for run in ways.values()]

    def plain(self, tab: str) -> Run | None:
        """Return the newest plain run, which may still go on."""
        runs = [run for run in self.runs.get(tab, ()) if run.name == PLAIN]
        begun = [run for run in runs if run.rounds]
        return (begun or runs)[-1] if runs else None

    def present(self, tab: str) -> list[Run]:
        """List the runs of the lap that goes on; none if all came to their end."""
        runs = self.runs.get(tab, [])
        lap = next((run.lap for run in runs if run.finished is None), None)
        return [run for run in runs if run.lap == lap]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to draft, against plain decoding in the same laps: a row of a table.

    Attributes:
        laps: of each, what ran plainly and what ran this way; the newest last.
        clock: speeds in tokens a second after the first, of all runs of a lap together; None where
            they were too short.
        same: how many tokens are those of plain decoding, of how many.
    """

    laps: Row
    clock: Compared | None
    same: int
    of: int
    verdict: Payoff

    @property
    def run(self) -> Run:
        """The newest run."""
        return self.laps[-1][1]

    @property
    def pairs(self) -> int:
        return len(self.laps)

    @property
    def plain(self) -> float | None:
        return None if self.clock is None else self.clock.plain

    @property
    def speed(self) -> float | None:
        return None if self.clock is None else self.clock.speed

    @property
    def idle(self) -> bool:
        """True if hardly anything was guessed: what the runs differ by is no gain of guesses."""
        return self.pairs >= IDLE and is_idle(self.verdict)

    @property
    def comparable(self) -> bool:
        """True if the speeds of both may be shown side by side: they say what the answer says."""
        return not self.idle and not lacking(self.verdict)

    @property
    def proof(self) -> str:
        """Words such as "55 of 55 tokens identical"; the reason if some are not."""
        words = f"{self.same} of {self.of} tokens identical"
        if self.same == self.of:
            return words
        if self.run.params.verify != "match":
            return f"{words}: {self.run.params.verify} keeps the law, not the text"
        near = any(done.near_tie for done in self.run.rounds)
        return words + (": a near-tie, see specllama prove" if near else ": run specllama prove")


def race(
    board: RaceBoard, lap: Callable[[int], list[Run]], goal: int, enough: Callable[[Way], bool]
) -> Iterator[Run]:
    """Yield the runs of a race, until its pairs are ``enough`` or there are ``goal``."""
    while (n := board.free_lap("race")) < goal:
        runs = lap(n)
        board.runs.setdefault("race", []).extend(runs)
        yield from runs
        found = ways(board, "race")
        if not found or enough(found[0]):
            return


def ways(board: RaceBoard, tab: str) -> list[Way]:
    """List the ways that were run on a tab against plain runs, the fastest first. The laps of all
    tabs count, so that no two give a method different verdicts."""
    rows: dict[str, Row] = defaultdict(list)
    for lap in (lap for one in board.runs for lap in board.laps(one).values() if PLAIN in lap):
        for run in (run for run in lap.values() if run.name != PLAIN):
            rows[run.params.proposer].append((lap[PLAIN], run))
    speeds = [pairs(row, lambda run: run.speed) for row in rows.values()]
    spread, free = _noise(speeds)
    # half of each difference is the plain run's, which all rows have in common
    free /= 1 + (sum(map(bool, speeds)) - 1) / 4
    here, found = {run.params.proposer for run in board.runs.get(tab, ())}, []
    for (name, row), speed in zip(rows.items(), speeds, strict=True):
        clock = _compared(speed, spread, free, LOOKED_AT)
        if name in here:
            found.append(Way(row, clock, *_same(row), _verdict(row, clock)))
    return sorted(found, key=lambda way: -(way.verdict.ratio or 0.0))


def _same(row: Row) -> tuple[int, int]:
    """Count the tokens that equal plain decoding in the runs of a row, and all tokens."""
    sames = [run.same(plain) for plain, run in row]
    return sum(same for same, _ in sames), sum(of for _, of in sames)


def model(board: RaceBoard) -> SpeedModel | None:
    """Return the speed model with the pair's own figures from races."""
    runs = [run for lap in board.laps("race").values() for run in lap.values()]
    singles = singles_of(p for run in runs if run.name == PLAIN for p in run.passes)
    return SpeedModel.of([p for run in runs if run.name != PLAIN for p in run.passes], singles)


def _verdict(row: Row, clock: Compared | None) -> Payoff:
    drafted = [run for _, run in row]
    return payoff([one for run in drafted for one in run.passes], clock, drafted[-1].passes)


# ---- in words


def between(low: float | None, high: float | None) -> str:
    """Format a range such as "0.62–0.86"."""
    return "" if low is None or high is None else f"{low:.2f}–{high:.2f}"


def ratio_words(one: Interval | Payoff) -> str:
    """Format a ratio such as "0.74× (0.62–0.86)"; "" if the range is too wide to be a figure."""
    if one.ratio is None or is_wide(one):
        return ""
    interval = between(one.low, one.high)
    return f"{one.ratio:.2f}×" + (f" ({interval})" if interval else "")


def is_idle(verdict: Payoff) -> bool:
    """True if hardly anything was guessed, unless looking for guesses surely cost time."""
    return verdict.drafted < FEW * verdict.tokens and verdict.answer != "slower"


def lacking(verdict: Interval | Payoff) -> str:
    """Return the reason why an answer is not known yet; "" if it is."""
    if verdict.ratio is None:
        return TOO_SHORT
    if verdict.low is None:
        return TOO_FEW
    return TOO_WIDE if is_wide(verdict) else ""


def _probing(verdict: Payoff) -> str:
    if verdict.ratio is not None and verdict.high is not None and verdict.high < 1.0:
        return f"after probing that cost {1 - verdict.ratio:.0%}"
    return "after probing that cost too little to measure"


def answer(way: Way) -> tuple[str, str]:
    """Return the answer to "does it pay?": a word, and the sentence that explains it."""
    one = way.verdict
    if way.idle:
        return "NO", IDLY
    match one.answer:
        case "faster":
            return "YES", f"drafting is {one.ratio:.2f}× faster here"
        case "slower":
            return "NO", f"plain decoding is {1 / (one.ratio or 1.0):.2f}× faster here"
        case "off":
            return "NO", f"drafting switches itself off here, {_probing(one)}"
        case "unsure":
            return "CANNOT TELL YET", "plain and drafted are too close to call"
    return "CANNOT TELL YET", lacking(one)


def decided(way: Way) -> bool:
    """True if further pairs would only make the answer more precise."""
    return way.idle or (way.pairs >= LEAST and way.verdict.answer not in ("unsure", "unknown"))


def why(board: RaceBoard, way: Way) -> str:
    """Explain in a sentence the cost of a guess and how many are kept, if that explains the answer;
    else the yield of a pass and its time. An answer that is not sure has no reason."""
    pair, one = model(board), way.verdict
    if not one.ratio or not one.per_pass or one.answer not in ("faster", "slower") or way.idle:
        return ""
    if pair is None or pair.pays != (one.ratio > 1.0):
        took = one.per_pass / one.ratio
        if took < 1.0:  # no pass takes less than a plain one: the machine was busy
            return ""
        return f"each pass gave {one.per_pass:.1f} tokens and took as long as {took:.1f} plain ones"
    cost = pair.c + pair.beta
    return (
        f"a guess costs {cost:.2f} of a plain step: it pays where more than {min(cost, 1.0):.0%} "
        f"are kept, and {pair.alpha:.0%} of those checked were"
    )


def way_words(way: Way) -> str:
    """Return words such as "raced, 2 pairs: 198 tok/s, 0.74× (0.62–0.86) of plain"."""
    if way.comparable:
        found = f"{way.speed:.0f} tok/s, {ratio_words(way.verdict)} of plain"
        found += ", drafting stays off" if way.verdict.answer == "off" else ""
    else:
        found = IDLY if way.idle else lacking(way.verdict)
    return f"raced, {number_of(way.pairs, 'pair')}: {found}"
