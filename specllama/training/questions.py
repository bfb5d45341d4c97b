"""The prompts that a target answers for its head: of a person's own texts and chats, or a list.

    texts   every piece of a file becomes questions of the kinds that people ask about such a text
    chats   the questions of finished conversations, each with what was before it
    list    ``questions.toml``: ways of asking, times topics

What a head is judged by has topics, or pieces of texts, that it never learns from. Everything is a
function of the texts, a seed and the number of the question: a run that goes on asks what it would
have asked.
"""

from __future__ import annotations

import random
import tomllib
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import count, zip_longest
from pathlib import Path
from zlib import crc32

from specllama.errors import SpecllamaError, UsageError
from specllama.interface import Message
from specllama.store.sessions import SessionStore
from specllama.store.texts import read_named

Chat = tuple[Message, ...]
Side = Mapping[str, Sequence[Chat]]

GREEDY = 0.3  # of the questions; the others are answered at ``WARM``
WARM = 0.8
LEAST_HELD, MOST_HELD = 4, 24  # questions of each kind that are held out
_HELD_EVERY = 20  # between these
_PIECE = 1200  # characters
_SHORTEST = 80
_MOST_CHATS = 2000

CODE = frozenset({
    ".py", ".js", ".ts", ".tsx", ".jsx", ".c", ".h", ".cc", ".cpp", ".hpp", ".rs", ".go", ".java",
    ".kt", ".swift", ".rb", ".php", ".cs", ".scala", ".lua", ".sh", ".sql", ".r", ".jl", ".hs",
    ".ml", ".pl", ".html", ".css", ".toml", ".yaml", ".yml",
})  # fmt: skip

WAYS: dict[str, list[tuple[str, str]]] = tomllib.loads(
    files("specllama.training").joinpath("ways.toml").read_text("utf-8")
)


@dataclass(frozen=True, slots=True)
class Exercise:
    """A question to the target.

    Attributes:
        id: its number in the order of asking.
        held_out: its reply is for judging.
    """

    id: str
    kind: str
    held_out: bool
    messages: Chat
    seed: int
    temperature: float


@dataclass(frozen=True, slots=True)
class PromptList:
    """Questions by kind: those whose replies a head learns from, and those held out."""

    trained: Side
    held: Side

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted(kind for kind, chats in self.trained.items() if chats))

    def __len__(self) -> int:
        return sum(map(len, self.trained.values())) + sum(map(len, self.held.values()))

    def __add__(self, other: PromptList) -> PromptList:
        """Return both lists, whose questions of a kind come in turn until one has no more."""

        def joined(a: Side, b: Side) -> Side:
            pairs = {kind: zip_longest(a.get(kind, ()), b.get(kind, ())) for kind in {**a, **b}}
            return {k: [x for pair in v for x in pair if x is not None] for k, v in pairs.items()}

        return PromptList(joined(self.trained, other.trained), joined(self.held, other.held))

    def asked(self, seed: int, without: Container[str] = ()) -> Iterator[Exercise]:
        """Yield questions without an end, kinds in turn: all that there are, then again with other
        seeds, except those whose ids are in ``without``.

        The first of each kind are held out and answered at temperature 0, and then some others.
        """
        kinds = self.kinds
        most_of_all = max((len(self.trained[kind]) for kind in kinds), default=1)
        for number in count() if kinds else ():
            kind, turn = kinds[number % len(kinds)], number // len(kinds)
            most = min(len(self.held.get(kind, ())), MOST_HELD)
            before = min(_held_before(turn), most)
            id = f"{number:06}"
            if id in without:
                continue
            drawn = random.Random(f"{seed} {number}")
            own, greedy = drawn.getrandbits(32), drawn.random() < GREEDY
            if before < min(_held_before(turn + 1), most):
                yield Exercise(id, kind, True, self.held[kind][before], own, 0.0)
                continue
            again, at = divmod(turn - before, len(self.trained[kind]))
            if again > turn // most_of_all:  # the others have some that were not asked yet
                continue
            # at temperature 0 it would be answered alike
            warm = WARM if again or not greedy else 0.0
            yield Exercise(id, kind, False, self.trained[kind][at], own, warm)


