"""Settings of the next reply: the method, thoughts, recorded chances."""

from __future__ import annotations

from collections.abc import Callable

from specllama.errors import UsageError
from specllama.tui.reading import code_blocks
from specllama.tui.screens.turn import TurnScreen

USUAL_DRAFTING = {"speculate": True, "proposer": "auto", "window": "auto", "draft_max": None}
DEMONSTRATION = 4  # guesses a round
LIKELIEST = 3  # tokens alongside each of the reply, on request


class NextReply:
    """Changes of a screen's parameters; its public actions are the keymap's."""

    def __init__(self, screen: TurnScreen) -> None:
        self._screen = screen

    def action_use_method(self, name: str) -> None:
        plain = name == "none"
        params = self._screen.session.params
        try:
            params = params.replace(speculate=not plain, proposer="auto" if plain else name)
        except UsageError as error:
            self._screen.notify(error.message, severity="error", markup=False)
            return
        self._screen.set_params(params)
        words = {"none": "plain decoding", "auto": "the method is chosen automatically"}
        self._screen.notify(f"Next reply: {words.get(name) or self._screen.glyphs.label(name)}")

    def action_toggle_speculation(self) -> None:
        session = self._screen.session
        if session.lent:
            session.lend(None)
            self._screen.params_changed()
            self._screen.notify("Drafting decides for itself from the next reply on", timeout=2)
            return
        params = self._screen.session.params
        self._screen.set_params(params.replace(speculate=not params.speculate))
        state = "off" if params.speculate else "on"
        self._screen.notify(f"Drafting is {state} from the next reply on", timeout=2)

    def action_think(self, how: str = "") -> None:
        params = self._screen.session.params
        how = how or ("auto" if params.think == "off" else "off")
        self._screen.set_params(params.replace(think=how))
        self._screen.notify(f"Thoughts: {how}, from the next reply on", timeout=2)

    def action_record_likeliest(self) -> None:
        params = self._screen.session.params
        asked = None if params.chances else LIKELIEST
        self._screen.set_params(params.replace(chances=asked))
        words = "are recorded" if asked else "are no longer recorded"
        self._screen.notify(f"The target's three likeliest tokens {words}, from the next reply on")

    def demonstrate(self) -> None:
        """Let the very first conversation draft where it does not pay, so that drafting is seen."""
        session = self._screen.session
        params = session.params
        if self._screen.loader.bundled and params == params.replace(**USUAL_DRAFTING):
            session.lend(params.replace(window="fixed", draft_max=DEMONSTRATION))


class Copying:
    """Copies of a screen's conversation, made with ``copy``."""

    def __init__(self, screen: TurnScreen, copy: Callable[[str], object]) -> None:
        self._screen = screen
        self._copy = copy

    def message(self, index: int) -> None:
        self._copy(self._screen.session.messages[index].content)

    def code(self, index: int) -> None:
        self._copy_code(self._screen.session.messages[index].content)

    def action_copy(self, what: str = "") -> None:
        """Copy the last reply, its last code block, or the conversation."""
        reply = self._last_reply()
        if what == "chat":
            self._copy(self._screen.session.export("md"))
        elif what == "code":
            self._copy_code(reply or "")
        elif reply is None:
            self._screen.notify("There is no reply to copy yet", timeout=2)
        else:
            self._copy(reply)

    def _copy_code(self, text: str) -> None:
        blocks = code_blocks(text)
        if blocks:
            self._copy(blocks[0])
        else:
            self._screen.notify("There is no code block here", timeout=2)

    def _last_reply(self) -> str | None:
        messages = reversed(self._screen.session.messages)
        return next((m.content for m in messages if m.role == "assistant"), None)
