"""A model out of a package of the Python index, where the hub is out of reach."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import ggufs
import pytest
from click.testing import CliRunner, Result
from fakehub import FakeHub
from packages import MEMBER, only_index, write_wheel
from real_models import installed_smollm2

from specllama import paths
from specllama.cli.hub import command
from specllama.errors import ModelUnavailable
from specllama.models import catalog, package_index, refs
from specllama.models.download import WrongContent

FIRST = catalog.load()[catalog.FIRST]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    return ggufs.write_llama(tmp_path / "small.gguf", quant="F32").read_bytes()


@pytest.fixture(autouse=True)
def shelf(monkeypatch: pytest.MonkeyPatch, nobody_else: Path, tmp_path: Path, data: bytes) -> Path:
    only_index(monkeypatch, tmp_path / "shelf", data)
    write_wheel(tmp_path / "shelf", data)
    return tmp_path / "shelf"


def run(*args: str) -> Result:
    result = CliRunner().invoke(command, args)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def left() -> list[str]:
    """Everything in our folder but locks, and folders that are empty."""
    root = paths.models_dir()
    return sorted(p.name for p in root.rglob("*") if p.is_file() and p.suffix != ".lock")


def test_the_package_of_the_catalog_is_the_one_that_the_tests_install() -> None:
    package = FIRST.package
    assert package is not None
    tests = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert package.name in tests["optional-dependencies"]["test"]
    file = installed_smollm2()
    assert file is not None
    assert file.as_posix().endswith(package.file)
    assert file.stat().st_size == package.bytes
    assert hashlib.sha256(file.read_bytes()).hexdigest() == package.sha256
    assert FIRST.bytes == pytest.approx(package.bytes, rel=0.01)
    assert FIRST.to_dict()["package"] == package.name


def test_it_comes_with_where_from_licence_and_size(data: bytes) -> None:
    result = run("pull", catalog.FIRST, "--json")
    said = " ".join(result.stderr.splitlines()[:2])
    for words in ("Apache-2.0", "474 kB", "small-model==1.0", "Python index", "cannot be reached"):
        assert words in said, said
    assert f"specllama chat -m {catalog.FIRST}" in result.stderr
    path = refs.resolve(catalog.FIRST)
    assert path == paths.models_dir() / FIRST.target.repo / Path(MEMBER).name
    assert path.read_bytes() == data
    (told,) = json.loads(result.stdout)["models"]
    assert (told["path"], told["commit"]) == (str(path), None)
    assert left() == sorted([path.name, f"{path.name}.json"])
    assert run("verify", catalog.FIRST).exit_code == 0
    assert "already here" in run("pull", catalog.FIRST).stderr
    run("rm", "-y", catalog.FIRST)
    assert left() == []


def test_where_the_hub_has_it_the_hub_is_taken(
    monkeypatch: pytest.MonkeyPatch, data: bytes, shelf: Path
) -> None:
    other = data + b"\0"
    with FakeHub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add(FIRST.target.repo, {Path(MEMBER).name: other})
        said = run("pull", catalog.FIRST).stderr
        assert "Python index" not in said
        assert refs.resolve(catalog.FIRST).read_bytes() == other
        run("rm", "-y", catalog.FIRST)
        hub.listed.clear()
        assert "is not on the hub (404)" in run("pull", catalog.FIRST).stderr
    assert refs.resolve(catalog.FIRST).read_bytes() == data


def test_another_file_is_refused_and_leaves_nothing(shelf: Path, data: bytes) -> None:
    for wrong in (data[:-1] + b"x", data + b"x", data[:100]):
        write_wheel(shelf, wrong)
        with pytest.raises(WrongContent, match="is another file: its SHA-256"):
            run("pull", catalog.FIRST)
        assert left() == []
    write_wheel(shelf, data, "small_model/other.gguf")
    with pytest.raises(WrongContent, match="does not hold small_model/Smol"):
        run("pull", catalog.FIRST)
    assert left() == []


def test_an_index_without_it_is_one_sentence(shelf: Path) -> None:
    next(shelf.iterdir()).unlink()
    with pytest.raises(ModelUnavailable, match="No matching distribution found for") as caught:
        run("pull", catalog.FIRST)
    assert "\n" not in caught.value.message
    assert "pip config list" in str(caught.value.hint)
    assert left() == []


def test_without_the_network_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECLLAMA_OFFLINE", "1")
    with pytest.raises(ModelUnavailable, match="the network is switched off"):
        run("pull", catalog.FIRST)


def test_without_pip_there_is_uv_and_without_both_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shelf: Path, data: bytes
) -> None:
    monkeypatch.setattr(package_index, "find_spec", lambda name: None)
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(ModelUnavailable, match="neither pip nor uv is here"):
        run("pull", catalog.FIRST)
    assert left() == []
    uv = programs / "uv"
    uv.write_text(
        f"#!{sys.executable}\n"
        "import sys, zipfile\n"
        "assert sys.argv[1:3] == ['pip', 'install'] and sys.argv[-1] == 'small-model==1.0'\n"
        "assert '--no-deps' in sys.argv and '--no-build' in sys.argv\n"
        "to = sys.argv[sys.argv.index('--target') + 1]\n"
        f"zipfile.ZipFile({str(next(shelf.iterdir()))!r}).extractall(to)\n"
    )
    uv.chmod(0o755)
    run("pull", catalog.FIRST)
    assert refs.resolve(catalog.FIRST).read_bytes() == data


def test_what_a_kill_left_is_cleared_away(data: bytes) -> None:
    folder = paths.models_dir() / FIRST.target.repo / ".package-killed"
    folder.mkdir(parents=True)
    (folder / "half.whl").write_bytes(b"half")
    run("pull", catalog.FIRST)
    assert not folder.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_nothing(number: int, data: bytes) -> None:
    """In front of an index that accepts and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        index = f"http://127.0.0.1:{server.getsockname()[1]}/simple"
        kept = {k: v for k, v in os.environ.items() if k not in ("PIP_NO_INDEX", "PIP_FIND_LINKS")}
        process = subprocess.Popen(
            [sys.executable, "-m", "specllama", "hub", "pull", catalog.FIRST],
            env={**kept, "PIP_INDEX_URL": index},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        server.settimeout(30)
        asked, _ = server.accept()
        with asked:
            work = next(paths.models_dir().rglob(".package-*"))
            process.send_signal(number)
            began = time.monotonic()
            _, err = process.communicate(timeout=15)
            assert time.monotonic() - began < 5
            asked.settimeout(10)
            while asked.recv(4096):
                pass  # pip has ended, too
    assert process.returncode == 128 + number
    assert "Traceback" not in err
    assert "nothing is kept; run the same command again to begin anew" in err
    assert not work.exists()
    assert left() == []
