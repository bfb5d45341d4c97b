"""Every method: what it is, whether it fits the loaded target, and what it has achieved here."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from specllama.bench import outcome
from specllama.bench.experiment import RaceBoard
from specllama.interface import EngineInfo, MethodInfo
from specllama.text import sanitize_line
from specllama.tui.screens.base import Page
from specllama.tui.track_record import TrackRecord, track_record
from specllama.tui.widgets.keys import Keys

AUTOMATIC = MethodInfo(
    "auto",
    "Automatic",
    "What suits the pair: copies where the text repeats itself, else the draft model.",
    True,
)
PLAIN = MethodInfo("none", "Plain", "One token per pass of the target: the yardstick.", True)


def choices(info: EngineInfo | None) -> list[MethodInfo]:
    """Usable methods first, in the engine's order, then the others; nothing without a model."""
    if info is None or not info.methods:
        return []
    methods = [m for m in info.methods if m.name not in (AUTOMATIC.name, PLAIN.name)]
    usable = [m for m in methods if m.available]
    return [AUTOMATIC, *usable, PLAIN, *(m for m in methods if not m.available)]


def raced(board: RaceBoard) -> dict[str, tuple[str, str]]:
    """By method, what races said of it since the pair was loaded: in words, and the answer."""
    found: dict[str, tuple[str, str]] = {}
    for tab in ("race", "methods"):
        for way in outcome.ways(board, tab):
            if way.plain is not None:
                found["none"] = f"F4: {way.plain:.0f} tok/s", ""
            found[way.run.params.proposer] = outcome.way_words(way), way.verdict.answer
    return found


class MethodsScreen(Page):
    TITLE = "Ways to draft"
    HELP = """
    A method proposes tokens; the target decides, so all of them give the same text. Enter uses
    the method from the next reply on. What is not available says why. Figures are those of the
    races (F4) of today, else of the round logs of this pair on this machine.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Use", id="methods.use", priority=True),
    ]

    def __init__(
        self,
        info: EngineInfo | None,
        current: str,
        raced: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        super().__init__()
        self.raced = raced or {}
        self.methods = choices(info)
        self.info = info
        self.current = current
        self.record: TrackRecord | None = None

    def compose_page(self) -> ComposeResult:
        yield OptionList(id="methods", markup=False)
        yield Keys()

    def on_mount(self) -> None:
        super().on_mount()
        options = self.query_one(OptionList)
        for method in self.methods:
            options.add_option(Option(self._row(method), method.name))
        if self.methods:
            at = next((i for i, m in enumerate(self.methods) if m.name == self.current), 0)
            options.highlighted = at
            drafting = [m for m in self.methods if m not in (AUTOMATIC, PLAIN)]
            n = sum(m.available for m in drafting)
            self.set_title(self.TITLE or "", f"{n} of {len(drafting)} available for this pair")
        else:
            self.set_title(self.TITLE or "", "load a model to see what it can use: F6")
        options.focus()
        if self.info is not None:
            self._look_up(self.info)

    @work(thread=True, exit_on_error=False, group="logs")
    def _look_up(self, info: EngineInfo) -> None:
        self.app.call_from_thread(self._looked_up, track_record(info))

    def _looked_up(self, record: TrackRecord) -> None:
        if self.is_attached:
            self.record = record
            self._write()

    def on_resize(self) -> None:
        super().on_resize()
        self._write()

    def _write(self) -> None:
        """The rows anew: with other figures, or in other columns."""
        options = self.query_one(OptionList)
        if options.option_count < len(self.methods):
            return  # they are still to be made
        for i, method in enumerate(self.methods):
            options.replace_option_prompt_at_index(i, self._row(method))

    def _row(self, method: MethodInfo) -> Content:
        ink, glyphs = self.ink, self.glyphs
        name = sanitize_line(method.label)
        mine = method.name == self.current
        style = "" if method.available else ink.muted
        width = max(30, self.app.size.width - 9)
        parts: list[tuple[str, str]] = [
            (f"{glyphs.bullet if mine else glyphs.ring} ", ink.accent if mine else ink.muted),
            (name, f"bold {style}".strip()),
        ]
        if mine:
            parts.append(("  in use", ink.good))
        elif not method.available:
            reason = f"  {sanitize_line(method.reason) or 'not available'}"
            if len(name) + len(reason) > width:
                reason = "\n  " + "\n  ".join(wrap(reason.strip(), width))
            parts.append((reason, ink.warn))
        lines = wrap(sanitize_line(method.description), width)
        parts.append(("\n  " + "\n  ".join(lines), ink.muted))
        if method.available and method is not AUTOMATIC:
            parts.append(self._achieved(method.name, width))
        return Content.assemble(*parts, "\n")

    def _achieved(self, method: str, width: int) -> tuple[str, str]:
        """Always a separate line, so that nothing moves once the logs are read."""
        words, answer = self.raced.get(method, ("", ""))
        if not words and self.record is None:
            return "\n", ""
        if not words and self.record is not None and (logged := self.record.words(method)):
            verdict = self.record.verdict(method)
            words, answer = f"here: {logged}", "" if verdict is None else verdict.answer
        lines = wrap(self.glyphs.text(words or "not measured here yet"), width)
        return "\n  " + "\n  ".join(lines), self.ink.verdict(answer)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._use(self.methods[event.option_index])

    def action_choose(self) -> None:
        at = self.query_one(OptionList).highlighted
        if at is not None:
            self._use(self.methods[at])

    def _use(self, method: MethodInfo) -> None:
        if method.available:
            self.dismiss(method.name)
        else:
            reason = sanitize_line(method.reason) or "not available for this model"
            self.notify(f"{method.label}: {reason}", severity="warning", markup=False)
