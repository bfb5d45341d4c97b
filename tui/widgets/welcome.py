"""The line at the top, and the welcome in an empty conversation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from specllama.models import catalog
from specllama.models.refs import NO_DRAFT
from specllama.text import count, sanitize_line, size
from specllama.tui.advice import guesses
from specllama.tui.loader import EngineLoader, loading_words
from specllama.tui.widgets.inked import Inked

SHORT = 24  # rows below which the least is said
ROOMY = 30  # and from which there are empty lines
HEADLINE = "Guess, check, keep: the same text, in fewer passes."


class TopBar(Inked, Widget):
    """The loaded pair, its exactness and its state."""

    def __init__(self, loader: EngineLoader, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.loader = loader

    @property
    def status(self) -> tuple[str, str]:
        """The state of the engine, and its ink."""
        loader, ink = self.loader, self.ink
        if loader.ready and loader.info is not None and loader.progress is None:
            return f"● {sanitize_line(loader.server or loader.info.device)}", ink.good
        if loader.wanted is None:
            return "○ no model: F6", ink.warn
        if loader.failed:
            return f"○ {'no server' if loader.server else 'not loaded'}", ink.bad
        if loader.resting:
            return f"○ {loader.resting}", ink.muted
        words = "connecting" if loader.server else loading_words(loader.progress)
        return f"○ {words}", ink.warn

    def _promise(self, exactness: str) -> Piece:
        """Name the effect of drafting on the text here; the doctor explains how it was measured."""
        if exactness.startswith("bitwise"):
            return "drafting: exact", self.ink.good
        if exactness.startswith("near-ties possible"):
            compared = "(not measured" not in exactness
            words = "exact up to rounding" if compared else "not compared yet"
            return f"drafting: {words}", self.ink.muted
        return sanitize_line(exactness), self.ink.muted

    def render(self) -> Content:
        loader, ink, width = self.loader, self.ink, self.content_size.width
        left: list[Piece] = [("specllama ", "bold $primary")]
        info = loader.info
        right = Content.assemble(self.status)
        room = width - right.cell_length - 1
        chip = Content("")
        if info is not None and loader.ready and guesses(info):
            chip = Content.assemble("  ", self._promise(info.exactness))
        if not loader.ready and loader.wanted is not None:
            # The pair that is loading, not the previous one.
            wanted = [ref for ref in loader.wanted if ref is not None and ref != NO_DRAFT]
            names = [sanitize_line(PurePath(ref).name.removesuffix(".gguf")) for ref in wanted]
            left.append((" + ".join(names), ink.muted))
        elif info is not None:
            left.append((sanitize_line(info.target.label), "bold"))
            if (draft := info.draft) is not None:
                used = Content.assemble(*left, chip).cell_length + 3
                whole = used + len(draft.label) <= room
                name = draft.label if whole else difference(draft.name, info.target.name)
                left.append((sanitize_line(f" + {name}"), ""))
        line = Content.assemble(*left)
        if line.cell_length + chip.cell_length <= room:
            line = Content.assemble(line, chip)
        if line.cell_length > room:
            line = line.truncate(max(0, room), ellipsis=True)
        gap = " " * max(1, width - line.cell_length - right.cell_length)
        return Content.assemble(line, gap, right)


def difference(name: str, other: str) -> str:
    """Return the words of a name that another one lacks: "0.5b" of a draft, next to its target."""
    mine, theirs = name.split("-"), other.split("-")
    for end in (0, -1):
        while len(mine) > 1 and theirs and mine[end] == theirs[end]:
            del mine[end], theirs[end]
    return "-".join(mine)


EXAMPLES = (
    "Why is the sky blue?",
    "Tell me a short story about a llama.",
    "Write a Python function that adds two numbers.",
)
BUNDLED_EXAMPLES = ("What is a draft model?", *EXAMPLES[1:])  # it knows little else
Piece = tuple[str, str]


def examples(loader: EngineLoader) -> tuple[str, ...]:
    """Return example questions for the wanted model."""
    return BUNDLED_EXAMPLES if loader.bundled else EXAMPLES


def next_example(text: str, loader: EngineLoader) -> str | None:
    """Return the text that Tab writes into a prompt that is empty or holds an example."""
    those = examples(loader)
    if text in those:
        return those[(those.index(text) + 1) % len(those)]
    return None if text.strip() else those[0]


def legend(widget: Inked) -> list[Piece]:
    """Explain the signs of the row of rounds."""
    ink, g = widget.ink, widget.glyphs
    return [
        (f"{g.accepted} ", ink.source("draft")),
        ("kept  ", ink.muted),
        (f"{g.rejected} ", ink.rejected),
        ("refused  ", ink.muted),
        (f"{g.target} ", ink.target),
        ("the target's own token\n", ink.muted),
    ]


def keys(widget: Inked, *lines: tuple[str, str]) -> list[Piece]:
    """Draw keys and their use, one pair a line."""
    pieces = [[(f"{key:>6}  ", "bold $primary"), (f"{words}\n", widget.ink.muted)]
              for key, words in lines]  # fmt: skip
    return [piece for line in pieces for piece in line]


def keys_in_rows(widget: Inked, width: int, lines: Sequence[tuple[str, str]]) -> list[Piece]:
    """Draw keys and their use, as many in a row as there is room for."""
    room = width - 8
    wide = max(len(key) + len(words) for key, words in lines) + 4
    columns = max(1, room // wide)
    if sum(len(key) + len(words) + 3 for key, words in lines) - 2 <= room:
        wide, columns = 0, len(lines)
    pieces: list[Piece] = []
    for i, (key, words) in enumerate(lines, 1):
        last = i % columns == 0 or i == len(lines)
        gap = "\n" if last else " " * max(wide - len(key) - len(words) - 1, 2)
        pieces += [(f"{key} ", "bold $primary"), (f"{words}{gap}", widget.ink.muted)]
    return pieces


KEYS = (
    ("F2", "replies as they were drafted"),
    ("F3", "a reply round by round"),
    ("F4", "does drafting pay here?"),
    ("F6", "other models"),
    ("F1", "every key"),
)
BRIEFLY = ("drafted", "rounds", "pays?", "models", "keys")
DEMONSTRATION_BRIEFLY = (
    "The bundled pair is too small to gain. This first chat drafts all the same: F9 ends that.\n"
)
DEMONSTRATION = (
    "The bundled pair is too small for a guess to pay. This first chat drafts all the same, to "
    "show it: F9 lets drafting switch itself off.\n"
)


def first_real() -> str:
    """Return words for the real model that is offered first."""
    pair = catalog.load()[catalog.FIRST]
    name = f"{pair.family} {count(pair.target.params)}"
    return f"{name}, {size(pair.bytes)}, {pair.licence}"


class Welcome(Inked, Static):
    """The view of an empty conversation: a greeting, questions to ask and keys; with the bundled
    pair, a real one that would be fast here.

    Args:
        recorded: what came of the reply that was played before, on the first launch.
    """

    def __init__(
        self, loader: EngineLoader, *, recorded: str | None = None, id: str | None = None
    ) -> None:
        super().__init__(id=id, markup=False)
        self.loader, self.recorded = loader, recorded

    def on_mount(self) -> None:
        self.redraw()

    def on_resize(self) -> None:
        self.call_after_refresh(self.redraw)  # it may need more lines than it was given just now

    def redraw(self) -> None:
        loader, ink = self.loader, self.ink
        height = self.app.size.height
        short, line = height < SHORT, "\n" if height >= ROOMY else ""
        parts: list[Piece] = [(f"{HEADLINE}\n{line}", "bold")]
        if not loader.possible:
            parts += [("F6 ", "bold $primary"), ("chooses a model to begin.\n", "")]
            self.update(Content.assemble(*parts))
            return
        if not short:
            parts += [*legend(self), (line, "")]
        asked = examples(loader)[: 1 if short else None]
        for i, example in enumerate(asked):
            first = ("Tab ", "writes: ") if i == 0 else ("    ", "        ")
            parts += [(first[0], "bold $primary"), (first[1], ink.muted), (f"{example}\n", "")]
        rows = list(KEYS)
        if short:
            rows = [(key, words) for (key, _), words in zip(KEYS, BRIEFLY, strict=True)]
        parts += [(line, ""), *keys_in_rows(self, self.app.size.width, rows), (line, "")]
        if loader.bundled:
            parts += self._of_the_bundled_pair(short=short)
        self.update(Content.assemble(*parts).rstrip())

    def _of_the_bundled_pair(self, *, short: bool) -> list[Piece]:
        """Explain why it drafts in vain, where drafting pays, and what to get for real work."""
        ink, parts = self.ink, list[Piece]()
        if self.recorded is not None:
            played = f"Recorded: {self.recorded}. " if self.recorded else ""
            parts.append((DEMONSTRATION_BRIEFLY if short else played + DEMONSTRATION, ""))
        parts += [
            ("Ctrl+L ", "bold $primary"),
            (f"gets {'' if short else 'a real model: '}{first_real()}\n", ink.muted),
        ]
        machine = self.loader.machine
        if (pair := machine.recommended()) is not None:
            lead = "" if short else "for real work here: "
            parts += [
                ("F6 ", "bold $primary"),
                (f"{lead}{pair.name}, {size(pair.bytes)} to download, ", ink.muted),
                (machine.judge(pair).speed, ink.muted),
            ]
        return parts
