"""What came of races: the proof, every way against plain decoding, kinds of text, findings.

Speeds, ratios and intervals come from ``paired`` alone, so that no column contradicts a verdict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specllama.bench.prompts import SLICES
from specllama.events import Answer, Verdict
from specllama.store.checks import Finding
from specllama.tui.measure import Meter
from specllama.tui.paired import LEVEL, LOOKED_AT, Compared, Pairs, compare
from specllama.tui.race import DRAFTED, PLAIN, Board, Run
from specllama.verdict import STILL, lead

TOO_SHORT = "the reply was too short"
LEAST, MOST = 3, 10  # pairs of a race: before it may end, and at most
MORE = 5  # pairs, on request
LITTLE = 0.05  # a loss that nobody feels

Row = list[tuple[list[Run], list[Run]]]
"""Of every lap, what ran plainly and what ran the other way."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to draft: how many of how many tokens are those of plain decoding, and whether it
    paid.

    Attributes:
        run: the newest. pairs: of runs, this way and plainly.
        plain, speed: tokens a second behind the first, plainly and this way.
    """

    run: Run
    pairs: int
    same: int
    of: int
    plain: float | None
    speed: float | None
    verdict: Verdict

    @property
    def proof(self) -> str:
        """ "55 of 55 tokens identical", and where they are not, why."""
        words = f"{self.same} of {self.of} tokens identical"
        if self.same == self.of:
            return words
        if self.run.params.verify != "match":
            return f"{words}: {self.run.params.verify} keeps the law, not the text"
        near = any(done.near_tie for done in self.run.rounds)
        return words + (": a near-tie, see specllama prove" if near else ": run specllama prove")


def ways(board: Board, tab: str) -> list[Way]:
    """What was run on a tab against its own plain runs; the fastest first."""
    names = dict.fromkeys(run.name for run in board.runs.get(tab, ()) if run.name != PLAIN)
    rows = [row for name in names if (row := _row(board, tab, "", name))]
    level = LOOKED_AT if tab == "race" else LEVEL
    compared = compare([_speeds(row) for row in rows], level=level, shared=True)
    found = []
    for row, one in zip(rows, compared, strict=True):
        sames = [
            way.same(plain) for plains, runs in row for plain, way in zip(plains, runs, strict=True)
        ]
        found.append(
            Way(
                row[-1][1][-1],
                len(row),
                sum(same for same, _ in sames),
                sum(of for _, of in sames),
                None if one is None else one.plain,
                None if one is None else one.speed,
                _verdict(row, one),
            )
        )
    return sorted(found, key=lambda way: -(way.verdict.ratio or 0.0))


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of text: tokens a second, and how long one waits for more of it, in milliseconds."""

    name: str
    plain: float | None
    drafted: float | None
    p50_ms: float | None
    p95_ms: float | None
    verdict: Verdict


def kinds(board: Board) -> list[Kind]:
    rows = {name: row for name in SLICES if (row := _row(board, "slices", name, DRAFTED))}
    out: list[Kind] = []
    compared = compare([_speeds(row) for row in rows.values()])
    for (name, row), one in zip(rows.items(), compared, strict=True):
        waits = sorted(1000 * wait for _, runs in row for run in runs for wait in _waits(run))
        out.append(
            Kind(
                name,
                None if one is None else one.plain,
                None if one is None else one.speed,
                _percentile(waits, 0.5),
                _percentile(waits, 0.95),
                _verdict(row, one),
            )
        )
    return out


@dataclass(frozen=True, slots=True)
class Company:
    """So many conversations at once, for as long as all of them went on.

    Attributes:
        plain, drafted: tokens a second of all together.
        gain: of ``plain``, over that of one alone. verdict: drafted, over plainly in the same
            company.
        same: tokens that are those of one alone, of how many.
    """

    lanes: int
    plain: float | None
    drafted: float | None
    gain: float | None
    verdict: Verdict
    same: int
    of: int


