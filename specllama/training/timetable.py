"""The division of a person's time between writing replies and training on them.

Time goes in cycles: each writes replies, reads again what has no features any more, and trains. A
cycle is as long as all before it, so that there is a usable head within minutes, and a cycle that
gains nothing says that twice the time gains nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_S, LONGEST_S = 60.0, 1800.0  # of a cycle
LEAST_GAIN = 0.01  # tokens a pass that a cycle has to gain, or the last one was enough
BEGUN_S = 900.0  # before that is asked: slow machines take a few steps in the first cycles
_OFTEN = 4.0  # readings of each text in a cycle, above which more text helps more


def cycle_s(spent_s: float, left_s: float) -> float:
    """Return the seconds of the next cycle; a short rest goes with it."""
    usual = min(max(FIRST_S, spent_s), LONGEST_S)
    return left_s if left_s < 1.5 * usual else usual


def writing_share(visits: float | None) -> float:
    """Return the share of a cycle in which replies are written.

    Args:
        visits: how often the last cycle trained on each token of text; None before the first.
    """
    if visits is None:
        return 1 / 3
    # a text that was not seen once needs no company; one that was seen often teaches little more
    return 1 / 6 if visits < 1 else 1 / 2 if visits > _OFTEN else 1 / 3


@dataclass(frozen=True, slots=True)
class Outlook:
    """A forecast of a training: time, text and room.

    Attributes:
        written: tokens of replies that there will be. visits: how often each is trained on.
        disk, memory: bytes.
    """

    seconds: float
    write_s: float
    written: int
    visits: float
    disk: int
    memory: int


def outlook(
    seconds: float, writes: float, trains: float, written: int, disk_a_token: float, **bounds: int
) -> Outlook:
    """Return what a training is expected to take.

    Args:
        writes, trains: tokens a second.
        written: tokens of replies that are there.
        bounds: ``disk`` bytes at most, ``memory`` bytes.
    """
    write_s = seconds / 3
    total = written + int(write_s * writes)
    visits = (seconds - write_s) * trains / max(total, 1)
    disk = min(int(total * disk_a_token), bounds["disk"])
    return Outlook(seconds, write_s, total, visits, disk, bounds["memory"])
