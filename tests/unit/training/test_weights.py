"""The weights that write replies: the first way that is much faster than the file as it is."""

from pathlib import Path

import pytest
from ggufs import write_llama

from specllama.errors import DoesNotFit
from specllama.models import memory
from specllama.models.gguf import GgufHeader, read_header
from specllama.training import weights
from specllama.training.weights import COPY, Weights, choose_weights

DISK = 10**9


@pytest.fixture
def target(tmp_path: Path) -> GgufHeader:
    return read_header(write_llama(tmp_path / "target.gguf", quant="Q4_1", file_type=3))


def chosen(
    target: GgufHeader, folder: Path, monkeypatch: pytest.MonkeyPatch, repacked: int, **took: float
) -> Weights:
    """Choose where passes take these seconds: as it is, repacked, of a copy; inf has no memory."""

    def pass_s(weights: Weights, threads: int | None) -> float:
        file, repack = weights
        seconds = took["copy" if file is not target else repack]
        if seconds == float("inf"):
            raise DoesNotFit("no memory", needed=1)
        return seconds

    monkeypatch.setattr(weights, "_pass_s", pass_s)
    monkeypatch.setattr(memory, "repacked_bytes", lambda header: repacked)
    return choose_weights(target, folder, 1, DISK)


@pytest.mark.parametrize(
    ("repacked", "took", "name"),
    [
        (100, {"auto": 1.0, "on": 0.6, "copy": 0.4}, "on"),
        (100, {"auto": 1.0, "on": 0.95, "copy": 0.4}, "copy"),
        (100, {"auto": 1.0, "on": float("inf"), "copy": 0.4}, "copy"),
        (0, {"auto": 1.0, "on": 0.1, "copy": 0.5}, "copy"),
        (0, {"auto": 1.0, "on": 0.1, "copy": 0.9}, "auto"),
        (0, {"auto": 1.0, "on": 0.1, "copy": float("inf")}, "auto"),
    ],
)
def test_the_first_much_faster_way_is_taken(
    target: GgufHeader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    repacked: int,
    took: dict[str, float],
    name: str,
) -> None:
    file, repack = chosen(target, tmp_path, monkeypatch, repacked, **took)
    assert (file.path.name, repack) == {
        "copy": (COPY, "auto"), "on": ("target.gguf", "on"), "auto": ("target.gguf", "auto"),
    }[name]  # fmt: skip
    assert (tmp_path / COPY).exists() == (name == "copy")


def test_a_copy_is_made_once_and_holds_the_numbers_of_the_file(
    target: GgufHeader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = {"auto": 1.0, "copy": 0.4}
    file, _ = chosen(target, tmp_path, monkeypatch, 0, **took)
    made = file.path.stat().st_mtime_ns
    assert set(file.tensor_types) == {"F16", "F32"}
    assert file.vocab_size == target.vocab_size
    again, _ = chosen(target, tmp_path, monkeypatch, 0, **took)
    assert again.path.stat().st_mtime_ns == made
    assert set(chosen(again, tmp_path / "new", monkeypatch, 0, **took)[0].tensor_types) == {
        "F16", "F32",
    }  # fmt: skip
    assert not (tmp_path / "new").exists(), "a file of floats needs no copy"


def test_a_copy_that_would_take_much_memory_is_not_made(
    target: GgufHeader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 100_000)
    assert chosen(target, tmp_path, monkeypatch, 0, auto=1.0, copy=0.1) == (target, "auto")


def test_a_copy_takes_half_of_the_disk_at_most(
    target: GgufHeader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_pass_s", lambda one, threads: 1.0 if one[0] is target else 0.1)
    copied, _ = choose_weights(target, tmp_path, 1, DISK)
    n = copied.path.stat().st_size
    copied.path.unlink()
    assert choose_weights(target, tmp_path, 1, disk=n) == (target, "auto")
    assert choose_weights(target, tmp_path, 1, disk=3 * n)[0].path.name == COPY


def test_a_pass_is_timed_on_a_real_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECLLAMA_HOME", str(tmp_path / "home"))
    target = read_header(write_llama(tmp_path / "target.gguf", blocks=4))
    assert choose_weights(target, tmp_path, 1, DISK) == (target, "auto")
    assert weights._pass_s((target, "auto"), 1) > 0
