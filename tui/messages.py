"""What widgets tell screens and threads tell the app."""

from __future__ import annotations

from dataclasses import dataclass

from textual.message import Message

from specllama.errors import SpecllamaError
from specllama.events import LoadProgress
from specllama.interface import EngineInfo


@dataclass
class EngineLoading(Message):
    """Progress of a load; only the newest is worth drawing."""

    progress: LoadProgress

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, EngineLoading)


@dataclass
class EngineReady(Message):
    info: EngineInfo


@dataclass
class EngineFailed(Message):
    error: SpecllamaError
    kept: bool = False
    """The load that failed was a switch, and the engine from before it will be used again."""


class TurnWoke(Message):
    """The running turn has something that should not wait for the timer."""

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, TurnWoke)


@dataclass
class PromptSubmitted(Message):
    """``text`` is complete; ``shown`` has large pastes folded to a label."""

    text: str
    shown: str


@dataclass
class TurnAction(Message):
    """A key pressed on a message in the transcript: edit, retry, copy and so on."""

    action: str
    index: int


@dataclass
class StorageFailed(Message):
    """Something could not be written; said once per kind."""

    what: str
    reason: str


class InkChanged(Message):
    """Theme or glyphs changed: what was drawn with the old ones must be drawn again."""
