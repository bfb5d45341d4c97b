"""A training without a model: texts and weights are numbers in a file, time passes as it is told.

python tests/support/training_fakes.py train-draft TARGET …    the command over it, in real time
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_files import write_eagle3

from specllama.training.phases import Amounts, Over, TargetPhases
from specllama.training.training_card import METADATA, Milestone, TrainingCard

KEPT_S = 1.0  # of work, after which its state is kept
STEP_S = 0.05
WRITES, TRAINS = 100, 2000  # tokens a second


class Clock:
    """A clock that stands still but for ``pass_by``."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class FakeReply:
    prompt: tuple[int, ...] = (1, 2, 3)


class FakeWork(TargetPhases):
    """The phases without a target.

    Args:
        best: tokens a pass that no training exceeds; with more text, it is reached sooner.
        folder: keeps the state, as the real one does; None keeps none.
    """

    def __init__(
        self,
        pass_by: Callable[[float], object] = time.sleep,
        folder: Path | None = None,
        best: float = 2.0,
    ) -> None:
        self._pass_by, self.best = pass_by, best
        self._file = None if folder is None else folder / "texts.jsonl"
        self.written = self.trained = self.unread = 0
        self.called: list[str] = []
        self.exported: list[float] = []
        self.spent: dict[str, float] = dict.fromkeys(("write", "read", "train"), 0.0)
        self._kept: dict[str, float] = {}  # of each phase, when its state was kept last
        if self._file is not None and self._file.exists():
            self.written, self.trained = json.loads(self._file.read_text())

    def _step(self, phase: str) -> None:
        self._pass_by(STEP_S)
        self.spent[phase] += STEP_S
        if self.spent[phase] >= self._kept.get(phase, 0.0) + KEPT_S:
            self._kept[phase] = self.spent[phase]
            self._keep()

    def _keep(self) -> None:
        if self._file is not None:
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps([self.written, self.trained]))
            part.replace(self._file)

    def amounts(self) -> Amounts:
        n = self.written
        return Amounts(
            written=n,
            held_out=n // 10,
            read=n,
            unread=self.unread,
            disk=5000 * n,
            replies={"code": n // 100},
        )

    def write(self, over: Over) -> None:
        self.called.append("write")
        while not over():
            self._step("write")
            self.written += int(WRITES * STEP_S)
        self._keep()

    def read(self, over: Over) -> None:
        self.called.append("read")
        while self.unread and not over():
            self._step("read")
            self.unread -= 1

    def train(
        self,
        over: Over,
        report: Callable[[Milestone], None],
        ahead: Callable[[], float | None],
    ) -> None:
        self.called.append("train")
        while not over():
            self._step("train")
            self.trained += int(TRAINS * STEP_S)
            report(Milestone(0, self.trained, 3.0, (), 0.0))
        self._keep()
        report(self.figures())

    def figures(self) -> Milestone:
        learned = 1 - math.exp(-min(self.trained / 100_000, self.written / 3_000))
        first = 0.9 * (self.best - 1) / self.best * learned
        right = (first, 0.8 * first, 0.7 * first)
        loss = 3.0 if self.trained else None
        return Milestone(0, self.trained, loss, right, 1 + (self.best - 1) * learned)

    def export(self, path: Path, card: TrainingCard) -> None:
        assert card.best is not None
        self.exported.append(card.best.per_pass)
        part = path.with_name(path.name + ".part")
        write_eagle3(part, layers=(2, 4, 5), keys={METADATA: card.encoded().decode()})
        part.replace(path)

    def held_out(self, n: int) -> Sequence[Any]:
        return [FakeReply()] * n


def replace_real(work: Callable[[Path], FakeWork], set: Callable[[Any, str, Any], Any]) -> None:
    """Let ``train-draft`` run over fake work; its head is loaded by nobody."""
    from specllama.bench import payback
    from specllama.cli import diagnostics
    from specllama.training import phases

    found = payback.Payback(step=0.1, row=0.1, kept=0.5, length=2, speed=1.3)
    set(diagnostics, "require_extra", lambda *names: None)
    set(phases, "open_work", lambda target, folder, *more: (work(folder), ""))
    set(payback, "payback", lambda *args: found)


def main() -> None:
    from specllama import cli
    from specllama.training import course

    course.TRY_S = course.FIRST_S = 0.4
    replace_real(lambda folder: FakeWork(folder=folder), setattr)
    sys.argv = ["specllama", *sys.argv[1:]]
    cli.main()


if __name__ == "__main__":
    main()