def companies(board: Board) -> list[Company]:
    runs = board.runs.get("lanes", [])
    alone = {run.prompt: run for run in runs if run.lanes == 1 and run.name == PLAIN}
    sizes = dict.fromkeys(run.lanes for run in runs)
    rows = {n: row for n in sizes if (row := _row(board, "lanes", str(n), DRAFTED))}
    out: list[Company] = []
    compared = compare([_speeds(row) for row in rows.values()])
    first = next((one.plain for one in compared if one is not None), None)
    for (n, row), one in zip(rows.items(), compared, strict=True):
        mine = [run for plains, drafted in row for run in (*plains, *drafted)]
        sames = [run.same(alone[run.prompt]) for run in mine if run is not alone[run.prompt]]
        out.append(
            Company(
                n,
                None if one is None else one.plain,
                None if one is None else one.speed,
                None if one is None or not first or 1 not in rows else one.plain / first,
                _verdict(row, one),
                sum(same for same, _ in sames),
                sum(of for _, of in sames),
            )
        )
    return out


def meter(board: Board) -> Meter:
    """What the drafted rounds of races say of the pair's own figures."""
    found = Meter()
    for tab in ("race", "sweep"):
        for runs in board.laps(tab).values():
            for run in (one for some in runs.values() for one in some):
                if run.name == PLAIN:
                    found.plain += run.singles
                for done in run.rounds:
                    if run.name != PLAIN:
                        found.observe(done)
    return found


# ---- in numbers


def _row(board: Board, tab: str, group: str, name: str) -> Row:
    laps = board.laps(tab, group).values()
    return [(ways[PLAIN], ways[name]) for ways in laps if PLAIN in ways and name in ways]


def _speeds(row: Row) -> Pairs:
    both = [(_together(plain), _together(way)) for plain, way in row]
    return [(plain, way) for plain, way in both if plain is not None and way is not None]


def _together(runs: Sequence[Run]) -> float | None:
    """Tokens a second behind the first, of all runs, for as long as all of them went on."""
    begin = max(run.began_s + run.ttft_s for run in runs)
    end = min(run.began_s + run.end_s for run in runs)
    tokens = sum(
        len(done.emitted)
        for run in runs
        for done in run.rounds
        if done.index and begin < run.began_s + done.t_s <= end
    )
    return tokens / (end - begin) if tokens and end > begin else None


def _verdict(row: Row, one: Compared | None) -> Verdict:
    answer: Answer = "unknown"
    if one is not None and one.low is not None and one.high is not None:
        answer = "faster" if one.low > 1.0 else "slower" if one.high < 1.0 else "unsure"
    if answer != "faster" and _stays_off(row[-1][1]):
        answer = "off"
    passes = [one for _, runs in row for run in runs for one in run.passes]
    return Verdict(
        answer=answer,
        ratio=None if one is None else one.ratio,
        low=None if one is None else one.low,
        high=None if one is None else one.high,
        tokens=sum(one.tokens for one in passes),
        passes=len(passes),
        drafted=sum(one.drafted for one in passes),
        accepted=sum(one.accepted for one in passes),
        judged=sum(one.judged for one in passes),
    )


def _stays_off(runs: Sequence[Run]) -> bool:
    """Whether these runs ended without drafts, because they were not worth it."""
    newest = [run.passes[-STILL:] for run in runs]
    return all(len(some) == STILL and all(one.declined for one in some) for some in newest)


def _waits(run: Run) -> list[float]:
    """Seconds between rounds."""
    times = [done.t_s for done in run.rounds]
    return [b - a for a, b in pairwise(times)]


def _percentile(values: Sequence[float], share: float) -> float | None:
    return values[min(int(share * len(values)), len(values) - 1)] if values else None


# ---- in words


def between(low: float | None, high: float | None) -> str:
    """ "0.62–0.86" """
    return "" if low is None or high is None else f"{low:.2f}–{high:.2f}"


def ratio(verdict: Verdict) -> str:
    """ "0.74× (0.62–0.86)" """
    if verdict.ratio is None:
        return ""
    interval = between(verdict.low, verdict.high)
    return f"{verdict.ratio:.2f}×" + (f" ({interval})" if interval else "")


