"""A model out of a package of the Python index, where the hub is out of reach."""

import errno
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import ggufs
import pytest
from click.testing import CliRunner, Result
from fakehub import FakeHub, Fault
from packages import MEMBER, only_index, write_wheel
from real_models import installed_smollm2

from specllama import paths
from specllama.cli.hub import command
from specllama.errors import ModelUnavailable, SpecllamaError
from specllama.models import catalog, download, package_index, pull, refs
from specllama.models.download import WrongContent

WHEEL = "small_model-1.0-py3-none-any.whl"
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
    for wrong in (data + b"x", data[:100]):
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


def test_a_signal_ends_it_and_leaves_nothing(data: bytes) -> None:
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
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=15)  # pip alone would go on for minutes
            asked.settimeout(10)
            while asked.recv(4096):
                pass  # pip has ended, too
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in err
    assert "nothing is kept; run the same command again to begin anew" in err
    assert not work.exists()
    assert left() == []


class Index(FakeHub):
    """An index over HTTP, the only one that pip has; its wheels are files of a repository.

    Attributes:
        plan: what goes wrong with the next requests for the wheel, one after another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plan: list[Fault] = []

    def fault(self, key: str) -> Fault | None:
        return self.plan.pop(0) if self.plan else super().fault(key)

    def put(self, shelf: Path, data: bytes, method: int = zipfile.ZIP_STORED) -> None:
        """Offer a wheel with this file in it."""
        wheel = write_wheel(shelf, data, method=method)
        self.add("some/index", {wheel.name: wheel.read_bytes()})

    def ranges(self) -> list[str | None]:
        """Forget the requests so far, and return the ranges that they asked of the wheel."""
        found = [request.range for request in self.of(WHEEL)]
        self.requests.clear()
        return found


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, shelf: Path, data: bytes) -> Iterator[Index]:
    with Index() as index:
        index.put(shelf, data)
        for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/some/index/simple/")
        monkeypatch.setattr(download, "sleep", lambda seconds: None)
        yield index


def broken_off(index: Index, after: int = 1000) -> Path:
    """Pull from an index that sends so many bytes and no more; return what is kept."""
    index.plan = [Fault(), Fault(cut_after=after), Fault(status=403)]
    with pytest.raises(ModelUnavailable, match="403"):
        run("pull", catalog.FIRST)
    assert index.ranges() == [None, None, f"bytes={after}-"]
    (name,) = left()
    (part,) = paths.models_dir().rglob(name)
    assert part.stat().st_size == after
    file = f"{FIRST.target.repo}/{Path(MEMBER).name}"
    assert pull.unfinished() == {file: after}
    return part


def arrived(data: bytes) -> bool:
    """True if the file is here, with its receipt and nothing else."""
    path = refs.resolve(catalog.FIRST)
    return path.read_bytes() == data and left() == sorted([path.name, f"{path.name}.json"])


def test_an_index_that_breaks_off_is_asked_for_the_rest(index: Index, data: bytes) -> None:
    index.plan = [Fault(), Fault(cut_after=1000)]
    run("pull", catalog.FIRST)
    assert index.ranges() == [None, None, "bytes=1000-"]
    assert arrived(data)


@pytest.mark.parametrize("sums", [False, True])
def test_the_next_pull_continues(index: Index, data: bytes, sums: bool) -> None:
    index.sums = sums
    broken_off(index)
    assert "continuing at" in run("pull", catalog.FIRST).stderr
    assert index.ranges() == [None, "bytes=1000-"]
    assert arrived(data)
    assert not pull.unfinished()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_came_before_a_signal_is_kept(index: Index, data: bytes, number: int) -> None:
    size = len(index.repos["some/index"][WHEEL])
    index.plan = [Fault(), Fault(bytes_per_s=size // 20)]
    package = catalog.load()[catalog.FIRST].package
    code = f"""if True:
        import runpy
        from dataclasses import replace
        from specllama.models import catalog
        from specllama.models.catalog import Package
        pairs = catalog.load()
        pairs[catalog.FIRST] = replace(pairs[catalog.FIRST], package={package!r})
        runpy.run_module("specllama", run_name="__main__")
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code, "hub", "pull", catalog.FIRST],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not any(
        part.stat().st_size for part in paths.models_dir().rglob("*.part")
    ):
        time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=15)
    (part,) = paths.models_dir().rglob("*.part")
    kept = part.stat().st_size
    assert 0 < kept < size
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert "Traceback" not in err
        assert "what arrived is kept; run the same command again to resume" in err
        assert left() == [part.name]
    index.ranges()
    run("pull", catalog.FIRST)
    assert index.ranges() == [None, f"bytes={kept}-"]
    assert arrived(data)


