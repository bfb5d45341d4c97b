"""Messages of widgets to screens and of threads to the app."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from specllama.errors import SpecllamaError
from specllama.events import Loading, Notice
from specllama.interface import EngineInfo
from specllama.tui.record import Record


class Latest(Message):
    """A message of which only the newest is worth acting on."""

    def can_replace(self, message: Message) -> bool:
        return type(message) is type(self)


@dataclass
class EngineLoading(Latest):
    """The start or progress of a load or a measurement at rest."""

    progress: Loading | Notice | None = None


@dataclass
class EngineReady(Message):
    info: EngineInfo


@dataclass
class EngineFailed(Message):
    error: SpecllamaError
    kept: bool = False
    """A switch failed to load; the previous pair is loaded again."""


@dataclass
class EngineGone(Message):
    """The end of the loaded engine by itself. A reply that was being written shows it, too."""

    error: SpecllamaError


class TurnWoke(Latest):
    """A sign that the running turn has news that must not wait for the timer."""


@dataclass
class RecordGrew(Message, bubble=False):
    """A message to every screen: a reply that is being written has new rounds, or has just
    ended."""

    record: Record

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, RecordGrew) and message.record is self.record


@dataclass
class PromptSubmitted(Message):
    """A message to send, with its large pastes."""

    text: str


@dataclass
class StorageFailed(Message):
    """A message to the app: something could not be written; shown once per kind."""

    what: str
    reason: str


class Scrolled(Latest):
    """Another part of the conversation is shown."""


class InkChanged(Message):
    """A change of theme or glyphs: every drawing with the old ones must be drawn again."""
