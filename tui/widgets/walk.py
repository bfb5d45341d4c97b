"""One round drawn as it happened: the draft, the target's verdict, the committed tokens."""

from __future__ import annotations

from textual.content import Content

from specllama.events import RoundDone
from specllama.figures import depths
from specllama.text import number_of, sanitize, whole
from specllama.tui.record import fate_of, is_special
from specllama.tui.themes import Glyphs, Ink
from specllama.tui.widgets.drafted import written
from specllama.tui.widgets.stats_strip import duration

BAR = 10
STAGES = ("draft", "verify", "commit")
TOOK = (" ", " ", ", waiting ")  # before the time: a stage that takes none has the rest
TAIL_CHARS = 1000
WORDS = {"accepted": "kept", "rejected": "refused", "untested": "unread"}


def token_text(text: str) -> str:
    """Format a token for people: make its leading space and its line breaks visible."""
    shown = sanitize(text).replace("\n", "⏎").replace("\t", "→")
    if shown.startswith(" "):
        shown = "␣" + shown[1:]
    return shown or '""'


def number(value: float | None) -> str:
    """Format a number; "" if unknown."""
    return "" if value is None else f"{value:.2f}"


def headline(done: RoundDone, at: int, total: int, glyphs: Glyphs, ink: Ink) -> Content:
    label = glyphs.label(done.source) if done.drafted else "plain step"
    parts = [
        (f"Round {at + 1} of {total}", "bold"),
        ("   " + label, ink.source(done.source) if done.drafted else ink.muted),
    ]
    if done.window_reason:
        parts.append((f"   window {done.draft_max}: {sanitize(done.window_reason)}", ink.muted))
    if done.near_tie:
        parts.append(("   near-tie", ink.muted))
    return Content.assemble(*parts)


def passage(before: str, done: RoundDone, stage: int, ink: Ink, width: int, height: int) -> Content:
    """Draw the end of the text so far, and this round's tokens at their place in it."""
    new = "".join(done.drafted_text[i] for i in best_path(done)) + done.target_text
    end = "".join(whole([before[-TAIL_CHARS:]]))
    tail = last_lines(sanitize(end), width, height - line_count(new, width))
    if len(tail) < len(end) or len(before) > TAIL_CHARS:
        tail = "…" + tail
    parts: list[tuple[str, str]] = [(tail, ink.muted)]
    style = ink.source(done.source)
    if stage == 2:
        parts += written(done, ink, whole(done.emitted_text))
    else:
        fates = fate_of(done) if stage == 1 else ["drafted"] * len(done.drafted)
        for i in best_path(done):
            text, fate = sanitize(done.drafted_text[i]), fates[i]
            chip = {
                "drafted": f"reverse {style}",
                "accepted": f"underline {style}",
                "rejected": ink.ghosts[0],
                "untested": ink.ghosts[2],
            }[fate]
            parts.append((text, chip))
    parts.append(("▍", ink.accent))
    return Content.assemble(*parts)


