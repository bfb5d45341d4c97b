"""Saving of the view: documents of a reply, a race or a round, or the screen as SVG."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static

from specllama import paths
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
from specllama.text import encodable, rate, sanitize_line
from specllama.tui import clipboard
from specllama.tui.race_runner import Advice
from specllama.tui.record import Record, fate_of
from specllama.tui.screens.page import Page
from specllama.tui.themes import UNICODE
from specllama.tui.widgets import walk
from specllama.tui.widgets.inked import Keys
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


WORDS = {
    "svg": "a picture (SVG)",
    "md": "Markdown, for an issue",
    "json": "JSON",
}


class ExportScreen(Page, ModalScreen[Any]):
    TITLE = "Save what you see"
    HELP = """
    Up and Down choose what is saved and how; the name of the file stands below and can be changed,
    folder and all. Enter saves, Esc leaves. A picture needs nothing from elsewhere, so that it can
    be attached to an issue; what a model wrote is shown as text and never as markup.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Leave", id="page.back"),
        Binding("enter", "save", "Save", id="export.save", priority=True),
        Binding("down", "move(1)", "Next", show=False, priority=True),
        Binding("up", "move(-1)", "Previous", show=False, priority=True),
    ]

    AUTO_FOCUS = "#save-path"

    def __init__(self, exports: Sequence[Export]) -> None:
        super().__init__()
        self.rows = {
            f"{what.label} as {WORDS[form]}": (what, form)
            for what in exports
            for form in what.forms
        }
        self._asked = ""  # a file that is there: Enter again replaces it

    def compose(self) -> ComposeResult:
        with Vertical(id="save"):
            yield from super().compose()

    def compose_page(self) -> ComposeResult:
        yield OptionList(*self.rows, id="save-rows", markup=False)
        yield Input(id="save-path")
        yield Static(id="save-problem", markup=False)
        yield Keys(show_command_palette=False)

    def on_mount(self) -> None:
        super().on_mount()
        rows = self.query_one(OptionList)
        rows.can_focus = False
        rows.highlighted = 0

    @property
    def row(self) -> tuple[Export, str]:
        """The chosen export and its form."""
        return [*self.rows.values()][self.query_one(OptionList).highlighted or 0]

    def action_move(self, step: int) -> None:
        rows = self.query_one(OptionList)
        rows.highlighted = ((rows.highlighted or 0) + step) % len(self.rows)

    @on(OptionList.OptionHighlighted)
    def _propose(self) -> None:
        """Propose a new file name, in the folder that was typed."""
        (what, form), field = self.row, self.query_one("#save-path", Input)
        typed = _path(field.value).parent
        path = clipboard.export_path(
            what.stem, form, typed if typed != Path() and typed.is_dir() else None
        )
        near = path.parent == clipboard.here()
        field.value = encodable(path.name if near else str(path))
        # of a long path the name is seen; a field does not scroll to the first value it gets
        self.call_after_refresh(
            field.scroll_to, x=len(field.value), animate=False, force=True, immediate=True
        )

    @on(Input.Changed)
    def _typed(self) -> None:
        self._asked = ""
        self._tell()

    def _tell(self, problem: str = "") -> None:
        """Show what is wrong with the name, or where Enter saves it."""
        line = self.query_one("#save-problem", Static)
        line.set_class(bool(problem), "-wrong")
        folder = (clipboard.here() or Path()) / _path(
            self.query_one("#save-path", Input).value
        ).parent
        line.update(sanitize_line(problem or f"Enter saves it in {folder}"))

    @on(OptionList.OptionSelected)
    def action_save(self) -> None:
        given = self.query_one("#save-path", Input).value.strip()
        path = _path(given)
        if not given or path.is_dir():
            self._tell("Give the name of a file")
        elif not path.parent.is_dir() and path.parent != paths.data_dir() / "exports":
            self._tell(f"There is no folder {path.parent}")
        elif path.exists() and self._asked != given:
            self._asked = given
            self._tell(f"{path.name} is there already: Enter again replaces it")
        else:
            self._write(path)

    def _write(self, path: Path) -> None:
        try:
            paths.private_folder(path.parent)
            what, form = self.row
            path.write_text(encodable(what.forms[form]()), "utf-8")
        except (OSError, ValueError) as error:  # the latter: a zero byte in the name
            self._tell(f"It cannot be saved there: {getattr(error, 'strerror', None) or error}")
        else:
            self.dismiss(path)


def _path(given: str) -> Path:
    try:
        return Path(given).expanduser()
    except RuntimeError:  # no user has that name
        return Path(given)
