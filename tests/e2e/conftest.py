from __future__ import annotations

from collections.abc import Iterator

import pytest

from specllama.engine import Engine
from specllama.params import EngineOptions


@pytest.fixture(scope="session")
def tiny() -> Iterator[Engine]:
    # one thread: on a busy machine two threads of so small a model mostly wait for each other
    with Engine.load("tiny", None, EngineOptions(threads=1)) as engine:
        yield engine
