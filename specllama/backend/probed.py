"""A decoder of one text in passes of any width, to compare its rows bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from specllama.arrays import Row
from specllama.backend.base import Context

# a branch alongside a chain: rows 3 and 4 follow row 0, past the cells of rows 1 and 2
TREE = (-1, 0, 1, 0, 3)
LINE = (0, 3, 4)


class Seen(Protocol):
    """The sums inside passes: by name, a hash of each token's row."""

    def expect(self, n: int) -> None: ...

    def take(self) -> Mapping[str, Sequence[int]]: ...


@dataclass(frozen=True, slots=True)
class Computed:
    """One row of a pass: its logits and the sums before them."""

    logits: Row
    inside: Mapping[str, int]

    def same(self, other: Computed) -> bool:
        """True if both are equal bit for bit, in all sums that both passes name alike."""
        mine, theirs = self.inside, other.inside
        return bool(
            np.array_equal(self.logits.view(np.uint32), other.logits.view(np.uint32))
        ) and all(mine[name] == theirs[name] for name in mine.keys() & theirs.keys())


class Probe:
    """Rows of one text after a common beginning, decoded in passes of any width."""

    def __init__(
        self,
        context: Context,
        seen: Seen | None,
        base: int,
        tick: Callable[[int], object] = lambda rows: None,
    ) -> None:
        self.context = context
        self._tick = tick  # called before every pass, with its rows
        self._seen = seen
        self._base = base
        n = context.max_rows
        self._text = [spread(i if i % 4 < 2 else 1, context.n_vocab) for i in range(n + 1)]
        self._alone: list[Computed] = []
        self.worst = 0.0

    def run(self, start: int, n: int) -> list[Computed]:
        """Compute rows ``start`` to ``start + n - 1`` in one pass after those before."""
        return self.evaluate(self._text[start : start + n], None)

    def evaluate(self, tokens: Sequence[int], parents: Sequence[int] | None) -> list[Computed]:
        self._tick(len(tokens))
        if self._seen is not None:
            self._seen.expect(len(tokens))
        rows = self.context.forward(tokens, outputs="all", parents=parents).copy()
        inside = {} if self._seen is None else self._seen.take()
        return [
            Computed(row, {name: hashes[i] for name, hashes in inside.items()})
            for i, row in enumerate(rows)
        ]

    def restart(self) -> None:
        """Go back to the head."""
        self.context.rollback(self._base)

    def padded(
        self, text: Sequence[int], width: int, parents: Sequence[int] | None = None
    ) -> list[Computed]:
        """Run these tokens of the text in one pass of ``width`` rows, and keep only theirs."""
        n = len(text)
        past = len(self.context.tokens)
        tokens = [self._text[i] for i in text]
        if parents is not None:
            parents = [*parents, *range(n - 1, width - 1)]
        rows = self.evaluate(tokens + tokens[-1:] * (width - n), parents)[:n]
        if parents is None:
            self.context.rollback(past + n)
        return rows

    def padded_steps(self, text: Sequence[int], width: int) -> list[Computed]:
        """Compute these tokens after the common beginning, each in a pass of ``width`` rows."""
        self.restart()
        return [self.padded([i], width)[0] for i in text]

    @property
    def has_steps(self) -> bool:
        return bool(self._alone)

    def steps(self, n: int) -> None:
        """Decode the first ``n`` tokens one by one."""
        self.restart()
        self._alone = [self.run(i, 1)[0] for i in range(n)]

    def extend(self, n: int, size: int) -> None:
        """Decode on to ``n`` tokens in passes of ``size``, which were found to be like steps."""
        for start in range(len(self._alone), n, size):
            self._alone += self.run(start, min(size, n - start))

    def matches(self, n: int) -> bool:
        """True if a pass of the first ``n`` tokens, and the step after it, are like steps."""
        self.restart()
        rows = self.run(0, n)
        pairs = list(zip(self._alone, rows, strict=False))
        if n < len(self._alone):
            pairs.append((self._alone[n], self.run(n, 1)[0]))
        self.worst = max(float(np.abs(a.logits - b.logits).max()) for a, b in pairs)
        return all(a.same(b) for a, b in pairs)


def spread(i: int, n_vocab: int) -> int:
    """Return a token of a sequence that spreads over the vocabulary, the same on every machine."""
    return (7919 * i + 101) % n_vocab
