"""A pool with a running state over a table, for tests: it forgets as llama.cpp does."""

from dataclasses import replace
from typing import Any

import numpy as np
from table_model import FakeCache, FakeTable

from specllama.arrays import Row
from specllama.backend.batch import Shape
from specllama.backend.kernels import Kernels
from specllama.backend.recurrent_pool import RunningPool
from specllama.cancel import Cancel


class _State:
    """Of one sequence: by distance from the end of the last pass what the state was made of; those
    that a pass was too short for are older ones. ``back``: which is the present one."""

    def __init__(self, planes: int) -> None:
        self.kept: list[list[int]] = [[] for _ in range(1 + planes)]
        self.back = 0
        self.seen: list[int] = []

    @property
    def present(self) -> list[int]:
        return self.kept[self.back]

    def become(self, text: list[int]) -> None:
        self.kept[0], self.back = text, 0


class RunningFake(FakeCache):
    """A row is a function of the state: the tokens that it was made of, right or wrong.

    Attributes:
        saved, restored: how often.
        shared: passes of several sequences.
        broken: raised in the middle of the next pass, whose state is then neither old nor new.
    """

    def __init__(self, table: FakeTable, shape: Shape, *, planes: int) -> None:
        cells = replace(shape, n_ctx=shape.n_ctx * shape.lanes)
        super().__init__(table, cells, Cancel(), by_order=False)
        self.planes = planes
        self.undivided = shape.n_batch
        self.saved = self.restored = self.shared = 0
        self.broken: BaseException | None = None
        self._states_of = [_State(planes) for _ in range(shape.sequences)]

    def decode(self, *, tiled: bool) -> None:
        n, in_it = self.batch.n, self.batch.sequences[: self.batch.n, 0].tolist()
        sequences = list(dict.fromkeys(in_it))
        parts = {s: [i for i in range(n) if in_it[i] == s] for s in sequences}
        if len(sequences) > 1:
            self.shared += 1
            assert len({len(rows) for rows in parts.values()}) == 1, "parts of one length"
            assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
        for s, rows in parts.items():
            one = self._states_of[s]
            one.seen = [*one.present, *self.batch.token[rows].tolist()]
        super().decode(tiled=tiled)
        error, self.broken = self.broken, None
        for s, one in enumerate(self._states_of):
            if s not in parts:
                if len(sequences) > 1:  # moved, without its planes
                    one.kept = [one.present, *([[99] * 9] * self.planes)]
                    one.back = 0
            elif error is not None:
                one.become([99] * len(one.seen))
            else:
                last = len(parts[s]) if n <= self.undivided else 1
                for back in range(min(last, 1 + self.planes)):
                    one.kept[back] = one.seen[: len(one.seen) - back]
                one.back = 0
        if error is not None:
            raise error

    def _text(self, sequence: int) -> Any:
        return self._states_of[sequence].seen

    def _row(self, text: Any, position: int) -> Row:
        return self._table.row(text[: position + 1])

    def remove(self, sequence: int, begin: int) -> bool:
        one = self._states_of[sequence]
        end = len(one.present)
        if begin == 0:
            one.become([])
        elif begin < end:
            if one.back or end - begin > self.planes:
                return False
            one.back = end - begin
            one.kept[one.back] = (one.present + [99] * end)[:begin]
        return super().remove(sequence, begin)

    def clear(self) -> None:
        super().clear()
        for one in self._states_of:
            one.become([])

    def end(self, sequence: int) -> int:
        return min(super().end(sequence), len(self._states_of[sequence].present))

    def state(self, sequence: int) -> bytes:
        present = self._states_of[sequence].present
        return super().state(sequence) + np.array(present, np.int32).tobytes()

    def restore(self, sequence: int, state: bytes) -> bool:
        n = len(state) // 16  # a token has three numbers there, and one in the state
        self._states_of[sequence].become(np.frombuffer(state[12 * n :], np.int32).tolist())
        return super().restore(sequence, state[: 12 * n])

    def save_running(self, sequence: int, into: Any = None) -> Any:
        self.saved += 1
        return np.array(self._states_of[sequence].present, np.int32).tobytes()

    def restore_running(self, sequence: int, state: Any) -> bool:
        self.restored += 1
        self._states_of[sequence].become(np.frombuffer(state, np.int32).tolist())
        return True


class RunningFakePool(RunningPool):
    def __init__(
        self, table: FakeTable, *, planes: int, max_rows: int = 33, lanes: int = 1
    ) -> None:
        shape = Shape(4096, lanes, max_rows, max_leaves=1, n_batch=256, apart=lanes > 1)
        self.fake = RunningFake(table, shape, planes=planes)
        super().__init__(self.fake, shape, table.n_vocab, Kernels(), in_order=False)  # type: ignore[arg-type]
