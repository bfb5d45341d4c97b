"""F1: what this place is, and what every key does."""

from __future__ import annotations

from inspect import cleandoc

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.widgets import Footer, Static

from specllama.tui.keymap import ACTIONS
from specllama.tui.screens.base import Page

WORDS = """
accepted: a drafted token the target would have written too
rejected: a drafted token it would not have written, and the untested ones behind it
target token: the one the target adds each round, after a rejection or as a bonus
round: propose, verify, commit; every round yields accepted + 1 tokens
acceptance: accepted of all drafted tokens
window: how many tokens are drafted next
TTFT: time to first token: tokenize, read the prompt, first step
"""


class HelpScreen(Page):
    TITLE = "Help"

    def __init__(self, page_help: str, focus_help: str) -> None:
        super().__init__()
        self._texts = [cleandoc(t) for t in (page_help, focus_help) if t.strip()]

    def compose_page(self) -> ComposeResult:
        with VerticalScroll(id="help"):
            for text in self._texts:
                yield Static(text + "\n", markup=False)
            yield Static(self._keys(), markup=False)
            yield Static(Content.assemble(("\nWords", "bold $primary")), markup=False)
            yield Static(self._words(), markup=False)
        yield Footer()

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#help").focus()

    def _keys(self) -> Content:
        parts: list[tuple[str, str]] = [("Everywhere\n", "bold $primary")]
        for action in ACTIONS:
            keys = action.keys.replace(",", " ") or "-"
            slash = f"/{action.slash}" if action.slash else ""
            parts.append((f"{keys:>9}  ", "bold"))
            parts.append((f"{slash:<12}", self.ink.accent))
            parts.append((f" {action.help}\n", ""))
        parts += [
            (f"{'ctrl+p':>9}  ", "bold"),
            (f"{'':12} Everything, by name\n", ""),
            ("\nOn a message (Tab)\n", "bold $primary"),
            ("  e edit   r again   c continue   y copy   b copy code   i inspect", ""),
            ("   d as drafted   u undo\n", ""),
        ]
        return Content.assemble(*parts)

    def _words(self) -> Content:
        parts: list[tuple[str, str]] = []
        for line in WORDS.strip().splitlines():
            word, _, meaning = line.partition(":")
            parts += [(f"{word:>13}", "bold"), (f" {meaning}\n", "")]
        return Content.assemble(*parts)
