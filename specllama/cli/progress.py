"""Bars on stderr for long work; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from specllama.cli import diagnostics

QUIET_S = 30.0  # between two lines


class Bar:
    """One bar, also as the downloader's Progress. Without a terminal it prints a line every half
    minute.

    Args:
        transfer: what is counted are bytes.
    """

    def __init__(self, label: str, total: int = 1000, *, transfer: bool = False) -> None:
        from specllama.cli.listing import clean, console

        self._label = clean(label)
        self._total, self._transfer = max(total, 1), transfer
        self._said = time.monotonic()
        self._live: Any = None
        if sys.stderr.isatty():
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )

            columns: list[Any] = [TextColumn("{task.description}", markup=False), BarColumn(20)]
            if transfer:
                columns += [DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(True)]
            else:
                columns += [TaskProgressColumn(), TimeRemainingColumn(True)]
            self._live = Progress(*columns, console=console(err=True))
            self._task = self._live.add_task(self._shortened(), total=self._total)

    def _shortened(self) -> str:
        import shutil

        room = max(shutil.get_terminal_size().columns - (62 if self._transfer else 40), 12)
        name = self._label
        return name if len(name) <= room else "…" + name[-(room - 1) :]

    def __enter__(self) -> Bar:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()

    def named(self, label: str) -> None:
        """Show another label from now on."""
        self._label = label
        if self._live is not None:
            self._live.update(self._task, description=self._shortened())

    def advanced(self, done: int, total: int = 0) -> None:
        """Show that ``done`` of the total is done; of another ``total``, once that is known."""
        self._total = total or self._total
        if self._live is not None:
            self._live.update(self._task, completed=done, total=self._total)
        elif time.monotonic() >= self._said + QUIET_S:
            self._said = time.monotonic()
            diagnostics.note(f"{self._label}: {done / self._total:.0%}")

    def resumed(self, done: int) -> None:
        """Start from this point: earlier bytes do not count as speed."""
        self.waiting(f"continuing at {done / self._total:.0%}")
        if self._live is not None:
            self._live.reset(self._task, completed=done, total=self._total)

    def waiting(self, text: str) -> None:
        """Show a line above the bar."""
        from specllama.cli.listing import clean

        if self._live is not None:
            self._live.console.print(clean(text))
        else:
            diagnostics.note(text)


class Redrawn:
    """One line of a terminal's stderr that is drawn anew, and removed in the end; elsewhere, or
    where it is ``hidden``, nothing."""

    def __init__(self, *, hidden: bool = False) -> None:
        self._shown, self._length = not hidden and sys.stderr.isatty(), 0

    def show(self, text: str) -> None:
        if not self._shown:
            return
        print(f"\r{text.ljust(self._length)}", end="", file=sys.stderr, flush=True)
        self._length = len(text)

    def clear(self) -> None:
        if self._length:
            print(f"\r{' ' * self._length}\r", end="", file=sys.stderr, flush=True)
            self._length = 0
