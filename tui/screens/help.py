"""F1: what this place is, and what every key does."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import cleandoc
from textwrap import fill, wrap

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Static

from specllama.tui import legend
from specllama.tui.keymap import ACTIONS, Action
from specllama.tui.screens.base import Page
from specllama.tui.widgets.keys import Keys

WORDS = """
kept: a guess that the target would have written too; files and JSON say accepted
refused: a guess that it would not have written
unread: a guess behind a refused one, which the target had no use for
target token: the one the target adds each round, behind the guesses that it kept
tokens a pass: what one pass of the target yields; plain decoding yields one
1.29× faster (1.21–1.37): the truth lies between in 9 of 10 cases; a busy machine widens it
waiting: neither drafting nor verifying: sampling, drawing, pipes, other conversations
plain step: one pass of the target for one token, timed in the same minutes
round: guess, check, keep; every round yields the kept guesses and one token more
acceptance: how many of all guesses were kept
window: how many guesses are made next
TTFT: time to first token: tokenize, queue, read the prompt, first step
"""


PALETTE = Action("app.palette", "ctrl+p", "command_palette", "Palette", "Everything, by name")
ON_A_MESSAGE = (
    ("up down", "go between messages, Esc back to the prompt"),
    ("e", "edit and send again, or edit a reply and continue from there"),
    ("r  s", "write the reply again, with its seed or a new one"),
    ("c", "continue the last reply where it ended"),
    ("y  x", "copy the message, or its last code block"),
    ("b", "race its question: plain against drafted"),
    ("i", "inspect it round by round"),
    ("t", "fold or unfold its thought"),
    ("d", "show it as drafted"),
    ("u", "undo the last turn"),
    ("alt+left", "the version before an edit or a reply written again; alt+right goes on"),
)


class HelpScreen(Page):
    TITLE = "Help"

    def __init__(self, page_help: str, focus_help: str, changed: Mapping[str, str]) -> None:
        super().__init__()
        self._changed = changed
        self._texts = [cleandoc(t) for t in (page_help, focus_help) if t.strip()]

    def compose_page(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            yield Static(id="help-text", markup=False)
        yield Keys()

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#help").focus()

    def on_resize(self) -> None:
        super().on_resize()
        self.query_one("#help-text", Static).update(self._text(max(30, self.size.width - 8)))

    def _text(self, width: int) -> Content:
        parts: list[tuple[str, str]] = []
        for text in self._texts:
            paragraphs = [" ".join(p.split()) for p in text.split("\n\n")]
            parts += [(f"{fill(p, width)}\n\n", "") for p in paragraphs]
        parts.append(("Signs and colours\n", "bold $primary"))
        for sign, style, meaning in [
            *legend.signs(self.glyphs, self.ink),
            *legend.colours(self.glyphs, self.ink),
        ]:
            parts += [(" " * max(0, 9 - len(sign)), ""), (sign, style), ("  ", "")]
            parts.append((_hanging(meaning, width, 11), ""))
        parts += self._letters(width)
        parts.append(("\nKeys\n", "bold $primary"))
        for action in (*ACTIONS, PALETTE):
            keys = self._changed.get(action.id, action.keys).replace(",", " ")
            slash = f"/{action.slash}" if action.slash else ""
            parts += [(f"{keys:>9}  ", "bold"), (f"{slash:<12} ", self.ink.accent)]
            parts.append((_hanging(action.help, width, 24), ""))
        parts.append(("\nOn a message (Tab goes there)\n", "bold $primary"))
        for keys, what in ON_A_MESSAGE:
            parts += [(f"{keys:>9}  ", "bold"), (_hanging(what, width, 11), "")]
        parts.append(("\nWords\n", "bold $primary"))
        for line in WORDS.strip().splitlines():
            word, _, meaning = line.partition(": ")
            parts += [(f"{word:>13}  ", "bold"), (_hanging(meaning, width, 15), "")]
        return Content.assemble(*parts)

    def _letters(self, width: int) -> list[tuple[str, str]]:
        """The letters of the methods, one after the other."""
        found = legend.letters(self.glyphs, self.ink)
        if not found:
            return []
        parts: list[tuple[str, str]] = [("  letters  who guessed:", "")]
        used = len(parts[0][0])
        for letter, style, name in found:
            need = len(letter) + len(name) + 3
            if used + need > width:
                parts.append(("\n" + " " * 9, ""))
                used = 9
            parts += [("  ", ""), (letter, style), (f" {name}", "")]
            used += need
        return [*parts, ("\n", "")]


def _hanging(text: str, width: int, indent: int) -> str:
    """The text wrapped to the right of its term, with a line break at the end."""
    lines = wrap(text, max(16, width - indent)) or [""]
    return ("\n" + " " * indent).join(lines) + "\n"
