"""Every way to draft: what it is, whether the loaded target can use it, a key to switch."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.widgets import Footer, OptionList
from textual.widgets.option_list import Option

from specllama.interface import MethodInfo
from specllama.text import sanitize_line
from specllama.tui.screens.base import Page


class MethodsScreen(Page):
    TITLE = "Ways to draft"
    HELP = """
    A method proposes tokens; the target decides, so all of them give the same text. Enter uses
    the method from the next reply on. What is not available says why.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Use", id="methods.use"),
    ]

    def __init__(self, methods: Sequence[MethodInfo], current: str) -> None:
        super().__init__()
        self.methods = list(methods)
        self.current = current

    def compose_page(self) -> ComposeResult:
        yield OptionList(id="methods", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        super().on_mount()
        options = self.query_one(OptionList)
        # What can be used stands first; the order is otherwise the engine's.
        self.methods.sort(key=lambda m: not m.available)
        for method in self.methods:
            options.add_option(Option(self._row(method), method.name))
        if self.methods:
            at = next((i for i, m in enumerate(self.methods) if m.name == self.current), 0)
            options.highlighted = at
            auto = "  auto chooses among them" if self.current == "auto" else ""
            n = sum(m.available for m in self.methods)
            self.set_title(self.TITLE or "", f"{n} of {len(self.methods)} available{auto}")
        else:
            self.set_title(self.TITLE or "", "load a model to see what it can use: F6")
        options.focus()

    def _row(self, method: MethodInfo) -> Content:
        ink, glyphs = self.ink, self.glyphs
        name = sanitize_line(method.label)
        mine = method.name == self.current
        style = "" if method.available else ink.muted
        width = max(30, self.app.size.width - 9)
        parts: list[tuple[str, str]] = [
            (f"{glyphs.bullet if mine else glyphs.ring} ", ink.accent if mine else ink.muted),
            (name, f"bold {style}".strip()),
        ]
        if mine:
            parts.append(("  in use", ink.good))
        elif not method.available:
            reason = f"  {sanitize_line(method.reason) or 'not available'}"
            if len(name) + len(reason) > width:
                reason = "\n  " + "\n  ".join(wrap(reason.strip(), width))
            parts.append((reason, ink.warn))
        lines = wrap(sanitize_line(method.description), width)
        parts.append(("\n  " + "\n  ".join(lines) + "\n", ink.muted))
        return Content.assemble(*parts)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self._use(self.methods[event.option_index])

    def action_choose(self) -> None:
        at = self.query_one(OptionList).highlighted
        if at is not None:
            self._use(self.methods[at])

    def _use(self, method: MethodInfo) -> None:
        if method.available:
            self.dismiss(method.name)
        else:
            reason = sanitize_line(method.reason) or "not available for this model"
            self.notify(f"{method.label}: {reason}", severity="warning", markup=False)
