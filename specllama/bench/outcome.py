"""The results of races: every way against plain decoding, in numbers and in words.

Speeds, ratios and intervals come from ``paired`` alone, so that no column contradicts a verdict.
"""

from __future__ import annotations

from dataclasses import dataclass

from specllama.bench.experiment import PLAIN, RaceBoard, Run
from specllama.bench.paired import (
    LEVEL,
    LOOKED_AT,
    Compared,
    Pairs,
    compare,
    ratio_words,
)
from specllama.bench.speed_model import SpeedModel
from specllama.events import Answer, Payoff
from specllama.text import number_of
from specllama.verdict import ROUNDS_UNTIL_OFF, WIDE, counted, lead

TOO_SHORT = "the reply was too short"
TOO_WIDE = "not known yet: the runs differ too much"
LEAST, MOST = 3, 10  # pairs of a race: before it may end, and at most
MORE = 5  # pairs, on request
IDLE = 2  # pairs, after which a race ends in which hardly anything is guessed
FEW = 0.05  # guesses for each token, that are hardly any

Row = list[tuple[Run, Run]]
"""Of every lap, what ran plainly and what ran the other way."""


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
        """True if hardly anything was guessed."""
        return self.pairs >= IDLE and self.verdict.drafted < FEW * self.verdict.tokens

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


def ways(board: RaceBoard, tab: str) -> list[Way]:
    """List the ways that were run on a tab against its plain runs, the fastest first."""
    rows: list[Row] = []
    for name in dict.fromkeys(run.name for run in board.runs.get(tab, []) if run.name != PLAIN):
        laps = [lap for lap in board.laps(tab).values() if PLAIN in lap and name in lap]
        if laps:
            rows.append([(lap[PLAIN], lap[name]) for lap in laps])
    level = LOOKED_AT if tab == "race" else LEVEL
    clocks = compare([_speeds(row) for row in rows], level=level, shared=True)
    found = [
        Way(row, clock, *_same(row), _verdict(row, clock))
        for row, clock in zip(rows, clocks, strict=True)
    ]
    return sorted(found, key=lambda way: -(way.verdict.ratio or 0.0))


def _same(row: Row) -> tuple[int, int]:
    """Count the tokens that equal plain decoding in the runs of a row, and all tokens."""
    sames = [run.same(plain) for plain, run in row]
    return sum(same for same, _ in sames), sum(of for _, of in sames)


def model(board: RaceBoard) -> SpeedModel | None:
    """Return the speed model with the pair's own figures from races."""
    laps = [lap for tab in ("race", "sweep") for lap in board.laps(tab).values()]
    runs = [run for lap in laps for run in lap.values()]
    singles = [ms for run in runs if run.name == PLAIN for ms in run.singles]
    return SpeedModel.of([p for run in runs if run.name != PLAIN for p in run.passes], singles)


# ---- in numbers


def _speeds(row: Row) -> Pairs:
    both = [(_speed(plain), _speed(way)) for plain, way in row]
    return [(plain, way) for plain, way in both if plain is not None and way is not None]


def _speed(run: Run) -> float | None:
    """Return the tokens per second after the first one."""
    tokens, seconds = sum(one.tokens for one in run.passes), run.end_s - run.ttft_s
    return tokens / seconds if tokens and seconds > 0 else None


def _verdict(row: Row, one: Compared | None) -> Payoff:
    answer: Answer = "unknown"
    if one is not None and one.low is not None and one.high is not None:
        answer = "faster" if one.low > 1.0 else "slower" if one.high < 1.0 else "unsure"
        if answer == "unsure" and one.high > WIDE * one.low:
            answer = "unknown"
    if answer != "faster" and _stays_off(row[-1][1]):
        answer = "off"
    return counted([one for _, run in row for one in run.passes], answer, one)


def _stays_off(run: Run) -> bool:
    """True if it ended without drafts, because they were not worth it."""
    newest = run.passes[-ROUNDS_UNTIL_OFF:]
    return len(newest) == ROUNDS_UNTIL_OFF and all(one.declined for one in newest)


# ---- in words


def said(verdict: Payoff) -> str:
    """Return the words for a table or a list: did it pay?"""
    match verdict.answer:
        case "unknown" if verdict.low is not None:
            return TOO_WIDE
        case "unknown" if verdict.ratio is not None:
            return f"{verdict.ratio:.2f}× in one run: Enter runs it again"
        case "off":
            return f"off, {_probing(verdict)}"
    return lead(verdict, TOO_SHORT)


def _probing(verdict: Payoff) -> str:
    if verdict.ratio is not None and verdict.high is not None and verdict.high < 1.0:
        return f"after probing that cost {1 - verdict.ratio:.0%}"
    return "after probing that cost too little to measure"


def answer(way: Way) -> tuple[str, str]:
    """Return the answer to "does it pay?": a word, and the sentence that explains it."""
    one = way.verdict
    if way.idle and one.answer in ("unsure", "unknown", "off"):
        return "NO", "hardly anything was guessed in this text"
    match one.answer:
        case "faster":
            return "YES", f"drafting is {one.ratio:.2f}× faster here"
        case "slower":
            return "NO", f"plain decoding is {1 / (one.ratio or 1.0):.2f}× faster here"
        case "off":
            return "NO", f"drafting switches itself off here, {_probing(one)}"
        case "unsure":
            return "CANNOT TELL YET", "plain and drafted are too close to call"
    if one.low is not None:
        return "CANNOT TELL YET", TOO_WIDE
    return "CANNOT TELL YET", TOO_SHORT if one.ratio is None else "one pair of runs proves nothing"


def decided(way: Way) -> bool:
    """True if further pairs would only make the answer more precise."""
    return way.idle or (way.pairs >= LEAST and way.verdict.answer not in ("unsure", "unknown"))


def why(board: RaceBoard, way: Way) -> str:
    """Explain in a sentence the cost of a guess and how many are kept, if that explains the answer;
    else the yield of a pass and its time."""
    pair, one = model(board), way.verdict
    if one.ratio is None or not one.passes:
        return ""
    if pair is None or pair.pays != (one.ratio > 1.0):
        tokens = one.tokens / one.passes
        took = tokens / one.ratio
        return f"each pass gave {tokens:.1f} tokens and took as long as {took:.1f} plain ones"
    cost = pair.c + pair.beta
    return (
        f"a guess costs {cost:.2f} of a plain step: it pays where more than {min(cost, 1.0):.0%} "
        f"are kept, and {pair.alpha:.0%} of those checked were"
    )


def way_words(way: Way) -> str:
    """Return words such as "raced, 2 pairs: 198 tok/s, 0.74× (0.62–0.86) of plain"."""
    speed = "" if way.speed is None else f"{way.speed:.0f} tok/s, "
    ratio = ratio_words(way.verdict)
    found = TOO_SHORT if way.verdict.ratio is None else TOO_WIDE
    found = f"{speed}{ratio} of plain" if ratio else found
    off = ", drafting stays off" if way.verdict.answer == "off" else ""
    return f"raced, {number_of(way.pairs, 'pair')}: {found}{off}"
