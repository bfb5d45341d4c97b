"""The command palette: actions, methods and stored conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

from textual.command import DiscoveryHit, Hit, Hits, Provider

from specllama.errors import SpecllamaError
from specllama.text import sanitize_line
from specllama.tui.keymap import ACTIONS
from specllama.tui.messages import ActionAsked
from specllama.tui.pages import PagedApp

SESSIONS_LISTED = 30


Found = tuple[str, Callable[[], object], str | None]
"""Words, their action, and help."""


class Palette(Provider):
    """Every action of the keymap, by name; for words that are typed also methods and chats."""

    async def discover(self) -> Hits:
        for label, act, help in self._actions():
            yield DiscoveryHit(label, act, help=help)

    async def search(self, query: str) -> Hits:
        matcher = self.matcher(query)
        for label, act, help in (*self._actions(), *self._methods(), *self._sessions()):
            score = max(matcher.match(label), 0.8 * matcher.match(help or ""))
            if score > 0:
                yield Hit(score, matcher.highlight(label), act, help=help)

    @property
    def _app(self) -> PagedApp:
        return cast(PagedApp, self.app)

    def _asked(self, action: str) -> Callable[[], object]:
        return lambda: self._app.post_message(ActionAsked(action))

    def _actions(self) -> Iterator[Found]:
        """Yield every action, and every word that may follow it."""
        for one in ACTIONS:
            help = f"{one.help} ({one.keys})" if one.keys else one.help
            yield one.label, self._asked(one.action), help
            for word in one.words:
                yield f"{one.label}: {word}", self._asked(f"{one.action}('{word}')"), one.help

    def _methods(self) -> Iterator[Found]:
        from specllama.tui.widgets.race_tables import choices

        for method in choices(self._app.chat.loader.info):
            if method.available:
                title = f"Draft with: {sanitize_line(method.label)}"
                yield title, self._asked(f"use_method({method.name!r})"), None

    def _sessions(self) -> Iterator[Found]:
        try:
            found = self._app.chat.store.summaries(limit=SESSIONS_LISTED)
        except SpecllamaError:
            return
        for one in found:
            resume = partial(self._app.resume_session, one.id)
            yield f"Resume: {sanitize_line(one.title)}", resume, None
