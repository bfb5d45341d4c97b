"""Sampling, speculation and the system prompt of this conversation; the look of the app."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Footer, Input, Label, Static, TextArea

from specllama.errors import UsageError
from specllama.params import PROPOSERS, THINK, VERIFY_RULES, GenerateParams
from specllama.tui.screens.base import Page
from specllama.tui.state import VIEWS, Preferences

Parse = Callable[[str], Any]


def _maybe_int(text: str) -> int | None:
    return None if text.strip().lower() in ("", "none", "random", "auto") else int(text)


def _stops(text: str) -> tuple[str, ...]:
    r"""Stop strings apart by commas, with \n for a line break."""
    return tuple(s.strip().replace("\\n", "\n") for s in text.split(",") if s.strip())


@dataclass(frozen=True, slots=True)
class Setting:
    """One line of the form; ``sampling`` says which of the two dataclasses it belongs to."""

    name: str
    label: str
    hint: str
    parse: Parse
    sampling: bool = False


def _flag(text: str) -> bool:
    value = text.strip().lower()
    if value in ("yes", "y", "on", "true", "1"):
        return True
    if value in ("no", "n", "off", "false", "0"):
        return False
    raise ValueError("yes or no")


def _choice(*allowed: str) -> Parse:
    def parse(text: str) -> str:
        value = text.strip().lower()
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return value

    return parse


SETTINGS: tuple[Setting, ...] = (
    Setting("temperature", "temperature", "0 is greedy", float, True),
    Setting("top_k", "top-k", "0 is off", int, True),
    Setting("top_p", "top-p", "1 is off", float, True),
    Setting("min_p", "min-p", "0 is off", float, True),
    Setting("repeat_penalty", "repeat penalty", "1 is off", float, True),
    Setting("seed", "seed", "empty draws a new one", _maybe_int),
    Setting("max_tokens", "max tokens", "empty: until the context is full", _maybe_int),
    Setting("stop", "stop strings", "apart by commas", _stops),
    Setting("think", "thoughts", ", ".join(THINK), _choice(*THINK)),
    Setting("think_budget", "think at most", "tokens; empty: no bound", _maybe_int),
    Setting("on_full", "when full", "stop or shift", _choice("stop", "shift")),
    Setting("proposer", "drafting", ", ".join(PROPOSERS), _choice(*PROPOSERS)),
    Setting("draft_max", "draft at most", "tokens per round; empty: the pair decides", _maybe_int),
    Setting("draft_p_min", "draft while p over", "0 to 1", float),
    Setting("verify", "verification", ", ".join(VERIFY_RULES), _choice(*VERIFY_RULES)),
)
SPECULATION = 11  # where the second section begins
FLAGS = {  # answered with yes or no, by label
    "default-system": "for new chats too",
    "speculate": "draft",
    "exact": "exact rows only",
}


def _origin(name: str, params: GenerateParams, card: Mapping[str, float]) -> str:
    """Who chose a sampling field."""
    if name not in params.from_card:
        return "yours"
    return "the model's card" if name in card else "default"


def shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ", ".join(str(v).replace("\n", "\\n") for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


class SettingsScreen(Page):
    TITLE = "Settings"
    HELP = """
    Tab and Shift+Tab move between the fields. Esc goes back and keeps what was changed; a value
    that cannot be used is named at the bottom and has to be put right first, Ctrl+X drops all
    changes. A sampling field left empty is that of the model's card, or the default. Sampling and
    the system prompt are stored with the conversation.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Keep", id="settings.keep", priority=True),
        Binding("ctrl+x", "drop", "Drop changes", id="settings.drop", priority=True),
        Binding("down", "app.focus_next", "Next", show=False),
        Binding("up", "app.focus_previous", "Previous", show=False),
    ]

    AUTO_FOCUS = ""

    def __init__(
        self,
        params: GenerateParams,
        system: str,
        prefs: Preferences,
        card: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        self.params = params
        self.card = card or {}
        self.system = system
        self.prefs = prefs

    def compose_page(self) -> ComposeResult:
        with VerticalScroll(id="settings", can_focus=False):
            yield Label("System prompt", classes="section")
            yield TextArea(self.system, id="system", soft_wrap=True, tab_behavior="focus")
            yield from self._switch("default-system", bool(self.prefs.system_prompt))
            yield Label("Sampling", classes="section")
            for i, setting in enumerate(SETTINGS):
                if i == SPECULATION:
                    yield Label("Speculation", classes="section")
                    yield from self._switch("speculate", self.params.speculate, "F9")
                hint = setting.hint
                if setting.sampling:
                    hint += f" · {_origin(setting.name, self.params, self.card)}"
                yield from self._field(setting.name, setting.label, self._value(setting), hint)
            yield from self._switch("exact", self.params.exact, "bitwise, where the device allows")
            yield Label("Appearance", classes="section")
            themes = "nord, dracula, ansi-dark, ... (palette: Theme shows them)"
            yield from self._field("theme", "theme", self.prefs.theme, themes)
            yield from self._field("glyphs", "symbols", self.prefs.glyphs, "auto, unicode, ascii")
            yield from self._field("view", "replies", self.prefs.view, ", ".join(VIEWS))
            yield from self._field(
                "animation", "animation", self.prefs.animation, "auto, full, none"
            )
        yield Static(id="problem", markup=False)
        yield Footer()

    def _field(self, name: str, label: str, value: str, hint: str) -> ComposeResult:
        with Horizontal(classes="setting"):
            yield Label(label)
            yield Input(value, id=f"set-{name}")
            yield Static(hint, classes="hint", markup=False)

    def _switch(self, name: str, value: bool, hint: str = "yes or no") -> ComposeResult:
        return self._field(name, FLAGS[name], "yes" if value else "no", hint)

    def _value(self, setting: Setting) -> str:
        params = self.params.on_card(self.card)
        owner: object = params.sampling if setting.sampling else params
        return shown(getattr(owner, setting.name))

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one("#system", TextArea).cursor_blink = False
        self.query_one("#set-temperature").focus(scroll_visible=self.app.size.height < 24)

    @on(Input.Changed)
    def _typed(self) -> None:
        _, problem = self._read()
        self.query_one("#problem", Static).update(problem)

    def _text(self, name: str) -> str:
        return self.query_one(f"#set-{name}", Input).value

    def _read(self) -> tuple[GenerateParams | None, str]:
        """The parameters as typed, or the error in them."""
        sampling: dict[str, Any] = {}
        other: dict[str, Any] = {}
        for setting in SETTINGS:
            if setting.sampling and not self._text(setting.name).strip():
                sampling[setting.name] = None
                continue
            try:
                value = setting.parse(self._text(setting.name))
            except ValueError as error:
                reason = str(error) if str(error).startswith("one of") else "not a number"
                return None, f"{setting.label}: {reason}"
            (sampling if setting.sampling else other)[setting.name] = value
        for name, label in FLAGS.items():
            try:
                value = _flag(self._text(name))
            except ValueError as error:
                return None, f"{label}: {error}"
            if name != "default-system":
                other[name] = value
        try:
            params = self.params
            for name, value in sampling.items():
                # what was only shown stays where it came from
                if value != getattr(params.on_card(self.card).sampling, name):
                    params = params.choose(name, value)
            return params.replace(**other), self._look_problem()
        except UsageError as error:
            return None, error.message

    def _look_problem(self) -> str:
        theme = self._text("theme").strip()
        if theme not in self.app.available_themes:
            return f"theme: there is none named {theme!r}"
        for name, allowed in (
            ("glyphs", ("auto", "unicode", "ascii")),
            ("view", VIEWS),
            ("animation", ("auto", "full", "none")),
        ):
            if self._text(name).strip() not in allowed:
                return f"{name}: one of {', '.join(allowed)}"
        return ""

    def action_back(self) -> None:
        params, problem = self._read()
        if params is None or problem:
            self.query_one("#problem", Static).update(problem)
            self.app.bell()
            return
        prefs = self.prefs
        prefs.theme = self._text("theme").strip()
        prefs.glyphs = self._text("glyphs").strip()
        prefs.view = self._text("view").strip()
        prefs.animation = self._text("animation").strip()
        system = self.query_one("#system", TextArea).text.strip()
        prefs.system_prompt = system if _flag(self._text("default-system")) else ""
        self.dismiss((params, system))

    def action_drop(self) -> None:
        self.dismiss(None)
