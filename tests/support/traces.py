"""What simulated pairs cost and how likely their guesses are, and talks between both."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from replay import Spot
from table_model import FakeTable

from specllama.arrays import Row

_MEASURED = (1.0, 1.82, 2.58, 2.60, 3.6, 4.3, 5.1)

MEASURED = [0.0, *_MEASURED, *(5.1 + 0.55 * i for i in range(1, 60))]  # two cores, a 1 B target

CPU = [0.0, 1, 1.5, 2.1, 2.1, 2.75, 3.4, 3.7, 4.0, 4.4, 4.8, 5.1, 5.3, 5.45, 5.55, 5.65, 5.75, 6.3]

BF16 = [0.0, 1, 1.58, 1.7, 1.9, 2, 2.1, 2.25, 2.4, 2.55, 2.7, 2.8, 2.9, 3.05, 3.2, 3.3, 3.4]

GPU = [0.0, *(1 + 0.03 * (n - 1) for n in range(1, 18))]

DEAR = [0.0, *(1 + 0.55 * (n - 1) for n in range(1, 18))]

CLIFF = [
    0.0,
    1,
    1.12,
    1.4,
    1.67,
    1.92,
    2.17,
    2.41,
    2.66,
    *(1.51 + 0.0166 * n for n in range(9, 18)),
]


def trace(kind: str, seed: int, n: int = 1000) -> list[Spot]:
    rng = random.Random(f"{kind} {seed}")
    spots = []
    for i in range(n):
        if kind == "liar":  # sure of itself and always wrong
            spots.append(Spot(rng.random() < 0.02, 0.99, 7.0))
        elif kind == "alternating":
            good = (i // 120) % 2 == 0
            spots.append(Spot(rng.random() < (0.97 if good else 0.03), 0.95, 4.0))
        elif kind == "fast alternating":
            good = (i // 17) % 2 == 0
            spots.append(Spot(rng.random() < (0.97 if good else 0.03), 0.95, 4.0))
        elif kind == "good":
            p = rng.choice((0.5, 0.9, 0.99))
            spots.append(Spot(rng.random() < p, p, 8 * p - 2))
        elif kind == "lure":  # good until trusted, then worthless
            spots.append(Spot(rng.random() < (0.98 if i < 400 else 0.01), 0.97, 6.0))
        elif kind == "false copies":
            spots.append(Spot(rng.random() < 0.3, 0.3, 0.5, copy=(24, 8, 0)))
        else:  # copies that break off after two tokens, under a weak model
            spots.append(Spot(rng.random() < 0.4, 0.5, 1.0, copy=(12, 8, 2)))
    return spots


KINDS = ("liar", "alternating", "fast alternating", "good", "lure", "false copies", "short copies")

V = 64


class Script(FakeTable):
    """Writes a given text; ``right[i]`` False makes it say something else at position i."""

    def __init__(self, text: Sequence[int], right: Sequence[bool] | None = None) -> None:
        super().__init__(V)
        self._text, self._right = text, right
        self.start: Callable[[], int] = lambda: 0  # where in the text the cache begins

    def row(self, tokens: Sequence[int]) -> Row:
        at = self.start() + len(tokens)
        row = np.zeros(V, np.float32)
        if at < len(self._text):
            token = self._text[at]
            good = self._right is None or self._right[at]
            row[token if good else 1 + token % (V - 1)] = 8.0 if good else 5.0
        return row


@dataclass(frozen=True)
class Talk:
    """A prompt, the reply to it, and where the draft model guesses right."""

    prompt: list[int]
    reply: list[int]
    right: list[bool]


def fresh(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(1, V) for _ in range(n)]


def talk(rng: random.Random, parts: Iterable[tuple[str, int, float]]) -> Talk:
    """Parts of a reply: ("quote" or "new", tokens, how often the draft model is right)."""
    prompt = fresh(rng, 120)
    reply: list[int] = []
    right: list[bool] = []
    for kind, n, rate in parts:
        if kind == "quote":
            at = rng.randrange(len(prompt) - n)
            reply += prompt[at : at + n]
        else:
            reply += fresh(rng, n)
        right += [rng.random() < rate for _ in range(n)]
    return Talk(prompt, reply, right)
