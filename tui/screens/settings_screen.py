"""The settings as a sheet over the chat: the conversation, the model's context, the app's look."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Label, Select, Static, Switch, TextArea

from specllama.errors import UsageError
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.settings.setting import declared
from specllama.text import sanitize_line
from specllama.tui.screens.page import Page
from specllama.tui.state import VIEWS, Preferences
from specllama.tui.widgets.inked import Inked
from specllama.tui.widgets.prompt import Editor


class Toggle(Inked, Switch):
    """A switch whose states differ without color, too."""

    def render(self) -> Content:
        on = self.value
        bar, knob = "━━", "●" if on else "○"
        ink = self.ink.good if on else self.ink.muted
        track = f"{bar}{knob}" if on else f"{knob}{bar}"
        return Content.assemble((track, ink), (" on" if on else " off", "" if on else ink))


class Choose(Inked, Select[str], inherit_bindings=False):
    """A choice that Up and Down leave, as they leave every other field."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter,space", "show_overlay", "Open")]

    def __init__(self, options: tuple[str, ...], value: str, *, id: str | None = None) -> None:
        pairs = [(option, option) for option in options]
        super().__init__(pairs, value=value, allow_blank=False, compact=True, id=id)


Owner = Literal["params", "sampling", "load", "look", "sheet"]
Control = Input | Choose | Toggle | TextArea
RELOADS = "Saving loads the model again with it; the conversation stays."


def _maybe_int(text: str) -> int | None:
    return None if text.strip().lower() in ("", "none", "random", "auto") else int(text)


def _stops(text: str) -> tuple[str, ...]:
    r"""Stop strings apart by commas, with \n for a line break."""
    return tuple(s.strip().replace("\\n", "\n") for s in text.split(",") if s.strip())


@dataclass(frozen=True, slots=True)
class Field:
    """One line of the sheet.

    Attributes:
        help: shown while the field has the focus.
        owner: what it is an attribute of.
        parse: of a field that is typed; raises ValueError. None for a choice or a switch.
        choices: of a choice.
        empty: what an empty field stands for.
    """

    name: str
    label: str
    help: str
    owner: Owner = "params"
    parse: Callable[[str], Any] | None = None
    choices: tuple[str, ...] = ()
    empty: str = ""


CARD = "Empty follows the model's card, else the default."


def _of(name: str, label: str, help: str, owner: Owner = "params", *, empty: str = "") -> Field:
    """Make the field of a setting, whose declaration gives its type and choices."""
    one = declared(SETTINGS[owner])[name]
    parse: Callable[[str], Any] | None = None
    if one.kind != "bool" and not one.choices:
        whole = _maybe_int if one.default is None else int
        parse = {"int": whole, "float": float, "texts": _stops}.get(one.kind, str)
    return Field(name, label, help, owner, parse, tuple(one.choices), empty)


SETTINGS: dict[Owner, Any] = {
    "params": GenerateParams,
    "sampling": SamplingParams,
    "load": EngineOptions,
}
GROUPS: dict[str, tuple[Field, ...]] = {
    "System prompt": (
        Field("system", "", "What the model is told before every conversation.", "sheet"),
        Field("default_system", "use in new chats", "Begin new chats with it.", "sheet"),
    ),
    "Sampling": (
        _of("temperature", "temperature", f"0 is greedy. {CARD}", "sampling"),
        _of("top_k", "top-k", f"0 is off. {CARD}", "sampling"),
        _of("top_p", "top-p", f"1 is off. {CARD}", "sampling"),
        _of("min_p", "min-p", f"0 is off. {CARD}", "sampling"),
        _of("repeat_penalty", "repeat penalty", f"1 is off. {CARD}", "sampling"),
        _of("seed", "seed", "Empty draws a new one for each reply.", empty="random"),
    ),
    "Replies": (
        _of("max_tokens", "max tokens", "Empty: until the context is full.", empty="no limit"),
        _of("stop", "stop strings", "Apart by commas, \\n is a line break.", empty="none"),
        _of("think", "thoughts", "auto is the model's way; low to high say how hard."),
        _of("think_budget", "think at most", "Tokens; empty: no bound.", empty="no limit"),
    ),
    "Context": (
        _of("n_ctx", "context size",
            f"Tokens; empty: what fits, 0: the trained length. {RELOADS}", "load",
            empty="what fits"),
        _of("on_full", "when full", "stop ends the reply; shift forgets the oldest text."),
    ),
    "Drafting": (
        _of("speculate", "draft", "Off is plain decoding. F9 turns it on and off, too."),
        _of("proposer", "method", "auto mixes what the pair has; F4, 2 explains each."),
        _of("window", "draft window",
            "auto drafts as far as it was measured to pay; fixed always drafts the most."),
        _of("draft_max", "longest draft", "Tokens a round; empty: the pair decides.",
            empty="automatic"),
        _of("draft_p_min", "min. confidence",
            "Drafts end at a guess less sure than this, 0 to 1; 0 is off."),
        _of("verify", "verification",
            "match: same seed, same text. rejection and block: same distribution."),
        _of("exact", "the same bits",
            f"on: one kind of pass, drafted or not; a number: its most rows. {RELOADS}",
            "load"),
    ),
    "Appearance": (
        Field("theme", "theme", "Colors of the app.", "look"),
        Field("view", "replies", "As text, as drafted, or with the refused guesses. F2"
              " changes it for once.", "look", choices=tuple(VIEWS)),
        Field("animation", "animation", "none is best over slow connections.", "look",
              choices=("auto", "full", "none")),
    ),
}  # fmt: skip
FIELDS = {field.name: field for fields in GROUPS.values() for field in fields}


