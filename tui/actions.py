"""What keys, palette and slash commands do to the conversation on the screen."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from textual import work

from specllama import paths
from specllama.errors import SpecllamaError
from specllama.events import RoundDone
from specllama.params import GenerateParams
from specllama.tui import clipboard
from specllama.tui.parts import AppPart
from specllama.tui.reading import code_blocks
from specllama.tui.speedup import ENOUGH_PLAIN
from specllama.tui.state import VIEWS

PLAIN_TOKENS = 32
PLAIN_PROMPT = "Once upon a time there was a"


class ChatActions(AppPart):
    _measuring: threading.Event | None = None

    async def run_chat_action(self, action: str) -> None:
        """From the palette and slash commands: where the action lives does not matter."""
        name = action.partition("(")[0]
        owner: Any = self if hasattr(self, f"action_{name}") else self.chat
        await self.run_action(action, owner)

    async def action_cycle_view(self) -> None:
        chat = self.chat
        view = VIEWS[(VIEWS.index(chat.view) + 1) % len(VIEWS)]
        self.prefs.view = view
        self.save_prefs()
        await chat.set_view(view)
        words = {
            "text": "Replies as text",
            "drafted": "Replies as drafted",
            "ghosts": "Replies as drafted, with rejected drafts",
        }
        self.notify(words[view], timeout=2)

    def action_toggle_speculation(self) -> None:
        params = self.session.params
        self.set_params(params.replace(speculate=not params.speculate))
        state = "on" if self.session.params.speculate else "off"
        self.notify(f"Speculation is {state} from the next reply on", timeout=2)

    def action_toggle_rounds(self) -> None:
        self.prefs.show_rounds = not self.prefs.show_rounds
        self.save_prefs()
        self.chat.query_one("#rounds").display = self.prefs.show_rounds

    def action_stop(self) -> None:
        self.chat.action_stop()

    def action_new_chat(self) -> None:
        self.chat.when_idle(self._new_chat)

    async def _new_chat(self) -> None:
        self.session.clear()
        self.session.system = self.prefs.system_prompt
        await self.chat.show_conversation()
        self.chat.prompt.focus()

    def action_retry(self) -> None:
        self.chat.action_retry()

    def action_reseed(self) -> None:
        self.chat.action_reseed()

    def action_continue(self) -> None:
        self.chat.action_continue()

    def action_edit_last(self) -> None:
        self.chat.action_edit_last()

    def action_undo(self) -> None:
        self.chat.action_undo()

    def copy_text(self, text: str) -> None:
        self._copy(text)

    @work(thread=True, exit_on_error=False, group="copy")
    def _copy(self, text: str) -> None:
        said = clipboard.copy(text, lambda t: self.call_from_thread(self.copy_to_clipboard, t))
        self.call_from_thread(self.notify, said, timeout=3, markup=False)

    def copy_code(self, text: str) -> None:
        blocks = code_blocks(text)
        if blocks:
            self.copy_text(blocks[0])
        else:
            self.notify("There is no code block here", timeout=2)

    def _last_reply(self) -> str | None:
        return next(
            (m.content for m in reversed(self.session.messages) if m.role == "assistant"), None
        )

    def action_copy_reply(self) -> None:
        reply = self._last_reply()
        if reply is None:
            self.notify("There is no reply to copy yet", timeout=2)
        else:
            self.copy_text(reply)

    def action_copy_code(self) -> None:
        self.copy_code(self._last_reply() or "")

    def action_copy_chat(self) -> None:
        self.copy_text(self.session.export("md"))

    def action_export(self, form: str) -> None:
        if not self.session.messages:
            self.notify("There is nothing to export yet", timeout=2)
            return
        kind: Any = form
        path = clipboard.export_path(self.session.title, form)
        try:
            paths.private_folder(path.parent)
            path.write_text(self.session.export(kind), "utf-8", errors="replace")
        except OSError as error:
            reason = error.strerror or str(error)
            self.notify(f"{path}: {reason}", title="Not exported", severity="error", markup=False)
            return
        self.notify(str(path), title="Exported", markup=False)

    def action_measure_plain(self) -> None:
        if not self.engine_ready:
            self.notify("Load a model first")
            return
        self.chat.when_idle(self._measure_plain)

    def measure_fixed(self) -> None:
        """A window of fixed length never takes a plain step to be compared with: take some while
        the cache is empty and the user reads or types. A request that comes meanwhile waits for
        the few that a comparison needs."""
        params = self.session.params
        drafts = params.speculate and params.proposer != "none" and params.draft_max != 0
        if params.window == "fixed" and drafts:
            self._measure_plain(quiet=True)

    def _measure_plain(self, *, quiet: bool = False) -> None:
        self.stop_measuring()
        self._measuring = threading.Event()
        self._measure(self._measuring, quiet)

    def stop_measuring(self) -> None:
        if self._measuring is not None:
            self._measuring.set()  # looked at between two steps

    @work(thread=True, exit_on_error=False, group="measure")
    def _measure(self, hurry: threading.Event, quiet: bool) -> None:
        try:
            steps = self._plain_steps(hurry)
        except SpecllamaError as error:
            if not quiet:
                self.call_from_thread(self.notify, error.message, severity="error", markup=False)
            return
        self.call_from_thread(self._plain_measured, steps, quiet)

    def _plain_steps(self, hurry: threading.Event) -> list[float]:
        """Milliseconds of plain steps; no more than a comparison needs once ``hurry`` is set."""
        params = GenerateParams(
            max_tokens=PLAIN_TOKENS, speculate=False, proposer="none", seed=1, ignore_eos=True
        )
        steps: list[float] = []
        for event in self.host.generate(PLAIN_PROMPT, params):
            if isinstance(event, RoundDone) and event.index > 0:
                steps.append(event.verify_ms + event.other_ms)
            if hurry.is_set() and len(steps) >= ENOUGH_PLAIN:
                break
        return steps

    def _plain_measured(self, rounds: list[float], quiet: bool) -> None:
        for ms in rounds:
            self.chat.strip.meter.observe_plain(ms)
        self.chat.refresh_strip()
        if rounds and not quiet:
            speed = 1000 * len(rounds) / sum(rounds)
            self.notify(f"Plain decoding: {speed:.1f} tok/s over {len(rounds)} tokens")

    def action_editor(self) -> None:
        """Write the prompt in $EDITOR; the app waits with the terminal given back."""
        import shlex
        import subprocess
        import tempfile

        command = os.environ.get("VISUAL") or os.environ.get("EDITOR")
        if not command:
            self.notify("Set $EDITOR to write the prompt in your own editor")
            return
        prompt = self.chat.prompt
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prompt.md"
            path.write_text(prompt.full_text, "utf-8", errors="replace")
            try:
                with self.suspend():
                    subprocess.run([*shlex.split(command), str(path)], check=False)
                text = path.read_text("utf-8", errors="replace")
            except (OSError, ValueError) as error:
                self.notify(f"{command}: {error}", severity="error", markup=False)
                return
        prompt.put(text.rstrip("\n"))
