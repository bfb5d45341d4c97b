"""The division of a person's time between writing replies, reading them and training on them.

Time goes in cycles: each writes replies, reads what its target computes for them, and trains. A
cycle is as long as all before it, so that there is a usable head within minutes, and a cycle that
gains nothing says that twice the time gains nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S, LONGEST_S = 60.0, 1800.0  # of a cycle
LEAST_GAIN = 0.01  # tokens a pass that a cycle has to gain, or the last one was enough
SEVERAL = 3  # cycles before that is asked
_OFTEN = 4.0  # readings of each text in a cycle, above which more text helps more


def cycle_s(spent_s: float, left_s: float) -> float:
    """Return the seconds of the next cycle; a short rest goes with it."""
    usual = min(max(FIRST_S, spent_s), LONGEST_S)
    return left_s if left_s < 1.5 * usual else usual


def writing_share(passes: float | None) -> float:
    """Return the share of a cycle in which replies are written.

    Args:
        passes: how often the last cycle trained on each token of text; None before the first.
    """
    if passes is None:
        return 1 / 3
    # a text that was not seen once needs no company; one that was seen often teaches little more
    return 1 / 6 if passes < 1 else 1 / 2 if passes > _OFTEN else 1 / 3


@dataclass(frozen=True, slots=True)
class Paces:
    """Tokens a second of the three phases."""

    write: float
    read: float
    train: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """The time and the room that a training is expected to take.

    Attributes:
        written: tokens of replies that there will be. passes: how often each is trained on.
        disk, memory: bytes.
    """

    seconds: float
    write_s: float
    read_s: float
    train_s: float
    written: int
    passes: float
    disk: int
    memory: int


def outlook(paces: Paces, seconds: float, known: int, disk: int, memory: int) -> Outlook:
    """Foretell a training of some seconds.

    Args:
        known: tokens of replies that are there.
        disk: bytes of each token's features, of a bound that is kept elsewhere.
    """
    write_s = seconds * writing_share(None)
    written = int(write_s * paces.write)
    read_s = min(written / max(paces.read, 1e-9), seconds - write_s)
    train_s = seconds - write_s - read_s
    passes = train_s * paces.train / max(known + written, 1)
    return Outlook(seconds, write_s, read_s, train_s, known + written, passes, disk, memory)
