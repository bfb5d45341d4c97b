from collections.abc import Iterator
from pathlib import Path

import pytest
from ggufs import write_llama

from specllama.backend.lane import CellLane
from specllama.backend.llama import LlamaModel
from specllama.backend.llama_pool import open_pool
from specllama.settings.params import EngineOptions


@pytest.fixture(scope="session")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of four layers and random weights, for heads."""
    return write_llama(tmp_path_factory.mktemp("heads") / "target.gguf", blocks=4)


@pytest.fixture
def target(target_file: Path) -> Iterator[CellLane]:
    """A lane of it, which takes trees."""
    options = EngineOptions(threads=1, check_memory=False).resolved(on_gpu=False)
    given = {"n_ctx": 256, "max_rows": 32, "threads": 1, "max_leaves": 8}
    model = LlamaModel(target_file)
    yield open_pool(model, options=options, flash=options.flash_attn, **given).open()
    model.close()
