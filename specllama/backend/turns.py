"""Times of passes, taken by turns: only neighbors in time compare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import perf_counter

from specllama.backend.base import Context, Outputs

_NARROW = 16
Turn = list[dict[int, float]]


def timed(
    lanes: Sequence[Context],
    sizes: Iterable[int],
    turns: int,
    *,
    outputs: Outputs | None = None,
    text: Sequence[int] = (0,),
    done: Callable[[], object] = lambda: None,
) -> list[Turn]:
    """Return the milliseconds of passes after what the lanes hold: by turn, lane and rows.

    The last of three in a row counts: llama.cpp reuses a graph from the second pass of a shape on,
    and CUDA captures it in the second and replays it from the third on.

    Args:
        outputs: of passes; None: all rows of narrow ones, the last of those that read a text.
        text: tokens that passes repeat.
        done: called after every size.
    """
    found = []
    for _ in range(turns):
        found.append([dict[int, float]() for _ in lanes])
        for n in sizes:
            for lane, ms in zip(lanes, found[-1], strict=True):
                rows = outputs or ("all" if n <= _NARROW else "last")
                past, tokens = lane.n_past, [text[i % len(text)] for i in range(n)]
                for _ in range(3):
                    begin = perf_counter()
                    lane.forward(tokens, outputs=rows)
                    ms[n] = (perf_counter() - begin) * 1e3
                    lane.rollback(past)
            done()
    return found
