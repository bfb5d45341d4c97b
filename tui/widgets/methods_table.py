"""The methods: the idea of each, its fit to the loaded target, and its results here."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import wrap
from typing import ClassVar

from textual import work
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from specllama.bench import outcome
from specllama.bench.outcome import RaceBoard
from specllama.interface import EngineInfo, MethodInfo
from specllama.text import sanitize_line
from specllama.tui.track_record import TrackRecord, track_record
from specllama.tui.widgets.inked import Inked

AUTOMATIC = MethodInfo(
    "auto",
    "Automatic",
    "What suits the pair: copies where the text repeats itself, else the draft model.",
    True,
)
PLAIN = MethodInfo("none", "Plain", "One token per pass of the target: the yardstick.", True)


def choices(info: EngineInfo | None) -> list[MethodInfo]:
    """List usable methods first, in the engine's order, then the others; nothing without a
    model."""
    if info is None or not info.methods:
        return []
    methods = [m for m in info.methods if m.name not in (AUTOMATIC.name, PLAIN.name)]
    usable = [m for m in methods if m.available]
    return [AUTOMATIC, *usable, PLAIN, *(m for m in methods if not m.available)]


def raced(board: RaceBoard) -> dict[str, tuple[str, str]]:
    """Return by method the results of races since the pair was loaded: in words, and the answer."""
    found: dict[str, tuple[str, str]] = {}
    for tab in ("race", "methods"):
        for way in outcome.ways(board, tab):
            if way.plain is not None:
                found["none"] = f"raced: {way.plain:.0f} tok/s", ""
            found[way.run.params.proposer] = outcome.way_words(way), way.verdict.answer
    return found


class MethodList(Inked, OptionList):
    """A row for each; Enter uses one, the page races it.

    Attributes:
        current: the method in use.
        raced: the results of today's races.
    """

    HELP = """
    A method proposes tokens; the target decides, so all of them give the same text. What is not
    available says why. Figures are those of the races of today, else of the round logs of this
    pair on this machine.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select", "Use", id="methods.use")]

    def __init__(self, info: EngineInfo | None, current: str, *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self.methods, self.info, self.current = choices(info), info, current
        self.raced: Mapping[str, tuple[str, str]] = {}
        self.record: TrackRecord | None = None

    def on_mount(self) -> None:
        for method in self.methods:
            self.add_option(Option(self._row(method), method.name))
        names = [method.name for method in self.methods]
        self.highlighted = names.index(self.current) if self.current in names else None
        if self.info is not None:
            self._look_up(self.info)

    @property
    def chosen(self) -> MethodInfo | None:
        return None if self.highlighted is None else self.methods[self.highlighted]

    @work(thread=True, exit_on_error=False, group="logs")
    def _look_up(self, info: EngineInfo) -> None:
        self.app.call_from_thread(self._looked_up, track_record(info))

    def _looked_up(self, record: TrackRecord) -> None:
        if self.is_attached:
            self.record = record
            self.write_rows()

    def on_resize(self) -> None:
        self.write_rows()

    def write_rows(self) -> None:
        """Write the rows anew: with other figures, or in other columns."""
        if self.option_count < len(self.methods):
            return  # they are still to be made
        for i, method in enumerate(self.methods):
            self.replace_option_prompt_at_index(i, self._row(method))

    def _row(self, method: MethodInfo) -> Content:
        ink, name = self.ink, sanitize_line(method.label)
        mine = method.name == self.current
        style = "" if method.available else ink.muted
        width = max(30, self.app.size.width - 9)
        parts: list[tuple[str, str]] = [
            ("● " if mine else "○ ", ink.accent if mine else ink.muted),
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
        if method.available:
            parts.append(self._achieved(method.name, width))
        return Content.assemble(*parts, "\n")

    def _achieved(self, method: str, width: int) -> tuple[str, str]:
        """Return a separate line, even if empty, so that nothing moves once the logs are read."""
        words, answer = self.raced.get(method, ("", ""))
        if not words and self.record is None:
            return "\n", ""
        if not words and self.record is not None and (logged := self.record.words(method)):
            verdict = self.record.verdict(method)
            words, answer = f"here: {logged}", "" if verdict is None else verdict.answer
        lines = wrap(words or "not measured here yet: R races it", width)
        return "\n  " + "\n  ".join(lines), self.ink.verdict(answer)
