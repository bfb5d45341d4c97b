"""The race's answer and tables, and the methods: their ideas, their fit, their results here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from specllama.bench import outcome
from specllama.bench.experiment import PLAIN, TOKENS, Run
from specllama.bench.outcome import RaceBoard, Way, ratio_words
from specllama.interface import EngineInfo, MethodInfo
from specllama.text import rate, sanitize_line
from specllama.tui.themes import Glyphs, Ink
from specllama.tui.widgets.inked import Inked
from specllama.tui.widgets.stats_strip import duration, reading
from specllama.verdict import details

AUTOMATIC = MethodInfo(
    "auto",
    "Automatic",
    "What suits the pair: copies where the text repeats itself, else the draft model.",
    True,
)
PLAINLY = MethodInfo("none", "Plain", "One token per pass of the target: the yardstick.", True)


def choices(info: EngineInfo | None) -> list[MethodInfo]:
    """List usable methods first, in the engine's order, then the others; nothing without a
    model."""
    if info is None or not info.methods:
        return []
    methods = [m for m in info.methods if m.name not in (AUTOMATIC.name, PLAINLY.name)]
    usable = [m for m in methods if m.available]
    return [AUTOMATIC, *usable, PLAINLY, *(m for m in methods if not m.available)]


def raced(board: RaceBoard) -> dict[str, tuple[str, str]]:
    """Return by method the results of races since the pair was loaded: in words, and the answer."""
    found: dict[str, tuple[str, str]] = {}
    for tab in ("race", "methods"):
        for way in outcome.ways(board, tab):
            if way.plain is not None:
                found["none"] = f"raced: {way.plain:.0f} tok/s", ""
            answer = "unknown" if way.idle else way.verdict.answer
            found[way.run.params.proposer] = outcome.way_words(way), answer
    return found


class MethodList(Inked, OptionList):
    """A row for each; Enter uses one, the page races it.

    Attributes:
        current: the method in use.
        raced: the results of today's races.
    """

    HELP = """
    A method proposes tokens; the target decides, so all of them give the same text. What is not
    available says why. Figures are those of the races of today.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "select", "Use", id="methods.use")]

    def __init__(self, info: EngineInfo | None, current: str, *, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self.methods, self.current = choices(info), current
        self.raced: Mapping[str, tuple[str, str]] = {}

    def on_mount(self) -> None:
        for method in self.methods:
            self.add_option(Option(self._row(method), method.name))
        names = [method.name for method in self.methods]
        self.highlighted = names.index(self.current) if self.current in names else None

    @property
    def chosen(self) -> MethodInfo | None:
        return None if self.highlighted is None else self.methods[self.highlighted]

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
            words, answer = self.raced.get(method.name, ("not measured here yet: R races it", ""))
            parts.append(("\n  " + "\n  ".join(wrap(words, width)), ink.verdict(answer)))
        return Content.assemble(*parts, "\n")


NAME = 9  # cells in front of a bar
SMALLEST = 8  # cells of the longest bar


# Letters five dots high, a line of bits for each row of dots from the top.
_LETTERS = {
    "A": "010 101 111 101 101", "C": "111 100 100 100 111", "E": "111 100 110 100 111",
    "L": "100 100 100 100 111", "N": "1001 1101 1011 1001 1001", "O": "111 101 101 101 111",
    "S": "111 100 111 001 111", "T": "111 010 010 010 010", "Y": "101 101 010 010 010",
    " ": "0 0 0 0 0",
}  # fmt: skip


def large(word: str) -> list[str]:
    """Draw a word in letters three lines high, two dots to a cell."""
    rows = [" ".join(line) for line in zip(*(_LETTERS[one].split() for one in word), strict=True)]
    dots = [row.replace(" ", "0") for row in (*rows, "0" * len(rows[0]))]
    signs = {"00": " ", "10": "▀", "01": "▄", "11": "█"}
    return [
        "".join(signs[a + b] for a, b in zip(dots[i], dots[i + 1], strict=True)) for i in (0, 2, 4)
    ]


def answer(way: Way, ink: Ink, width: int, *, tall: bool) -> list[Content]:
    """Draw the answer to "does it pay?": a word in its color, as large as there is room, and the
    sentence that explains it."""
    word, sentence = outcome.answer(way)
    style = {"YES": ink.good, "NO": ink.warn}.get(word, ink.accent)
    explained = Content.assemble((sentence, "bold"))
    letters = large(word)
    if not tall or len(letters[0]) > width:
        badge = (f"  {word}  ", f"bold reverse {style}")
        return Content.assemble(badge, "  ", explained).wrap(width)
    lines = [Content.assemble((line, style)) for line in letters]
    if len(letters[0]) + 3 + explained.cell_length > width:
        return [*lines, explained]
    return [lines[0], Content.assemble(lines[1], "   ", explained), lines[2]]


def question(run: Run, asked: str, pairs: int, ink: Ink, width: int) -> Content:
    """Describe the race: the prompt, the tokens it got, the number of runs."""
    tokens = len(run.tokens)
    told = f"  {tokens} tokens" if tokens else ""
    if pairs:
        told += f", {pairs} {'pair' if pairs == 1 else 'pairs'} of runs"
        told += ", by the clock" if width >= 70 else ""
    line = sanitize_line(asked)
    room = max(width - len(told) - 2, 10)
    if len(line) > room:
        line = line[: room - 1] + "…"
    return Content.assemble(f'"{line}"', (told, ink.muted))


def bars(way: Way, ink: Ink, width: int) -> list[Content]:
    """Draw plain and drafted for comparison by eye: tokens a second, and the time of one run."""
    if not way.plain or not way.speed or not way.comparable:
        return []
    tokens = len(way.run.tokens) - 1
    told = ratio_words(way.verdict)
    figures = [
        f"  {rate(speed):>5} tok/s  {duration(1000 * tokens / speed):>6}"
        for speed in (way.plain, way.speed)
    ]
    room = width - NAME - max(map(len, figures))
    beside = room - len(told) - 2 >= SMALLEST
    room -= len(told) + 2 if beside else 0
    most = max(way.plain, way.speed)
    lines: list[Content] = []
    for name, speed, figure, more in (
        (PLAIN, way.plain, figures[0], ""),
        (way.run.name, way.speed, figures[1], f"  {told}" if beside else ""),
    ):
        cells = max(round(speed / most * room), 1)
        style = ink.muted if name == PLAIN else ink.source(way.run.params.proposer)
        bar = (f"{name:<{NAME}}", "bold"), ("█" * cells, style), " " * (room - cells)
        lines.append(Content.assemble(*bar, figure, (more, ink.verdict(way.verdict.answer))))
    return lines if beside else [*lines, Content.assemble(" " * NAME, (told, ink.muted))]


def present(runs: Sequence[Run], glyphs: Glyphs, ink: Ink, width: int) -> list[Content]:
    """Draw the runs that go on, as far as they have come: the prompt read, then tokens written."""
    lines: list[Content] = []
    for run in runs:
        name = f"{run.name:<{NAME}} "
        line = Content("waits for its turn" if run.started is None else "begins")
        if run.rounds:
            most = run.params.max_tokens or TOKENS
            words = f"{len(run.tokens)} of at most {most} tokens written"
            speed = "" if run.speed is None else f", {rate(run.speed)} tok/s"
            line = Content.assemble((words + speed, ink.muted))
        elif run.prefill is not None:
            line = reading(run.prefill, width - len(name), glyphs, ink)
        lines.append(Content.assemble((name, "bold"), line))
    return lines


def proof(way: Way, ink: Ink, width: int) -> Content:
    """Draw whether the text is the same; a rule that keeps only the law is no failure. More follows
    as far as it fits the line."""
    if way.same == way.of:
        line = Content.assemble((f"✓ {way.proof}", ink.good))
    else:
        style = ink.warn if way.run.params.verify == "match" else ink.muted
        line = Content.assemble((f"✗ {way.proof}", style))
    for part in reversed(details(way.verdict, both=True)):
        longer = Content.assemble(line, (f" · {part}", ink.muted))
        line = longer if longer.cell_length <= width else line
    return line
