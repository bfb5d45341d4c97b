"""The pages behind the function keys: what each is opened with, and what comes of it.

They are imported when they are opened, for the sake of the first frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from textual.screen import Screen

from specllama.errors import SpecllamaError
from specllama.params import GenerateParams
from specllama.session import Session
from specllama.tui.parts import AppPart
from specllama.tui.record import Record
from specllama.tui.screens.chat import ChatScreen


class Pages(AppPart):
    def _open(self, screen: Screen[Any], then: Callable[[Any], None] | None = None) -> None:
        # A function key pressed on another page replaces that page.
        if len(self.screen_stack) > 1 and not isinstance(self.screen, ChatScreen):
            if type(self.screen) is type(screen):
                return
            self.screen.dismiss(None)
        self.push_screen(screen, then)

    def action_help(self) -> None:
        from specllama.tui.screens.help import HelpScreen

        focus = getattr(self.focused, "HELP", "") if self.focused is not None else ""
        self._open(HelpScreen(getattr(self.screen, "HELP", "") or "", focus or "", self.prefs.keys))

    def action_inspector(self) -> None:
        self.inspect(None)

    def inspect(self, record: Record | None) -> None:
        from specllama.tui.screens.inspector import InspectorScreen

        chat = self.chat
        live = chat.live_record
        if record is None and live is not None:
            found: Record | None = live
        else:
            found = record if record is not None and record.rounds else chat.latest_record()
        others = [r for _, r in sorted(chat.records.items(), reverse=True) if r.rounds]
        following = live is not None and found is live
        found = found or Record("nothing generated yet")
        self._open(InspectorScreen(found, others, follow=following))

    def action_playground(self) -> None:
        from specllama.tui.screens.playground import PlaygroundScreen

        chat = self.chat
        done = [r.finished for _, r in sorted(chat.records.items()) if r.finished is not None]
        meter = chat.strip.meter
        timings = done[-1].timings if done else None
        self._open(PlaygroundScreen(meter.pair(), meter.speedup_by_length(), timings))

    def action_methods(self) -> None:
        from specllama.tui.screens.methods import MethodsScreen

        params = self.session.params
        now = params.proposer if params.speculate else "none"

        def chosen(name: str | None) -> None:
            if name is not None:
                self.use_method(name)

        self._open(MethodsScreen(self.engine_info, now), chosen)

    def action_models(self) -> None:
        from specllama.tui.screens.models import ModelsScreen

        self._open(ModelsScreen(self.wanted, self.options), self.switch_model)

    # ------------------------------------------------------------------ conversations

    def action_sessions(self) -> None:
        from specllama.tui.screens.sessions import SessionsScreen

        self._open(SessionsScreen(self.store, self.session.id), self._session_chosen)

    def _session_chosen(self, session: str | None) -> None:
        if session is not None:
            self.resume_session(session)
        elif self.session.id is not None and self.session.id not in {
            s.id for s in self.store.summaries(limit=1000)
        }:
            # The conversation on the screen was deleted in the list.
            self.action_new_chat()

    def resume_session(self, session: str) -> None:
        async def go() -> None:
            try:
                self.session.load(session)
            except SpecllamaError as error:
                self.notify(error.message, severity="error", markup=False)
                return
            self.set_params(self.session.params)
            await self.chat.show_conversation()

        self.chat.when_idle(go)

    def stored_stats(self, session: Session) -> dict[int, dict[str, Any]]:
        """The finish lines of stored replies, by message."""
        if session.id is None:
            return {}
        try:
            messages = self.store.get(session.id).messages
        except SpecllamaError:
            return {}
        return {i: m.stats for i, m in enumerate(messages) if m.stats is not None}

    # ------------------------------------------------------------------ settings

    def action_settings(self) -> None:
        from specllama.tui.screens.settings import SettingsScreen

        self._open(
            SettingsScreen(self.session.params, self.session.system, self.prefs),
            self._settings_changed,
        )

    def _settings_changed(self, result: tuple[GenerateParams, str] | None) -> None:
        if result is None:
            return
        params, system = result
        self.set_params(params)
        self.session.system = system
        self.save_prefs()
        self.glyph_choice = self.prefs.glyphs
        self.theme = self.prefs.theme
        self.redraw()
