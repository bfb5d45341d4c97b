"""One turn of the conversation."""

from __future__ import annotations

from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Size
from textual.reactive import Reactive
from textual.widget import Widget
from textual.widgets import Collapsible, Markdown, Static

from specllama.events import Finished, RoundDone
from specllama.figures import rounding
from specllama.replies import attach
from specllama.text import WordCount, number_of, sanitize, sanitize_line
from specllama.tui import keymap
from specllama.tui.record import Record
from specllama.tui.widgets.drafted import DraftedView
from specllama.tui.widgets.inked import Inked, flow
from specllama.tui.widgets.markdown_parser import PlainGuard, parser

FOLD_CHARS = 3000
CHUNK_CHARS = 4000

Piece = tuple[str, str]
"""Words and their style."""

REASONS = {
    "cancelled": "stopped",
    "length": "token limit reached",
    "context": "context full",
    "error": "failed",
    "stop_string": "stop string",
}


class PlainText(Vertical):
    """Long text in chunks, so that an addition draws only the last chunk again."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._chunks: list[str] = []
        self._split(text)

    def compose(self) -> ComposeResult:
        for chunk in self._chunks:
            yield Static(chunk.removesuffix("\n"), markup=False)

    async def append(self, text: str) -> None:
        known = len(self._chunks)
        self._split(text)
        if known:
            list(self.query(Static))[known - 1].update(self._chunks[known - 1].removesuffix("\n"))
        await self.mount_all(
            Static(chunk.removesuffix("\n"), markup=False) for chunk in self._chunks[known:]
        )

    def _split(self, text: str) -> None:
        # A chunk ends at a line break, or where one line alone exceeds it.
        for line in text.splitlines(keepends=True):
            for start in range(0, len(line), CHUNK_CHARS):
                piece = line[start : start + CHUNK_CHARS]
                last = self._chunks[-1] if self._chunks else ""
                full = len(last) + len(piece) > CHUNK_CHARS and last.endswith("\n")
                if not self._chunks or full or len(last) > 4 * CHUNK_CHARS:
                    self._chunks.append(piece)
                else:
                    self._chunks[-1] += piece


class MessageView(Inked, Vertical, can_focus=True):
    """Base of the two kinds of turn; keys act on the focused one."""

    HELP = """
    Tab moves from the prompt into the conversation, Up and Down between messages, Esc back. What is
    typed goes to the prompt. Keys act on this message: Enter edits it, Ctrl+R writes the reply
    again, Ctrl+O copies, F3 inspects it, F4 races its question.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "app.ask('edit')", "Edit", id="turn.edit"),
        *keymap.message_bindings(),
        Binding("left", "app.ask('version(-1)')", "Former version", show=False),
        Binding("right", "app.ask('version(1)')", "Later version", show=False),
        Binding("up", "app.focus_previous", "Up", show=False),
        Binding("down", "app.focus_next", "Down", show=False),
    ]

    def __init__(self, index: int, text: str) -> None:
        super().__init__()
        self.index = index
        self.text = text
        self.version = (1, 1)
        self.walked = False  # its versions are the next that Alt+Left and Alt+Right go through
        self.name_line = Static(classes="name")

    def named(self, name: str, style: str) -> Content:
        """Return the line above a message: its writer, and its version of how many."""
        number, count = self.version
        parts = [(sanitize_line(name), style)]
        if count > 1:
            parts.append((f"  ‹{number}/{count}›", self.ink.accent))
            keys = " Left, Right" if self.has_focus else " Alt+Left, Alt+Right"
            parts += [(keys, self.ink.muted)] * (self.has_focus or self.walked)
        return Content.assemble(*parts)

    def heading(self) -> Content:
        raise NotImplementedError

    def show_version(self, number: int, count: int, walked: bool) -> None:
        self.version, self.walked = (number, count), walked
        self.redraw_name()

    @on(events.Mount)
    @on(events.Focus)
    @on(events.Blur)
    def redraw_name(self) -> None:
        self.name_line.update(self.heading())


