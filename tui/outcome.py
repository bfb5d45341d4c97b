"""What came of races: the proof, every way against plain decoding, kinds of text, findings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from specllama.events import Verdict
from specllama.prompts import SLICES
from specllama.store.checks import Finding
from specllama.tui.race import PLAIN, Board, Run
from specllama.verdict import Pass, judge, judge_together, lead

TOO_SHORT = "the reply was too short"


@dataclass(frozen=True, slots=True)
class Way:
    """One way to draft: how many of how many tokens are those of plain decoding, and whether it
    paid."""

    run: Run
    same: int
    of: int
    verdict: Verdict

    @property
    def proof(self) -> str:
        """ "55 of 55 tokens identical", and where they are not, why."""
        words = f"{self.same} of {self.of} tokens identical"
        if self.same == self.of:
            return words
        if self.run.params.verify != "match":
            return f"{words}: {self.run.params.verify} keeps the law, not the text"
        return words + (
            ": a near-tie, see specllama prove" if self._near else ": run specllama prove"
        )

    @property
    def _near(self) -> bool:
        return any(done.near_tie for done in self.run.rounds)


def ways(board: Board, tab: str) -> list[Way]:
    """What was run on a tab against its own plain run; the fastest first."""
    plain = board.plain(tab)
    if plain is None or plain.finished is None:
        return []
    found = [Way(run, *run.same(plain), run.against(plain)) for run in board.ways(tab)]
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
    out: list[Kind] = []
    for name in SLICES:
        ways = board.ways("slices", name)
        plains = [r for r in board.runs.get("slices", ()) if r.name == PLAIN and r.group == name]
        if not ways:
            continue
        verdict = judge(
            [one for run in ways for one in run.passes],
            [ms for run in plains for ms in run.singles],
        )
        waits = sorted(1000 * wait for run in ways for wait in _waits(run))
        p50, p95 = _percentile(waits, 0.5), _percentile(waits, 0.95)
        out.append(Kind(name, _speed(plains), _speed(ways), p50, p95, verdict))
    return out


@dataclass(frozen=True, slots=True)
class Company:
    """So many conversations at once, for as long as all of them went on.

    Attributes:
        plain, drafted: tokens a second of all together.
        gain: plainly, over one alone. verdict: drafted, over plainly in the same company.
        same: tokens that are those of one alone, of how many.
    """

    lanes: int
    plain: float | None
    drafted: float | None
    gain: Verdict
    verdict: Verdict
    same: int
    of: int


def companies(board: Board) -> list[Company]:
    runs = board.runs.get("lanes", [])
    alone = {run.prompt: run for run in runs if run.lanes == 1 and run.name == PLAIN}
    singles = [one.pass_ms for one in _shared(list(alone.values()))[0]]
    out: list[Company] = []
    for n in dict.fromkeys(run.lanes for run in runs):
        mine = [run for run in runs if run.lanes == n]
        if not all(run.finished for run in mine):
            break
        plain, plain_speed = _shared([run for run in mine if run.name == PLAIN])
        drafted, drafted_speed = _shared([run for run in mine if run.name != PLAIN])
        sames = [run.same(alone[run.prompt]) for run in mine if run is not alone[run.prompt]]
        out.append(
            Company(
                n,
                plain_speed,
                drafted_speed,
                judge_together(plain, singles, lanes=n),
                judge_together(drafted, [one.pass_ms for one in plain]),
                sum(same for same, _ in sames),
                sum(of for _, of in sames),
            )
        )
    return out


def _shared(runs: Sequence[Run]) -> tuple[list[Pass], float | None]:
    """The rounds in which everybody who went on at once was there, in order, and their tokens a
    second."""
    found: list[Pass] = []
    tokens, seconds = 0, 0.0
    for first in range(0, len(runs), runs[0].lanes if runs else 1):
        wave = runs[first : first + runs[first].lanes]
        begin = max(run.began_s + run.ttft_s for run in wave)
        end = min(run.began_s + run.end_s for run in wave)
        timed = [
            (run.began_s + done.t_s, done) for run in wave for done in run.rounds if done.index
        ]
        inside = sorted((at, Pass.of(done)) for at, done in timed if begin < at <= end)
        found += [one for _, one in inside]
        tokens += sum(one.tokens for _, one in inside)
        seconds += max(end - begin, 0.0)
    return found, tokens / seconds if seconds > 0 else None


def findings(tab: str, board: Board) -> dict[str, Finding]:
    """What a tab that was run to its end says for the list of what was checked."""
    found: dict[str, Finding] = {}
    if tab == "slices":
        told = [kind for kind in kinds(board) if kind.verdict.answer != "unknown"]
        words = ", ".join(f"{kind.name} {_short(kind.verdict)}" for kind in told)
        holds = bool(told) and all(_keeps_up(kind.verdict) for kind in told)
        return {"kinds": Finding(holds, words or f"Not known yet: {TOO_SHORT}")}
    if tab == "lanes":
        return found
    tried = ways(board, tab)
    proved = [way for way in tried if way.run.params.verify == "match"]
    if proved:
        same, of = sum(way.same for way in proved), sum(way.of for way in proved)
        words = proved[0].proof if len(proved) == 1 else f"{same} of {of} tokens identical"
        found["text"] = Finding(same == of, words)
    if tried:
        best = next((way for way in tried if way.verdict.answer != "unknown"), tried[0])
        known = best.verdict.answer != "unknown"
        what = {"race": "speed", "sweep": "length", "methods": "methods"}[tab]
        named = f"{best.run.name} is the fastest: " if known and tab != "race" else ""
        found[what] = Finding(
            known and _keeps_up(best.verdict), named + lead(best.verdict, TOO_SHORT)
        )
    return found


def _keeps_up(verdict: Verdict) -> bool:
    """Nothing shows a loss."""
    return verdict.answer != "slower"


def _short(verdict: Verdict) -> str:
    return "off" if verdict.answer == "off" or not verdict.ratio else f"{verdict.ratio:.2f}×"


def _speed(runs: Sequence[Run]) -> float | None:
    """Tokens a second behind the first."""
    seconds = sum(run.end_s - run.ttft_s for run in runs)
    return sum(len(run.tokens) - 1 for run in runs) / seconds if seconds > 0 else None


def _waits(run: Run) -> list[float]:
    """Seconds between rounds."""
    times = [done.t_s for done in run.rounds]
    return [b - a for a, b in pairwise(times)]


def _percentile(values: Sequence[float], share: float) -> float | None:
    return values[min(int(share * len(values)), len(values) - 1)] if values else None
