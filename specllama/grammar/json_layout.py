"""White space between the parts of JSON, as this model writes it.

A schema leaves it open where a line ends and how far it is indented, and a model does it the same
way every time. Of other texts nothing is learnt that is ever asked for.
"""

from __future__ import annotations

from copy import copy

Habits = dict[bytes, dict[bytes, float]]
"""What white space stood in a place (see ``JsonLayout``), and how often; what is longer ago counts
less. Behind a line break stands what the line is indented further than the one before, or a ``-``
for each byte less."""

WHITE = b" \t\r\n"
_OPEN, _CLOSE = b"{[", b"}]"
_BEFORE = b"{[,:"  # a value may follow
_BEHIND = b"}],:"  # what is no value
_VALUE = ord("v")
_FADE = 0.8  # of what was counted, with each further time
_PRIOR = 0.5  # times that what is usual elsewhere counts
_LONGEST = 64  # white space of a schema is no longer


class JsonLayout:
    """A reader of the layout of JSON, byte by byte."""

    def __init__(self) -> None:
        self._inside = b""  # brackets that are open
        self._before = 0  # the last part, by its kind; 0 at the beginning
        self._space = b""  # behind it
        self._indent = b""  # of this line
        self._quoted = self._escaped = False
        self._own: Habits = {}  # of this text

    def copy(self) -> JsonLayout:
        return copy(self)

    def read(self, text: bytes, habits: Habits | None = None) -> None:
        """Read more of a text, and note its layout in ``habits``."""
        for byte in text:
            if self._quoted:
                self._quoted = self._escaped or byte != 0x22
                self._escaped = not self._escaped and byte == 0x5C
            elif byte in WHITE:
                self._space += bytes((byte,))
            else:
                self._part(byte, habits)

    def _part(self, byte: int, habits: Habits | None) -> None:
        space, inner = self._space, self._before == _VALUE and byte not in _BEHIND
        if habits is not None and self._before and not inner and len(space) < _LONGEST:
            for known in (self._own, habits):
                _count(known.setdefault(self._place(byte), {}), self._further(space))
        if (line := space.rfind(b"\n")) >= 0:
            self._indent = space[line + 1 :]
        self._space = b""
        if byte in _OPEN:
            self._inside += bytes((byte,))
        elif byte in _CLOSE:
            self._inside = self._inside[:-1]
        self._before = byte if byte in _BEFORE else _VALUE
        self._quoted = byte == 0x22

    def guess(self, byte: int | None, habits: Habits) -> tuple[bytes, float] | None:
        """Guess the white space before ``byte`` (None: before a value), and its probability; return
        None if there is no basis for a guess."""
        if self._quoted or not self._before:
            return None
        place = self._place(_VALUE if byte is None else byte)
        ways = (
            self._own.get(place),
            self._as_opened(place, self._own),
            habits.get(place),
            self._as_opened(place, habits),
            {b" " if self._before == ord(":") else b"": _PRIOR},
        )
        counts = next(way for way in ways if way)
        if counts is ways[-1] and (byte is None or byte not in b",:") and self._before != ord(":"):
            return None
        likeliest = max(counts, key=counts.__getitem__)
        space = self._whole(likeliest)
        if not space.startswith(self._space):
            return None
        return space[len(self._space) :], counts[likeliest] / (sum(counts.values()) + _PRIOR / 2.0)

    def _as_opened(self, place: bytes, habits: Habits) -> dict[bytes, float] | None:
        """Return the white space before a further value, or the end, after brackets like these."""
        before, kind = place[-2:]
        opened = habits.get(self._inside[-1:] * 2 + bytes((_VALUE,)))
        if not opened or (kind not in _CLOSE and (before != ord(",") or kind != _VALUE)):
            return None
        space = max(opened, key=opened.__getitem__)
        lines = space.startswith(b"\n")
        if kind in _CLOSE:
            return {b"\n" + b"-" * (len(space) - 1) if lines else b"": _PRIOR}
        return {b"\n" if lines else b" ": _PRIOR}

    def _place(self, byte: int) -> bytes:
        kind = byte if byte in _BEHIND else _VALUE
        return self._inside[-1:] + bytes((self._before, kind))

    def _further(self, space: bytes) -> bytes:
        line = space.rfind(b"\n")
        if line < 0:
            return space
        now, before = space[line + 1 :], self._indent
        if now.startswith(before):
            return b"\n" + now[len(before) :]
        return b"\n" + b"-" * max(len(before) - len(now), 0)

    def _whole(self, further: bytes) -> bytes:
        if not further.startswith(b"\n"):
            return further
        less = further.count(b"-")
        return b"\n" + self._indent[: len(self._indent) - less] + further[1 + less :]


def _count(counts: dict[bytes, float], space: bytes) -> None:
    for one in counts:
        counts[one] *= _FADE
    counts[space] = counts.get(space, 0.0) + 1.0
