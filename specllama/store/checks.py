"""What was checked of a pair before drafting is trusted: what came of it, when, under what.

One line a check in ``checks.jsonl``, appended by the race, ``prove``, ``bench run`` and ``tune``. A
check holds as long as nothing that it rests on has changed: the build, the two files, the device.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from specllama.errors import SpecllamaError
from specllama.files import DAMAGE
from specllama.interface import EngineInfo, ModelInfo
from specllama.paths import checks_file
from specllama.store.rounds import iter_lines, open_for_append, package_versions

SPOKEN = (
    "specllama",
    "llama-cpp-python",
    "the device",
    "the number of threads",
)  # old and new are worth reading


class Finding(msgspec.Struct, frozen=True):
    """What came of a check; ``words`` say it in a line: "128 of 128 tokens identical".

    Attributes:
        known: False where what was run cannot tell; ``ok`` says nothing then.
    """

    ok: bool
    words: str
    known: bool = True


class Check(msgspec.Struct, frozen=True):
    """One finding about a pair.

    Attributes:
        what: text, speed, length, methods or kinds.
        by: the command that found it. when_s: seconds since 1970.
        pair: file names of target and draft model, "" without one.
        rests_on: what the finding rests on, by name.
    """

    what: str
    by: str
    when_s: float
    pair: tuple[str, str]
    rests_on: dict[str, str]
    finding: Finding

    def changes(self, now: Mapping[str, str]) -> list[str]:
        """In words, what differs today; the finding holds while that is nothing."""
        return [
            f"{name} changed from {was} to {now.get(name, 'nothing')}"
            if name in SPOKEN
            else f"{name} changed"
            for name, was in self.rests_on.items()
            if now.get(name) != was
        ]


def rests_on(info: EngineInfo) -> dict[str, str]:
    """What every figure of a loaded pair rests on; models stand for size and time of their file."""
    from specllama.backend.devices import library_files

    versions = package_versions()
    build = hashlib.sha256("\n".join(library_files()).encode()).hexdigest()[:16]
    return {
        "specllama": versions["specllama"],
        "llama-cpp-python": versions["llama-cpp-python"],
        "the build of llama.cpp": build,
        "the target's file": _file(info.target),
        "the draft model's file": "" if info.draft is None else _file(info.draft),
        "the device": info.device,
        "the number of threads": str(info.threads),
    }


def _file(model: ModelInfo) -> str:
    try:
        stat = os.stat(model.path)
    except OSError:
        return str(model.file_bytes)
    return f"{stat.st_size} {stat.st_mtime_ns}"


def pair_of(info: EngineInfo) -> tuple[str, str]:
    draft = "" if info.draft is None else Path(info.draft.path).name
    return Path(info.target.path).name, draft


def add(info: EngineInfo, by: str, findings: Mapping[str, Finding]) -> bool:
    """Keep what was found of a pair, by what was checked; False where it cannot be written."""
    now, pair, rests = time.time(), pair_of(info), rests_on(info)
    lines = [
        msgspec.json.encode(Check(what, by, round(now, 3), pair, rests, finding)) + b"\n"
        for what, finding in findings.items()
    ]
    try:
        handle = open_for_append(checks_file())
        try:
            os.write(handle, b"".join(lines))
        finally:
            os.close(handle)
    except OSError:
        return False
    return True


def newest(info: EngineInfo) -> dict[str, Check]:
    """The latest check of each kind of this pair; {} where none can be read."""
    pair, found = pair_of(info), {}
    try:
        for line in iter_lines(checks_file()):
            check = _check(line)
            if check is not None and check.pair == pair:
                found[check.what] = check
    except SpecllamaError:
        pass
    return found


def unreadable() -> int:
    """How many lines of the file are damaged, or of another version; 0 where there is no file."""
    try:
        return sum(_check(line) is None for line in iter_lines(checks_file()))
    except SpecllamaError:
        return 0


def _check(line: dict[str, Any] | None) -> Check | None:
    try:
        check = msgspec.convert(line, Check)
        day(check.when_s, 0.0)
    except (OSError, *DAMAGE):
        return None
    return check


def day(when_s: float, now_s: float) -> str:
    """ "today 14:05", "12 Nov", "12 Nov 2025"; the local time."""
    when, now = datetime.fromtimestamp(when_s), datetime.fromtimestamp(now_s)
    if when.date() == now.date():
        return f"today {when:%H:%M}"
    return f"{when.day} {when:%b}" + ("" if when.year == now.year else f" {when.year}")
