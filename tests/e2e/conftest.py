from __future__ import annotations

from collections.abc import Iterator

import pytest

from specllama.engine.engine import Engine
from specllama.params import EngineOptions


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        # the speed profile that the engine keeps belongs to the tests, not to the user
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        # one thread: on a busy machine two threads of so small a model mostly wait for each other
        with Engine.load("tiny", None, EngineOptions(threads=1)) as engine:
            yield engine
