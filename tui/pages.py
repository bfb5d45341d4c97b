"""The pages opened from the chat, each with its opening and the effect of its answer.

The keymap names them. A page is imported when it is opened, so that the first frame comes early.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from textual.screen import Screen
from textual.widgets import OptionList

from specllama.interface import Message
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.text import sanitize_line
from specllama.tui.loader import Pair
from specllama.tui.looks import ThemedApp
from specllama.tui.record import Record
from specllama.tui.screens.base import Page
from specllama.tui.screens.chat import ChatScreen
from specllama.tui.widgets.sidebar import Sidebar

if TYPE_CHECKING:
    from specllama.tui.exports import Export
    from specllama.tui.lane_watch import LaneWatch
    from specllama.tui.screens.settings import SheetValues


@runtime_checkable
class Exporting(Protocol):
    """A screen with something on it that can be saved."""

    def exports(self) -> list[Export]: ...


class PagedApp(ThemedApp):
    """The app as the pages need it."""

    options: EngineOptions
    lanes: LaneWatch | None = None

    @property
    def chat(self) -> ChatScreen:
        raise NotImplementedError

    def action_reload(self) -> None:
        raise NotImplementedError

    def action_new_chat(self) -> None:
        raise NotImplementedError

    def resume_session(self, session: str) -> None:
        raise NotImplementedError

    def switch_model(self, pair: Pair | None) -> None:
        raise NotImplementedError


def show(app: PagedApp, screen: Screen[Any], then: Callable[[Any], None] | None = None) -> None:
    """Open a page; one that was opened with another function key gives way."""
    if len(app.screen_stack) > 1 and not isinstance(app.screen, ChatScreen):
        if type(app.screen) is type(screen):
            return
        if isinstance(app.screen, Page) and not app.screen.may_leave():
            return
        app.screen.dismiss(None)
    app.push_screen(screen, then)


def _help(app: PagedApp) -> None:
    from specllama.tui.screens.help import HelpScreen

    here, focus = app.screen, app.focused
    if isinstance(here, HelpScreen):
        return
    keys = [
        (app.get_key_display(one.binding), one.binding.description)
        for one in here.active_bindings.values()
        if one.node is not app and one.enabled and not one.binding.system
        if one.binding.description and not one.binding.action.startswith(("app.focus", "screen."))
    ]
    texts = [getattr(one, "HELP", "") or "" for one in (here, focus) if one is not None]
    server = bool(app.chat.loader.server)
    of_page = None if here is app.chat else keys
    show(app, HelpScreen(texts, of_page, app.prefs.keys, server=server))


def inspect(app: PagedApp, record: Record | None = None) -> None:
    """Open the rounds of a reply: of the given one, else of the one being written, else of the
    last."""
    from specllama.tui.exports import Circumstances
    from specllama.tui.screens.inspector import InspectorScreen

    chat = app.chat
    if _tells_no_rounds(app):
        return
    live = chat.live_record
    if record is None and live is not None:
        found: Record | None = live
    else:
        found = record if record is not None and record.rounds else chat.latest_record()
    others = [r for _, r in sorted(chat.records.items(), reverse=True) if r.rounds]
    found = found or Record("nothing generated yet")
    under = Circumstances(chat.loader.info, chat.session.params)
    show(app, InspectorScreen(found, others, follow=found.live, under=under))


def _tells_no_rounds(app: PagedApp) -> bool:
    """True if another engine writes here, which reports no rounds; show that then."""
    if (loader := app.chat.loader).foreign and loader.info is not None:
        words = f"{loader.info.device} does not tell its rounds: F6 shows what it counts"
        app.notify(words, markup=False)
    return loader.foreign


def race(app: PagedApp, index: int | None = None, *, tab: str = "race") -> None:
    """Open the page that shows whether drafting pays, on the question at or before message
    ``index``."""
    from specllama.tui.screens.race import RaceScreen

    chat, session = app.chat, app.chat.session
    if isinstance(app.screen, RaceScreen):
        app.screen.action_tab(tab)
        return
    if chat.busy and tab == "race":
        app.notify("A reply is being written: Esc stops it")
        return
    if _tells_no_rounds(app):
        return
    messages = session.messages[: None if index is None else index + 1]
    while messages and messages[-1].role != "user":
        messages = messages[:-1]
    head = [Message("system", session.system)] if session.system else []

    screen = RaceScreen(
        chat.board,
        chat.loader.host,
        chat.loader.info if chat.loader.ready else None,
        session.params,
        [*head, *messages] if messages else None,
        log=session.logs_rounds,
        tab=tab,
        busy=lambda: chat.busy,
    )

    def applied(chosen: GenerateParams | str | None) -> None:
        """Apply settings that won, or a method by its name."""
        if isinstance(chosen, str):
            chat.next_reply.action_use_method(chosen)
        elif chosen is not None:
            chat.set_params(chosen)
        chat.refresh_strip()

    show(app, screen, applied)


def _methods(app: PagedApp) -> None:
    race(app, tab="methods")


def _models(app: PagedApp) -> None:
    from specllama.tui.screens.models import ModelsScreen

    loader = app.chat.loader
    if loader.server:  # it was started with its pair
        _top(app)
        return
    downloads = app.chat.downloads
    screen = ModelsScreen(loader.wanted, app.options, downloads, loader.machine, app.prefs)
    show(app, screen, app.switch_model)


def _top(app: PagedApp) -> None:
    from specllama.tui.screens.top import TopScreen

    if app.lanes is None:
        app.notify("Lanes are a server's: specllama chat --remote URL shows them")
    else:
        show(app, TopScreen(app.lanes))


def _sessions(app: PagedApp) -> None:
    from specllama.tui.screens.sessions import SessionsScreen

    store, session = app.chat.store, app.chat.session
    sidebar = app.chat.query_one(Sidebar)
    if app.screen is app.chat and sidebar.display and not sidebar.has_focus_within:
        sidebar.query_one(OptionList).focus()
        return

    def chosen(found: str | None) -> None:
        if found is not None:
            app.resume_session(found)
        elif session.id is not None and session.id not in {
            s.id for s in store.summaries(limit=1000)
        }:
            # The conversation on the screen was deleted in the list.
            app.action_new_chat()

    show(app, SessionsScreen(store, session.id), chosen)


def _settings(app: PagedApp) -> None:
    from specllama.tui.screens.settings import SettingsScreen

    chat, loader = app.chat, app.chat.loader
    info = loader.info

    def changed(settings: SheetValues | None) -> None:
        if settings is None:
            return
        chat.set_params(settings.params)
        chat.session.system = settings.system
        if settings.options is not None and settings.options != app.options:
            app.options = settings.options
            if loader.possible:
                app.action_reload()
        app.save_prefs()
        chat.show_sidebar()
        app.theme = app.prefs.theme
        app.redraw()

    show(
        app,
        SettingsScreen(
            chat.session.params,
            None if loader.server else app.options,
            chat.session.system,
            app.prefs,
            {} if info is None else info.target.card,
            None if info is None else info.target.n_ctx,
        ),
        changed,
    )


def _export(app: PagedApp) -> None:
    """Save the screen's content, as documents and as a picture."""
    from specllama.tui.exports import Export
    from specllama.tui.pages import self_contained
    from specllama.tui.screens.export import ExportScreen

    screen = app.screen
    if isinstance(screen, ExportScreen):
        return
    picture = self_contained(app.export_screenshot(title="specllama"))
    exports = list(screen.exports()) if isinstance(screen, Exporting) else []
    name = type(screen).__name__.removesuffix("Screen")
    exports.append(Export("The screen", f"specllama {name}", {"svg": lambda: picture}))

    def saved(path: Path | None) -> None:
        if path is not None:
            app.notify(sanitize_line(str(path.absolute())), title="Saved", markup=False)

    app.push_screen(ExportScreen(exports), saved)


PAGES: Mapping[str, Callable[[PagedApp], None]] = MappingProxyType(
    {
        "help": _help,
        "inspector": inspect,
        "race": race,
        "methods": _methods,
        "models": _models,
        "top": _top,
        "sessions": _sessions,
        "settings": _settings,
        "export": _export,
    }
)


FONTS = re.compile(r"@font-face\s*\{[^}]*\}\s*")
UNFIT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]")  # XML has no way to write them
FONT = "font-family: Fira Code, "


def self_contained(svg: str) -> str:
    """Remove the fonts that a drawing of Rich or Textual would fetch: use the reader's own."""
    svg = FONTS.sub("", svg).replace(FONT, "font-family: ui-monospace, Menlo, Consolas, ")
    return UNFIT.sub("\ufffd", svg)
