"""Documents to save from a screen: a reply, a race or a round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from specllama.bench import outcome
from specllama.bench.experiment import PLAIN, Run, question
from specllama.bench.outcome import RaceBoard
from specllama.interface import EngineInfo, Prompt
from specllama.session import Session
from specllama.settings.params import GenerateParams
from specllama.store.document import (
    Raw,
    fact_list,
    heading,
    page,
    paragraph,
    quote,
    table,
)
from specllama.store.rounds import circumstances
from specllama.store.summary import provenance, reply_parts, settings
from specllama.text import rate
from specllama.tui.race_runner import Advice
from specllama.tui.record import Record, fate_of
from specllama.tui.themes import UNICODE
from specllama.tui.widgets import walk
from specllama.tui.widgets.stats_strip import duration

BEFORE = 600  # letters of the text before a round
TABS = {"race": "Plain and drafted", "methods": "Methods"}
RUN_HEADS = ("run", "first token", "tok/s", "tokens", "kept", "refused", "same text", "verdict")
GUESS_HEADS = ("guess", "text", "behind", "sure", "q", "p", "verdict", "why", "likeliest there")


@dataclass(frozen=True, slots=True)
class Export:
    """A thing that can be saved: its title, a name for its file, and its writer for each ending of
    the file name."""

    label: str
    stem: str
    forms: dict[str, Callable[[], str]]


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The pair and settings of all measurements on the screen; without a pair they are left out."""

    info: EngineInfo | None = None
    params: GenerateParams = field(default_factory=GenerateParams)

    def parts(self) -> list[str]:
        if self.info is None:
            return []
        header = circumstances(self.info, self.params)
        return [*provenance(header), settings(header["params"])]


def reply(record: Record, question: str, text: str, under: Circumstances) -> str:
    """Make a document of one reply; of one stored without its rounds, from its text and figures."""
    turn = record.request()
    started = record.started
    if started is not None:
        asked = under.params.replace(seed=started.seed, proposer=started.proposer)
        under = Circumstances(under.info, asked)
    methods = {one.name: one.short for one in under.info.methods} if under.info else {}
    name = under.info.target.name if under.info else "specllama"
    return page(
        "A reply, as it was drafted",
        [
            fact_list([["written by ", Raw(name)]]),
            heading("Question"),
            quote(question),
            heading("Reply"),
            *reply_parts(turn, methods, text),
            *under.parts(),
        ],
    )


# ---- a race


def of_conversation(
    session: Session, records: Mapping[int, Record], at: int | None, under: Circumstances
) -> list[Export]:
    """List the conversation, and its last reply or the first one from message ``at`` on."""
    messages = session.messages
    if not messages:
        return []
    forms = {"md": session.export, "json": lambda: session.export("json")}
    found = [Export("The conversation", session.title, forms)]
    replies = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if at is not None:
        replies = [i for i in replies if i >= at][:1]
    if replies:
        last = replies[-1]
        record = records.get(last, Record())
        question, text = messages[last - 1].content if last else "", messages[last].content
        stem = f"{session.title} reply"
        forms = {"md": lambda: reply(record, question, text, under)}
        found.append(Export("The reply", stem, forms))
    return found


def race(
    board: RaceBoard, prompt: Prompt | None, advice: Advice | None, under: Circumstances
) -> str:
    """Make a document of all tabs that were run."""
    parts: list[str] = []
    if raced := outcome.ways(board, "race"):
        word, sentence = outcome.answer(raced[0])
        parts.append(paragraph(f"{word.capitalize()}: {sentence}."))
    if advice is not None:
        parts.append(paragraph(f"Recommended: {advice.words}."))
    if asked := question(prompt):
        parts += [heading("Question"), quote(asked)]
    for tab, title in TABS.items():
        parts += _tab(board, tab, title)
    return page("Does drafting pay?", [*parts, *under.parts()])


def _tab(board: RaceBoard, tab: str, title: str) -> list[str]:
    plain, ways = board.plain(tab), outcome.ways(board, tab)
    if plain is None or not ways:
        return []
    rows = [_run(plain, ways[0].plain, "", "plain decoding")]
    for way in ways:
        same = f"{way.same} of {way.of}"
        rows.append(_run(way.run, way.speed, same, outcome.said(way.verdict)))
    said = [paragraph(f"{ways[0].proof}.")] if tab == "race" else []
    return [heading(title), *said, table(RUN_HEADS, rows)]


def _run(run: Run, speed: float | None, same: str, verdict: str) -> list[str]:
    end = run.finished
    drafted = end.draft_n if end else 0
    kept = end.draft_n_accepted if end else 0
    return [
        run.name,
        duration(1000 * run.ttft_s),
        rate(speed),
        str(len(run.tokens)),
        str(kept) if run.name != PLAIN else "",
        str(drafted - kept) if run.name != PLAIN else "",
        same,
        verdict,
    ]


# ---- a round


def round_(record: Record, at: int, under: Circumstances) -> str:
    """Make a document of one round as the inspector explains it."""
    done, verify = record.rounds[at], record.verify_at(at)
    label = {m.name: m.short for m in (under.info.methods if under.info else ())}
    who = " + ".join(label.get(part) or part for part in done.source.split("+"))
    how = f"drafted by the {who}" if done.drafted else "a plain step"
    times = (done.draft_ms, done.verify_ms, done.waiting_ms)
    facts: list[list[str]] = [
        [f"round {at + 1} of {len(record.rounds)}, {how}"],
        [f"window {done.draft_max}: ", Raw(done.window_reason)],
        ["draft {:.2f} ms, target {:.2f} ms, waiting {:.2f} ms".format(*times)],
        [f"rule: {verify}" + (", a near-tie" if done.near_tie else "")],
    ]
    parts: list[str] = [
        fact_list(facts),
        paragraph(walk.caption(done, 2, UNICODE)),
        heading("Text before"),
        quote(record.text_before(at)[-BEFORE:]),
    ]
    if done.drafted:
        fates = fate_of(done)
        rows = [
            [
                str(i + 1),
                Raw(done.drafted_text[i]),
                "text" if done.parents[i] < 0 else str(done.parents[i] + 1),
                walk.number(done.confidence[i]),
                walk.number(done.q[i]),
                walk.number(done.p[i]),
                walk.WORDS[fates[i]],
                Raw(walk.equation(done, i, fates[i], verify)),
                Raw(walk.likeliest(walk.place_of(done, i))),
            ]
            for i in range(len(done.drafted))
        ]
        n = len(GUESS_HEADS) - (not done.chances)
        parts += [heading("Guesses"), table(GUESS_HEADS[:n], [row[:n] for row in rows])]
    wrote = "".join(done.emitted_text)
    parts += [heading("Written"), fact_list([[Raw(wrote)]])]
    return page("A round of speculative decoding", [*parts, *under.parts()])
