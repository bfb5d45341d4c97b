"""What the parts of the app share: one declaration of the state and the calls between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from specllama.engine.host import EngineFactory, HostLike
from specllama.interface import EngineInfo, MethodInfo
from specllama.params import EngineOptions, GenerateParams
from specllama.session import Session
from specllama.store.sessions import SessionStore
from specllama.tui.state import Preferences
from specllama.tui.widgets.base import InkedApp

if TYPE_CHECKING:
    from specllama.tui.screens.chat import ChatScreen
    from specllama.tui.screens.models import Choice


class AppPart(InkedApp):
    """The base of the app's parts: its engine (loading.py), its pages, its actions."""

    prefs: Preferences
    options: EngineOptions
    session: Session
    store: SessionStore
    host: HostLike
    factory_for: Callable[[str, str | None], EngineFactory]
    wanted: tuple[str, str | None] | None = None
    """Target and draft that are loaded, or are to be."""
    engine_info: EngineInfo | None = None
    engine_ready = False

    @property
    def methods(self) -> tuple[MethodInfo, ...]:
        return () if self.engine_info is None else self.engine_info.methods

    @property
    def chat(self) -> ChatScreen:
        raise NotImplementedError

    def save_prefs(self) -> None:
        raise NotImplementedError

    def redraw(self) -> None:
        raise NotImplementedError

    def set_params(self, params: GenerateParams) -> None:
        raise NotImplementedError

    def use_method(self, name: str) -> None:
        raise NotImplementedError

    def switch_model(self, choice: Choice | None) -> None:
        raise NotImplementedError

    def measure_fixed(self) -> None:
        raise NotImplementedError

    def stop_measuring(self) -> None:
        raise NotImplementedError

    def action_new_chat(self) -> None:
        raise NotImplementedError
