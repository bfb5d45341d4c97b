"""Every action of the chat screen: its id, its keys, its names.

One table feeds the bindings, the palette, the slash commands and the help screen.

A key may be changed in the app's own settings (``tui.json`` in the configuration folder) under the
action's id: ``"keys": {"chat.retry": "f12"}``.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from textual.binding import Binding

from specllama.errors import UsageError
from specllama.settings.params import THINK

WIDE = 100  # columns: every function key is in the footer
BESIDE = 120  # columns: the panel stands alongside the conversation


@dataclass(frozen=True, slots=True)
class Action:
    id: str
    keys: str
    action: str
    """An action of the app or of its chat; ``show('NAME')`` opens a page."""
    label: str
    help: str
    slash: str = ""
    footer: int | None = None
    """The columns from which the chat's footer shows it."""
    priority: bool = True
    words: tuple[str, ...] = ()
    """What may follow the slash command; the action takes it."""


ACTIONS: tuple[Action, ...] = (
    Action("app.help", "f1", "show('help')", "Help", "What the keys do here", "help", 0),
    Action("chat.view", "f2", "cycle_view", "View",
           "Switch view: text, accepted guesses, all guesses", "view", 0),
    Action("app.inspector", "f3", "show('inspector')", "Inspect",
           "Step through the last reply round by round", "inspect", 0),
    Action("app.race", "f4", "show('race')", "Pays?",
           "Does drafting pay? Plain against drafted, and the methods", "race", 0),
    Action("app.methods", "f5", "show('methods')", "Methods",
           "Every method, and which of them this model can use"),
    Action("app.models", "f6", "show('models')", "Models",
           "Choose target and draft model, download others", "models", 0),
    Action("app.use_download", "ctrl+l", "use_download", "Use download",
           "Load the pair that was downloaded last; with the bundled pair, get a real model first"),
    Action("app.reload", "", "reload", "Load again",
           "Load the same pair again, after a failure or when its files changed"),
    Action("app.sessions", "f7", "show('sessions')", "Chats",
           "Search, resume, rename and delete conversations", "sessions", WIDE),
    Action("app.settings", "f8", "show('settings')", "Settings",
           "System prompt, sampling, context, drafting, appearance", "settings", 0),
    Action("chat.speculate", "f9", "toggle_speculation", "Drafting",
           "Turn drafting off and on; same seed, same text where the rule is match", "draft", WIDE),
    Action("chat.stop", "escape", "stop", "Stop", "Stop the reply and keep what is there",
           priority=False),
    Action("chat.new", "ctrl+n", "new_chat", "New chat", "Begin a new conversation", "new"),
    Action("chat.retry", "ctrl+r", "retry", "Again",
           "Write the last reply again with the same seed; /retry new takes another one", "retry",
           words=("new",)),
    Action("chat.continue", "ctrl+t", "continue", "Continue",
           "Continue the last reply where it ended", "continue"),
    Action("chat.answer", "alt+a", "answer_now", "Answer now",
           "End the thought and answer with what was thought so far", "answer"),
    Action("chat.think", "", "think", "Thoughts on/off",
           "Whether, or how hard, the model thinks: /think on, off, low, medium, high or auto",
           "think", words=THINK),
    Action("chat.reseed", "alt+r", "retry('new')", "New seed",
           "Write the last reply again with another seed"),
    Action("chat.edit", "", "edit", "Edit", "Change the last question and send it again", "edit"),
    Action("chat.undo", "alt+u", "undo", "Undo turn",
           "Take back the last question and its reply; Ctrl+Z brings them back", "undo"),
    Action("chat.thought", "alt+t", "thought", "Thought", "Fold or unfold the last thought",
           "thought"),
    Action("chat.version_back", "alt+left", "version(-1)", "Former version",
           "What was written before this question was edited or this reply written again"),
    Action("chat.version_on", "alt+right", "version(1)", "Later version",
           "Back to what was written later"),
    Action("chat.copy", "ctrl+o", "copy", "Copy",
           "Copy the last reply; /copy code its last code block, /copy chat the conversation",
           "copy", words=("code", "chat")),
    Action("chat.copy_code", "alt+o", "copy('code')", "Copy code",
           "Copy the last code block of the last reply"),
    Action("app.export", "ctrl+s", "export", "Save",
           "Save the conversation to a file, or a page as a picture; /export json, /export svg",
           "export", priority=False, words=("md", "json", "svg")),
    Action("chat.editor", "ctrl+g", "editor", "Editor", "Write the prompt in $EDITOR"),
    Action("chat.panel", "f12", "toggle_panel", "Figures",
           "Show live figures", "figures"),
    Action("app.quit", "ctrl+q", "quit", "Quit", "Leave; the conversation is kept", "quit"),
)  # fmt: skip
ON_MESSAGE = ("chat.retry", "chat.reseed", "chat.copy", "chat.copy_code")
_COMMAND = re.compile(r"/[A-Za-z][A-Za-z_-]*")
SLASH = {action.slash: action for action in ACTIONS if action.slash}


def bindings() -> list[Binding]:
    """Return the app's bindings: these keys work on every screen."""
    return [
        Binding(a.keys, f"ask({a.action!r})", a.label, show=False, id=a.id, priority=a.priority)
        for a in ACTIONS
        if a.keys
    ]


def chat_bindings() -> list[Binding]:
    """Return the bindings of the chat's footer; other screens show their own keys.
    ``Action.footer`` is the width it needs."""
    return [_listed(a, a.footer) for a in ACTIONS if a.footer is not None]


def message_bindings() -> list[Binding]:
    """Return what the footer shows of the keys that act on the message in focus."""
    return [_listed(a, 0) for a in ACTIONS if a.id in ON_MESSAGE]


def _listed(action: Action, columns: int) -> Binding:
    asked = f"screen.listed({action.action!r}, {columns})"
    return Binding(action.keys, asked, action.label, show=True, id=action.id, priority=True)


def slash_command(text: str) -> Action | None:
    """Return the action of "/undo" and the like; None for a message: anything else, paths included,
    and text that begins with "//".

    Raises:
        UsageError: it looks like a command, but there is none of that name, or it takes no words.
    """
    name, _, rest = text.strip().partition(" ")
    if not _COMMAND.fullmatch(name) or "\n" in text.strip():
        return None
    action = SLASH.get(name[1:].lower())
    literally = f"to send it as text, type /{name}"
    if action is None:
        near = difflib.get_close_matches(name[1:].lower(), SLASH, n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists them;"
        raise UsageError(f"there is no command {name}", f"{hint} {literally}")
    word = rest.strip().lower()
    if action.words and word:
        if word not in action.words:
            raise UsageError(f"{name} takes one of {', '.join(action.words)}", literally)
        return replace(action, action=f"{action.action}('{word}')")
    if word:
        raise UsageError(f"{name} takes no words", literally)
    return action
