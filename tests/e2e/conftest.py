from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from engines import measured
from ggufs import write_llama

from specllama.backend.llama import LlamaModel
from specllama.bench.prompts import BenchPrompt, load_prompts
from specllama.engine.engine import Engine
from specllama.settings.params import EngineOptions


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker("e2e")


@contextmanager
def bundled_pair(home: Path) -> Iterator[Engine]:
    """The speed profile that the engine keeps belongs to the tests, not to the user.

    Its rows are bitwise on any processor: where repacked ones are not, they stay as stored.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(home))
        # one thread: on a busy machine two threads of so small a model mostly wait for each other
        options = EngineOptions(threads=1)
        engine = measured("tiny", None, options)
        if not engine.info.exactness.startswith("bitwise"):
            engine.close()
            engine = measured("tiny", None, replace(options, repack="off"))
        with engine:
            yield engine


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with bundled_pair(tmp_path_factory.mktemp("home")) as engine:
        yield engine


@pytest.fixture(scope="module")
def own_tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A pair of the module's own: what its tests teach it is not kept for others."""
    with bundled_pair(tmp_path_factory.mktemp("home")) as engine:
        yield engine


@pytest.fixture(scope="session")
def prompts() -> list[BenchPrompt]:
    return load_prompts()


@pytest.fixture(scope="session")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small llama of random weights."""
    return write_llama(tmp_path_factory.mktemp("files") / "target.gguf", quant="Q8_0")


@pytest.fixture(scope="session")
def llama(llama_file: Path) -> Iterator[LlamaModel]:
    model = LlamaModel(llama_file, pre="gpt-2")
    yield model
    model.close()


@pytest.fixture
def nothing_on_stderr(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    """llama.cpp's log goes to ``logging``; a terminal app would be painted over."""
    yield
    assert capfd.readouterr().err == ""