def _held_before(turn: int) -> int:
    """Count the questions of a kind that are held out before its ``turn``, without a bound."""
    return min(turn, LEAST_HELD) + max(turn - 1, 0) // _HELD_EVERY


def _asked(text: str) -> Chat:
    return (Message("user", text),)


# -- the list that ships --


@cache
def shipped() -> PromptList:
    """Return the list that ships: every way of asking about every topic, by kind."""
    data = tomllib.loads(files("specllama.training").joinpath("questions.toml").read_text("utf-8"))

    def questions(kind: str, topics: str) -> list[Chat]:
        ways = data[kind]["ways"]
        found = [_asked(way.replace("{x}", x)) for x in data[kind][topics] for way in ways]
        random.Random(kind).shuffle(found)
        return found

    return PromptList(
        {kind: questions(kind, "topics") for kind in data},
        {kind: questions(kind, "held") for kind in data},
    )


# -- a person's texts and chats --


def of_texts(names: Sequence[str]) -> tuple[PromptList, str]:
    """Make questions of files and folders; also return, in words, which files were left out.

    Raises:
        UsageError: a name is neither a file nor a folder, or there is no text.
    """
    texts, without = read_named(names, "cannot learn from")
    units = [unit for path, text in texts for unit in _units(path, text)]
    if not units:
        raise UsageError(
            f"there is no text to learn from in {', '.join(names)}",
            "give plain text, Markdown or code",
        )
    return _divided(units), without


def of_chats(path: Path | None = None) -> PromptList:
    """Make questions of the finished conversations that are stored here, the newest first.

    They are a person's own: only call this with consent.
    """
    units: list[list[tuple[str, Chat]]] = []
    with suppress(SpecllamaError), SessionStore.peek(path) as store:
        for one in store.summaries(limit=_MOST_CHATS):
            session = store.get(one.id)
            system = [Message("system", session.system)] if session.system else []
            if all(message.state == "done" for message in session.messages):
                said = [message.message for message in session.messages]
                units.append(list(_turns([*system, *said])))
    return _divided(units)


def _turns(chat: Sequence[Message]) -> Iterator[tuple[str, Chat]]:
    """Yield the questions of a chat that were answered, each with what was before it."""
    for i, message in enumerate(chat[:-1]):
        if message.role == "user" and chat[i + 1].role == "assistant":
            yield "chat", tuple(chat[: i + 1])


def _units(path: Path, text: str) -> Iterator[list[tuple[str, Chat]]]:
    """Yield the questions about each piece of a file; they stay together."""
    ways = WAYS["code" if path.suffix.lower() in CODE else "prose"]
    for piece in _pieces(text):
        yield [(kind, _asked(way.replace("{x}", piece))) for kind, way in ways]


def _pieces(text: str) -> Iterator[str]:
    """Cut a text into pieces at empty lines, or at any line where they would become too long."""
    pieces = [""]
    for line in text.splitlines(keepends=True):
        full = len(pieces[-1]) + len(line) > _PIECE
        if full or (not line.strip() and len(pieces[-1]) > _PIECE // 2):
            pieces.append("")
        pieces[-1] += line[:_PIECE]
    return (piece.strip("\n") for piece in pieces if len(piece.strip()) >= _SHORTEST)


def _divided(units: Iterable[list[tuple[str, Chat]]]) -> PromptList:
    """Hold some units out, of every kind a few; questions of one unit stay together."""
    units = sorted((unit for unit in units if unit), key=lambda unit: crc32(repr(unit[0]).encode()))
    trained, held = defaultdict[str, list[Chat]](list), defaultdict[str, list[Chat]](list)
    total = Counter(kind for unit in units for kind, _ in unit)
    for unit in units:
        kind = unit[-1][0]
        enough = min(max(LEAST_HELD, total[kind] // _HELD_EVERY), total[kind] // 4)
        side = held if len(held[kind]) < enough else trained
        for kind, question in unit:
            side[kind].append(question)
    return PromptList(trained, held)
