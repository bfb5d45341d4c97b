"""The states on disk of an engine's conversations: found by their text, written by a thread.

A text belongs to an owner: a conversation of the store, which has one text at a time, or a server,
which has many. What an engine knows of a text is as good as new where the same files, build and
settings made it (``StateKeys``): the state of a target stands in the folder of its key, those of
draft models and heads carry theirs, so that another draft model costs its own state alone.

The keys name every byte of the files. Where these were never read to their end, the writing thread
does that, while the engine is at rest; until then nothing is taken from disk, for a prompt is read
in less time than weights are hashed, and nothing is written.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import msgspec
import numpy as np

from specllama.arrays import HiddenNeed, Rows
from specllama.backend.base import Blob, Pool
from specllama.backend.hidden import HiddenRows
from specllama.backend.kernels import Read
from specllama.backend.lane import Parked
from specllama.backend.recurrent_pool import Checkpoint, Checkpoints, ParkedWhole
from specllama.engine.serving import in_thread
from specllama.engine.slot import HeldText, ParkedText
from specllama.errors import SpecllamaError, StoreError
from specllama.files import DAMAGE
from specllama.models.contents import Check
from specllama.settings.params import SERVER
from specllama.store import states
from specllama.store.states import Bytes, StateFile, States
from specllama.text import size
from specllama.text_history import common_prefix

logger = logging.getLogger("specllama.engine.shelf")

_SHARED = 8  # a text is worth its bytes where one token in so many is of use
_CLOSE_S = 10.0  # for what is still to be written when the engine is closed
_READ_S = 2.0  # for the rest of files that must be read before anything is
_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class StateKeys:
    """Names of everything by which a state would be another: files, build, machine, settings.

    Attributes:
        target: of its cells. pools: of the cells of draft models. heads: by method.
    """

    target: str
    pools: Sequence[tuple[Pool, str]] = ()
    heads: Mapping[str, str] = field(default_factory=dict)

    def of(self, pool: Pool) -> str | None:
        return next((key for one, key in self.pools if one is pool), None)

    def pool(self, key: str) -> Pool | None:
        return next((one for one, its in self.pools if its == key), None)


Opener = Callable[[Check | None], tuple[States, StateKeys] | None]
"""Opens the folder of an engine's states; None while a file was not read, unless it gets a check:
then it reads it, or raises ModelUnavailable for one that has changed since it was loaded."""


class _Lane(msgspec.Struct, frozen=True, array_like=True):
    """A parked lane without its bytes; see ``Parked``.

    Attributes:
        tokens: 32-bit integers.
        hidden: of hidden states by position: the first position, how many, how wide.
        whole: (length, width of its hidden state or 0) of each copy of a running state; None of a
            lane that has none.
    """

    tokens: bytes
    hidden: tuple[int, int, int]
    need: str | tuple[int, ...]
    read: tuple[Read, ...]
    whole: tuple[tuple[int, int], ...] | None = None

    @property
    def n_parts(self) -> int:
        return 2 + 2 * len(self.whole or ())


class _Array(msgspec.Struct, frozen=True, array_like=True):
    name: str
    kind: str
    shape: tuple[int, ...]


class _Head(msgspec.Struct, frozen=True, array_like=True):
    """The head of a file; ``sizes`` are those of all its parts, in order."""

    key: str
    scope: str
    inexact_from: int | None
    read: int
    ends: tuple[int, ...]
    target: _Lane
    beside: tuple[tuple[str, _Lane], ...]
    heads: tuple[tuple[str, str, tuple[_Array, ...]], ...]
    sizes: tuple[int, ...]

    def held(self, scope: str) -> HeldText:
        return HeldText(self.ends, None, self.read, self.inexact_from, scope)


class Shelf:
    """The texts on disk of one engine. Its thread looks them up, and another one writes them.

    Attributes:
        resting: whether the engine does nothing.

    Args:
        owned: whether an owner is still there; what it left is deleted else.
        most: bytes of memory that texts may take while they wait to be written, besides the one
            that is being written and the newest one; the oldest ones are left out.
    """

    def __init__(
        self,
        opener: Opener,
        owned: Callable[[str], bool] = lambda owner: True,
        *,
        most: int = 1 << 30,
    ) -> None:
        self._opener, self._owned, self._most = opener, owned, most
        self._opened: tuple[States, StateKeys] | None = None
        self.resting = threading.Event()
        self.resting.set()
        self._outlines: dict[bytes, ParkedText] = {}  # by head, with the scope's name in files
        self._waiting: list[ParkedText] = []  # to be written, the next one in front
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False
        self._trouble = self._told = ""  # why a text was not written, and what was said of that

    def _open(self, check: Check | None = None) -> tuple[States, StateKeys] | None:
        self._opened = self._opened or self._opener(check)
        return self._opened

    def _wait(self) -> None:
        """Wait for the engine to rest, unless it closes."""
        while not (self._closing or self.resting.wait(_LOOK_S)):
            pass

    # -- finding --

    def take(
        self, scope: str, usable: Callable[[ParkedText], int], least: int, longest: int
    ) -> ParkedText | None:
        """Return the text of a scope with the most usable tokens, no fewer than ``least``, with all
        that belongs to it, ready for lanes. It fits into ``longest`` tokens.

        Raises:
            StoreError: it is damaged, which deletes it, or gone.
        """
        best: tuple[ParkedText, StateFile | None] | None = None
        for text, found in self._all(scope):
            n, size = usable(text), len(text.blob.tokens)
            if n >= least and size <= min(_SHARED * n, longest):
                least, best = n + 1, (text, found)
        if best is None or best[1] is None:
            return None if best is None else best[0]
        try:
            return self._taken(best[1], scope)
        except StoreError:
            states.delete(best[1])
            raise

    def _all(self, scope: str) -> list[tuple[ParkedText, StateFile | None]]:
        """List the texts of a scope: those on disk without their bytes, with the file; those on the
        way there whole."""
        with self._change:
            waiting = [(one, None) for one in self._waiting if one.held.scope == scope]
        some: list[tuple[ParkedText, StateFile | None]] = [*waiting]
        there: dict[bytes, ParkedText] = {}
        opened = self._open()
        for found in opened[0].found() if opened else ():
            if (one := self._outlines.get(found.head) or _outline(found)) is not None:
                there[found.head] = one
                if one.held.scope == _hidden(scope):
                    some.append((ParkedText(one.blob, replace(one.held, scope=scope)), found))
        self._outlines = there
        return some

    def _taken(self, found: StateFile, scope: str) -> ParkedText:
        assert self._opened is not None
        try:
            head, keys = msgspec.msgpack.decode(found.head, type=_Head), self._opened[1]
            if head.key != keys.target:
                raise StoreError(f"{found.path.name} is of other files, build or settings")
            return self._whole(head, keys, scope, states.read(found, head.sizes))
        except DAMAGE as error:
            raise StoreError(f"{found.path.name} cannot be read: {error}") from None

    def _whole(
        self, head: _Head, keys: StateKeys, scope: str, parts: Sequence[memoryview]
    ) -> ParkedText:
        at = 0

        def blob(about: _Lane) -> Blob:
            nonlocal at
            begin, at = at, at + about.n_parts
            return _unpacked(about, parts[begin:at])

        target, beside, heads = blob(head.target), [], {}
        for key, about in head.beside:
            one, pool = blob(about), keys.pool(key)
            if pool is not None:
                beside.append((pool, one))
        for name, key, arrays in head.heads:
            held = {
                array.name: np.frombuffer(part, array.kind).reshape(array.shape)
                for array, part in zip(arrays, parts[at:], strict=False)
            }
            at += len(arrays)
            if keys.heads.get(name) == key:
                heads[name] = held
        return ParkedText(target, head.held(scope), beside, heads)

    # -- writing --

    def put(self, text: ParkedText) -> None:
        """Queue a text to be written; it replaces its owner's texts that it continues."""
        with self._change:
            if self._closing:
                return
            self._waiting = [one for one in self._waiting if not _replaces(text, one)]
            self._waiting.append(text)
            while sum(one.n_bytes for one in self._waiting[1:-1]) > self._most:
                del self._waiting[1]
            self._change.notify_all()
        if self._thread is None:
            self._thread = in_thread("states", self._write)

    def trouble(self) -> str:
        """Explain why a text was not written, "" if all were; once."""
        before, self._told = self._told, self._trouble
        return "" if before == self._told else self._told

    def close(self) -> None:
        """Write the waiting texts, and nothing more."""
        with self._change:
            self._closing = True
            self._change.notify_all()
        if self._thread is not None:
            if self._opened is None:
                self._thread.join(_READ_S)
            if self._opened is not None:
                self._thread.join(_CLOSE_S)

    def _write(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    return
                text = self._waiting[0]
            try:
                self._keep(text)
            except (OSError, SpecllamaError) as error:
                why = (isinstance(error, OSError) and error.strerror) or error
                self._trouble = f"cannot keep a conversation's state: {why}"
                logger.warning("%s", self._trouble)
            except Exception:
                logger.exception("cannot keep a conversation's state")
            with self._change:
                if self._waiting and self._waiting[0] is text:
                    del self._waiting[0]
                self._change.notify_all()

    def _is_owned(self, owner: str) -> bool:
        return owner == SERVER or self._owned(owner)

    def _keep(self, text: ParkedText) -> None:
        if (opened := self._open(self._wait)) is None or not self._is_owned(text.held.owner):
            return
        there, keys = opened
        if (whole := _packed(text, keys)) is None:
            return
        head, parts = whole
        owner, tokens, scope = text.held.owner, text.blob.tokens, _hidden(text.held.scope)
        name = "text"
        if owner == SERVER:
            digest = hashlib.blake2b(np.asarray(tokens, "<i4").tobytes(), digest_size=8)
            name = f"{scope}{digest.hexdigest()}"
        if not there.write(owner, name, head, parts):
            raise StoreError(f"it takes more than {size(there.most)}, the limit (--kv-disk)")
        if owner != SERVER:
            if not self._is_owned(owner):  # it was deleted meanwhile
                there.forget(owner)
            return
        for found in there.found():
            old = _outline(found) if found.owner == owner and found.head != head else None
            if old is not None and old.held.scope == scope and _begins(old.blob.tokens, tokens):
                states.delete(found)


def _replaces(new: ParkedText, old: ParkedText) -> bool:
    if (new.held.owner, new.held.scope) != (old.held.owner, old.held.scope):
        return False
    return new.held.owner != SERVER or _begins(old.blob.tokens, new.blob.tokens)


def _begins(beginning: Sequence[int], text: Sequence[int]) -> bool:
    return common_prefix(beginning, text) == len(beginning)


def _hidden(scope: str) -> str:
    """Return a scope's name in files."""
    return hashlib.blake2b(scope.encode(), digest_size=8).hexdigest() if scope else ""


def _packed(text: ParkedText, keys: StateKeys) -> tuple[bytes, list[Bytes]] | None:
    """Pack a text into a head and parts; return None for a target that cannot be packed."""
    target = _lane_packed(text.blob)
    if target is None:
        return None
    about, parts = target
    beside: list[tuple[str, _Lane]] = []
    for pool, blob in text.beside:
        key, one = keys.of(pool), _lane_packed(blob)
        if key is not None and one is not None:
            beside.append((key, one[0]))
            parts += one[1]
    heads: list[tuple[str, str, tuple[_Array, ...]]] = []
    for name, held in text.heads.items():
        if (key := keys.heads.get(name)) is not None:
            arrays = {array: np.ascontiguousarray(held[array]) for array in held}
            described = (_Array(n, a.dtype.str, a.shape) for n, a in arrays.items())
            heads.append((name, key, tuple(described)))
            parts += [a.data.cast("B") if a.size else b"" for a in arrays.values()]
    head = _Head(
        keys.target, _hidden(text.held.scope), text.held.inexact_from, text.held.read,
        text.held.ends, about, tuple(beside), tuple(heads), tuple(len(part) for part in parts),
    )  # fmt: skip
    return msgspec.msgpack.encode(head), parts


def _lane_packed(blob: Blob) -> tuple[_Lane, list[Bytes]] | None:
    """Pack a parked lane into a description and its bytes; None if its kind is not known."""
    if not isinstance(blob, Parked):
        return None
    first, end = blob.hidden.first, blob.hidden.end
    states = blob.hidden.rows(first, end)
    n, width = (0, 0) if states is None else states.shape
    parts: list[Bytes] = [blob.state, _bytes(states)]
    whole: list[tuple[int, int]] = []
    for one in blob.checkpoints if isinstance(blob, ParkedWhole) else ():
        whole.append((one.length, 0 if one.hidden is None else one.hidden.shape[1]))
        parts += [memoryview(one.state).cast("B"), _bytes(one.hidden)]
    about = _Lane(
        np.asarray(blob.tokens, "<i4").tobytes(),
        (first, n, width),
        blob.need,
        tuple(blob.read),
        tuple(whole) if isinstance(blob, ParkedWhole) else None,
    )
    return about, parts


def _unpacked(about: _Lane, parts: Sequence[Bytes]) -> Parked:
    """Rebuild a packed lane. Without parts it is an outline, which shows how much of a text it
    holds.

    Raises:
        ValueError, IndexError: the parts do not fit what stands beside them.
    """
    tokens: list[int] = np.frombuffer(about.tokens, "<i4").tolist()
    state, hidden, need = b"", HiddenRows(), cast(HiddenNeed, "nothing")
    if parts:
        state, need = cast(bytes, parts[0]), cast(HiddenNeed, about.need)
        first, n, width = about.hidden
        hidden.clear(first)
        if n:
            hidden.add(first, _rows(parts[1], n, width))
    if about.whole is None:
        return Parked(tokens, state, hidden, need, about.read)
    kept = Checkpoints()
    for i, (length, width) in enumerate(about.whole):
        row = _rows(parts[3 + 2 * i], 1, width) if width and parts else None
        kept.add(Checkpoint(length, bytearray(parts[2 + 2 * i]) if parts else b"", row))
    return ParkedWhole(tokens, state, hidden, need, about.read, kept)


def _bytes(rows: Rows | None) -> Bytes:
    return b"" if rows is None else rows.astype(np.float32, order="C").data.cast("B")


def _rows(data: Bytes, n: int, width: int) -> Rows:
    return np.frombuffer(data, np.float32).reshape(n, width).copy()


def _outline(found: StateFile) -> ParkedText | None:
    """Return the text of a file without its bytes; None if another version wrote it."""
    try:
        head = msgspec.msgpack.decode(found.head, type=_Head)
        blob = _unpacked(head.target, ())
    except DAMAGE:
        return None
    return ParkedText(blob, head.held(head.scope))
