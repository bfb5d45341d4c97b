"""The plain chat: lines in, text out. The accessible path, and the one for pipes.

Replies go to stdout; prompts, statistics and answers to commands go to stderr.
"""

from __future__ import annotations

import difflib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import cast

import click

from specllama import signals
from specllama.cancel import Cancel
from specllama.cli import diagnostics
from specllama.cli.lines import Lines, open_lines
from specllama.cli.output import wrapped
from specllama.cli.printer import Printer
from specllama.errors import SpecllamaError, UsageError
from specllama.events import Event
from specllama.files import write_new
from specllama.interface import EngineLike, Stepped
from specllama.replies import attach
from specllama.session import Session
from specllama.settings.config_file import apply_text
from specllama.store.sessions import SessionStore

COMMANDS: dict[str, tuple[str, str]] = {
    "help": ("", "Show these commands."),
    "system": ("[TEXT|none]", "Show or change the system prompt."),
    "retry": ("[new]", "Answer the last question again with its seed, or with a new one."),
    "undo": ("", "Take back the last question and its reply."),
    "continue": ("", "Continue the last reply."),
    "answer": ("", "End the thought of a stopped reply and answer now."),
    "think": ("[LEVEL]", "How hard the model thinks: on, off, low, medium, high or auto."),
    "edit": ("TEXT", "Change the last question and answer it."),
    "read": ("PATH", "Put a file's text into the next message."),
    "sessions": ("[WORDS]", "List stored conversations."),
    "new": ("", "Begin a new conversation."),
    "draft-max": ("N", "Most tokens drafted per round; 0 decodes plainly."),
    "proposer": ("NAME", "Method of drafting."),
    "seed": ("N|none", "Fix the random seed, or draw one for each reply."),
    "temperature": ("X", "0 always takes the likeliest token."),
    "quit": ("", "Leave (or Ctrl-D)."),
}
ALIASES = {"exit": "quit", "q": "quit", "?": "help", "temp": "temperature", "clear": "new"}


@contextmanager
def resting(engine: EngineLike) -> Iterator[None]:
    """Measure unknown figures of the model while the next message is typed; show them then."""
    if not getattr(engine, "unmeasured", False):
        yield
        return
    from specllama.backend.cores import Others
    from specllama.engine.serving import REST_S

    measured, typed, new = cast(Stepped, engine), Cancel(), not engine.info.exact_rows
    others = Others()

    def measure() -> None:
        if not (typed.wait(REST_S) or others.busy()):
            measured.measure(cancel=typed)

    thread = threading.Thread(target=measure, daemon=True)
    thread.start()
    try:
        yield
    finally:
        typed.set()
        thread.join()
    if new and engine.info.exact_rows:
        diagnostics.note(f"checked, once, what drafting changes here: {measured.info.exactness}")


