"""How much of a prompt is read while others wait."""

from __future__ import annotations

import pytest

from specllama.backend.kernels import TILE
from specllama.engine.pace import CHUNK, Pace


@pytest.mark.parametrize(
    ("writing_ms", "reading_ms", "chunk"),
    [
        (10.0, 0.01, CHUNK),  # reading costs next to nothing
        (30.0, 0.3, 300),  # three passes' worth
        (10.0, 5.0, TILE),  # never less than a tile
    ],
)
def test_a_prompt_takes_three_passes_of_the_others(
    writing_ms: float, reading_ms: float, chunk: int
) -> None:
    pace = Pace()
    assert pace.chunk() == 2 * TILE, "nothing is known"
    for _ in range(3):
        pace.passed(4, writing_ms / 1e3)
        pace.passed(128, 128 * reading_ms / 1e3)
    assert pace.chunk() == pytest.approx(chunk, abs=1)
    for _ in range(30):  # the machine became four times as fast in writing
        pace.passed(2, writing_ms / 4e3)
    assert pace.chunk() == pytest.approx(
        min(max(chunk_of(writing_ms / 4, reading_ms), TILE), CHUNK), abs=1
    )


def chunk_of(writing_ms: float, reading_ms: float) -> float:
    return 3 * writing_ms / reading_ms
