"""A pool with a running state over a table, for tests: it forgets as llama.cpp does."""

from __future__ import annotations

from typing import Any

import numpy as np
from table_model import FakeCache, FakeTable

from specllama.arrays import Row
from specllama.backend.cache import Shape
from specllama.backend.kernels import Kernels
from specllama.backend.running import RunningPool
from specllama.cancel import StopFlag


class RunningFake(FakeCache):
    """A row is a function of the state: the tokens that it was made of, right or wrong.

    Attributes:
        saved, restored: how often.
        broken: raised in the middle of the next pass, whose state is then neither old nor new.
    """

    def __init__(self, table: FakeTable, shape: Shape, *, planes: int) -> None:
        super().__init__(table, shape, StopFlag())
        self.planes = planes
        self.undivided = shape.n_batch
        self.saved = self.restored = 0
        self.broken: BaseException | None = None
        # by distance from the end; those that a pass was too short for are older ones
        self._kept: list[list[int]] = [[] for _ in range(1 + planes)]
        self._back = 0  # which of them is the present one
        self._seen: list[int] = []

    @property
    def _present(self) -> list[int]:
        return self._kept[self._back]

    def decode(self, *, tiled: bool) -> None:
        n = self.batch.n
        self._seen = [*self._present, *self.batch.token[:n].tolist()]
        super().decode(tiled=tiled)
        if self.broken is not None:
            error, self.broken = self.broken, None
            self._kept[0], self._back = [99] * len(self._seen), 0
            raise error
        past = len(self._seen) - n
        last = n if n <= self.undivided else 1
        for back in range(min(last, 1 + self.planes)):
            self._kept[back] = self._seen[: past + n - back]
        self._back = 0

    def _row(self, text: Any, position: int) -> Row:
        return self._table.row(self._seen[: position + 1])

    def remove(self, sequence: int, begin: int) -> bool:
        end = len(self._present)
        if begin == 0:
            self._kept[0], self._back = [], 0
        elif begin < end:
            if self._back or end - begin > self.planes:
                return False
            self._back = end - begin
            self._kept[self._back] = (self._present + [99] * end)[:begin]
        return super().remove(sequence, begin)

    def clear(self) -> None:
        super().clear()
        self._kept[0], self._back = [], 0

    def end(self, sequence: int) -> int:
        return min(super().end(sequence), len(self._present))

    def state(self, sequence: int) -> bytes:
        return super().state(sequence) + np.array(self._present, np.int32).tobytes()

    def restore(self, sequence: int, state: bytes) -> bool:
        n = len(state) // 16  # a token has three numbers there, and one in the state
        self._kept[0], self._back = np.frombuffer(state[12 * n :], np.int32).tolist(), 0
        return super().restore(sequence, state[: 12 * n])

    def save_running(self, sequence: int, into: Any = None) -> Any:
        self.saved += 1
        return np.array(self._present, np.int32).tobytes()

    def restore_running(self, sequence: int, state: Any) -> bool:
        self.restored += 1
        self._kept[0], self._back = np.frombuffer(state, np.int32).tolist(), 0
        return True


class RunningFakePool(RunningPool):
    def __init__(self, table: FakeTable, *, planes: int, max_rows: int = 33) -> None:
        shape = Shape(4096, lanes=1, max_rows=max_rows, max_leaves=1, n_batch=256)
        self.fake = RunningFake(table, shape, planes=planes)
        super().__init__(self.fake, shape, table.n_vocab, Kernels(), in_order=False)
