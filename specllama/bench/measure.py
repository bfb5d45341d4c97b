"""The cost of passes on this machine, timed directly: v(n) of the target, steps of the draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from specllama.backend.base import Context, Outputs
from specllama.speculative.policy.costs import Costs

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)
READS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Median milliseconds by rows (target, every row with logits) and by tokens (draft)."""

    context: int
    target: dict[int, float]
    draft: dict[int, float]
    prefill_row_ms: float

    @property
    def ratios(self) -> dict[int, float]:
        return {n: ms / self.target[1] for n, ms in self.target.items()}

    @property
    def draft_step(self) -> float | None:
        """A draft step in plain steps."""
        return self.draft[1] / self.target[1] if self.draft else None

    def curve(self, rows: int) -> list[float]:
        """Return ``[0, ms(1), ..., ms(rows)]``, interpolated."""
        return _curve(self.target, rows)

    def reading(self, tokens: int) -> float:
        """Return the draft model's milliseconds to read that many tokens at once; 0 without one."""
        return _curve(self.draft, tokens)[-1] if self.draft else 0.0

    def between(self, later: PassCosts) -> PassCosts:
        """Return the mean of this and another measurement of the same passes."""

        def mean(a: dict[int, float], b: dict[int, float]) -> dict[int, float]:
            return {n: (a[n] + b[n]) / 2 for n in a}

        return PassCosts(
            self.context,
            mean(self.target, later.target),
            mean(self.draft, later.draft),
            (self.prefill_row_ms + later.prefill_row_ms) / 2,
        )

    def store(self, costs: Costs) -> None:
        """Store these figures in the costs of a window."""
        costs.target.slope = min(max(self.prefill_row_ms / self.target[1], 0.01), 1.0)
        for rows in sorted(self.target):
            costs.target.set(rows, self.target[rows], self.context)
        for tokens in sorted(self.draft):
            costs.draft.set(tokens, self.draft[tokens], self.context)

    def to_dict(self) -> dict[str, Any]:
        return {
            "context": self.context,
            "target_ms": {str(n): round(ms, 4) for n, ms in self.target.items()},
            "target_ratio": {str(n): round(r, 3) for n, r in self.ratios.items()},
            "draft_ms": {str(n): round(ms, 4) for n, ms in self.draft.items()},
            "draft_step": self.draft_step,
            "prefill_row_ms": self.prefill_row_ms,
        }


def _curve(known: dict[int, float], rows: int) -> list[float]:
    points = sorted(known.items())
    out = [0.0]
    for n in range(1, rows + 1):
        after = next(((k, v) for k, v in points if k >= n), None)
        before = next(((k, v) for k, v in reversed(points) if k <= n), points[0])
        if after is None:
            (a, x), (b, y) = points[-2], points[-1]
            out.append(y + (y - x) / (b - a) * (n - b))
        elif after[0] == before[0]:
            out.append(after[1])
        else:
            (a, x), (b, y) = before, after
            out.append(x + (y - x) * (n - a) / (b - a))
    return out


def time_passes(
    context: Context,
    tokens: Sequence[int],
    sizes: Sequence[int],
    *,
    outputs: Outputs,
    repetitions: int,
    progress: Callable[[], object] | None = None,
) -> dict[int, float]:
    """Return the median milliseconds of each size of pass after ``tokens``, to which the cache is
    cut.

    Each size takes turns with the first one, its reference: only neighbours in time compare. The
    first pass of a size (graphs, buffers) does not count.
    """
    past = len(tokens)
    context.rollback(0)
    for i in range(0, past, 256):
        context.forward(tokens[i : i + 256], outputs="none")
    times: dict[int, list[float]] = {n: [] for n in sizes}
    filler = [tokens[i % past] for i in range(max(sizes))]
    turns = [sizes[0], *(n for size in sizes[1:] for n in (size, sizes[0]))]
    for repetition in range(repetitions + 1):
        for n in turns:
            for again in range(2):  # the second pass of a shape in a row reuses its graph
                begin = perf_counter()
                context.forward(filler[:n], outputs=outputs)
                elapsed = (perf_counter() - begin) * 1e3
                context.rollback(past)
                if repetition and again:
                    times[n].append(elapsed)
        if progress is not None:
            progress()
    return {n: median(values) for n, values in times.items()}


def measure_costs(
    target: Context,
    draft: Context | None,
    tokens: Sequence[int],
    *,
    repetitions: int = 5,
    progress: Callable[[], object] | None = None,
) -> PassCosts:
    """Time both contexts at the length of ``tokens`` (a real prompt, some hundred tokens)."""
    room = target.n_ctx - max(ROWS) - 1
    text = list(tokens)[: max(room, 1)]
    rows = [n for n in ROWS if n <= target.max_rows]
    v = time_passes(target, text, rows, outputs="all", repetitions=repetitions, progress=progress)
    begin = perf_counter()
    target.rollback(0)
    for i in range(0, len(text), 256):
        target.forward(text[i : i + 256], outputs="none")
    per_row = (perf_counter() - begin) * 1e3 / len(text)
    target.rollback(0)
    steps: dict[int, float] = {}
    if draft is not None:
        short = [t for t in text if t < draft.n_vocab][: draft.n_ctx - max(READS) - 1]
        steps = time_passes(
            draft, short, READS, outputs="last", repetitions=repetitions, progress=progress
        )
        draft.rollback(0)
    return PassCosts(len(text), v, steps, per_row)
