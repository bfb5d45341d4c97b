"""The answer and the tables of the race, drawn for the width of the screen."""

from __future__ import annotations

from textual.content import Content

from specllama.bench import outcome
from specllama.bench.experiment import PLAIN, Run
from specllama.bench.outcome import Way, ratio_words
from specllama.text import rate, sanitize_line
from specllama.tui.themes import Ink
from specllama.tui.widgets.stats_strip import duration
from specllama.verdict import details

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
    if not way.plain or not way.speed:
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
        lines.append(
            Content.assemble(
                (f"{name:<{NAME}}", "bold"),
                ("█" * cells, style),
                " " * (room - cells),
                figure,
                (more, ink.verdict(way.verdict.answer)),
            )
        )
    return lines if beside else [*lines, Content.assemble(" " * NAME, (told, ink.muted))]


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
