from collections.abc import Iterator

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from servers import Serving, serving, table


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server over a table model, for the tests of a file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        with serving(table(tmp_path_factory.mktemp("tables"))) as running:
            yield running
