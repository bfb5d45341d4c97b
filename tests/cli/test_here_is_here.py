"""A name that is on this machine is never asked of the network."""

import hashlib
import socket
from pathlib import Path

import ggufs
import pytest

from specllama import paths
from specllama.cli import invoke
from specllama.models import catalog, pull
from specllama.models.receipts import Receipt, write_receipt

FIRST = catalog.load()[catalog.FIRST]
HUB = FIRST.target.hub


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, nobody_else: Path) -> Path:
    def refused(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refused)
    name = f"SmolLM2-135M-Instruct-{HUB.quant}.gguf"
    path = paths.models_dir() / HUB.repo / name
    path.parent.mkdir(parents=True)
    ggufs.write_llama(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    write_receipt(path, Receipt(HUB.repo, name, "", path.stat().st_size, "sha256", digest))
    return path


@pytest.mark.parametrize("ref", [FIRST.name, str(HUB), HUB.repo])
@pytest.mark.parametrize("verb", [["hub", "info"], ["show"], ["hub", "pull"], ["hub", "path"]])
def test_no_verb_asks_for_it(
    here: Path, verb: list[str], ref: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = invoke([*verb, ref])
    told = "".join(capsys.readouterr())
    assert code == 0, told
    assert here.name.removesuffix(".gguf") in told


def test_a_pulled_file_that_was_written_to_is_not_as_it_was_pulled(here: Path) -> None:
    data = bytearray(here.read_bytes())
    data[-5] ^= 1
    here.write_bytes(data)
    assert not pull.is_here(HUB)