def said(verdict: Verdict) -> str:
    """In a table or a list: whether it paid."""
    match verdict.answer:
        case "unknown" if verdict.ratio is not None:
            return f"{verdict.ratio:.2f}× in one run: Enter runs it again"
        case "off":
            return f"off, {_probing(verdict)}"
    return lead(verdict, TOO_SHORT)


def _probing(verdict: Verdict) -> str:
    if verdict.ratio is not None and verdict.high is not None and verdict.high < 1.0:
        return f"after probing that cost {1 - verdict.ratio:.0%}"
    return "after probing that cost too little to measure"


def answer(way: Way) -> tuple[str, str]:
    """To "does it pay?": the word, and the sentence behind it."""
    one = way.verdict
    match one.answer:
        case "faster":
            return "YES", f"drafting is {one.ratio:.2f}× faster here"
        case "slower":
            return "NO", f"plain decoding is {1 / (one.ratio or 1.0):.2f}× faster here"
        case "off":
            return "NO", f"drafting switches itself off here, {_probing(one)}"
        case "unsure":
            return "CANNOT TELL YET", "plain and drafted are too close to call"
    return "CANNOT TELL YET", TOO_SHORT if one.ratio is None else "one pair of runs proves nothing"


def decided(way: Way) -> bool:
    """Whether further pairs would only say it more precisely."""
    return way.pairs >= LEAST and way.verdict.answer not in ("unsure", "unknown")


def why(board: Board, way: Way) -> str:
    """What a guess costs and how many are kept, as far as that explains the answer."""
    pair = meter(board).model()
    if pair is None or way.verdict.ratio is None or pair.pays != (way.verdict.ratio > 1.0):
        return ""
    cost = pair.c + pair.beta
    return (
        f"a guess costs {cost:.2f} of a plain step: it pays where more than {min(cost, 1.0):.0%} "
        f"are kept, and {pair.alpha:.0%} of those judged were"
    )


# ---- for the list of what was checked


def findings(tab: str, board: Board) -> dict[str, Finding]:
    """What a tab that was run to its end says for the list of what was checked."""
    if tab == "lanes":
        return {}
    if tab == "slices":
        told = kinds(board)
        words = ", ".join(f"{kind.name} {_short(kind.verdict)}" for kind in told)
        states = {_holds(kind.verdict) for kind in told}
        holds = False if False in states else None if None in states or not told else True
        return {"kinds": _finding(holds, words or TOO_SHORT)}
    found: dict[str, Finding] = {}
    tried = ways(board, tab)
    proved = [way for way in tried if way.run.params.verify == "match"]
    if proved:
        same, of = sum(way.same for way in proved), sum(way.of for way in proved)
        words = proved[0].proof if len(proved) == 1 else f"{same} of {of} tokens identical"
        found["text"] = Finding(same == of, words)
    if tried:
        best = tried[0]
        what = {"race": "speed", "sweep": "length", "methods": "methods"}[tab]
        named = "" if tab == "race" else f"best is {best.run.name}, "
        found[what] = _finding(_holds(best.verdict), named + said(best.verdict))
    return found


def _finding(holds: bool | None, words: str) -> Finding:
    return Finding(bool(holds), words, known=holds is not None)


def _holds(verdict: Verdict) -> bool | None:
    """Whether it is surely not slower, but for a loss that nobody feels; None where the runs
    cannot tell."""
    if verdict.low is None or verdict.high is None:
        return None
    if verdict.high < 1.0:
        return False
    return True if verdict.low > 1.0 - LITTLE else None


def way_words(way: Way) -> str:
    """ "F4, 2 pairs: 198 tok/s, 0.74× (0.62–0.86) of plain" """
    speed = "" if way.speed is None else f"{way.speed:.0f} tok/s, "
    found = f"{speed}{ratio(way.verdict)} of plain" if ratio(way.verdict) else TOO_SHORT
    off = ", drafting stays off" if way.verdict.answer == "off" else ""
    return f"F4, {way.pairs} pair{'s' if way.pairs != 1 else ''}: {found}{off}"


def _short(verdict: Verdict) -> str:
    words = ratio(verdict) or TOO_SHORT
    return f"off ({words})" if verdict.answer == "off" else words