def test_an_index_without_ranges_is_read_from_the_start(index: Index, data: bytes) -> None:
    broken_off(index)
    index.faults[WHEEL] = Fault(ignore_range=True)
    run("pull", catalog.FIRST)
    assert arrived(data)


@pytest.mark.parametrize(
    ("sums", "more", "method"),
    [
        (True, b"", zipfile.ZIP_STORED),
        (True, b"x", zipfile.ZIP_DEFLATED),
        (False, b"x", zipfile.ZIP_STORED),
    ],
)
def test_a_wheel_that_was_replaced_is_begun_anew(
    index: Index, shelf: Path, data: bytes, sums: bool, more: bytes, method: int
) -> None:
    index.sums = sums
    index.put(shelf, bytes(byte ^ 255 for byte in data) + more, method)
    broken_off(index, 500)
    index.put(shelf, data, method)
    run("pull", catalog.FIRST)
    assert arrived(data)


def test_two_wheels_that_look_alike_are_never_mixed(index: Index, shelf: Path, data: bytes) -> None:
    """The index gives no sums, and the wheels have one name and size."""
    index.put(shelf, data, zipfile.ZIP_DEFLATED)
    part = broken_off(index, 500)
    part.write_bytes(bytes(byte ^ 255 for byte in part.read_bytes()))
    with pytest.raises(WrongContent) as caught:
        run("pull", catalog.FIRST)
    assert "nothing was kept; pull it again" in str(caught.value.hint)
    assert left() == []
    run("pull", catalog.FIRST)
    assert arrived(data)


def test_a_wrong_wheel_leaves_nothing(index: Index, shelf: Path, data: bytes) -> None:
    index.put(shelf, data[:-1] + b"x")
    with pytest.raises(WrongContent, match="is another file: its SHA-256"):
        run("pull", catalog.FIRST)
    assert index.ranges() == [None, None]
    assert left() == []


def test_a_wheel_that_is_complete_is_not_asked_for_again(
    index: Index, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    """The disk was full when the file was to be taken out of it."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as context:
        context.setattr(package_index._Errand, "take", full)
        with pytest.raises(SpecllamaError, match="disk is full") as caught:
            run("pull", catalog.FIRST)
        assert "continues where it stopped" in str(caught.value.hint)
    index.ranges()
    run("pull", catalog.FIRST)
    assert index.ranges() == [None]
    assert arrived(data)


def test_two_pulls_do_not_write_one_part(index: Index, data: bytes) -> None:
    part = broken_off(index)
    with (
        pull._locked(paths.models_dir() / FIRST.target.repo),
        pytest.raises(SpecllamaError, match="another specllama is pulling"),
    ):
        run("pull", catalog.FIRST)
    assert part.stat().st_size == 1000
    run("pull", catalog.FIRST)
    assert arrived(data)


def test_the_hub_does_not_continue_the_part_of_a_wheel(
    index: Index, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    broken_off(index)
    with FakeHub() as hub:
        hub.add(FIRST.target.repo, {Path(MEMBER).name: data})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        run("pull", catalog.FIRST)
        assert [request.range for request in hub.of(Path(MEMBER).name)] == [None]
    assert arrived(data)


def test_a_wheel_that_only_pip_gets_comes_through_pip(index: Index, data: bytes) -> None:
    index.plan = [Fault(status=401)]
    run("pull", catalog.FIRST)
    assert index.ranges() == [None, None]
    assert arrived(data)


def test_another_version_is_another_package(index: Index, data: bytes, shelf: Path) -> None:
    files = index.repos["some/index"]
    for name in ("small_model-1.0.1-py3-none-any.whl", "small_model-2.0-py3-none-any.whl"):
        files[name] = b"another"
    run("pull", catalog.FIRST)
    assert arrived(data)
    assert {request.path.rpartition("/")[2] for request in index.requests} == {"", WHEEL}


def test_pips_proxy_is_ours(index: Index, monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_PROXY", index.url)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/some/index/simple/")
    broken_off(index)
    run("pull", catalog.FIRST)
    assert index.ranges() == [None, "bytes=1000-"]
    assert arrived(data)
