"""The messages of a conversation with every version of each: a tree with one chosen path.

An edited question or a reply that is written again is a sibling of the former one, which keeps
all that followed it. A message has a number, in the order of writing, and the number of the one it
follows; the number of the last message of the path says which versions are shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from specllama.errors import UsageError
from specllama.interface import Message

MessageState = Literal["done", "partial"]
START = -1  # what the first message follows


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One stored turn; a ``partial`` reply was interrupted. ``stats`` is a finish dictionary.

    ``reasoning`` and ``seams`` are those of ``Message``.
    """

    role: str
    content: str
    state: MessageState = "done"
    stats: dict[str, Any] | None = None
    reasoning: str = ""
    seams: tuple[str, str] | None = None

    @property
    def message(self) -> Message:
        return Message(self.role, self.content, self.reasoning, self.seams)

    @property
    def seed(self) -> int | None:
        """The seed of a reply, if known."""
        seed = (self.stats or {}).get("seed")
        return seed if isinstance(seed, int) else None

    @property
    def ended(self) -> bool:
        """True if the reply ended by itself, without being cut."""
        return (self.stats or {}).get("reason") in ("stop_token", "stop_string")


@dataclass(slots=True)
class Tree:
    """Every version of every message.

    Attributes:
        messages: by number, in the order of writing.
        parents: the number of the message that each follows; smaller than its own.
        leaf: where the chosen path ends; START if nothing is on it.
    """

    messages: dict[int, StoredMessage] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    leaf: int = START

    @property
    def path(self) -> list[int]:
        """The numbers of the chosen messages, first to last."""
        return self.path_to(self.leaf)

    def path_to(self, number: int) -> list[int]:
        out = []
        while number in self.messages:
            out.append(number)
            before = self.parents[number]
            number = before if before < number else START  # a damaged file: no walk in a circle
        return out[::-1]

    @property
    def chosen(self) -> list[StoredMessage]:
        return [self.messages[number] for number in self.path]

    @property
    def free(self) -> int:
        """The number of the next message."""
        return max(self.messages, default=START) + 1

    def put(self, number: int, parent: int, message: StoredMessage) -> None:
        """Add or change a message; the path ends with it."""
        self.parents[number], self.messages[number] = parent, message
        self.leaf = number

    def drop(self, number: int) -> None:
        """Remove a message that nothing follows."""
        del self.messages[number], self.parents[number]

    def versions(self, parent: int) -> list[int]:
        """List the messages that follow ``parent``, oldest first."""
        # a list first: the thread of a reply may add one meanwhile
        return [number for number in list(self.messages) if self.parents.get(number) == parent]

    def version_at(self, index: int) -> tuple[int, int]:
        """Return the version of the chosen message ``index`` and their number; the one after the
        last is still to come."""
        path = self.path
        if index < len(path):
            return self.version(path[index])
        count = len(self.versions(self.leaf)) + 1
        return count, count

    def number(self, index: int) -> int:
        """Return the number of the chosen message ``index``.

        Raises:
            UsageError: there is none.
        """
        path = self.path
        if not 0 <= index < len(path):
            raise UsageError(f"there is no message {index}")
        return path[index]

    def role(self, number: int) -> str:
        return self.messages[number].role

    def reply_to(self, number: int) -> int | None:
        """Return the chosen reply to a message, else the newest."""
        path = self.path
        replies = [n for n in self.versions(number) if self.messages[n].role == "assistant"]
        return max(replies, key=lambda n: (n in path, n), default=None)

    def end_of(self, number: int) -> int:
        """Return the last message of the newest branch after ``number``."""
        while found := self.versions(number):
            number = found[-1]
        return number

    def _ends(self) -> list[list[int]]:
        """List the paths to the messages that nothing follows: branch by branch, oldest first."""
        return sorted(map(self.path_to, self.messages.keys() - set(self.parents.values())))

    def beside(self, step: int) -> int | None:
        """Return the end of the branch before (-1) or after (1) the chosen path, or None.

        A path that was shortened is behind all the branches that go on from it.
        """
        here = self.path
        if self.versions(self.leaf):
            here = [*here, self.free]
        if step < 0:
            return max((path for path in self._ends() if path < here), default=[None])[-1]
        return min((path for path in self._ends() if path > here), default=[None])[-1]

    def version(self, number: int) -> tuple[int, int]:
        """Return the version of a message, from 1, and the number of its versions."""
        versions = self.versions(self.parents[number])
        return versions.index(number) + 1, len(versions)