class UserMessage(MessageView):
    def __init__(self, index: int, text: str) -> None:
        super().__init__(index, text)
        self.typed, self.files = attach.split(text)

    def compose(self) -> ComposeResult:
        yield self.name_line
        yield Static(self._shown(), markup=False, classes="said")

    def heading(self) -> Content:
        return self.named("You", "bold $secondary")

    def _shown(self) -> Content:
        typed, glyphs, muted = self.typed, self.glyphs, self.ink.muted
        said = [(sanitize(typed), "")]
        if len(typed) > FOLD_CHARS:
            rest = len(typed) - FOLD_CHARS // 3
            said = [(sanitize(typed[: FOLD_CHARS // 3]), "")]
            said.append((f" … {rest:,} more characters", muted))
        for name, text in self.files.items():
            lines = text.count("\n") + (not text.endswith("\n"))
            said.append((f"\n{glyphs.accepted} ", self.ink.accent))
            said.append((sanitize_line(name), "bold"))
            said.append((f"  {attach.size(text)}, {number_of(lines, 'line', ',')}", muted))
        return Content.assemble(*said)


class Body(Vertical):
    virtual_size = Reactive(Size(0, 0), repaint=False)


class AssistantMessage(MessageView):
    virtual_size = Reactive(Size(0, 0), repaint=False)

    def __init__(
        self,
        index: int,
        name: str,
        text: str = "",
        *,
        reasoning: str = "",
        record: Record | None = None,
        view: str = "text",
        live: bool = False,
        foot: str = "",
    ) -> None:
        super().__init__(index, text)
        self.speaker = name
        self.record = record or Record()
        self.view = view
        self.live = live
        self.foot = foot  # why it is not whole
        self.last = True  # no other follows it
        self.reasoning = reasoning
        self._guard = PlainGuard()
        self._count = WordCount()  # of the thought
        self._body, self._foot_line = Body(classes="body"), FootLine()
        self._thought: PlainText | None = None
        self._box: Collapsible | None = None  # folds the thought
        self._markdown: Markdown | None = None
        self._plain: PlainText | None = None
        self._drafted: DraftedView | None = None
        self._settled = ""
        self._last_block: Widget | None = None

    # ------------------------------------------------------------------ building

    def compose(self) -> ComposeResult:
        yield self.name_line
        yield self._body
        yield self._foot_line

    def heading(self) -> Content:
        return self.named(self.speaker, "bold $primary")

    def speak_as(self, name: str) -> None:
        """Show the name of the conversation's model."""
        self.speaker = name
        self.redraw_name()

    async def on_mount(self) -> None:
        self._body.styles.height = "auto"
        await self._build()
        self.redraw_foot()

    async def _build(self) -> None:
        body = self._body
        await body.remove_children()
        self._markdown = self._plain = self._drafted = self._last_block = None
        if self.view != "text" and self.record.rounds:
            self._drafted = DraftedView(ghosts=self.view == "ghosts")
            self._drafted.live = self.live
            self._drafted.load(self.record.rounds)
            await body.mount(self._drafted)
            return
        self._guard, self._count = PlainGuard(), WordCount()
        self._thought = self._box = None
        # Markdown must start empty: a widget made with text and then appended to garbles an
        # open code fence.
        self._markdown = Markdown(parser_factory=parser, open_links=False)
        await body.mount(self._markdown)
        await self._think(self.reasoning)
        await self._put(self.text)

    async def restart(self) -> None:
        """Continue the reply: stream into a fresh, empty widget that gets the old text."""
        self.foot = ""
        await self._build()
        self.redraw_foot()

    def _foot(self) -> list[Piece]:
        if self.foot:
            on = ": Ctrl+T continues, Ctrl+R writes it again" if self.last else ""
            return [(f"{self.foot}{on}", self.ink.muted)]
        if self.live:
            return [("▍", "$primary")]
        done = self.record.finished
        if done is None:
            return []
        if self.text or self.reasoning:
            return footer(self, done)
        return [("(the model ended at once)", self.ink.muted), *footer(self, done)]

    # ------------------------------------------------------------------ streaming

    async def stream(self, text: str, rounds: list[RoundDone], reasoning: str = "") -> None:
        """Add the text since the last flush."""
        self.text += text
        self.reasoning += reasoning
        if self.view != "text" and rounds and self._drafted is None:
            await self._build()
        elif self._drafted is not None:
            await self._drafted.extend(rounds)
        if self._drafted is None:
            await self._think(reasoning)
            await self._put(text)

    async def settle(self, text: str, reasoning: str = "", *, foot: str = "") -> None:
        """End the reply: draw it once more as a whole, without traces of streaming."""
        self.live = False
        self.foot = foot
        changed = (text, reasoning) != (self.text, self.reasoning)
        self.text, self.reasoning = text, reasoning
        if self._drafted is not None or changed:
            await self._build()
        else:
            self._name_thought()
            if self._markdown is not None and self._plain is None:
                shown = sanitize(text)
                if shown != self._settled:
                    await self._markdown.update(shown)
                    self._tighten()
                    self._settled = shown
        self.redraw_foot()

    def redraw_foot(self) -> None:
        self._foot_line.put(self._foot())

    async def _put(self, text: str) -> None:
        if not text:
            return
        safe = sanitize(text)
        if self._plain is not None:
            await self._plain.append(safe)
        elif self._guard.feed(safe):
            await self._go_plain(safe)
        elif self._markdown is not None:
            await self._markdown.append(safe)
        self._tighten()

    def _tighten(self) -> None:
        """Mark the last block, which needs no line below it.

        By hand: a rule with :last-child makes Textual match the styles of every block again
        whenever one is added, which costs more than all the rest of streaming.
        """
        children = self._markdown.children if self._markdown is not None else ()
        last = children[-1] if children else None
        if last is not self._last_block:
            if self._last_block is not None:
                self._last_block.remove_class("-last")
            if last is not None:
                last.add_class("-last")
            self._last_block = last

    async def _think(self, piece: str) -> None:
        """Add to the thought, which lies folded above the answer."""
        if not piece:
            return
        self._count.feed(piece)
        if self._thought is None:
            self._thought = PlainText(sanitize(piece))
            self._box = Collapsible(self._thought, title=self._thought_name(), collapsed=True)
            await self._body.mount(self._box, before=0)
        else:
            await self._thought.append(sanitize(piece))
        self._name_thought()

    def _name_thought(self) -> None:
        if self._box is not None:
            self._box.title = self._thought_name()

    def _thought_name(self) -> str:
        words = self._count.words
        verb = "thinking" if self.live and not self.text else "thought"
        return " · ".join((verb, number_of(words, "word", ","), "Alt+T unfolds it"))

    def fold(self) -> bool:
        """Fold or unfold the thought; return whether there is one."""
        if self._box is not None:
            self._box.collapsed = not self._box.collapsed
        return self._box is not None

    async def _go_plain(self, piece: str) -> None:
        assert self._markdown is not None
        self._plain = PlainText(self._markdown.source + piece)
        await self._markdown.remove()
        self._markdown = None
        note = "shown as plain text: too large for Markdown"
        await self._body.mount(Static(Content.assemble((note, self.ink.muted))), self._plain)

    # ------------------------------------------------------------------ views

    async def show_as(self, view: str) -> None:
        if view != self.view:
            self.view = view
            await self._build()

    async def on_markdown_link_clicked(self, event: Markdown.LinkClicked) -> None:
        """Show a model's link, and copy it if it is http(s); never open it."""
        event.stop()
        target = sanitize_line(event.href)
        if target.startswith(("http://", "https://")):
            self.app.copy_to_clipboard(target)
            self.notify(target, title="Link copied", markup=False)
        else:
            self.notify(target, title="Link", markup=False)


class FootLine(Inked, Widget):
    """Figures in a line that breaks between two of them, never within one."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Piece] = []

    def put(self, said: list[Piece]) -> None:
        self.said = said
        self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return max(1, len(self._lines(width)))

    def render(self) -> Content:
        return Content("\n").join(self._lines(self.content_size.width))

    def _lines(self, width: int) -> list[Content]:
        return flow(self.said, width, (" · ", self.ink.muted))


def footer(widget: Inked, done: Finished) -> list[Piece]:
    """Return the line below a finished reply, with the figures that the strip does not show."""
    ink = widget.ink
    tokens = "–" if done.tokens is None else done.tokens
    said = [(f"{tokens} token{'s' if tokens != 1 else ''}", ink.muted)]
    if (why := REASONS.get(done.reason)) is not None:
        said.insert(0, (why, ink.warn if done.reason != "stop_string" else ink.muted))
    if "seed" not in done.unknown:
        said.append((f"seed {done.seed}", ink.muted))
    if done.engine:
        said.append((sanitize_line(done.engine), ink.muted))
    words, seen = rounding(done)
    if words:
        said.append((words, ink.warn if seen else ink.muted))
    return said
