"""The command palette: actions, methods and stored conversations."""

from __future__ import annotations

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
    """What the palette lists, and what it asks for."""

    loader: EngineLoader
    store: SessionStore

    def resume_session(self, session: str) -> Any: ...


class ActionCommands(Provider):
    async def discover(self) -> Hits:
        for action in ACTIONS:
            yield DiscoveryHit(
                action.label,
                partial(_ask, self.app, action.action),
                help=_help(action.keys, action.help),
            )

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for action in ACTIONS:
            score = max(matcher.match(action.label), 0.8 * matcher.match(action.help))
            if score > 0:
                yield Hit(
                    score,
                    matcher.highlight(action.label),
                    partial(_ask, self.app, action.action),
                    help=_help(action.keys, action.help),
                )


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


def _help(keys: str, text: str) -> str:
    return f"{text} ({keys})" if keys else text
