"""The replies that a head learns from, in one file of lines: ``texts.jsonl``.

A reply is one line, appended whole by one call, so that a process that is killed loses none that it
has ended. A line that was torn nevertheless is cut off when the file is opened, and damaged ones
are passed over. The file is read where it is needed: memory holds where its lines begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from specllama.errors import StoreError
from specllama.files import DAMAGE
from specllama.paths import private_file, private_folder

TEXTS = "texts.jsonl"


@dataclass(frozen=True, slots=True)
class Sample:
    """One reply of the target.

    Attributes:
        kind: of its prompt, such as "code".
        held_out: it is for judging a head, who never learns from it.
        prompt, reply: tokens; a token that ended the reply is the last one.
        seed, temperature: it was written with.
    """

    id: str
    kind: str
    held_out: bool
    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    seed: int = 0
    temperature: float = 0.0


class _Line(NamedTuple):
    at: int
    size: int
    held_out: bool
    kind: str


class Corpus:
    """The replies in a folder, which is made if there is none.

    Attributes:
        tokens: of all replies, prompts apart.

    Raises:
        StoreError: the folder or the file cannot be read or written.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / TEXTS
        self.tokens = 0
        self._lines: dict[str, _Line] = {}
        try:
            private_folder(folder)
            with private_file(self.path).open("r+b") as file:
                self._end = self._index(file)
                file.truncate(self._end)
        except OSError as error:
            raise refused("replies", self.path, error) from None

    def _index(self, file: BinaryIO) -> int:
        """Take in the lines of the file; return the end of the last whole one."""
        at = 0
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                self._take(msgspec.json.decode(line, type=Sample), at, len(line))
            except DAMAGE:
                pass
            at += len(line)
        return at

    def _take(self, sample: Sample, at: int, size: int) -> None:
        if sample.id not in self._lines:
            self._lines[sample.id] = _Line(at, size, sample.held_out, sample.kind)
            self.tokens += len(sample.reply)

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, id: object) -> bool:
        return id in self._lines

    def count(self, held_out: bool, kind: str | None = None) -> int:
        """Count the replies of one side, and of one kind."""
        return sum(
            one.held_out == held_out and kind in (None, one.kind) for one in self._lines.values()
        )

    def append(self, sample: Sample) -> None:
        """Append a reply; one whose id is there already is left out.

        Raises:
            StoreError: it cannot be written; the file holds what it held before.
        """
        if sample.id in self._lines:
            return
        line = msgspec.json.encode(sample) + b"\n"
        try:
            with self.path.open("r+b", buffering=0) as file:
                file.seek(self._end)
                if file.write(line) < len(line):
                    file.truncate(self._end)
                    raise OSError("no room for a whole line")
        except OSError as error:
            raise refused("replies", self.path, error) from None
        self._take(sample, self._end, len(line))
        self._end += len(line)

    def samples(self, held_out: bool, without: Iterable[str] = ()) -> Iterator[Sample]:
        """Yield the replies of one side in the order in which they were written, except
        ``without``.

        Raises:
            StoreError: the file cannot be read.
        """
        but = frozenset(without)
        try:
            with self.path.open("rb") as file:
                for id, line in list(self._lines.items()):
                    if line.held_out == held_out and id not in but:
                        file.seek(line.at)
                        yield msgspec.json.decode(file.read(line.size), type=Sample)
        except (OSError, msgspec.MsgspecError) as error:
            raise refused("replies", self.path, error) from None


def refused(what: str, place: Path, error: Exception) -> StoreError:
    """Return the error for ``what`` could not be kept."""
    why = getattr(error, "strerror", None) or error
    return StoreError(
        f"cannot keep {what} in {place}: {why}",
        "free some room, give another --folder, or a smaller --disk",
    )
