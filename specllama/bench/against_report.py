"""The report of a proof against a server: the verdict in words, JSON, and a page to hand on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from specllama.bench.against import PLAIN, SPECULATIVE, WAYS, Outcome, Side, TextCase, Way
from specllama.bench.law import RIVALS
from specllama.bench.law_proof import LawCase
from specllama.store.document import Raw, fact_list, heading, page, paragraph, table

SCHEMA = "specllama.against.v1"

Answer = Literal["lossless so far", "not lossless", "not repeatable", "cannot be told"]


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

    def of(self, arm: str, temperature: float, way: Way | None = None) -> list[TextCase]:
        return [
            case
            for case in self.texts
            if case.arm == arm
            and case.temperature == temperature
            and (way is None or case.way == way)
        ]

    @property
    def temperatures(self) -> list[float]:
        return sorted({case.temperature for case in self.texts})


@dataclass(frozen=True, slots=True)
class Ruling:
    """A ruling: ``answer`` first, then the reasons, a sentence each."""

    answer: Answer
    reasons: tuple[str, ...]

    @property
    def fault(self) -> bool:
        return self.answer in ("not lossless", "not repeatable")

    @property
    def words(self) -> str:
        return {
            "lossless so far": "No fault found: its speculation changed nothing that was looked at",
            "not lossless": "NOT lossless: with speculation it writes something else",
            "not repeatable": "NOT repeatable: it gives the same greedy request different texts, "
            "with speculation and without",
            "cannot be told": "This cannot be told here",
        }[self.answer]


@dataclass(slots=True)
class _Reasons:
    """Reasons: ``faults`` are of speculation, ``wavers`` of the server with and without it."""

    faults: list[str] = field(default_factory=list)
    wavers: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    fine: list[str] = field(default_factory=list)


def judge(proof: ServerProof) -> Ruling:
    """Judge a proof by its greedy texts and the law. Equal texts with the same seed are reported,
    but few engines promise them: drawing with other random numbers is no fault."""
    found = _Reasons()
    for temperature in proof.temperatures:
        for way in WAYS:
            _judge_texts(proof, temperature, way, found)
    for temperature in dict.fromkeys(case.temperature for case in proof.laws):
        _judge_law(proof, temperature, found)
    answer: Answer = "cannot be told"
    if found.faults:
        answer = "not lossless"
    elif found.wavers:
        answer = "not repeatable"
    elif found.fine:
        answer = "lossless so far"
    return Ruling(answer, (*found.faults, *found.wavers, *found.doubts, *found.fine))


_FOUND: dict[Outcome, str] = {
    "near-tie": "part at a near-tie",
    "white space": "differ in white space at their ends",
    "different": "differ",
    "failed": "failed",
}


def _judge_texts(proof: ServerProof, temperature: float, way: Way, found: _Reasons) -> None:
    cases = proof.of(SPECULATIVE, temperature, way)
    if not cases:
        return
    count = Counter(case.outcome for case in cases)
    n, equal = len(cases), count["equal"]
    kind = "greedy texts" if temperature == 0.0 else f"texts at temperature {temperature:g}"
    seeded = " with the same seed" if temperature else ""
    said = f"{equal} of {n} {kind}{seeded} equal the plain ones, {WAYS[way]}"
    more = [f"{count[outcome]} {word}" for outcome, word in _FOUND.items() if count[outcome]]
    said = "; ".join([said, *more]) + "."
    itself: Way = "again" if way == "first" else way  # its first texts are what it is held to
    control = proof.of(PLAIN, temperature, itself)
    wavering = [case for case in control if case.outcome == "different"]
    wrong = [case for case in cases if case.outcome == "different"]
    if wrong:
        first = wrong[0]
        said += f" The first is prompt {first.prompt}, at character {first.at}{_gap_words(first)}."
    if temperature and wrong:
        found.doubts.append(said + " Few engines promise equal draws; the law is what counts.")
    elif wavering:
        said += (
            f" Of its plain texts {len(wavering)} of {len(control)} differ from their own first "
            f"ones ({WAYS[itself]}), so this alone does not show that speculation is to blame: "
            "start the same server without it and name that one with --plain URL."
        )
        known = any(case.gap is not None for case in wavering)
        (found.wavers if known or itself == "again" else found.doubts).append(said)
    elif wrong:
        if all(case.gap is None for case in wrong):
            said += " How near these were to a tie is not known."
        found.faults.append(said)
    else:
        (found.fine if count["failed"] < n else found.doubts).append(said)


def _gap_words(case: TextCase) -> str:
    if case.gap is None:
        return ""
    return f", where the plain token leads by {case.gap:.2f} in logprob ({case.gap_by})"


def _judge_law(proof: ServerProof, temperature: float, found: _Reasons) -> None:
    arms = {case.arm: case for case in proof.laws if case.temperature == temperature}
    case, control = arms.get(SPECULATIVE), arms.get(PLAIN)
    if case is None:
        return
    at = f"At temperature {temperature:g}, without seeds"
    if not case.tokens:
        found.doubts.append(f"{at}: no reply could be used ({case.note}).")
    elif not case.shown:
        found.fine.append(
            f"{at}: {case.tokens} tokens follow the law of {case.law} as far as can be seen "
            f"(largest evidence {_odds(case.largest)}, 100 to 1 would count). A law that is wrong "
            "in 1 of 100 draws takes hundreds to thousands of tokens to show; drafts that are "
            "accepted too often show only where -d names the draft."
        )
    else:
        said = (
            f"{at}: another law was shown after {case.found_at} tokens (evidence "
            f"{_odds(case.largest)} against the law of {case.law}; chance of a false alarm at "
            f"most {case.alarm:.0%}). What gave it away: {RIVALS.get(case.by, case.by)}."
        )
        if control is None or not control.tokens:
            found.faults.append(f"{said} There is no plain arm to compare with.")
        elif control.shown:
            found.doubts.append(
                f"{said} But its plain replies do not follow that law either (shown after "
                f"{control.found_at} tokens): it is not this server's law, so this says nothing "
                "about speculation."
            )
        else:
            found.faults.append(
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


def document(proof: ServerProof) -> str:
    """Build the page: the verdict, the comparisons, every difference."""
    verdict = judge(proof)
    parts: list[str] = [
        paragraph(verdict.words + ("" if proof.finished else " (ended early)") + "."),
        fact_list([[reason] for reason in verdict.reasons]),
        heading("What was compared"),
        fact_list(
            [
                *([fact] for fact in proof.server),
                [f"with speculation: {proof.speculative.what}"],
                [f"plain: {proof.plain.what}"],
                [f"the law at temperatures above 0: {proof.law or 'not known'}"],
                *([note] for note in proof.notes),
            ]
        ),
    ]
    if proof.texts:
        parts += [heading("Texts"), table(*text_table(proof))]
    if proof.laws:
        parts += [
            heading("Replies without seeds"),
            table(*law_table(proof)),
            paragraph(
                "Bets are made against the law that the tokens should come from, before each token "
                "is seen; while it is that law, the wealth of the bets reaches 100 times its "
                "beginning in at most 1 of 100 runs, however long one looks (Ville 1939)."
            ),
        ]
    different = [case for case in proof.texts if case.at is not None]
    different.sort(key=lambda case: (case.temperature, case.outcome != "different"))
    if different:
        parts += [heading("Differences"), *_differences(different)]
    return page("Is its speculation lossless?", parts)


def _differences(cases: Sequence[TextCase], most: int = 40) -> list[str]:
    rows = [
        [
            case.prompt,
            f"{case.arm}, {WAYS[case.way]}, temperature {case.temperature:g}",
            str(case.at),
            Raw(case.before),
            Raw(case.plain),
            Raw(case.other),
            "–" if case.gap is None else f"{case.gap:.2f}",
            case.outcome,
        ]
        for case in cases[:most]
    ]
    heads = ("prompt", "arm", "character", "after", "plain text", "this text", "gap", "found")
    left = len(cases) - len(rows)
    return [table(heads, rows), *([paragraph(f"{left} more are in the JSON.")] if left else [])]


def text_table(proof: ServerProof) -> tuple[tuple[str, ...], list[list[str]]]:
    heads = ("arm", "way", "temperature", "equal", "near-ties", "different", "failed", "accepted")
    rows = []
    for temperature in proof.temperatures:
        for arm in (SPECULATIVE, PLAIN):
            for way in WAYS:
                cases = proof.of(arm, temperature, way)
                if not cases:
                    continue
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
