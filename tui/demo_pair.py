"""``specllama demo`` in the app: its pair is made in the background, and deleted at its end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from textual.message import Message

from specllama.bench import scaled_pair
from specllama.errors import Cancelled, SpecllamaError

JOIN_S = 5.0


@dataclass
class DemoTold(Message):
    """News of the pair: it can be loaded, or ``error`` explains why not."""

    pair: tuple[str, str] | None = None
    error: SpecllamaError | None = None


class DemoPair:
    """The demonstration's pair, made in a thread that lives as long as its files do.

    Attributes:
        pair: target and draft model, once they are written.
    """

    def __init__(self, post: Callable[[Message], object]) -> None:
        self._post = post
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self.pair: tuple[str, str] | None = None

    @property
    def begun(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def begin(self) -> scaled_pair.WeightKind:
        """Write the pair; the first kind that there is room for is returned.

        Raises:
            SpecllamaError: there is no room.
        """
        kind = scaled_pair.affordable()[0]
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._make, args=(kind, self._over), name="specllama-demo", daemon=True
        )
        self._thread.start()
        return kind

    def close(self) -> None:
        """Delete the files."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(JOIN_S)
        self.pair = None

    def _make(self, kind: scaled_pair.WeightKind, over: threading.Event) -> None:
        def written(name: str, share: float) -> None:
            if over.is_set():
                raise Cancelled("the demonstration was left")

        try:
            with scaled_pair.workshop() as own:
                target, draft = scaled_pair.make(kind, own, written)
                self.pair = str(target), str(draft)
                self._post(DemoTold(self.pair))
                over.wait()
        except Cancelled:
            return
        except SpecllamaError as error:
            self._post(DemoTold(error=error))
        except OSError as error:
            why = error.strerror or str(error)
            self._post(DemoTold(error=SpecllamaError(f"the pair cannot be written: {why}")))