def line_count(text: str, width: int) -> int:
    return sum(1 + len(line) // max(1, width) for line in text.split("\n"))


def last_lines(text: str, width: int, count: int) -> str:
    """Return the tail of the text that fills at most ``count`` lines of the screen."""
    kept: list[str] = []
    for line in reversed(text.split("\n")):
        need = 1 + len(line) // max(1, width)
        if need > count:
            if count > 0:
                kept.append(line[-(count * width - width // 4) :].lstrip())
            break
        kept.append(line)
        count -= need
    return "\n".join(reversed(kept))


def best_path(done: RoundDone) -> list[int]:
    """Extend the accepted path to a leaf: the one line of a tree that reads as text."""
    path = list(done.accepted_path)
    at = path[-1] if path else -1
    while True:
        below = [i for i, parent in enumerate(done.parents) if parent == at]
        if not below:
            return path
        at = below[0]
        path.append(at)


def stage_bar(done: RoundDone, stage: int, ink: Ink, width: int) -> Content:
    times = (done.draft_ms, done.verify_ms, done.waiting_ms)
    parts: list[tuple[str, str]] = []
    for i, (name, took, ms) in enumerate(zip(STAGES, TOOK, times, strict=True)):
        label = f" {i + 1} {name}{took}{duration(ms)} "
        parts.append((label, "bold reverse $primary" if i == stage else ink.muted))
        parts.append((" ", ""))
    room = width - sum(len(text) for text, _ in parts)
    total = sum(times)
    if room >= 12 and total > 0:
        for i, ms in enumerate(times):
            style = ink.accent if i == stage else ink.muted
            parts.append(("▇▆▅"[i] * round(ms / total * room), style))
    return Content.assemble(*parts)


def table(
    done: RoundDone, stage: int, glyphs: Glyphs, ink: Ink, width: int = 80, verify: str = "match"
) -> Content:
    """Draw every drafted node with its confidence, then p and q and the verdict, then the target
    token.

    A chain is a list; a tree hangs its branches on their parents. ``verify`` is the rule that
    judged.
    """
    style = ink.source(done.source)
    if not done.drafted:
        lines = [Content.assemble(("nothing was drafted in this round", ink.muted))]
        if stage == 2:
            lines += _target_lines(done, glyphs, ink, verify)
        return Content("\n").join(lines)
    tree = _tree(done)
    column = min(40, max(len("token"), *(len(name) for _, name in tree)))
    fates = fate_of(done)
    several = len(set(done.sources)) > 1
    known = [("conf", done.confidence)] if any(c is not None for c in done.confidence) else []
    if stage >= 1:
        known += [
            (n, v) for n, v in (("p", done.p), ("q", done.q)) if any(x is not None for x in v)
        ]
    bars = width >= column + 70
    head = f"{'':3} {'token':<{column}}"
    for name, _ in known:
        head += f"  {name:>5}" + (" " * (BAR + 1) if bars and name != "conf" else "")
    lines = [Content.assemble((head + ("  verdict" if stage >= 1 else ""), ink.muted))]
    for place, (i, text) in enumerate(tree, 1):
        mine = ink.source(done.sources[i]) if several else style
        letter = glyphs.source(done.sources[i]) if several else ""
        name = text if len(text) <= column else text[: column - 1] + "…"
        parts: list[tuple[str, str]] = [(f"{place:>3} ", ink.muted), (f"{name:<{column}}", mine)]
        for name, values in known:
            value = values[i]
            parts.append((f"  {number(value):>5}", ""))
            if bars and name != "conf":
                full, rest = glyphs.meter(value or 0.0, BAR)
                parts += [(" " + full, mine), (rest if value is not None else " " * BAR, ink.muted)]
        if stage >= 1:
            parts.append(("  ", ""))
            why = equation(done, i, fates[i], verify) or WORDS[fates[i]]
            inks = {"accepted": mine, "rejected": ink.rejected, "untested": ink.muted}
            parts.append((f"{getattr(glyphs, fates[i])} {why}", inks[fates[i]]))
        if letter:
            parts.append((f" {letter}", mine))
        lines.append(Content.assemble(*parts))
    if stage == 2:
        lines += _target_lines(done, glyphs, ink, verify)
    return Content("\n").join(lines)


def equation(done: RoundDone, i: int, fate: str, verify: str) -> str:
    """Explain by the rule why guess ``i`` was kept or refused; "" if it was not judged."""
    kept = fate == "accepted"
    p, q = done.p[i], done.q[i]
    if fate == "untested" or (verify != "match" and p is None):
        return ""
    if verify == "match":
        place = depths(done.parents)[i] - 1
        drew = done.emitted_text[place] if place < done.accepted else done.target_text
        return f"drew {token_text(drew)} {'✓' if kept else '✗'}"
    if verify == "rejection" and p is not None:
        if p == 0.0:
            return "p = 0 ✗"
        if done.parents.index(done.parents[i]) < i:
            return ""  # what the siblings before it left is unknown
        ratio = min(1.0, p / (q or 1.0))
        if kept and ratio == 1.0:
            return "p ≥ q ✓"  # whatever the coin says
        return f"u < p/q {ratio:.2f} ✓" if kept else f"u ≥ p/q {ratio:.2f} ✗"
    return ""


def cost(done: RoundDone) -> str:
    """Compare the round's time with that of plain decoding; "" if unknown."""
    if done.plain_ms is None or not done.emitted:
        return ""
    took, plain = done.took_ms, done.plain_ms * len(done.emitted)
    gain = f"saved {duration(plain - took)}" if plain > took else f"lost {duration(took - plain)}"
    written = number_of(len(done.emitted), "token")
    return f"{duration(took)} for {written}; plain {duration(plain)}: {gain}."


def _target_lines(done: RoundDone, glyphs: Glyphs, ink: Ink, verify: str) -> list[Content]:
    if len(done.emitted) == done.accepted:
        return [Content.assemble(("  + unused: a stop token came before it", ink.muted))]
    recovered = (
        "the target's own choice after a refused guess"
        if verify == "match"
        else "drawn from the residual: the target's law minus the draft's"
    )
    kind = {
        "recovered": f"recovered token: {recovered}",
        "bonus": "bonus token: every guess was kept, and the pass had one more row",
        "plain": "the target's own token",
    }[done.target_kind]
    if is_special(done.target_text):
        kind = "the reply ends here: a stop token is no part of the text"
    token = f"  {glyphs.target} {token_text(done.target_text)}"
    return [Content.assemble((token, ink.target), (f"  {kind}", ink.muted))]


def caption(done: RoundDone, stage: int, glyphs: Glyphs) -> str:
    """Describe this stage in one sentence."""
    n = len(done.drafted)
    if stage == 0:
        if not n:
            return "No draft: the target takes one plain step."
        who = glyphs.label(done.source)
        return f"{who[0].upper()}{who[1:]} proposes {number_of(n, 'token')}."
    if stage == 1:
        rows = number_of(n + 1, "row")
        return f"The target checks all of them in one pass of {rows}, and keeps {done.accepted}."
    if words := cost(done):
        return words
    kept = len(done.emitted)
    rolled = n - done.accepted
    back = f", {number_of(rolled, 'row')} rolled back" if rolled else ""
    return f"{number_of(kept, 'token')} committed for the price of one target pass{back}."


def _tree(done: RoundDone) -> list[tuple[int, str]]:
    """List the nodes depth first, so that every branch stands below its parent: the number and the
    text of each."""
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(done.parents):
        children.setdefault(parent, []).append(i)
    rows: list[tuple[int, str]] = []
    waiting = [(i, "") for i in children.get(-1, [])[::-1]]
    while waiting:
        i, indent = waiting.pop()
        is_last = children[done.parents[i]][-1] == i
        mark, below = ("└─", "  ") if is_last else ("├─", "│ ")
        if done.is_chain:
            mark = below = ""
        rows.append((i, indent + mark + token_text(done.drafted_text[i])))
        waiting.extend((child, indent + below) for child in children.get(i, [])[::-1])
    return rows
