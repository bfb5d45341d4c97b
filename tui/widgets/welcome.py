"""The line at the top, and what stands in an empty conversation."""

from __future__ import annotations

from pathlib import PurePath

from textual.content import Content
from textual.widget import Widget
from textual.widgets import Static

from specllama.models.refs import NO_DRAFT
from specllama.text import sanitize_line
from specllama.tui.loader import EngineLoader, loading_words
from specllama.tui.widgets.base import Inked

SHORT = 24  # rows below which there is no room for empty lines


class TopBar(Inked, Widget):
    """Which pair is loaded, how exact it is, and whether it is ready."""

    DEFAULT_CSS = """
    TopBar { height: 1; padding: 0 1; background: $panel; }
    TopBar:ansi { background: transparent; }
    """

    def __init__(self, loader: EngineLoader, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.loader = loader

    @property
    def status(self) -> tuple[str, str]:
        """The state of the engine, and its ink."""
        loader, ink, glyphs = self.loader, self.ink, self.glyphs
        if loader.ready and loader.info is not None:
            return f"{glyphs.bullet} {sanitize_line(loader.server or loader.info.device)}", ink.good
        if loader.wanted is None:
            return f"{glyphs.ring} no model: F6", ink.warn
        if loader.failed:
            return f"{glyphs.ring} {'no server' if loader.server else 'not loaded'}", ink.bad
        if loader.resting:
            return f"{glyphs.ring} {loader.resting}", ink.muted
        words = "connecting" if loader.server else loading_words(loader.progress)
        return f"{glyphs.ring} {words}", ink.warn

    def _promise(self, exactness: str) -> Piece:
        """What drafting does to the text here; how that was found out is the doctor's."""
        if exactness.startswith("bitwise"):
            return self.glyphs.text("same text ✓"), self.ink.good
        if exactness.startswith("near-ties possible"):
            return "same text up to rounding", self.ink.muted
        return sanitize_line(exactness), self.ink.muted

    def render(self) -> Content:
        loader, ink, width = self.loader, self.ink, self.content_size.width
        left: list[tuple[str, str]] = [("specllama ", "bold $primary")]
        info = loader.info
        right = Content.assemble(self.status)
        if not loader.ready and loader.wanted is not None:
            # The pair that is loading, not the previous one.
            wanted = [ref for ref in loader.wanted if ref is not None and ref != NO_DRAFT]
            names = [sanitize_line(PurePath(ref).name) for ref in wanted]
            left.append((" + ".join(names), ink.muted))
        elif info is not None:
            target = f"{info.target.name} {info.target.quantization}"
            left.append((sanitize_line(target), "bold"))
            if info.draft is not None:
                draft = f" + {info.draft.name} {info.draft.quantization}"
                left.append((sanitize_line(draft), ""))
        line = Content.assemble(*left)
        room = width - right.cell_length - 1
        if info is not None and loader.ready:
            chip = Content.assemble(("  ", ""), self._promise(info.exactness))
            if line.cell_length + chip.cell_length <= room:
                line = Content.assemble(line, chip)
        if line.cell_length > room:
            line = line.truncate(max(0, room), ellipsis=True)
        gap = " " * max(1, width - line.cell_length - right.cell_length)
        return Content.assemble(line, gap, right)


EXAMPLES = (
    "What is a draft model?",
    "Tell me a short story about a llama.",
    "Write a Python function that adds two numbers.",
)
Piece = tuple[str, str]


def next_example(text: str) -> str | None:
    """What Tab writes into a prompt that holds nothing, or an example."""
    if text in EXAMPLES:
        return EXAMPLES[(EXAMPLES.index(text) + 1) % len(EXAMPLES)]
    return None if text.strip() else EXAMPLES[0]


def legend(widget: Inked) -> list[Piece]:
    """What the signs of the row of rounds mean."""
    ink, g = widget.ink, widget.glyphs
    return [
        (f"{g.accepted} ", ink.source("draft")),
        ("kept  ", ink.muted),
        (f"{g.rejected} ", ink.rejected),
        ("refused  ", ink.muted),
        (f"{g.target} ", ink.target),
        ("the target's own token: the row below shows every round.\n", ink.muted),
    ]


def keys(widget: Inked, *lines: tuple[str, str]) -> list[Piece]:
    """Keys and what they do, one pair a line."""
    pieces = [[(f"{key:>6}  ", "bold $primary"), (f"{words}\n", widget.ink.muted)]
              for key, words in lines]  # fmt: skip
    return [piece for line in pieces for piece in line]


TRY = ("Tab", "writes an example to send; again, another one")


class Welcome(Inked, Static):
    DEFAULT_CSS = """
    Welcome { height: auto; padding: 1 2; }
    .-short Welcome { padding: 0 2; }
    """

    def __init__(self, *, model_chosen: bool, id: str | None = None) -> None:
        super().__init__(id=id, markup=False)
        self.model_chosen = model_chosen

    def on_mount(self) -> None:
        self.redraw()

    def on_resize(self) -> None:
        self.call_after_refresh(self.redraw)  # it may need more lines than it was given just now

    def redraw(self) -> None:
        short = self.app.size.height < SHORT
        line = "" if short else "\n"
        parts: list[Piece] = [
            (f"A draft guesses, the target checks: the same text.\n{line}", "bold"),
        ]
        if not self.model_chosen:
            parts += [("F6 ", "bold $primary"), ("chooses a model to begin.\n", "")]
            self.update(Content.assemble(*parts))
            return
        if not short:
            parts += [*legend(self), ("\n", "")]
        parts += keys(
            self,
            TRY,
            ("Enter", "sends, Ctrl+J starts a new line"),
            ("F2", "shows replies as they were drafted"),
            ("F3", "walks through a reply round by round"),
            ("F4", "answers whether drafting pays here"),
            ("Ctrl+P", "finds everything else, F1 explains the keys"),
        )
        self.update(Content.assemble(*parts).rstrip())
