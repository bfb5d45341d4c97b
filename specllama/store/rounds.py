"""The round log: one JSON Lines file per run, schema ``specllama.rounds.v1``.

    {"type": "run", "schema": "specllama.rounds.v1", "run": ..., "target": {...}, ...}
    {"type": "start", "turn": 0, ...}       one per request: seed, proposer, parameters
    {"type": "round", "turn": 0, ...}       the fields of RoundDone
    {"type": "finish", "turn": 0, ...}      the fields of Finished

Every line is one ``write()`` on a file opened for appending: a killed process loses at most the
line in flight. A writer that finds a torn tail starts a new line first; readers skip lines that
they cannot read and types that they do not know. If the disk is full or read-only, logging stops
with one notice and generation continues.
"""

from __future__ import annotations

import errno
import os
import platform
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from specllama.cancel import Cancel
from specllama.errors import StoreError, UsageError
from specllama.events import Event, Finished, Notice, RoundDone, Started, with_unknown
from specllama.files import DAMAGE
from specllama.interface import EngineInfo, EngineLike, Message, ModelInfo, Prompt
from specllama.paths import package_versions, private_folder, rounds_dir
from specllama.settings.params import GenerateParams
from specllama.store.codec import encode, encode_event, params_to_dict
from specllama.told import Told, news

SCHEMA = "specllama.rounds.v1"
HASH_BYTES = 64 * 2**20  # larger models are hashed at rest, or as they are pulled
_LINE_NAMES = {"start": Started, "round": RoundDone, "finish": Finished}
_NAME_OF = {cls: name for name, cls in _LINE_NAMES.items()}


def circumstances(info: EngineInfo, params: GenerateParams) -> dict[str, Any]:
    """Describe the pair, the settings and the machine."""
    return {
        "target": _model(info.target), "draft": _model(info.draft) if info.draft else None,
        "device": info.device, "threads": info.threads, "flash_attn": info.flash_attn,
        "exactness": info.exactness, "measured": info.measured, "load_ms": info.load_ms,
        "params": params_to_dict(params), "versions": package_versions(),
        "platform": f"{platform.system()} {platform.machine()}",
    }  # fmt: skip


