"""The pages opened from the chat, and the palette of all actions, methods and conversations.

Each page has its opening here and the effect of its answer; the keymap names them. A page is
imported when it is opened, so that the first frame comes early.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from textual.app import SystemCommand
from textual.screen import Screen
from textual.widgets._toast import ToastRack

from specllama.errors import SpecllamaError
from specllama.files import write_new
from specllama.interface import Message
from specllama.paths import private_folder
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.text import sanitize_line
from specllama.tui import clipboard
from specllama.tui.keymap import ACTIONS
from specllama.tui.loader import Pair
from specllama.tui.record import Record
from specllama.tui.screens.chat_screen import ChatScreen
from specllama.tui.screens.page import Page
from specllama.tui.widgets.inked import ThemedApp

if TYPE_CHECKING:
    from specllama.tui.screens.settings_screen import SheetValues

SESSIONS_LISTED = 30  # in the palette


class PagedApp(ThemedApp):
    """An app with a chat and the pages that are opened from it; ``show_NAME`` opens one."""

    options: EngineOptions
    _chat: ChatScreen | None = None
    _exported: Sequence[Message] = ()  # the conversation as it was last saved to a file

    @property
    def chat(self) -> ChatScreen:
        assert self._chat is not None
        return self._chat

    # ------------------------------------------------------------------ conversations and models

    def action_reload(self) -> None:
        if self.chat.loader.possible:
            self.chat.when_idle(self.chat.loader.reload)
        else:
            self.notify("Choose a model first: F6", severity="warning")

    def switch_model(self, pair: Pair | None) -> None:
        if pair is not None:
            self.chat.when_idle(partial(self.chat.loader.switch, *pair))

    def resume_session(self, session: str) -> None:
        async def go() -> None:
            try:
                self.chat.session.load(session)
            except SpecllamaError as error:
                self.notify(error.message, severity="error", markup=False)
                return
            self.chat.take_back_queue()
            self.chat.params_changed()
            await self.chat.show_conversation()

        self.leaving(go)

    def action_new_chat(self) -> None:
        self.leaving(self._new_chat)

    def leaving(self, then: Callable[[], object]) -> None:
        """Stop the reply and do this; where the conversation would be lost, ask before it."""
        session, store = self.chat.session, self.chat.store

        def answered(path: str | None) -> None:
            if path == "" or (path and self._saved(Path(path).expanduser(), session.export())):
                self.chat.when_idle(then)

        def ask() -> None:
            if not store.lacks or session.messages in ([], self._exported):
                self.chat.when_idle(then)
                return
            from specllama.tui.screens.unkept_screen import UnkeptScreen

            why = sanitize_line(store.notices[-1]) if store.notices else "It is not stored yet."
            self.open(UnkeptScreen(str(clipboard.export_path(session.title, "md")), why), answered)

        self.chat.when_idle(ask)

    async def _new_chat(self) -> None:
        self.chat.take_back_queue()
        self.chat.session.clear()
        self.chat.session.system = self.prefs.system_prompt
        self.chat.params_changed()
        await self.chat.show_conversation()
        self.chat.prompt.focus()

    def get_system_commands(self, screen: Screen[Any]) -> Iterator[SystemCommand]:
        """Yield what the palette lists: every action, and every word that may follow it; for words
        that are typed also settings, methods and conversations."""
        from specllama.tui.screens.settings_screen import FIELDS
        from specllama.tui.widgets.race_tables import choices

        def asked(action: str) -> Callable[[], object]:
            return partial(self.run_action, f"ask({action!r})")

        for one in ACTIONS:
            help = f"{one.help} ({one.keys})" if one.keys else one.help
            label = f"{one.label} (/{one.slash})" if one.slash else one.label
            yield SystemCommand(label, help, asked(one.action))
            for word in one.words:
                act = asked(f"{one.action}('{word}')")
                yield SystemCommand(f"{label}: {word}", one.help, act)
        for field in FIELDS.values():
            title = f"Setting: {field.label or 'system prompt'}"
            yield SystemCommand(title, field.help, partial(self.show_settings, field.name), False)
        for method in choices(self.chat.loader.info):
            if method.available:
                title = f"Draft with: {sanitize_line(method.label)}"
                yield SystemCommand(title, "", asked(f"use_method({method.name!r})"), False)
        with suppress(SpecllamaError):
            for found in self.chat.store.summaries(limit=SESSIONS_LISTED):
                title = f"Resume: {sanitize_line(found.title)}"
                yield SystemCommand(title, "", partial(self.resume_session, found.id), False)

    # ------------------------------------------------------------------ pages

    def action_show(self, page: str) -> None:
        getattr(self, f"show_{page}")()

    def open(self, screen: Screen[Any], then: Callable[[Any], None] | None = None) -> None:
        """Open a page; one that was opened with another function key gives way."""
        if len(self.screen_stack) > 1 and not isinstance(self.screen, ChatScreen):
            if type(self.screen) is type(screen):
                return
            if isinstance(self.screen, Page) and not self.screen.may_leave():
                return
            self.screen.dismiss(None)
        self.push_screen(screen, then)

    def show_help(self) -> None:
        from specllama.tui.screens.help_screen import HelpScreen

        here, focus = self.screen, self.focused
        if isinstance(here, HelpScreen):
            return
        keys = [
            (self.get_key_display(one.binding), one.binding.description)
            for one in here.active_bindings.values()
            if one.node is not self and one.enabled and not one.binding.system
            if one.binding.description
            and not one.binding.action.startswith(("app.focus", "screen."))
        ]
        texts = [getattr(one, "HELP", "") or "" for one in (here, focus) if one is not None]
        server = bool(self.chat.loader.server)
        of_page = None if here is self.chat else keys
        self.open(HelpScreen(texts, of_page, self.prefs.keys, server=server))

    def show_inspector(self) -> None:
        """Open the rounds of a reply: of the one in focus, else of the one being written, else of
        the last."""
        from specllama.tui.screens.inspector_screen import InspectorScreen

        chat = self.chat
        if self._tells_no_rounds():
            return
        here, records = chat.here, chat.records
        asked = None if here is None else records.get(here.index) or records.get(here.index + 1)
        others = [r for _, r in sorted(records.items(), reverse=True) if r.rounds]
        first = chat.live_record if here is None else asked if asked and asked.rounds else None
        found = next(filter(None, [first, *others]), Record("nothing generated yet"))
        self.open(InspectorScreen(found, follow=found.live))

    def _tells_no_rounds(self) -> bool:
        """True if another engine writes here, which reports no rounds; show that then."""
        if (loader := self.chat.loader).foreign and loader.info is not None:
            words = f"{loader.info.device} does not tell its rounds: specllama top shows its counts"
            self.notify(words, markup=False)
        return loader.foreign

    def show_race(self, *, tab: str = "race") -> None:
        """Open the page that shows whether drafting pays, on the question of the message in focus,
        else on the last one."""
        from specllama.tui.screens.race_screen import RaceScreen

        chat, session = self.chat, self.chat.session
        if isinstance(self.screen, RaceScreen):
            self.screen.action_tab(tab)
            return
        if chat.busy and tab == "race":
            self.notify("A reply is being written: Esc stops it")
            return
        if self._tells_no_rounds():
            return
        asked = chat.question_before(None if chat.here is None else chat.here.index)
        head = [Message("system", session.system)] if session.system else []
        screen = RaceScreen(
            chat.board,
            chat.loader.host,
            chat.loader.info if chat.loader.ready else None,
            session.params,
            None if asked is None else [*head, *session.messages[: asked + 1]],
            tab=tab,
            busy=lambda: chat.busy,
        )

        def applied(chosen: GenerateParams | str | None) -> None:
            """Apply settings that won, or a method by its name."""
            if isinstance(chosen, str):
                chat.action_use_method(chosen)
            elif chosen is not None:
                chat.set_params(chosen)
            chat.refresh_strip()

        self.open(screen, applied)

    def show_methods(self) -> None:
        self.show_race(tab="methods")

    def show_models(self) -> None:
        from specllama.tui.screens.models_screen import ModelsScreen

        loader = self.chat.loader
        if loader.server:
            words = "The server was started with its pair; in a shell, specllama top shows its work"
            self.notify(words)
            return
        downloads = self.chat.downloads
        here = loader.info.here if loader.info is not None else ""
        machine, prefs = loader.machine, self.prefs
        screen = ModelsScreen(loader.wanted, self.options, downloads, machine, prefs, here)
        self.open(screen, self.switch_model)

    def show_sessions(self) -> None:
        from specllama.tui.screens.sessions_screen import SessionsScreen

        store, session = self.chat.store, self.chat.session

        def chosen(found: str | None) -> None:
            if found is not None:
                self.resume_session(found)
            elif session.id and all(s.id != session.id for s in store.summaries(limit=1000)):
                self.action_new_chat()  # the conversation on the screen was deleted in the list

        self.open(SessionsScreen(store, session.id), chosen)

    def show_settings(self, at: str = "") -> None:
        """Open the settings, at the field of that name."""
        from specllama.tui.screens.settings_screen import SettingsScreen

        if isinstance(self.screen, SettingsScreen):
            self.screen.go_to(at)
            return
        chat, loader, view = self.chat, self.chat.loader, self.prefs.view
        loaded = None if loader.info is None else loader.info.target

        def changed(settings: SheetValues | None) -> None:
            if settings is None:
                return
            chat.set_params(settings.params)
            chat.session.system = settings.system
            if settings.options is not None and settings.options != self.options:
                self.options = settings.options
                if loader.possible:
                    self.action_reload()
            self.save_prefs()
            if self.prefs.view != view:
                chat.call_next(chat.show_as, self.prefs.view)
            self.theme = self.prefs.theme
            self.redraw()

        self.open(
            SettingsScreen(
                chat.session.params,
                None if loader.server else self.options,
                chat.session.system,
                self.prefs,
                {} if loaded is None else loaded.card,
                None if loaded is None else loaded.n_ctx,
                at,
            ),
            changed,
        )

    def _picture(self) -> str:
        """Draw the page on top without what only passes over it."""
        toasts = self.screen.query(ToastRack).set(display=False)
        self.screen._refresh_layout()
        picture = self.export_screenshot(title="specllama")
        toasts.set(display=True)
        self.screen._refresh_layout()
        return picture

    def action_export(self, how: str = "") -> None:
        """Save the conversation to a new file, or a picture of the page on top."""
        session, screen = self.chat.session, self.screen
        how = how or ("md" if screen is self.chat and session.messages else "svg")
        try:
            if how == "svg":
                title = f"specllama {type(screen).__name__.removesuffix('Screen')}"
                text = self_contained(self._picture())
            else:
                title, text = session.title, session.export(cast(Literal["md", "json"], how))
        except SpecllamaError as error:
            self.notify(f"It cannot be saved: {error}", severity="error", markup=False)
        else:
            self._saved(clipboard.export_path(title, how), text)

    def _saved(self, path: Path, text: str) -> bool:
        """Write a new file, and show that or why not; return True if it is there."""
        try:
            private_folder(path.parent)
            write_new(path, text)
        except OSError as error:
            self.notify(f"It cannot be saved: {error.strerror}", severity="error", markup=False)
            return False
        if path.suffix != ".svg":
            self._exported = self.chat.session.messages
        self.notify(sanitize_line(str(path.absolute())), title="Saved", markup=False)
        return True


FONTS = re.compile(r"@font-face\s*\{[^}]*\}\s*")
UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # XML has no way to write them
FONT = "font-family: Fira Code, "


def self_contained(svg: str) -> str:
    """Remove the fonts that a drawing of Rich or Textual would fetch: use the reader's own."""
    svg = FONTS.sub("", svg).replace(FONT, "font-family: ui-monospace, Menlo, Consolas, ")
    return UNFIT.sub("\ufffd", svg)
