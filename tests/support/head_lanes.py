"""Lanes of heads for tests: what a pass over one says, and fakes that answer passes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggufs import bpe_tokens

from specllama.arrays import Row, Rows
from specllama.backend.base import Part
from specllama.engine.engine import Engine
from specllama.errors import SpecllamaError
from specllama.settings.params import EngineOptions

VOCAB = len(bpe_tokens()[0])


def texts(seed: int, n: int) -> list[int]:
    """Tokens drawn at random."""
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCAB, n)]


def refused(target: Path, *heads: Path) -> SpecllamaError:
    """Load heads that a target cannot have; return the error."""
    options = EngineOptions(threads=1, heads=tuple(str(head) for head in heads))
    with pytest.raises(SpecllamaError) as caught:
        Engine.load(target, None, options)
    return caught.value


def same(got: Rows, wanted: Rows, near: float = 3e-2, spread: float = 0.5) -> None:
    """Compare rows that differ among themselves."""
    said = np.isfinite(wanted)
    assert (np.isfinite(got) == said).all()
    assert np.abs(got[said] - wanted[said]).max() < near
    assert wanted[said].std() > spread


def feed(lane: Any, tokens: Sequence[int], states: Rows) -> tuple[Row, Row]:
    """Logits and state behind the last of these pairs."""
    part = Part(lane, tokens, "last", states=states)
    lane.pool.run([part])
    return part.rows[0], part.left[0]


def grow(
    lane: Any, tokens: Sequence[int], states: Rows, parents: Sequence[int], head: int = 0
) -> tuple[Rows, Rows]:
    """Logits and states behind drafted nodes."""
    part = Part(lane, tokens, "all", parents, states, head)
    lane.pool.run([part])
    return part.rows, part.left


def encode(lane: Any, features: Rows) -> Rows:
    """States of the target's."""
    part = Part(lane, (), "states", states=features)
    lane.pool.run([part])
    return part.left


def read(lane: Any, states: Rows) -> None:
    """Take in states of the target."""
    for at in range(0, len(states), lane.n_batch):
        lane.pool.run([Part(lane, (), "none", states=states[at : at + lane.n_batch])])


def begin_at(lane: Any, position: int) -> None:
    """Hold nothing; the next token lies there."""
    lane.rollback(0)
    lane.rollback(position)


class FakeHeadLane:
    """A lane of a head that is its own pool. What passes say and what stays is the test's:
    ``encode``, ``feed``, ``read``, ``grow``, ``drop``, ``begin_at`` and ``rollback_to``."""

    first: int
    max_rows = 1
    layers: tuple[int, ...] = ()

    @property
    def pool(self) -> Any:
        return self

    def run(self, parts: Sequence[Part]) -> None:
        (part,) = parts
        me: Any = self
        if part.outputs == "states":
            part.left = me.encode(part.states)
        elif part.parents is not None:
            part.rows, part.left = me.grow(part.tokens, part.states, part.parents, part.head)
        elif not len(part.tokens):
            me.read(part.states)
        else:
            row, state = me.feed(part.tokens, part.states)
            part.rows, part.left = row[None], state[None]

    def rollback(self, keep: int) -> None:
        me: Any = self
        if me.first < keep <= me.end or keep == me.first:
            me.rollback_to(keep)
        else:
            assert me.first == me.end or keep < me.first
            me.begin_at(keep)

    def keep_path(self, path: Sequence[int]) -> None:
        assert not path
        me: Any = self
        me.drop()

    def drop(self) -> None:
        pass
