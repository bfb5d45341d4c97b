"""The prompt, in which a message is typed.

It has several lines, history and completion, names files, folds large pastes to a label and keeps
unsent text on disk.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar

from textual import events, work
from textual.binding import Binding, BindingType
from textual.document._document import Document
from textual.document._edit import Edit
from textual.message import Message
from textual.widgets import TextArea

from specllama.errors import PromptTooLong, SpecllamaError, UsageError
from specllama.replies import attach
from specllama.tui.messages import PromptSubmitted, StorageFailed
from specllama.tui.state import DraftFile, PromptHistory
from specllama.tui.widgets.above_prompt import Attached, Completions, complete

# The editor wraps and draws all of its text; with a megabyte, every key would be slow.
FOLD_PASTE_CHARS, FOLD_PASTE_LINES = 6000, 40
SAVE_AFTER_S = 0.4
UNDONE = 500  # changes that can be undone
Count = Callable[[str], int]
_LABEL = re.compile(r"\[pasted text #(\d+), [\d,]+ characters\]")


def types(event: events.Key) -> bool:
    """True if a key writes a character."""
    joins = unicodedata.category(event.character or " ") == "Cf"
    return joins or (event.is_printable and ("+" not in event.key or event.key == "+"))


class Editor(TextArea):
    """A text that can be undone from anywhere in it.

    Textual lays the text out before it moves the cursor off a line that is gone: so the cursor
    waits where it is valid before and after.
    """

    def _undo_batch(self, edits: Sequence[Edit]) -> None:
        self.move_cursor((0, 0), record_width=False)
        super()._undo_batch(edits)

    def _redo_batch(self, edits: Sequence[Edit]) -> None:
        self.move_cursor((0, 0), record_width=False)
        super()._redo_batch(edits)


class Prompt(Editor):
    HELP = """
    Enter sends. Ctrl+J (or Shift+Enter, where the terminal can tell it apart) starts a new line.
    Up and Down at the first and last line walk through what was sent before.
    A large paste becomes one label, and is sent as a whole. Ctrl+C or Esc twice empties the prompt,
    Ctrl+U takes out all before the cursor, Ctrl+Z brings it back.

    / in an empty prompt lists the commands. @ lists files: the text of @notes.md or @"my notes.md"
    goes with the message; @@ is an @ that names no file.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "ctrl+j,shift+enter,alt+enter", "newline", "New line", id="prompt.newline", show=False
        ),
        Binding("tab", "leave", "Messages", id="prompt.leave", show=False),
        Binding("ctrl+u", "delete_before", "Delete all before", id="prompt.empty", show=False),
        Binding("escape", "close_completions", "Close", show=False),
    ]

    class Left(Message):
        """A move of the focus to the conversation, by Tab."""

    def __init__(self, history: PromptHistory, draft: DraftFile) -> None:
        super().__init__(
            id="prompt",
            highlight_cursor_line=False,
            placeholder="Write a message",
            max_checkpoints=UNDONE,
        )
        self.cursor_blink = False  # an idle app must cost nothing
        # The editor's own use of function keys would hide the app's.
        for key in ("f6", "f7"):
            self._bindings.key_to_bindings.pop(key, None)
        self.sent_before = history
        self.draft = draft
        self.pastes: dict[str, str] = {}
        """What the text stands for: pastes by their number, and by "@name" the text of files."""
        self.completions, self.attached = Completions(self.take_completion), Attached(markup=False)
        self.n_ctx = 0  # tokens that the context holds, once a model is loaded
        self._count: Count | None = None
        self._tokens: dict[str, int | None] = {}
        """Of texts of files; None where they are being counted, or could not be."""
        self._closed_at: int | None = None  # where a completion begins that was closed
        self._at: int | None = None  # position in the history, None while writing anew
        self._before_history = ""
        self._dirty = False

    def on_mount(self) -> None:
        left = self.draft.load()
        if left.text:
            self.text, self.pastes = left.text, left.pastes
            self.move_cursor(self.document.end)
        if left.waiting:
            self.put_before(left.waiting)

    # ------------------------------------------------------------------ sending

    async def _on_key(self, event: events.Key) -> None:
        # Not a binding: those are looked up before keys still on their way to the editor, so
        # Enter would overtake the text of a fast typist.
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            self._look()  # the change by the key before may not have been told yet
            chosen = self.completions.chosen
            if (
                chosen is None
                or chosen.insert == self.text
                or (self.take_completion() and chosen.final)
            ):
                self.action_send()
            return
        if event.key == "question_mark" and not self.text:
            event.stop()
            event.prevent_default()
            await self.app.run_action("app.show('help')")
            return
        if unicodedata.category(event.character or " ") == "Cf":
            # Joiners of Persian, of Indic scripts and of emoji: Python calls them not printable.
            event.stop()
            event.prevent_default()
            self._replace_via_keyboard(event.character or "", *self.selection)
            return
        await super()._on_key(event)
        if event.character is not None and event.character.isspace():
            # Undo takes back a word, not everything typed in one go.
            self.history.checkpoint()

    # ------------------------------------------------------------------ completion

    @property
    def _document(self) -> Document:
        assert isinstance(self.document, Document)
        return self.document

    @property
    def _cursor(self) -> int:
        """The number of characters before the cursor."""
        return self._document.get_index_from_location(self.cursor_location)

    def _look(self) -> None:
        """Offer completions at the cursor, unless they were closed."""
        found = complete(self.text, self._cursor) if self.selection.is_empty else None
        if found is None or found.start != self._closed_at:
            self._closed_at = None
        self.completions.show(None if self._closed_at is not None else found)

    def take_completion(self) -> bool:
        """Put the chosen candidate into the text."""
        found, chosen = self.completions.completion, self.completions.chosen
        if found is None or chosen is None:
            return False
        start = self._document.get_location_from_index(found.start)
        self.move_cursor(self.replace(chosen.insert, start, self.cursor_location).end_location)
        self._look()
        return True

    def on_text_area_selection_changed(self) -> None:
        self._look()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Leave Esc to the app unless there is something to close."""
        return action != "close_completions" or self.completions.completion is not None

    def action_close_completions(self) -> None:
        if self.completions.completion is not None:
            self._closed_at = self.completions.completion.start
        self.completions.show(None)

    # ------------------------------------------------------------------ files

    def with_files(self, typed: str) -> str:
        """Return the message to send: the files that the text mentions, and the text.

        Raises:
            UsageError: one cannot be attached.
        """
        files: dict[str, str] = {}
        for mention in attach.mentions(typed):
            if self._wants(mention):
                files[mention.name] = self._read(mention.name)
        return attach.attach(typed, files)

    def put_message(self, message: str) -> None:
        """Replace the text by the typed text of a message, and keep the files it had."""
        typed, files = attach.again(message)
        self.put(typed)
        self.pastes |= {f"@{name}": text for name, text in files.items()}
        self._show_attached()

    def put_before(self, messages: Iterable[str]) -> None:
        """Put unsent messages before the text in the prompt."""
        typed, files = self.text, {n: text for n, text in self.pastes.items() if n[0] == "@"}
        self.put_message(attach.together(messages))
        self.pastes = files | self.pastes
        if typed.strip():
            self.insert(f"\n\n{typed}")

    def _wants(self, mention: attach.Mention) -> bool:
        known = f"@{mention.name}" in self.pastes
        return known or mention.means_a_file or attach.exists(mention.name)

    def _read(self, name: str) -> str:
        if f"@{name}" not in self.pastes:
            self.pastes[f"@{name}"] = attach.read(name, self.n_ctx)
        return self.pastes[f"@{name}"]

    @property
    def naming(self) -> bool:
        """True if the name of a file is being typed."""
        at = self._cursor
        return "@" in self.text and any(m.end == at for m in attach.mentions(self.text))

    def _show_attached(self) -> None:
        """Show a chip for every mentioned file, except for a name that is being typed."""
        text = self.text
        at = self._cursor
        chips: dict[str, tuple[str, str, bool]] = {}
        for mention in attach.mentions(text) if "@" in text else ():
            if mention.end != at and self._wants(mention):
                try:
                    chip = self._chip(mention.name, self._read(mention.name))
                except UsageError as error:
                    chip = mention.name, error.message, False
                chips[mention.name] = chip
        self.attached.show(list(chips.values()))

    def _chip(self, name: str, text: str) -> tuple[str, str, bool]:
        """Return a file's name, its size and tokens, and whether it can be sent."""
        if self._count is not None and text not in self._tokens:
            self._tokens[text] = None
            self._count_tokens(self._count, text)
        tokens = self._tokens.get(text)
        if tokens is not None and tokens > self.n_ctx > 0:
            words = f"at least {attach.tokens_of(tokens)}, and the context holds {self.n_ctx:,}"
            return name, f"{name} is too large: {words}", False
        return name, attach.summary(text, tokens), True

    def count_with(self, count: Count | None) -> None:
        """Set the loaded model's counting of tokens; None while none is loaded."""
        self._count = count
        self._tokens.clear()
        self._show_attached()

    @work(thread=True, exit_on_error=False, group="count")
    def _count_tokens(self, count: Count, text: str) -> None:
        try:
            tokens = count(text)
        except PromptTooLong as error:
            tokens = error.n_prompt or self.n_ctx + 1
        except SpecllamaError:
            return  # the estimate stays
        self.app.call_from_thread(self._counted, count, text, tokens)

    def _counted(self, count: Count, text: str, tokens: int) -> None:
        if count is self._count and self.is_attached:
            self._tokens[text] = tokens
            self._show_attached()

    def action_send(self) -> None:
        text = self.full_text
        if text.strip():
            self.post_message(PromptSubmitted(text))

    def sent(self) -> None:
        """Clear the prompt after its text was sent."""
        if not self.sent_before.add(self.full_text):
            self.app.post_message(StorageFailed("prompt history", str(self.sent_before.path)))
        self._tokens.clear()
        self._replace("")
        self.save_draft()

    @property
    def full_text(self) -> str:
        return _LABEL.sub(lambda m: self.pastes.get(m.group(1), m.group(0)), self.text)

    def put(self, text: str) -> None:
        """Replace the text, which undo brings back; long text is folded."""
        self._replace(self._fold(text))
        self.focus()

    def _replace(self, text: str) -> None:
        """Replace the text. Undo brings it back with its pastes, files are read again."""
        self.pastes = {name: text for name, text in self.pastes.items() if name.isdigit()}
        self._at = None
        self.history.checkpoint()
        self.replace(text, (0, 0), self.document.end)
        self.history.checkpoint()
        self.move_cursor(self.document.end)

    def action_newline(self) -> None:
        self.insert("\n")

    def action_delete_before(self) -> None:
        """Delete everything before the cursor, which undo brings back."""
        self.delete((0, 0), self.cursor_location)

    def empty(self) -> None:
        """Delete everything, which undo brings back."""
        self.clear()
        self.history.checkpoint()

    def action_leave(self) -> None:
        self._look()
        if not self.take_completion():
            self.post_message(self.Left())

    # ------------------------------------------------------------------ pasting

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        # Terminals send returns; editors, and models, expect newlines.
        text = event.text.replace("\r\n", "\n").replace("\r", "\n")
        self.move_cursor(self.replace(self._fold(text), *self.selection).end_location)

    def _fold(self, text: str) -> str:
        if len(text) <= FOLD_PASTE_CHARS and text.count("\n") < FOLD_PASTE_LINES:
            return text
        number = str(max(map(int, filter(str.isdigit, self.pastes)), default=0) + 1)
        self.pastes[number] = text
        return f"[pasted text #{number}, {len(text):,} characters]"

    # ------------------------------------------------------------------ history

    def action_cursor_up(self, select: bool = False) -> None:
        if self.completions.completion is not None:
            self.completions.move(-1)
        elif select or self.cursor_location[0] > 0 or not self._recall(-1):
            super().action_cursor_up(select)

    def action_cursor_down(self, select: bool = False) -> None:
        last = self.document.line_count - 1
        if self.completions.completion is not None:
            self.completions.move(1)
        elif select or self.cursor_location[0] < last or not self._recall(1):
            super().action_cursor_down(select)

    def _recall(self, step: int) -> bool:
        entries = self.sent_before.entries
        if self._at is None:
            if step > 0 or not entries:
                return False
            self._before_history = self.full_text
            at = len(entries) - 1
        else:
            at = self._at + step
            if at < 0:
                return False
        self.put(self._before_history if at >= len(entries) else entries[at])
        self._at = at if at < len(entries) else None
        return True

    # ------------------------------------------------------------------ unsent text

    def on_text_area_changed(self) -> None:
        self._look()
        self._show_attached()
        # A timer that is already running will save this change, too: no write per key.
        if not self._dirty:
            self._dirty = True
            self.set_timer(SAVE_AFTER_S, self.save_draft)

    def save_draft(self) -> None:
        self._dirty = False
        if not self.draft.save(self.text, self._used_pastes()):
            self.app.post_message(StorageFailed("unsent text", str(self.draft.path)))

    def _used_pastes(self) -> dict[str, str]:
        text = self.text
        used = _LABEL.findall(text) + [f"@{mention.name}" for mention in attach.mentions(text)]
        return {name: self.pastes[name] for name in used if name in self.pastes}

    def on_unmount(self) -> None:
        if self._dirty:
            self.draft.save(self.text, self._used_pastes())