class Repl:
    """A loop that reads messages and commands until the input ends.

    Args:
        session: the conversation.
        store: where others are kept.
        lines: where input comes from; standard input unless given.
        quiet: no statistics after replies.
        thoughts: how they are shown, see ``Printer``.
    """

    def __init__(
        self,
        session: Session,
        store: SessionStore,
        *,
        lines: Lines | None = None,
        quiet: bool = False,
        thoughts: str = "show",
    ) -> None:
        self.session = session
        self.store = store
        self.lines = lines or open_lines([f"/{name}" for name in COMMANDS])
        self.quiet = quiet
        self.thoughts = thoughts
        self._files: dict[str, str] = {}  # the next message carries them
        self._notes: set[str] = set()  # that were shown
        self._leaving = False
        self._failed = 0

    def run(self) -> int:
        """Exit code: 0, or in a pipe the code of the first turn that failed."""
        if self.lines.interactive:
            self._greet()
        while not self._leaving:
            try:
                with resting(self.session.engine):
                    text = self.lines.message()
            except KeyboardInterrupt:
                diagnostics.say("\n(Ctrl-D or /quit leaves)", diagnostics.DIM)
                continue
            if text is None:
                break
            if not text.strip():
                continue
            try:
                self._take(text)
            except SpecllamaError as error:
                code = diagnostics.report(error)
                self._failed = self._failed or code
            except signals.Interrupted as stopped:
                if stopped.code == diagnostics.Exit.TERMINATED or not self.lines.interactive:
                    raise
        self._offer_file()
        return 0 if self.lines.interactive else self._failed

    def _offer_file(self) -> None:
        """Offer a file for the conversation that ends, if the store does not hold it."""
        if not (self.store.lacks and self.session.messages):
            return
        diagnostics.warn("this conversation is not stored")
        while self.lines.interactive:
            path = click.prompt("save it to (Enter: no file)", "", show_default=False, err=True)
            try:
                if path:
                    write_new(Path(path).expanduser(), self.session.export())
                return
            except OSError as error:
                diagnostics.report(error)

    # ---- messages

    def _take(self, text: str) -> None:
        if text.startswith("//"):
            said = text[2:].strip().lower()
            text = text[2:] if said in ("exit", "quit") else text[1:]
        elif text.startswith("/"):
            self._command(text[1:])
            return
        elif self.lines.interactive and text.strip().lower() in ("exit", "quit"):
            word = text.strip().lower()
            diagnostics.note(f"to leave: /{word} or Ctrl-D; to send the word: //{word}")
            return
        if self._files:
            named = " ".join(map(attach.named, self._files))
            text, self._files = attach.attach(f"{named} {text}", self._files), {}
        self._reply(lambda cancel: self.session.send(text, cancel=cancel))

    def _reply(self, ask: Callable[[Cancel], Iterator[Event]]) -> None:
        """Print one reply; Ctrl-C stops it and keeps the text so far."""
        cancel = Cancel()
        with signals.stop_on_signals(cancel) as received:
            Printer(quiet=self.quiet, thoughts=self.thoughts, known=self._notes).show(ask(cancel))
        if received:
            if self.lines.interactive:
                diagnostics.note(self._how_to_go_on())
            raise signals.Interrupted(received[0])

    def _how_to_go_on(self) -> str:
        last = self.session.messages[-1] if self.session.messages else None
        if last is not None and last.reasoning and not last.content:
            return "stopped; /continue thinks on, /answer ends the thought, /retry asks again"
        return "stopped; /continue writes on, /retry asks again"

    def _greet(self) -> None:
        info = self.session.engine.info
        pair = info.target.name
        if info.draft is not None:
            pair += f" + {info.draft.name}"
        diagnostics.note(f"{pair} on {info.device}, {info.exactness} · /help lists commands")
        if self.session.messages:  # of a loaded conversation, its end
            diagnostics.note(f"“{self.session.title}”, {len(self.session.messages)} messages")
        for message in self.session.messages[-2:]:
            diagnostics.say(f"{message.role}: {message.content}")

    # ---- commands

    def _command(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        name = ALIASES.get(name.lower(), name.lower())
        if name not in COMMANDS:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean /{near[0]}?" if near else "/help lists them."
            raise UsageError(
                f"there is no command /{name}", f"{hint} To send it as text, type //{name}"
            )
        handler: Callable[[str], None] = getattr(self, "_do_" + name.replace("-", "_"))
        handler(rest.strip())

    def _do_help(self, rest: str) -> None:
        left = max(len(name) + len(usage) for name, (usage, _) in COMMANDS.items()) + 5
        room = (diagnostics.width() or 10_000) - left
        for name, (usage, text) in COMMANDS.items():
            lines = wrapped(text, room).replace("\n", "\n" + " " * left)
            diagnostics.say(f"  /{name} {usage}".ljust(left) + lines)
        diagnostics.say('  Several lines: end a line with \\, or put """ before and after.')
        diagnostics.say("  Ctrl-C stops a reply and keeps it; Ctrl-D leaves.")

    def _do_system(self, rest: str) -> None:
        if rest:
            self.session.system = "" if rest.lower() == "none" else rest
        diagnostics.say(f"system prompt: {self.session.system or 'none'}")

    def _do_retry(self, rest: str) -> None:
        if rest not in ("", "new"):
            raise UsageError("/retry takes nothing, or: new", "/retry new takes another seed")
        self._reply(lambda cancel: self.session.retry(new_seed=rest == "new", cancel=cancel))

    def _do_continue(self, rest: str) -> None:
        self._reply(lambda cancel: self.session.continue_reply(cancel=cancel))

    def _do_answer(self, rest: str) -> None:
        self._reply(lambda cancel: self.session.continue_reply(answer=True, cancel=cancel))

    def _do_think(self, rest: str) -> None:
        self._set("think", rest or "on")

    def _do_undo(self, rest: str) -> None:
        diagnostics.say(f"took back: {self.session.undo()}")

    def _do_edit(self, rest: str) -> None:
        roles = [message.role for message in self.session.messages]
        if "user" not in roles:
            raise UsageError("there is nothing to edit yet")
        index = len(roles) - 1 - roles[::-1].index("user")
        if not rest:
            raise UsageError("/edit takes the new question", "Up brings the last one back")
        self._reply(lambda cancel: self.session.edit(index, rest, cancel=cancel))

    def _do_read(self, rest: str) -> None:
        name = attach.unquoted(rest)
        if not name:
            raise UsageError("/read takes a path", "for example: /read notes.md")
        self._files[name] = attach.read(name, self.session.engine.info.target.n_ctx)
        said = attach.summary(self._files[name])
        diagnostics.say(f"{name}: {said}; it goes with your next message")

    def _do_sessions(self, rest: str) -> None:
        found = self.store.summaries(query=rest, limit=20)
        if not found:
            diagnostics.say("no stored conversation" + (f" has “{rest}”" if rest else " yet"))
        for one in found:
            mark = "*" if one.id == self.session.id else " "
            diagnostics.say(f"{mark} {one.id}  {one.messages:>3} messages  {one.title}")

    def _do_new(self, rest: str) -> None:
        self._offer_file()
        self.session.clear()
        diagnostics.say("new conversation")

    def _do_quit(self, rest: str) -> None:
        self._leaving = True

    def _set(self, name: str, text: str) -> None:
        if not name or not text:
            raise UsageError("a value is missing", "see /help")
        self.session.params = apply_text(self.session.params, name, text)
        diagnostics.say(f"{name} = {text}")

    _do_draft_max = partialmethod(_set, "draft-max")
    _do_proposer = partialmethod(_set, "proposer")
    _do_seed = partialmethod(_set, "seed")
    _do_temperature = partialmethod(_set, "temperature")
