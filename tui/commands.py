"""The command palette: actions, methods and stored conversations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol, cast

from textual.app import App
from textual.command import DiscoveryHit, Hit, Hits, Provider

from specllama.errors import SpecllamaError
from specllama.store.sessions import SessionStore
from specllama.text import sanitize_line
from specllama.tui.keymap import ACTIONS
from specllama.tui.loader import EngineLoader
from specllama.tui.messages import ActionAsked

SESSIONS_LISTED = 30


class PaletteApp(Protocol):
    """The app for the palette: its lists and its actions."""

    loader: EngineLoader
    store: SessionStore

    def resume_session(self, session: str) -> Any: ...


class ActionCommands(Provider):
    async def discover(self) -> Hits:
        for label, action, help in _entries():
            yield DiscoveryHit(label, partial(_ask, self.app, action), help=help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for label, action, help in _entries():
            score = max(matcher.match(label), 0.8 * matcher.match(help))
            if score > 0:
                asked = partial(_ask, self.app, action)
                yield Hit(score, matcher.highlight(label), asked, help=help)


class MethodCommands(Provider):
    async def search(self, query: str) -> Hits:
        from specllama.tui.widgets.methods import choices

        matcher = self.matcher(query)
        app = cast(PaletteApp, self.app)
        for method in choices(app.loader.info):
            if not method.available:
                continue
            title = f"Draft with: {sanitize_line(method.label)}"
            if (score := matcher.match(title)) > 0:
                action = f"use_method({method.name!r})"
                yield Hit(score, matcher.highlight(title), partial(_ask, self.app, action))


class SessionCommands(Provider):
    async def search(self, query: str) -> Hits:
        app = cast(PaletteApp, self.app)
        matcher = self.matcher(query)
        try:
            found = app.store.summaries(limit=SESSIONS_LISTED)
        except SpecllamaError:
            return
        for summary in found:
            title = f"Resume: {sanitize_line(summary.title)}"
            if (score := matcher.match(title)) > 0:
                yield Hit(score, matcher.highlight(title), partial(app.resume_session, summary.id))


def _ask(app: App[Any], action: str) -> None:
    app.post_message(ActionAsked(action))


def _entries() -> Iterator[tuple[str, str, str]]:
    """Yield label, action and help of every action, and of every word that may follow it."""
    for one in ACTIONS:
        yield one.label, one.action, f"{one.help} ({one.keys})" if one.keys else one.help
        for word in one.words:
            yield f"{one.label}: {word}", f"{one.action}('{word}')", one.help
