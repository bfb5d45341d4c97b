"""Downloads while the app runs: one after the other, in a thread each, stopped and taken up again.

What arrives is kept as ``models.pull`` keeps it, so that a download that was stopped, broke off or
lost its process continues where it was, here or with ``specllama hub pull``.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from textual.message import Message

from specllama.errors import ModelUnavailable, SpecllamaError
from specllama.text import sanitize_line, size
from specllama.tui.bridge import Clock, monotonic

State = Literal["waiting", "asking", "running", "stopping", "stopped", "failed", "done"]
TOLD_EVERY_S = 0.25
SPEED_OVER_S = 8.0
JOIN_S = 1.0


class _Stopped(Exception):
    """An end of a download by the user."""


@dataclass(eq=False)
class Download:
    """One reference that is, or was, being pulled: a catalogue pair or one model.

    Attributes:
        ref: as ``hub pull`` takes it.
        done, total: bytes; ``total`` is 0 until the hub answers.
        note: why it stands still.
        error: of a failed one.
        opens: it is loaded as soon as it is here, if nothing else was chosen meanwhile.
        target, draft: what to load when it is done; ``target`` is None for what is no model.
    """

    ref: str
    state: State = "waiting"
    done: int = 0
    total: int = 0
    note: str = ""
    error: SpecllamaError | None = None
    opens: bool = False
    target: str | None = None
    draft: str | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    _seen: deque[tuple[float, int]] = field(default_factory=deque)

    @property
    def active(self) -> bool:
        return self.state in ("waiting", "asking", "running", "stopping")

    @property
    def speed(self) -> float | None:
        """The bytes per second, over the last seconds."""
        if self.state != "running" or len(self._seen) < 2:
            return None
        (t0, n0), (t1, n1) = self._seen[0], self._seen[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 and n1 > n0 else None

    def count(self, done: int, now: float) -> None:
        self.done, self.note = done, ""
        if self._seen and now - self._seen[-1][0] < TOLD_EVERY_S:
            return
        self._seen.append((now, done))
        while now - self._seen[0][0] > SPEED_OVER_S and len(self._seen) > 2:
            self._seen.popleft()

    def count_anew(self) -> None:
        self._seen.clear()


@dataclass
class DownloadTold(Message, bubble=False):
    """A message to the app, then to every screen: a download moved, or is over."""

    over: Download | None = None

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, DownloadTold) and message.over is None


def left_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s left"
    return f"{seconds / 60:.0f} min left" if seconds < 5400 else f"{seconds / 3600:.1f} h left"


def figures(download: Download) -> list[str]:
    """List the figures of its progress, most important first."""
    if download.state == "waiting":
        return ["waits for the one before it"]
    if download.state == "asking":
        return ["asking the hub"]
    if not download.total:
        return []
    words = [
        f"{download.done / download.total:.0%}",
        f"{size(download.done)} of {size(download.total)}",
    ]
    if (speed := download.speed) is not None:
        words += [f"{size(speed)}/s", left_words((download.total - download.done) / speed)]
    return words


def progress_words(download: Download) -> str:
    """Describe the progress of a running download."""
    if download.state == "stopping":
        return "stopping; what arrived is kept"
    return " · ".join([*figures(download), *([download.note] * bool(download.note))])


class Downloads:
    """Every download of this run of the app, newest last.

    Args:
        post: takes a DownloadTold from any thread.
    """

    def __init__(self, post: Callable[[Message], object], clock: Clock = monotonic) -> None:
        self.all: dict[str, Download] = {}
        self._post = post
        self._clock = clock
        self._told = 0.0
        self._turn = threading.Lock()
        self._threads: list[threading.Thread] = []

    @property
    def newest(self) -> Download | None:
        """The download that is running, else the one that was begun last."""
        downloads = list(self.all.values())
        running = [d for d in downloads if d.active and d.state != "waiting"]
        return next(iter(running or downloads[::-1]), None)

    def begin(self, ref: str) -> Download:
        """Pull ``ref``, or go on with it."""
        old = self.all.pop(ref, None)
        if old is not None and old.active and not old.stop.is_set():
            self.all[ref] = old
            return old
        download = self.all[ref] = Download(ref)
        if old is not None:
            download.done, download.total = old.done, old.total
        thread = threading.Thread(
            target=self._run, args=(download,), name="specllama-download", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        self._post(DownloadTold())
        return download

    def stop(self, ref: str) -> None:
        """Stop a download; the bytes that arrived are kept."""
        download = self.all.get(ref)
        if download is not None and download.active:
            download.stop.set()
            download.state = "stopping"
            self._post(DownloadTold())

    def forget(self, ref: str) -> None:
        """Remove the line of a download that is over."""
        if ref in self.all and not self.all[ref].active:
            del self.all[ref]

    def close(self) -> None:
        """Stop them all, and give one that has begun a process the time to end it."""
        for download in self.all.values():
            download.stop.set()
        for thread in self._threads:
            thread.join(JOIN_S)

    # ------------------------------------------------------------------ the download's thread

    def _run(self, download: Download) -> None:
        with self._turn:
            try:
                self._pull(download)
                download.state = "done"
            except _Stopped:
                download.state = "stopped"
            except SpecllamaError as error:
                download.state, download.error = "failed", error
            except Exception as error:
                download.state = "failed"
                download.error = ModelUnavailable(
                    f"the download ended with {type(error).__name__}: {sanitize_line(str(error))}",
                    "what arrived is kept: try again",
                )
        self._post(DownloadTold(over=download))

    def _pull(self, download: Download) -> None:
        from specllama.models import pull
        from specllama.models.gguf import read_header
        from specllama.models.hub_client import HubClient
        from specllama.models.loadable import check_loadable

        self._check(download)
        download.state = "asking"
        self._post(DownloadTold())
        wanted = pull.expand(download.ref)
        progress = _Told(self, download)
        client = HubClient(waiting=progress.waiting)
        if not any(pull.packaged(ref) for _, ref in wanted):  # what has another way asks itself
            client.reach()
        items = []
        for role, ref in wanted:
            self._check(download)
            items.append(pull.make_item(client, role, ref))
        pull.check_space(items)
        files = [(item, file) for item in items for file in item.missing]
        download.total = sum(item.model.bytes for item in items)
        progress.before = download.total - sum(file.size for _, file in files)
        download.done = progress.before + sum(item.bytes_here(file) for item, file in files)
        download.state = "stopping" if download.stop.is_set() else "running"
        for item, file in files:
            self._check(download)
            pull.fetch(item, client, progress, name=file.name)
            progress.before += file.size
        models = [item for item in items if not item.model.sidecar]
        for item in models:
            check_loadable(read_header(item.path))
        for item in models:
            if item.role == "draft":
                download.draft = item.ref
            else:
                download.target = item.ref

    def _check(self, download: Download) -> None:
        if download.stop.is_set():
            raise _Stopped

    def counted(self, download: Download, done: int) -> None:
        now = self._clock()
        download.count(done, now)
        self._check(download)
        if now - self._told >= TOLD_EVERY_S:
            self._told = now
            self._post(DownloadTold())

    def stands_still(self, download: Download, reason: str) -> None:
        download.note = reason
        download.count_anew()
        self._check(download)
        self._post(DownloadTold())


@dataclass
class _Told:
    """The progress of one file, as part of its download.

    Attributes:
        before: bytes of the files that are complete.
    """

    downloads: Downloads
    download: Download
    before: int = 0

    def resumed(self, done: int) -> None:
        self.download.count_anew()
        self.advanced(done)

    def advanced(self, done: int) -> None:
        self.downloads.counted(self.download, self.before + done)

    def waiting(self, reason: str) -> None:
        self.downloads.stands_still(self.download, reason)
