"""One log line per request for the server's operator; a stalled terminal holds nothing up."""

from __future__ import annotations

import queue
import sys
import threading
from datetime import datetime

_MOST = 1000  # lines that were not written yet; further ones are dropped, and counted


class AccessLog:
    """Writes lines to stderr in a thread of its own."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str] = queue.Queue(_MOST)
        self._dropped = 0
        threading.Thread(target=self._write, name="specllama-access-log", daemon=True).start()

    def put(self, line: str) -> None:
        """Take a line; never waits."""
        try:
            self._lines.put_nowait(f"{datetime.now():%Y-%m-%d %H:%M:%S} {line}")
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            dropped, self._dropped = self._dropped, 0
            if dropped:
                line += f"\n({dropped} lines were dropped: they came faster than they were read)"
            try:
                print(line, file=sys.stderr, flush=True)
            except (OSError, ValueError):  # its reader is gone
                return
