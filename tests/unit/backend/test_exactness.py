"""How exact passes are: measured on contexts whose faults are known, kept as long as it holds."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from engines import FakeContext
from table_model import FakeTable

from specllama.arrays import Rows
from specllama.backend import verdicts
from specllama.backend.base import Outputs
from specllama.backend.exactness import SCHEMA, Exactness
from specllama.backend.probe import CELLS, HEAD, LONG, probe
from specllama.errors import EngineError
from specllama.settings.params import DRAFT_MAX


class Faulty(FakeContext):
    """Rows that round: in passes of ``wide`` rows and more, or of branches, or after such a pass.

    Args:
        long: only where the cache was lengthened.
        fills: takes copies; else it has to read.
    """

    def __init__(
        self,
        *,
        wide: int = 1000,
        branches: bool = False,
        state: bool = False,
        long: bool = False,
        fills: bool = True,
        max_rows: int = 65,
    ) -> None:
        super().__init__(FakeTable(seed=1), n_ctx=CELLS, max_rows=max_rows)
        self._wide, self._branches, self._state = wide, branches, state
        self._long, self._fills = long, fills
        self.filled = 0
        self._spoilt_at = CELLS

    def fill(self, copies: int) -> None:
        if not self._fills:
            raise EngineError("no copies")
        self.filled = copies * len(self.tokens)

    def forward(
        self, tokens: Sequence[int], *, outputs: Outputs, parents: Sequence[int] | None = None
    ) -> Rows:
        past = len(self.tokens)
        rows = super().forward(tokens, outputs=outputs, parents=parents)
        if outputs != "all" or (self._long and past + self.filled < 512):
            return rows
        if self._state and len(tokens) >= self._wide:
            self._spoilt_at = past  # its rows are right, what it leaves behind is not
        elif (len(tokens) >= self._wide) or past > self._spoilt_at:
            rows += np.float32(1e-5)
        if self._branches and parents is not None:
            rows[-1] += np.float32(1e-5)
        return rows

    def rollback(self, keep_len: int) -> None:
        super().rollback(keep_len)
        if keep_len <= self._spoilt_at:
            self._spoilt_at = CELLS


def look(context: Faulty) -> Exactness:
    return probe(context, None, context.fill, trained=CELLS)


def test_a_model_without_faults_is_exact_in_every_pass() -> None:
    context = Faulty()
    found = look(context)
    assert (found.rows, found.trees, found.differs) == (65, True, 0)
    assert found.widths == (2, 3, 4, 8, 16, 32, 65)
    assert found.cells == (HEAD, LONG)
    assert LONG > 512
    assert context.tokens == []
    assert found.label == "bitwise up to 65 rows"
    assert "2, 3, 4, 8, 16, 32 and 65 rows" in found.measured


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("wide", [2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 16, 17])
def test_the_first_width_that_rounds_is_found(wide: int, state: bool, long: bool) -> None:
    found = look(Faulty(wide=wide, long=long, state=state))
    assert found.rows == wide - 1 if wide <= 16 else found.rows == 16
    assert found.differs == (wide if wide <= 16 else 32)
    assert found.trees == (wide > 5)
    assert (found.label.startswith("bitwise")) == (wide - 1 > DRAFT_MAX)
    assert f"{found.differs} rows differ by up to 1e-05" in found.measured


def test_branches_are_judged_by_themselves() -> None:
    found = look(Faulty(branches=True))
    assert (found.rows, found.trees) == (65, False)


def test_a_cache_that_takes_no_copies_is_read_to_its_length() -> None:
    context = Faulty(fills=False, wide=4, long=True)
    assert look(context).rows == 3
    assert sum(context.passes) > LONG
    short = probe(Faulty(fills=False), None, Faulty(fills=False).fill, trained=256)
    assert short.cells == (HEAD,), "no further than the model was trained for"


def test_a_narrow_context_is_measured_as_far_as_it_goes() -> None:
    assert look(Faulty(max_rows=20)).widths == (2, 3, 4, 8, 16, 20)


def test_a_large_model_is_measured_as_far_as_windows_go_by_themselves() -> None:
    context = Faulty()
    found = probe(context, None, context.fill, trained=CELLS, far=False)
    assert (found.rows, found.widths) == (16, (2, 3, 4, 8, 16))


def test_what_logits_hide_shows_inside() -> None:
    class Inside:
        """A product that is another one in passes of three and more rows."""

        n = 0

        def expect(self, n: int) -> None:
            self.n = n

        def take(self) -> Mapping[str, Sequence[int]]:
            return {"kqv": [self.n >= 3] * self.n, f"only-{self.n}": [0] * self.n}

    context = Faulty()
    found = probe(context, Inside(), context.fill, trained=CELLS)
    assert (found.rows, found.differs, found.by) == (2, 3, 0.0)
    assert "inside, in the last bits" in found.measured
    assert found.label == "near-ties possible beyond 2 rows"


def test_what_was_not_measured_says_so() -> None:
    found = Exactness(why_not="a running state")
    assert found.label == "near-ties possible (not measured)"
    assert "a running state" in found.measured


# -- kept ----------------------------------------------------------------------------------------

KEY = {"file": "f", "build": ["b"], "machine": ["m"], "threads": 2, "kv": ["f16", "f16"]}


class Once:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Exactness:
        self.calls += 1
        return Exactness(rows=self.calls + 1, widths=(2, 3), cells=(40,))


def measured(key: dict[str, object], once: Once, folder: Path) -> Exactness:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("specllama.paths.profiles_dir", lambda: folder)
        return verdicts.kept(SCHEMA, key, Exactness, once)


def test_a_verdict_is_kept_until_something_changes(tmp_path: Path) -> None:
    once = Once()
    first = measured(KEY, once, tmp_path)
    assert measured(dict(reversed(KEY.items())), once, tmp_path) == first
    assert once.calls == 1
    changes = ({"threads": 1}, {"build": ["other"]}, {"machine": ["more"]}, {"kv": ["f16", "q8_0"]})
    for i, change in enumerate(changes, start=2):
        measured({**KEY, **change}, once, tmp_path)
        assert once.calls == i
    assert measured(KEY, once, tmp_path) == first


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe", b'{"key": {}, "found": {"rows": 9}}'])
def test_a_damaged_verdict_is_measured_again(tmp_path: Path, damage: bytes) -> None:
    once = Once()
    measured(KEY, once, tmp_path)
    [file] = tmp_path.rglob("*.json")
    file.write_bytes(damage)
    assert measured(KEY, once, tmp_path).rows == 3
    assert measured(KEY, once, tmp_path).rows == 3


def test_a_folder_that_cannot_be_written_to_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    once = Once()
    assert measured(KEY, once, tmp_path / "file").rows == 2
    assert measured(KEY, once, tmp_path / "file").rows == 3


@pytest.mark.parametrize("far", [True, False])
def test_what_is_left_to_measure_is_told_before_every_pass(far: bool) -> None:
    context = Faulty()
    said: list[tuple[int, float]] = []
    sound = probe(
        context, None, context.fill, trained=4096, far=far, told=lambda *now: said.append(now)
    )
    assert sound.rows == (65 if far else 16)
    steps, shares = [step for step, _ in said], [share for _, share in said]
    assert sorted(set(steps)) == [1, 2, 3, 4]
    assert steps == sorted(steps)
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert 0.7 < shares[-1] < 0.99, "an estimate that is over before the end is none"


def test_threads_that_change_bits_are_found() -> None:
    context = Faulty()

    def all_threads() -> None:
        context._wide = 8

    found = probe(context, None, context.fill, trained=4096, all_threads=all_threads)
    assert (found.rows, found.trees, found.differs) == (1, False, 16)