class RoundLog:
    """Log of one run's events in its file, by default in the usual folder. No method raises
    because of the disk.

    The file is created with the first event, so a run that fails to start leaves none.
    """

    def __init__(
        self,
        info: EngineInfo,
        params: GenerateParams,
        *,
        command: str = "run",
        folder: Path | None = None,
    ) -> None:
        now = datetime.now(UTC).astimezone()
        self.run = f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
        self.path = (folder or rounds_dir()) / f"{self.run}.jsonl"
        self.failure: str | None = None
        self._params = params
        self._fd: int | None = None
        self._turn = -1
        self._header = {
            "type": "run", "schema": SCHEMA, "run": self.run,
            "started": now.isoformat(timespec="milliseconds"), "command": command,
            **circumstances(info, params),
        }  # fmt: skip

    def write(self, event: Event, params: GenerateParams | None = None) -> Notice | None:
        """Append one event; only Started, RoundDone and Finished are logged.

        Args:
            event: what happened.
            params: parameters of this request, written with Started if they differ by request.

        Returns:
            A notice for the user the first time that writing fails, else None.
        """
        name = _NAME_OF.get(type(event))
        if name is None or self.failure is not None:
            return None
        if name == "start":
            self._turn += 1
        turn = max(self._turn, 0)
        try:
            if self._fd is None:
                self._fd = open_for_append(self.path)
                self._append(encode(self._header))
            if name == "start":
                now, used = round(time.time(), 3), params_to_dict(params or self._params)
                told = {**event.to_dict(), "type": name, "turn": turn}
                self._append(encode({**told, "time_s": now, "params": used}))
            else:
                self._append(encode_event(event, name, turn=turn))
            if event.ends:
                os.fsync(self._fd)
        except OSError as error:
            self.failure = error.strerror or str(error)
            self.close()
            said = f"the round log cannot be written ({self.failure}); logging is off for this run"
            return Notice(said, "warning", "log")
        return None

    def close(self) -> None:
        if self._fd is not None:
            fd, self._fd = self._fd, None
            try:
                os.close(fd)
            except OSError as error:
                self.failure = self.failure or error.strerror

    def _append(self, line: bytes) -> None:
        assert self._fd is not None
        data = line + b"\n"
        if os.write(self._fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _model(info: ModelInfo) -> dict[str, Any]:
    """Describe a model file, with its hash if that is cheap."""
    from specllama.models.contents import of_model

    known = info.sha256 or (of_model(Path(info.path), HASH_BYTES) if info.path else None)
    return {**info.to_dict(), "sha256": known}


def open_for_append(path: Path) -> int:
    """Open the file of lines at ``path`` and complete its last line; the caller closes it.

    Raises:
        OSError: it cannot be opened.
    """
    private_folder(path.parent)
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    size = os.lseek(fd, 0, os.SEEK_END)
    if size:
        os.lseek(fd, size - 1, os.SEEK_SET)
        if os.read(fd, 1) != b"\n":
            os.write(fd, b"\n")
    return fd


class Logged:
    """An engine that logs its requests' rounds and otherwise is unchanged: see ``EngineLike``.

    A log that cannot be written shows as one Notice among the events.

    Attributes:
        log: of the requests since ``close``, None before the first.
    """

    def __init__(
        self, engine: EngineLike, *, command: str = "run", folder: Path | None = None
    ) -> None:
        self._engine, self._command, self._folder = engine, command, folder
        self.log: RoundLog | None = None

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def generate(
        self, prompt: Prompt, params: GenerateParams, *, cancel: Cancel | None = None
    ) -> Iterator[Event]:
        """See ``EngineLike.generate``; the log keeps ``params`` as the engine completed them.

        Closing this generator closes the one below, so that an engine rolls back at once.
        """
        used = params.on_card(self.info.target.card)
        if self.log is None:
            self.log = RoundLog(self.info, used, command=self._command, folder=self._folder)
        log, events = self.log, self._engine.generate(prompt, params, cancel=cancel)
        try:
            for event in events:
                if (notice := log.write(event, used)) is not None:
                    yield notice
                yield event
        finally:
            close = getattr(events, "close", None)
            if close is not None:
                close()

    def count_tokens(self, prompt: str | Sequence[Message]) -> int:
        return self._engine.count_tokens(prompt)

    def close(self) -> None:
        """Close the log, so that a further request begins another; the engine is the caller's."""
        if self.log is not None:
            self.log.close()
            self.log = None


@dataclass(slots=True)
class LoggedTurn(Told):
    """One request of a run; ``finished`` is None if the process died before it ended."""

    index: int


@dataclass(slots=True)
class RunRecord:
    """A run log as read: the header line (empty if it was lost), its turns, unreadable lines."""

    path: Path
    header: dict[str, Any] = field(default_factory=dict)
    turns: list[LoggedTurn] = field(default_factory=list)
    skipped: int = 0

    @property
    def run(self) -> str:
        return self.path.stem

    @property
    def rounds(self) -> list[RoundDone]:
        return [done for turn in self.turns for done in turn.rounds]


def iter_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield every line of a log as a dictionary; None for one that is not a JSON object.

    Raises:
        StoreError: the file cannot be read at all.
    """
    try:
        with path.open("rb") as file:
            for raw in file:
                if not raw.strip():
                    continue
                try:
                    value = msgspec.json.decode(raw)
                except DAMAGE:
                    yield None
                    continue
                yield value if isinstance(value, dict) else None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}") from None


def read_run(path: Path) -> RunRecord:
    """Read one log; damaged and foreign lines are counted, never fatal.

    Raises:
        StoreError: the file cannot be read at all.
    """
    record = RunRecord(path)
    turns: dict[int, LoggedTurn] = {}
    for found in iter_lines(path):
        line = found or {}
        if (event := _parse(line)) is not None:
            index = line.get("turn")
            at = index if isinstance(index, int) else 0
            turns.setdefault(at, LoggedTurn(len(turns))).take(event)
        elif line.get("type") == "run":
            record.header = line
        else:
            record.skipped += 1
    record.turns = list(turns.values())
    return record


def _parse(line: dict[str, Any]) -> Event | None:
    """Return the event of a line; None if it has none, misses fields, or contradicts itself."""
    cls = _LINE_NAMES.get(str(line.get("type")))
    if cls is None:
        return None
    try:
        event: Event = msgspec.convert(with_unknown(cls, line), cls)
    except DAMAGE:
        return None
    return event if all(map(_consistent, news(event).rounds)) else None


def _consistent(done: RoundDone) -> bool:
    n = len(done.drafted)
    return (
        len(done.parents) == len(done.drafted_text) == len(done.confidence) == n
        and len(done.emitted) == len(done.emitted_text)
        and len(done.accepted_path) >= done.accepted >= 0
        and all(0 <= node < n for node in done.accepted_path)
        and all(-1 <= parent < i for i, parent in enumerate(done.parents))
    )


def list_runs(folder: Path | None = None) -> list[Path]:
    """Log files, newest first (their names begin with date and time)."""
    folder = folder or rounds_dir()
    try:
        found = [p for p in folder.iterdir() if p.suffix == ".jsonl" and not p.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot read {folder}: {error.strerror or error}") from None
    return sorted(found, key=lambda p: p.name, reverse=True)


def delete_run(path: Path) -> int:
    """Delete a log; returns the bytes freed, 0 when it is gone already.

    Raises:
        StoreError: it cannot be deleted.
    """
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise StoreError(f"cannot delete {path}: {error.strerror or error}") from None
    return size


def find_run(selector: str, folder: Path | None = None) -> Path:
    """Find a log by ``last``, by a path, or by the start or the last part of its name.

    Raises:
        StoreError: nothing matches.
        UsageError: more than one matches.
    """
    if selector.endswith(".jsonl") and Path(selector).is_file():
        return Path(selector)
    runs = list_runs(folder)
    if not runs:
        raise StoreError("there is no round log yet", "make one: specllama run 'Hello'")
    if selector == "last":
        return runs[0]
    matches = [p for p in runs if p.stem.startswith(selector) or p.stem.endswith(f"-{selector}")]
    matches = [p for p in matches if p.stem == selector] or matches
    if not matches or not selector:
        raise StoreError(f"no round log is named {selector!r}", "list them: specllama log ls")
    if len(matches) > 1:
        raise UsageError(
            f"{selector!r} fits {len(matches)} round logs",
            "give more of the name: specllama log ls",
        )
    return matches[0]
