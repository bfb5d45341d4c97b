"""The answer and the tables of the race, drawn for the width of the screen."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from specllama.bench import outcome
from specllama.bench.experiment import PLAIN, TOGETHER, Run
from specllama.bench.outcome import Way
from specllama.bench.paired import ratio_words
from specllama.bench.prompts import SLICES
from specllama.events import Payoff
from specllama.interface import EngineInfo
from specllama.text import rate, sanitize_line
from specllama.tui.themes import Glyphs, Ink
from specllama.tui.widgets.stats_strip import duration
from specllama.verdict import details

NAME = 9  # cells in front of a bar
SMALLEST = 8  # cells of the longest bar


def answer(way: Way, glyphs: Glyphs, ink: Ink, width: int, *, tall: bool) -> list[Content]:
    """The answer to "does it pay?": a word in its colour, and the sentence that explains it."""
    word, sentence = outcome.answer(way)
    style = {"YES": ink.good, "NO": ink.warn}.get(word, ink.accent)
    badge = f"  {word}  "
    said = Content.assemble(
        (badge, f"bold reverse {style}"), ("  " + glyphs.text(sentence), "bold")
    )
    lines = said.wrap(width)
    if not tall:
        return lines
    blank = Content.assemble((" " * len(badge), f"reverse {style}"))
    return [blank, *lines, blank]


def question(run: Run, asked: str, pairs: int, glyphs: Glyphs, ink: Ink, width: int) -> Content:
    """What is raced: the prompt, how many tokens it got, how often."""
    tokens = len(run.tokens)
    told = f"  {tokens} tokens" if tokens else ""
    if pairs:
        told += f", {pairs} {'pair' if pairs == 1 else 'pairs'} of runs"
    line = sanitize_line(asked)
    room = max(width - len(told) - 2, 10)
    if len(line) > room:
        line = line[: room - len(glyphs.ellipsis)] + glyphs.ellipsis
    return Content.assemble(glyphs.text(f'"{line}"'), (glyphs.text(told), ink.muted))


def bars(way: Way, glyphs: Glyphs, ink: Ink, width: int) -> list[Content]:
    """Plain and drafted, to be compared by eye: tokens a second, and how long one run takes."""
    if not way.plain or not way.speed:
        return []
    tokens = len(way.run.tokens) - 1
    told = glyphs.text(ratio_words(way.verdict))
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
                (glyphs.full * cells, style),
                " " * (room - cells),
                figure,
                (more, ink.verdict(way.verdict.answer)),
            )
        )
    return lines if beside else [*lines, Content.assemble(" " * NAME, (told, ink.muted))]


def proof(way: Way, glyphs: Glyphs, ink: Ink, width: int) -> Content:
    """Whether the text is the same; a rule that keeps only the law is no failure. After it
    whatever else fits the line."""
    if way.same == way.of:
        line = Content.assemble((glyphs.text(f"✓ {way.proof}"), ink.good))
    else:
        style = ink.warn if way.run.params.verify == "match" else ink.muted
        line = Content.assemble((glyphs.text(f"✗ {way.proof}"), style))
    for part in reversed(details(way.verdict, both=True)):
        longer = Content.assemble(line, (f" {glyphs.dot} {part}", ink.muted))
        line = longer if longer.cell_length <= width else line
    return line


def methods(ways: Sequence[Way], glyphs: Glyphs, ink: Ink, width: int) -> Content:
    """Every way with its speed; whether the text is the same has a column of its own."""
    if not ways:
        return Content.assemble(("Enter runs every method on this prompt.", ink.muted))
    names = max(len(way.run.name) for way in ways)
    plain = next((way.plain for way in ways if way.plain), None)
    narrow = width < names + 60
    text = "same" if narrow else "same text"
    head = f"{'':{names}}  {'tok/s':>6}  {text}  {'' if narrow else 'does it pay?'}"
    lines = [
        Content.assemble((head, ink.muted)),
        Content.assemble((f"{'Plain':<{names}}  ", "bold"), f"{rate(plain):>6}"),
    ]
    for way in ways:
        same = glyphs.text("✓" if way.same == way.of else "✗")
        lines.append(
            Content.assemble(
                (f"{sanitize_line(way.run.name):<{names}}  ", "bold"),
                f"{rate(way.speed):>6}  ",
                (f"{same:<{len(text)}}  ", ink.muted if way.same == way.of else ink.warn),
                _brief(way.verdict, glyphs, ink) if narrow else _said(way.verdict, glyphs, ink),
            )
        )
    return Content("\n").join(lines)


def slices(ways: Sequence[Way], per_slice: int, glyphs: Glyphs, ink: Ink) -> Content:
    if not ways:
        words = f"Enter runs {per_slice} prompts of each kind of text."
        return Content.assemble((words, ink.muted))
    head = f"{'':6}{'plain':>8}{'drafted':>9}{'p50':>9}{'p95':>9}"
    lines = [Content.assemble((head, ink.muted))]
    for way in ways:
        figures = (
            f"{rate(way.plain):>8}{rate(way.speed):>9}"
            f"{duration(way.wait_ms(0.5)):>9}{duration(way.wait_ms(0.95)):>9}  "
        )
        said = _said(way.verdict, glyphs, ink)
        lines.append(Content.assemble((f"{way.run.group:<6}", "bold"), (figures, ""), said))
    legend = "tokens a second; p50, p95: how long one waits for more text"
    return Content("\n").join([*lines, Content.assemble((legend, ink.muted))])


def offer(info: EngineInfo | None, loading: str, *, can_widen: bool) -> str:
    """What Enter does for conversations at once, or why nothing.

    Args:
        loading: how far the pair is loaded again, with more lanes; "" where it is not.
        can_widen: it can be.
    """
    if info is None:
        return ""
    if info.lanes > 1:
        return f"Enter writes {len(SLICES)} replies {_several(info.lanes)} at once, each way."
    if loading:
        return f"The pair is loaded again: {loading}."
    if not can_widen:
        return "This engine writes one reply at a time: nothing can be run at once."
    most = max(TOGETHER)
    return (
        f"Enter loads the pair again, with room for {most} conversations (that took "
        f"{info.load_ms / 1000:.1f} s last time), and writes {len(SLICES)} replies "
        f"{_several(most)} at once, each way. It stays loaded so."
    )


def _several(lanes: int) -> str:
    """ "1, 2 and 4": how many conversations are raced at once, given the lanes."""
    *first, last = [str(n) for n in TOGETHER if n <= lanes]
    return f"{', '.join(first)} and {last}"


def lanes(ways: Sequence[Way], offer: str, glyphs: Glyphs, ink: Ink) -> Content:
    """Conversations at once; ``offer``: what Enter would do."""
    if not ways:
        return Content.assemble((offer, ink.muted))
    head = f"{'':4}{'plain':>8}{'':8}{'drafted':>8}{'each':>8}  same"
    lines = [Content.assemble((head, ink.muted))]
    for one in ways:
        lanes = one.run.lanes
        known = one.gain is not None and lanes > 1
        gain = "" if not known else glyphs.text(f"{one.gain or 0.0:.2f}×")
        each = None if one.speed is None else one.speed / lanes
        same = glyphs.text("✓" if one.same == one.of else "✗")
        lines.append(
            Content.assemble(
                (f"{lanes:<4}", "bold"),
                f"{rate(one.plain):>8}",
                (f"{gain:>8}", ink.muted),
                f"{rate(one.speed):>8}{rate(each):>8}  ",
                (f"{same:<6}", ink.muted if one.same == one.of else ink.warn),
                _said(one.verdict, glyphs, ink),
            )
        )
    legend = (
        f"tokens a second of N at once, {glyphs.times} over one; each: of one of them, "
        "drafted; same: every text is that of one alone"
    )
    return Content("\n").join([*lines, Content.assemble((legend, ink.muted))])


def together(ways: Sequence[Way], glyphs: Glyphs, ink: Ink) -> Content:
    """What the most of them gain and cost, in a sentence."""
    most = ways[-1]
    if most.gain is None or most.run.lanes < 2:
        return Content("")
    words = (
        f"Plainly, {most.run.lanes} at once write {most.gain:.2f}× as much as one alone, "
        f"each at {most.gain / most.run.lanes:.2f}× its speed"
    )
    return Content.assemble((glyphs.text(words), ink.accent))


def _brief(one: Payoff, glyphs: Glyphs, ink: Ink) -> Content:
    """The ratio alone; that drafting stayed off, instead of its interval."""
    words = ratio_words(one)
    if one.answer == "off":
        words = f"off ({words.partition(' ')[0]})"
    return Content.assemble((glyphs.text(words), ink.verdict(one.answer)))


def _said(one: Payoff, glyphs: Glyphs, ink: Ink) -> Content:
    kept = [part for part in details(one) if "kept" in part]
    rest = "".join(f" {glyphs.dot} {part}" for part in kept)
    return Content.assemble(
        (glyphs.text(outcome.said(one)), ink.verdict(one.answer)), (rest, ink.muted)
    )
