"""Plain steps beside the conversation, to have something to compare drafting with."""

from __future__ import annotations

import threading
from collections.abc import Callable

from textual.message import Message

from specllama.errors import EngineError, SpecllamaError
from specllama.events import RoundDone
from specllama.interface import EngineLike
from specllama.params import GenerateParams
from specllama.tui.messages import PlainMeasured
from specllama.tui.speedup import ENOUGH_PLAIN

STEPS = 32
PROMPT = "Once upon a time there was a"


class PlainSteps:
    """Takes them in its own thread, and posts PlainMeasured when they are done."""

    def __init__(self, engine: EngineLike, tell: Callable[[Message], object]) -> None:
        self._engine = engine
        self._tell = tell
        self._hurry = threading.Event()

    def take(self, *, quiet: bool = False) -> None:
        """Begin; ``quiet`` if nobody asked for it."""
        self.hurry()
        self._hurry = threading.Event()
        threading.Thread(
            target=self._run, args=(self._hurry, quiet), name="specllama-plain", daemon=True
        ).start()

    def hurry(self) -> None:
        """Stop as soon as a comparison is possible: a request is waiting."""
        self._hurry.set()  # checked between two steps

    def _run(self, hurry: threading.Event, quiet: bool) -> None:
        steps_ms: list[float] = []
        error: SpecllamaError | None = None
        params = GenerateParams(
            max_tokens=STEPS, speculate=False, proposer="none", seed=1, ignore_eos=True
        )
        try:
            for event in self._engine.generate(PROMPT, params):
                if isinstance(event, RoundDone) and event.index > 0:
                    steps_ms.append(event.verify_ms + event.other_ms)
                if hurry.is_set() and len(steps_ms) >= ENOUGH_PLAIN:
                    break
        except SpecllamaError as caught:
            error = caught
        except Exception as caught:
            error = EngineError(f"{type(caught).__name__}: {caught}")
        self._tell(PlainMeasured(steps_ms, quiet, error))
