"""What came of a race, drawn: a verdict in its colour, the proof, the tables of its tabs."""

from __future__ import annotations

from collections.abc import Sequence

from textual.content import Content

from specllama.events import Verdict
from specllama.text import sanitize_line
from specllama.tui.outcome import TOO_SHORT, Company, Kind, Way
from specllama.tui.themes import Glyphs, Ink
from specllama.tui.widgets.stats_strip import duration, rate
from specllama.verdict import details, lead
from specllama.verdict import together as in_company


def proof(way: Way, glyphs: Glyphs, ink: Ink) -> Content:
    """Whether the text is the same; a rule that keeps only the law is no failure."""
    if way.same == way.of:
        return Content.assemble((glyphs.text(f"✓ {way.proof}"), ink.good))
    style = ink.warn if way.run.params.verify == "match" else ink.muted
    return Content.assemble((glyphs.text(f"✗ {way.proof}"), style))


def verdict(
    one: Verdict, glyphs: Glyphs, ink: Ink, *, both: bool = False, tokens: bool = True
) -> Content:
    """The verdict in a line; ``tokens``: with how many a pass gave."""
    first = glyphs.text(lead(one, TOO_SHORT))
    told = details(one, both=both)[int(not tokens) :]
    rest = "".join(f" {glyphs.dot} {part}" for part in told)
    return Content.assemble((first, ink.verdict(one.answer)), (rest, ink.muted))


def methods(ways: Sequence[Way], glyphs: Glyphs, ink: Ink) -> Content:
    if not ways:
        return Content.assemble(("Enter runs every method on this prompt.", ink.muted))
    width = max(len(way.run.name) for way in ways)
    return Content("\n").join(
        Content.assemble(
            (f"{sanitize_line(way.run.name):<{width}}  ", "bold"),
            (f"{glyphs.text('✓')} ", ink.good)
            if way.same == way.of
            else (f"{glyphs.text('✗')} ", ink.warn),
            verdict(way.verdict, glyphs, ink),
        )
        for way in ways
    )


def slices(kinds: Sequence[Kind], per_slice: int, glyphs: Glyphs, ink: Ink) -> Content:
    if not kinds:
        words = f"Enter runs {per_slice} prompts of each kind of text."
        return Content.assemble((words, ink.muted))
    head = f"{'':6}{'plain':>8}{'drafted':>9}{'p50':>9}{'p95':>9}"
    lines = [Content.assemble((head, ink.muted))]
    for kind in kinds:
        figures = (
            f"{rate(kind.plain):>8}{rate(kind.drafted):>9}"
            f"{duration(kind.p50_ms):>9}{duration(kind.p95_ms):>9}  "
        )
        said = verdict(kind.verdict, glyphs, ink, tokens=False)
        lines.append(Content.assemble((f"{kind.name:<6}", "bold"), (figures, ""), said))
    legend = "tokens a second; p50, p95: how long one waits for more text"
    return Content("\n").join([*lines, Content.assemble((legend, ink.muted))])


def lanes(companies: Sequence[Company], offer: str, glyphs: Glyphs, ink: Ink) -> Content:
    """Conversations at once; ``offer``: what Enter would do."""
    if not companies:
        return Content.assemble((offer, ink.muted))
    head = f"{'':4}{'plain':>8}{'':8}{'drafted':>8}{'each':>8}  same"
    lines = [Content.assemble((head, ink.muted))]
    for one in companies:
        known = one.gain.ratio is not None and one.lanes > 1
        gain = "" if not known else glyphs.text(f"{one.gain.ratio or 0.0:.2f}×")
        each = None if one.drafted is None else one.drafted / one.lanes
        mark = ("✓", ink.good) if one.same == one.of else ("✗", ink.warn)
        lines.append(
            Content.assemble(
                (f"{one.lanes:<4}", "bold"),
                f"{rate(one.plain):>8}",
                (f"{gain:>8}", ink.muted),
                f"{rate(one.drafted):>8}{rate(each):>8}  ",
                (f"{glyphs.text(mark[0]):<6}", mark[1]),
                verdict(one.verdict, glyphs, ink, tokens=False),
            )
        )
    legend = (
        f"tokens a second of so many at once, {glyphs.times} over one; each: of one of them, "
        "drafted; same: every text is that of one alone"
    )
    return Content("\n").join([*lines, Content.assemble((legend, ink.muted))])


def together(companies: Sequence[Company], glyphs: Glyphs, ink: Ink) -> Content:
    """What the most of them gain and cost, in a sentence."""
    most = companies[-1]
    return Content.assemble((glyphs.text(in_company(most.gain, most.lanes)), ink.accent))
