"""The differences that rounding makes here, between passes of several rows and single steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specllama.arrays import Row, Rows
from specllama.backend.kernels import TILE
from specllama.bench.prompts import BenchPrompt, load_prompts
from specllama.engine.engine import Engine

_MARGIN = 1.5  # the furthest of some hundred gaps is not the furthest there is
_LIKELY = 7.0  # logits behind the best; tokens below a thousandth of its probability do not count
_SAMPLES = 4  # prompts to measure on, and passes of each width
_AMONG = 40  # prompts of which the longest are taken
_PARTS = (1 << 30, TILE // 2, 7)  # tokens of a pass that reads a prompt; few are not tiled
_WIDTHS = (2, 4, 8, 16, 32)  # of passes that are compared with single rows


@dataclass(frozen=True, slots=True)
class RowProbe:
    """Largest differences between passes of ``rows`` rows and the same rows alone: of a logit, and
    of a likely token's lead over another one."""

    rows: int
    difference: float
    moved: float = 0.0


@lru_cache(maxsize=1)
def rounding(engine: Engine) -> float:
    """Measure, once for an engine, how large a gap passes of several rows can close here, and a
    prompt that is read in other parts.

    It is the furthest that they moved one likely token's score from another's, with a margin.
    """
    most, n_ctx = min(engine.target.max_rows, 16), engine.target.n_ctx
    widths = [n for n in _WIDTHS if n <= most]
    texts = [engine.encode(prompt.content)[0][:n_ctx] for prompt in load_prompts()[:_AMONG]]
    moved = [0.0]
    for ids in sorted(texts, key=len)[-_SAMPLES:]:
        if len(ids) > most:
            moved += [probe.moved for probe in probe_rows(engine, ids, widths)]
            whole, *others = (_steps(engine, ids, most, size) for size in _PARTS)
            moved += [_moved(whole, other) for other in others]
    engine.reset()
    return _MARGIN * max(moved)


def rows_of(
    engine: Engine, head: Sequence[int], tail: Sequence[int], *, width: int = 1, part: int = 1 << 30
) -> list[Row]:
    """Return the row [n_vocab] of each token of ``tail``, evaluated in passes of ``width`` tokens
    after ``head``, which is read afresh in parts of ``part`` tokens."""
    target, size = engine.target, min(part, engine.target.n_batch)
    engine.reset()
    target.rollback(0)
    for i in range(0, len(head), size):
        target.forward(head[i : i + size], outputs="none")
    passes = (tail[i : i + width] for i in range(0, len(tail), width))
    return [row.copy() for tokens in passes for row in target.forward(tokens, outputs="all")]


def _steps(engine: Engine, prompt: Sequence[int], n: int, part: int = 1 << 30) -> Rows:
    """Return the rows [n, n_vocab] of a prompt's last ``n`` tokens, each a step of its own."""
    return np.stack(rows_of(engine, prompt[:-n], prompt[-n:], part=part))


def _moved(steps: Rows, rows: Rows) -> float:
    """Return how far the lead of a likely token over another one moved at most."""
    likely, apart = steps > steps.max(axis=1, keepdims=True) - _LIKELY, rows - steps
    up, down = np.where(likely, apart, -np.inf), np.where(likely, apart, np.inf)
    return float((up.max(axis=1) - down.min(axis=1)).max())


def probe_stated_rows(engine: Engine, prompts: Iterable[BenchPrompt]) -> list[RowProbe]:
    """Compare rows with single steps as far as ``engine.info`` promises; [] if it promises nothing.

    Measured after the longest of ``prompts``.
    """
    ids = max((engine.encode(prompt.content)[0] for prompt in prompts), key=len)
    stated = min(engine.info.exact_rows, engine.target.max_rows, len(ids) - 1)
    if stated < 2:
        return []
    return probe_rows(engine, ids, [*(n for n in _WIDTHS if n < stated), stated])


def probe_rows(engine: Engine, prompt: Sequence[int], widths: Sequence[int]) -> list[RowProbe]:
    """Measure on this machine how wide a pass stays bit-identical to single rows.

    ``prompt`` must be longer than the widest pass; its tail is evaluated both ways, in a few passes
    of each width.
    """
    target, widest = engine.target, max(widths)
    tail = prompt[-widest:]
    alone = _steps(engine, prompt, widest)
    out = []
    for n in widths:
        target.rollback(len(prompt) - widest)
        some = range(0, min(widest - n + 1, _SAMPLES * n), n)
        rows = np.concatenate([target.forward(tail[i : i + n], outputs="all").copy() for i in some])
        steps = alone[: len(rows)]
        out.append(RowProbe(n, float(np.abs(rows - steps).max()), _moved(steps, rows)))
    engine.reset()
    return out
