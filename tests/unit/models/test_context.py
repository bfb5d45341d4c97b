"""The context length that is taken when nobody says."""

from __future__ import annotations

from pathlib import Path

import ggufs
import pytest

from specllama.errors import CannotLoad
from specllama.models.context import LEAST, choose, within_share
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.memory import estimate_model

WHY = "memory"


@pytest.fixture
def header(tmp_path: Path) -> GgufHeader:
    return read_header(ggufs.write_llama(tmp_path / "m.gguf", context=40960))


@pytest.mark.parametrize(
    ("room", "tokens"), [(0, LEAST), (16384, 16384), (40959, 32768), (40960, 40960), (10**9, 40960)]
)
def test_it_doubles_as_long_as_it_fits(header: GgufHeader, room: int, tokens: int) -> None:
    length = choose(None, header, lambda n: n <= room, WHY)
    assert length.tokens == tokens
    assert (WHY in length.line()) == (tokens < 40960)


def test_what_is_asked_for_is_taken(header: GgufHeader) -> None:
    def never(n: int) -> bool:
        raise AssertionError(n)

    assert choose(512, header, never, WHY).tokens == 512
    assert choose(0, header, never, WHY).tokens == 40960
    assert choose(512, header, never, WHY).line() == "context: 512 tokens, as asked"
    beyond = "context: 50,000 tokens, as asked; it was trained for 40,960"
    assert choose(50_000, header, never, WHY).line() == beyond


def test_a_short_model_and_one_that_does_not_say(tmp_path: Path) -> None:
    short = read_header(ggufs.write_llama(tmp_path / "s.gguf", context=512))
    length = choose(None, short, lambda n: False, WHY)
    assert (length.tokens, length.line()) == (512, "context: 512 tokens, the trained length")
    silent = read_header(
        ggufs.write_llama(tmp_path / "n.gguf", keys={"llama.context_length": None})
    )
    with pytest.raises(CannotLoad, match="how long a context"):
        choose(None, silent, lambda n: True, WHY)
    assert choose(1024, silent, lambda n: True, WHY).tokens == 1024


def test_a_context_leaves_half_of_the_memory_to_others(header: GgufHeader) -> None:
    def need(n_ctx: int) -> int:
        return estimate_model(header, n_ctx=n_ctx).required

    bare, whole = need(256), need(40960)
    enough = int((bare + 2 * (whole - bare)) / 0.95) + 1000
    assert within_share(need, enough)(40960)
    assert not within_share(need, enough - 1_000_000)(40960)
    assert not within_share(need, 0)(LEAST)
