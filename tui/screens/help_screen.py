"""F1, or a question mark: this place explained, and its keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from inspect import cleandoc
from textwrap import fill, wrap

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from specllama.tui.keymap import ACTIONS, Action
from specllama.tui.screens.page import Page
from specllama.tui.themes import Glyphs, Ink
from specllama.tui.widgets.inked import flow

PALETTE = Action("app.palette", "ctrl+p", "command_palette", "Palette", "Everything, by name")
ON_A_MESSAGE = (
    ("up down", "go between messages, Esc back to the prompt; what is typed goes there, too"),
    ("left right", "the version before an edit or a reply written again; the one after it"),
    ("enter", "edit and send again, or edit a reply and continue from there"),
    ("others", "of the keys above: they act on this message instead of the last one"),
)


def words() -> dict[str, str]:
    """Read what each word of the field means that a screen uses."""
    import tomllib

    return tomllib.loads((files("specllama.tui") / "words.toml").read_text("utf-8"))


def signs(glyphs: Glyphs, ink: Ink) -> list[tuple[str, str, str]]:
    """List sign, style and meaning: of the row of rounds, of replies as drafted, and the colors of
    the verdict, below replies, in the strip, the race and the inspector."""
    return [
        (glyphs.accepted, ink.source("draft"), "a guess that was kept, in its source's color"),
        (glyphs.rejected, ink.rejected, "a guess that was refused"),
        (glyphs.untested, ink.muted, "a guess behind a refused one, which was not read"),
        (glyphs.target, ink.target, "the target's own token, which ends every round"),
        ("word", f"underline {ink.source('draft')}", "F2: guessed and kept"),
        ("word", ink.target, "F2: the target's own"),
        ("word", ink.ghosts[0], "F2: guessed and refused"),
        ("1.3×", ink.verdict("faster"), "surely faster than plain; a round that won time"),
        ("0.8×", ink.verdict("slower"), "surely slower than plain; a round that lost time"),
        ("1.0×", ink.verdict("unsure"), "not sure yet, or drafting is off"),
        ("80%", ink.warn, "the context is nearly full"),
    ]


class HelpScreen(Page):
    """Help on the page that it was opened from.

    Args:
        texts: of the page, and of what has the focus there.
        keys: of the page. None: it is the chat, with its keys and commands.
        server: it is over one.
    """

    TITLE = "Help"

    def __init__(
        self,
        texts: Sequence[str],
        keys: Sequence[tuple[str, str]] | None,
        changed: Mapping[str, str],
        *,
        server: bool = False,
    ) -> None:
        super().__init__()
        self._keys, self._changed, self._server = keys, changed, server
        self._texts = [cleandoc(t) for t in texts if t.strip()]

    def compose_page(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            yield Static(id="help-text", markup=False)

    def on_mount(self) -> None:
        self.query_one("#help").focus()

    def on_resize(self) -> None:
        self.query_one("#help-text", Static).update(self._text(max(30, self.size.width - 8)))

    def _text(self, width: int) -> Content:
        parts: list[tuple[str, str] | Content] = []
        for text in self._texts:
            paragraphs = [" ".join(p.split()) for p in text.split("\n\n")]
            parts += [(f"{fill(p, width)}\n\n", "") for p in paragraphs]
        if self._keys is not None:
            parts += self._listed("Keys here", self._keys, width, 11)
        else:
            parts += self._of_chat(width)
        parts.append(("\nSigns and colors\n", "bold $primary"))
        for sign, style, meaning in signs(self.glyphs, self.ink):
            parts += [(" " * max(0, 9 - len(sign)), ""), (sign, style), ("  ", "")]
            parts.append((_hanging(meaning, width, 11), ""))
        parts += [*self._letters(width), ("\n", "")]
        return Content.assemble(*parts, *self._listed("Words", words().items(), width, 15))

    def _of_chat(self, width: int) -> list[tuple[str, str]]:
        """List nine keys, and a command for everything."""
        listed = [one for one in ACTIONS if one.slash != "models" or not self._server]
        keys = [
            (self._changed.get(one.id, one.keys).replace(",", " "), one.help)
            for one in (*(one for one in listed if one.footer is not None), PALETTE)
        ]
        commands = [(f"/{one.slash}", one.help) for one in listed if one.slash]
        return [
            *self._listed("Keys", keys, width, 11),
            *self._listed("\nOn a message (Tab goes there)", ON_A_MESSAGE, width, 11),
            *self._listed("\nCommands", commands, width, 11),
        ]

    def _listed(
        self, title: str, rows: Iterable[tuple[str, str]], width: int, indent: int
    ) -> list[tuple[str, str]]:
        parts = [(f"{title}\n", "bold $primary")]
        for term, meaning in rows:
            parts += [(f"{term:>{indent - 2}}  ", "bold"), (_hanging(meaning, width, indent), "")]
        return parts

    def _letters(self, width: int) -> list[Content]:
        """List the letters of the methods, one after the other."""
        glyphs, ink = self.glyphs, self.ink
        found = [
            Content.assemble(
                (glyphs.source(method.name), ink.source(method.name)), f" {method.short}"
            )
            for method in glyphs.methods
            if method.letter
        ]
        if not found:
            return []
        lines = flow([("who guessed:", ""), *found], width - 11)
        return [Content.assemble("  letters  ", Content("\n" + " " * 11).join(lines), "\n")]


def _hanging(text: str, width: int, indent: int) -> str:
    """Wrap the text to the right of its term, with a line break at the end."""
    lines = wrap(text, max(16, width - indent)) or [""]
    return ("\n" + " " * indent).join(lines) + "\n"
