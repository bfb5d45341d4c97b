"""Two models of the bundled family on one server: each writes what it writes alone."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from servers import Serving, served

from specllama import paths
from specllama.cli.served_models import served_models
from specllama.engine.engine import Engine
from specllama.interface import Message
from specllama.models import memory
from specllama.server.loaded_models import Models
from specllama.server.service import Service
from specllama.settings.duration import seconds
from specllama.settings.params import EngineOptions, GenerateParams

OPTIONS = EngineOptions(n_ctx=512, threads=1, parallel=2)
NAMES = ("large", "small")


@pytest.fixture(scope="module")
def folder(module_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models, for a server that has a home of its own."""
    folder = tmp_path_factory.mktemp("models")
    tiny = paths.bundled_dir()
    shutil.copy(tiny / "tiny-target-q4_0.gguf", folder / "large.gguf")
    shutil.copy(tiny / "tiny-draft-q8_0.gguf", folder / "small.gguf")
    return folder


def opened(folder: Path, idle: str) -> Models:
    refs, params = (str(folder),), GenerateParams()
    return served_models(refs, (), (), OPTIONS, params, idle_s=seconds(idle))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with served(Service(opened(folder, "10m"))) as running:
        yield running


def test_each_writes_what_it_writes_alone(server: Serving, folder: Path) -> None:
    assert list(server.models.all) == list(NAMES)
    [_, later] = server.http.get("/api/tags").json()["models"]
    assert later["details"]["family"] == "llama", "its file is read before it is loaded"
    texts = {}
    for name in NAMES:
        asked = {"model": name, "seed": 5, "temperature": 0.9, "max_tokens": 24}
        texts[name] = server.chat("What is rain?", **asked)["choices"][0]["message"]["content"]
        with Engine.load(folder / f"{name}.gguf", "none", OPTIONS) as alone:
            params = GenerateParams(seed=5, max_tokens=24, proposer="none")
            params = params.replace(
                sampling=params.on_card(alone.info.target.card).sampling, from_card=()
            )
            params = params.replace(sampling=params.sampling.__class__(temperature=0.9))
            *_, end = alone.generate([Message("user", "What is rain?")], params)
            assert getattr(end, "text", None) == texts[name]
    assert texts["large"] != texts["small"]


def test_what_they_hold_is_told(server: Serving, folder: Path) -> None:
    server.chat(model="small", max_tokens=2)
    for model in server.http.get("/api/ps").json()["models"]:
        size = (folder / f"{model['name']}.gguf").stat().st_size
        assert size < model["size"] < size + 300 * memory.MIB
        assert model["context_length"] == 512
        held = server.models.all[model["name"]]
        assert 0 <= held.maps < held.holds


def test_a_later_one_finds_what_the_first_maps_taken(folder: Path) -> None:
    with served(Service(opened(folder, "10m"))) as server:
        large, small = server.models.all.values()
        large.maps = 7 * memory.MIB
        server.chat(model="small", max_tokens=2)
        assert getattr(small.queue.host.factory, "beside", 0) == 7 * memory.MIB
