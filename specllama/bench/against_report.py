"""The report of a proof against a server: the verdict in words, tables, JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, Literal

from specllama.bench.against import PLAIN, SPECULATIVE, WAYS, LawCase, Outcome, Side, TextCase, Way
from specllama.bench.law import RIVALS

SCHEMA = "specllama.against.v1"

Answer = Literal["lossless so far", "not lossless", "not repeatable", "cannot be told"]
Kind = Literal["fault", "waver", "doubt", "fine"]
"""A fault of speculation, one of the server with and without it, a doubt, no fault."""

_ANSWERS: dict[Kind, tuple[Answer, str]] = {
    "fault": ("not lossless", "NOT lossless: with speculation it writes something else"),
    "waver": (
        "not repeatable",
        "NOT repeatable: it gives the same greedy request different texts, "
        "with speculation and without",
    ),
    "fine": (
        "lossless so far",
        "No fault found: its speculation changed nothing that was looked at",
    ),
    "doubt": ("cannot be told", "This cannot be told here"),
}  # the first that there is a reason for


@dataclass(frozen=True, slots=True)
class ServerProof:
    """The findings of a proof.

    Attributes:
        server: what it is and how it was started, as facts in words.
        plain: where the plain texts come from. law: who knows the law, "" where nobody does.
        notes: what could not be tried, and why.
        finished: it was not ended early.
    """

    server: Sequence[str]
    speculative: Side
    plain: Side
    law: str
    prompts: int
    texts: list[TextCase]
    laws: list[LawCase]
    notes: list[str]
    finished: bool = True

    def of(self, arm: str, temperature: float, way: Way) -> list[TextCase]:
        asked = arm, temperature, way
        return [case for case in self.texts if (case.arm, case.temperature, case.way) == asked]

    @property
    def temperatures(self) -> list[float]:
        return sorted({case.temperature for case in self.texts})


@dataclass(frozen=True, slots=True)
class Ruling:
    """A ruling: ``answer`` first, then the reasons, a sentence each."""

    answer: Answer
    words: str
    reasons: tuple[str, ...]

    @property
    def fault(self) -> bool:
        return self.answer in ("not lossless", "not repeatable")


def judge(proof: ServerProof) -> Ruling:
    """Judge a proof by its greedy texts and the law. Equal texts with the same seed are reported,
    but few engines promise them: drawing with other random numbers is no fault."""
    reasons: dict[Kind, list[str]] = {"fault": [], "waver": [], "doubt": [], "fine": []}
    for temperature, way in product(proof.temperatures, WAYS):
        if cases := proof.of(SPECULATIVE, temperature, way):
            kind, words = _on_texts(proof, cases)
            reasons[kind].append(words)
    for temperature in dict.fromkeys(case.temperature for case in proof.laws):
        arms = {case.arm: case for case in proof.laws if case.temperature == temperature}
        if (case := arms.get(SPECULATIVE)) is not None:
            kind, words = _on_law(case, arms.get(PLAIN))
            reasons[kind].append(words)
    found: Kind = next((kind for kind in _ANSWERS if reasons[kind]), "doubt")
    return Ruling(*_ANSWERS[found], tuple(chain(*reasons.values())))


_FOUND: dict[Outcome, str] = {
    "near-tie": "part at a near-tie",
    "white space": "differ in white space at their ends",
    "different": "differ",
    "failed": "failed",
}


def _on_texts(proof: ServerProof, cases: Sequence[TextCase]) -> tuple[Kind, str]:
    """Judge the speculative texts of one way and temperature."""
    temperature, way = cases[0].temperature, cases[0].way
    count, n = Counter(case.outcome for case in cases), len(cases)
    kind = f"texts at temperature {temperature:g} with the same seed"
    said = f"{count['equal']} of {n} {kind if temperature else 'greedy texts'} equal the plain ones"
    more = [f"{count[outcome]} {word}" for outcome, word in _FOUND.items() if count[outcome]]
    said = "; ".join([f"{said}, {WAYS[way]}", *more]) + "."
    itself: Way = "again" if way == "first" else way  # its first texts are what it is held to
    control = proof.of(PLAIN, temperature, itself)
    wavering = [case for case in control if case.outcome == "different"]
    if wrong := [case for case in cases if case.outcome == "different"]:
        first = wrong[0]
        said += f" The first is prompt {first.prompt}, at character {first.at}{_gap_words(first)}."
    if temperature and wrong:
        return "doubt", said + " Few engines promise equal draws; the law is what counts."
    if wavering:
        said += (
            f" Of its plain texts {len(wavering)} of {len(control)} differ from their own first "
            f"ones ({WAYS[itself]}), so this alone does not show that speculation is to blame: "
            "start the same server without it and name that one with --plain URL."
        )
        known = any(case.gap is not None for case in wavering)
        return "waver" if known or itself == "again" else "doubt", said
    if wrong:
        if all(case.gap is None for case in wrong):
            said += " How near these were to a tie is not known."
        return "fault", said
    return "fine" if count["failed"] < n else "doubt", said


def _gap_words(case: TextCase) -> str:
    if case.gap is None:
        return ""
    return f", where the plain token leads by {case.gap:.2f} in logprob ({case.gap_by})"


def _on_law(case: LawCase, control: LawCase | None) -> tuple[Kind, str]:
    """Judge the unseeded replies at one temperature against the plain arm's."""
    at = f"At temperature {case.temperature:g}, without seeds"
    if not case.tokens:
        return "doubt", f"{at}: no reply could be used ({case.note})."
    if not case.shown:
        return "fine", (
            f"{at}: {case.tokens} tokens follow the law of {case.law} as far as can be seen "
            f"(largest evidence {_odds(case.largest)}, 100 to 1 would count). A law that is wrong "
            "in 1 of 100 draws takes hundreds to thousands of tokens to show; drafts that are "
            "accepted too often show only where -d names the draft."
        )
    said = (
        f"{at}: another law was shown after {case.found_at} tokens (evidence "
        f"{_odds(case.largest)} against the law of {case.law}; chance of a false alarm at "
        f"most {case.alarm:.0%}). What gave it away: {RIVALS.get(case.by, case.by)}."
    )
    if control is None or not control.tokens:
        return "fault", f"{said} There is no plain arm to compare with."
    if control.shown:
        return "doubt", (
            f"{said} But its plain replies do not follow that law either (shown after "
            f"{control.found_at} tokens): it is not this server's law, so this says nothing "
            "about speculation."
        )
    return "fault", (
        f"{said} Its plain replies do follow that law ({control.tokens} tokens, largest "
        f"evidence {_odds(control.largest)})."
    )