def shown(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, tuple):
        return ", ".join(str(v).replace("\n", "\\n") for v in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class SheetValues:
    """The values that the sheet changes: requests, the loading of models that are loaded here, the
    conversation's system prompt."""

    params: GenerateParams
    options: EngineOptions | None
    system: str


class Form(VerticalScroll, inherit_bindings=False, can_focus=False):
    """A form; Up and Down go to the next field, and the view follows."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down", "app.focus_next", "Next", show=False),
        Binding("up", "app.focus_previous", "Previous", show=False),
        Binding("pagedown", "page_down", "Page down", show=False),
        Binding("pageup", "page_up", "Page up", show=False),
    ]


class SettingsScreen(Page, ModalScreen[Any]):
    TITLE = "Settings"
    HELP = """
    Tab and Shift+Tab, Up and Down move between the fields; Space or Enter opens a choice and turns
    a switch. Ctrl+S saves and applies everything, Esc leaves without. Sampling and the system
    prompt are stored with the conversation; a context size holds until the app is closed
    (specllama config set ctx-size N keeps one).
    """

    HORIZONTAL_BREAKPOINTS = [(0, "-slim"), (56, "-narrow"), (100, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+s", "save", "Save", id="settings.save", priority=True),
        Binding("escape", "back", "Leave", id="page.back"),
    ]

    AUTO_FOCUS = ""

    def __init__(
        self,
        params: GenerateParams,
        options: EngineOptions | None,
        system: str,
        prefs: Preferences,
        card: Mapping[str, float] | None = None,
        n_ctx: int | None = None,
        at: str = "",
    ) -> None:
        super().__init__()
        self.card = card or {}
        self.params = params
        self.options = options
        self.system = system
        self.prefs = prefs
        self.n_ctx = n_ctx  # of what is loaded
        self._at = at
        self._warned = False
        self.fields = {  # a server's model was loaded when it was started
            field.name: field
            for field in FIELDS.values()
            if options is not None or field.owner != "load"
        }

    # ------------------------------------------------------------------ the form

    def compose(self) -> ComposeResult:
        with Vertical(id="sheet"):
            yield from super().compose()

    def compose_page(self) -> ComposeResult:
        with Form(id="settings"):
            for i, (title, fields) in enumerate(GROUPS.items()):
                yield Label(title, classes="section" if i else "section -first")
                for field in fields:
                    if field.name in self.fields:
                        yield from self._row(field)
        yield Static(id="setting-help", markup=False)

    def _row(self, field: Field) -> ComposeResult:
        if field.name == "system":
            yield Editor(self.system, id="system", soft_wrap=True, tab_behavior="focus")
            return
        with Horizontal(classes="setting"):
            yield Label(field.label)
            yield self._control(field)
            if origin := self._origin(field):
                yield Static(origin, classes="origin", markup=False)
        yield Static(id=f"problem-{field.name}", classes="problem", markup=False)

    def _control(self, field: Field) -> Control:
        value, id = self._held(field), f"set-{field.name}"
        if isinstance(value, bool):
            return Toggle(value, animate=False, id=id)
        choices = field.choices
        if field.name == "theme":
            choices = tuple(sorted(self.app.available_themes))
        if choices:
            return Choose(choices, value if value in choices else choices[0], id=id)
        return Input(value, placeholder=field.empty, id=id)

    def _held(self, field: Field) -> str | bool:
        """Return the value before any change, as its control holds it."""
        if field.name == "system":
            return self.system
        if field.name == "default_system":
            return bool(self.prefs.system_prompt)
        owner: object = {
            "params": self.params,
            "sampling": self.params.on_card(self.card).sampling,
            "load": self.options,
            "look": self.prefs,
        }[field.owner]
        value = getattr(owner, field.name)
        return value if isinstance(value, bool) else shown(value)

    def _origin(self, field: Field) -> str:
        """Return who chose a sampling field, or the size that an empty context size came to."""
        if field.name == "n_ctx":
            return "" if self.n_ctx is None else f"{self.n_ctx:,} now"
        if field.owner != "sampling":
            return ""
        if field.name not in self.params.from_card:
            return "yours"
        return "the model's card" if field.name in self.card else "default"

    def on_mount(self) -> None:
        self.query_one("#system", TextArea).cursor_blink = False
        self.query_one("#set-temperature").focus(scroll_visible=False)
        self.call_after_refresh(self.go_to, self._at)

    def go_to(self, name: str) -> None:
        """Give the focus to the field of that name, if it is one of these."""
        if name in self.fields:
            self.query_one(f"#{name}" if name == "system" else f"#set-{name}").focus()

    # ------------------------------------------------------------------ what is typed

    def _typed(self, field: Field) -> str | bool:
        control = self.query_one("#system" if field.name == "system" else f"#set-{field.name}")
        if isinstance(control, TextArea):
            return control.text
        assert isinstance(control, Input | Select | Switch)
        value = control.value
        return value if isinstance(value, bool) else str(value)

    @property
    def changed(self) -> list[Field]:
        """The fields that differ from their values before."""
        return [field for field in self.fields.values() if self._typed(field) != self._held(field)]

    def _read(self) -> tuple[SheetValues, dict[str, str]]:
        """Return the typed values, and the problems with them, by field."""
        params, options, problems = self.params, self.options, dict[str, str]()
        for field in self.changed:
            typed = self._typed(field)
            try:
                value: Any = typed
                if field.parse is not None:
                    assert isinstance(typed, str)
                    empty = field.owner == "sampling" and not typed.strip()
                    value = None if empty else field.parse(typed)
                match field.owner:
                    case "params":
                        params = params.replace(**{field.name: value})
                    case "sampling":
                        params = params.choose(field.name, value)
                    case "load":
                        assert options is not None
                        options = replace(options, **{field.name: value})
            except ValueError:
                kind = "a whole number" if field.parse in (int, _maybe_int) else "a number"
                problems[field.name] = f"{field.label} must be {kind}"
            except UsageError as error:
                problems[field.name] = sanitize_line(error.message)
        return SheetValues(params, options, str(self._typed(FIELDS["system"])).strip()), problems

    @on(Input.Changed)
    @on(TextArea.Changed)
    @on(Select.Changed)
    @on(Switch.Changed)
    def _edited(self) -> None:
        self._warned = False
        _, problems = self._read()
        for name in self.fields.keys() - {"system"}:
            line = self.query_one(f"#problem-{name}", Static)
            line.set_class(name in problems, "-wrong")
            line.update(problems.get(name, ""))
        n = len(self.changed)
        self.set_title("Settings", f"{n} changed" if n else "")
        self._say()

    @on(events.DescendantFocus)
    def _say(self) -> None:
        """Explain below the fields the one with the focus, or how to get out."""
        line = self.query_one("#setting-help", Static)
        line.set_class(self._warned, "-unsaved")
        if self._warned:
            n = len(self.changed)
            words = f"{n} change{'s' * (n > 1)} not saved"
            line.update(f"{words}: Ctrl+S saves, Esc again drops {'them' if n > 1 else 'it'}.")
            return
        around = [] if self.focused is None else self.focused.ancestors_with_self
        names = [(node.id or "").removeprefix("set-") for node in around]
        line.update(Content(next((FIELDS[name].help for name in names if name in FIELDS), "")))

    # ------------------------------------------------------------------ the ways out

    def may_leave(self) -> bool:
        """True if there are no unsaved changes; otherwise warn once."""
        if self._warned or not self.changed:
            return True
        self._warned = True
        self._say()
        self.app.bell()
        return False

    def action_save(self) -> None:
        found, problems = self._read()
        if problems:
            self.query_one(f"#set-{next(iter(problems))}").focus()
            self.app.bell()
            return
        for field in FIELDS.values():
            if field.owner == "look":
                setattr(self.prefs, field.name, self._typed(field))
        self.prefs.system_prompt = found.system if self._typed(FIELDS["default_system"]) else ""
        self.dismiss(found)