def _odds(log10: float) -> str:
    """Format the wealth of the bets as odds."""
    if log10 > 6:
        return f"10^{log10:.0f} to 1"
    return f"{10**log10:,.0f} to 1" if log10 >= 1 else f"{10**log10:.1f} to 1"


def to_json(proof: ServerProof) -> dict[str, Any]:
    verdict = judge(proof)
    return {
        "schema": SCHEMA,
        "verdict": verdict.answer,
        "reasons": list(verdict.reasons),
        "server": list(proof.server),
        "speculative": proof.speculative.what,
        "plain": proof.plain.what,
        "law": proof.law or None,
        "prompts": proof.prompts,
        "finished": proof.finished,
        "notes": list(proof.notes),
        "texts": [case.to_dict() for case in proof.texts],
        "laws": [case.to_dict() for case in proof.laws],
    }


def text_table(proof: ServerProof) -> tuple[tuple[str, ...], list[list[str]]]:
    heads = ("arm", "way", "temperature", "equal", "near-ties", "different", "failed", "accepted")
    rows = []
    for temperature, arm, way in product(proof.temperatures, (SPECULATIVE, PLAIN), WAYS):
        if cases := proof.of(arm, temperature, way):
            count = Counter(case.outcome for case in cases)
            rows.append(
                [
                    arm if arm == SPECULATIVE else "plain, against itself",
                    WAYS[way],
                    f"{temperature:g}",
                    f"{count['equal']}/{len(cases)}",
                    str(count["near-tie"]),
                    str(count["different"] + count["white space"]),
                    str(count["failed"]),
                    _accepted(cases),
                ]
            )
    return heads, rows


def _accepted(cases: Sequence[TextCase]) -> str:
    told = [case for case in cases if case.drafted is not None and case.accepted is not None]
    drafted = sum(case.drafted or 0 for case in told)
    return f"{sum(case.accepted or 0 for case in told)}/{drafted}" if told else "–"


def law_table(proof: ServerProof) -> tuple[tuple[str, ...], list[list[str]]]:
    heads = (
        "arm", "temperature", "tokens", "replies", "another law", "largest evidence", "read from",
    )  # fmt: skip
    return heads, [
        [
            case.arm,
            f"{case.temperature:g}",
            str(case.tokens),
            f"{case.replies}" + (f" ({case.skipped} not used)" if case.skipped else ""),
            f"shown after {case.found_at}" if case.shown else "not shown",
            _odds(case.largest) if case.tokens else "–",
            "listed tokens" if case.read_as == "tokens" else "text, split again",
        ]
        for case in proof.laws
    ]
