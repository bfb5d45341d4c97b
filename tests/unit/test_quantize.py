"""Quantizing through the binding: what is refused, what comes out, what is never left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import ggufs
import pytest

from specllama.errors import SpecllamaError, UnsupportedModel, UsageError
from specllama.models import quantize
from specllama.models.gguf import read_header


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ggufs.write_llama(tmp_path_factory.mktemp("q") / "m-F32.gguf", blocks=4)


@pytest.mark.parametrize("name", ["fp8", "FP8", "f8", "e4m3", "fp8-e4m3"])
def test_there_is_no_fp8(name: str) -> None:
    with pytest.raises(UsageError, match="GGUF has no FP8 tensor type") as caught:
        quantize.check_type(name)
    assert caught.value.hint == "use --type q8_0"
    assert "16-bit scale for each 32 weights" in caught.value.message


@pytest.mark.parametrize(
    ("name", "instead"), [("int4", "q4_0"), ("q4", "q4_k_m"), ("int8", "q8_0"), ("q4_k", "q4_k_m")]
)
def test_loose_names_are_answered(name: str, instead: str) -> None:
    with pytest.raises(UsageError) as caught:
        quantize.check_type(name)
    assert instead in (caught.value.hint or "")


def test_real_names_in_any_case() -> None:
    assert quantize.check_type("Q4_K_M") == "q4_k_m"
    with pytest.raises(UsageError, match="unknown quantization"):
        quantize.check_type("zebra")


@pytest.mark.parametrize(
    ("text", "layers"), [("1", (1,)), ("0-2", (0, 1, 2)), ("3,1", (1, 3)), (" 0 , 2-3 ", (0, 2, 3))]
)
def test_layer_lists(text: str, layers: tuple[int, ...]) -> None:
    assert quantize.parse_layers(text, 8) == layers


@pytest.mark.parametrize("text", ["", "x", "1-", "3-1", "8", "0-7", "-1"])
def test_layer_lists_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError):
        quantize.parse_layers(text, 8)


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
def test_a_result_of_the_type_asked_for(source: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "out.gguf"
    seen: list[tuple[int, int]] = []
    job = quantize.prepare(source, target, kind, threads=1)
    header = quantize.run(job, lambda done, of: seen.append((done, of)))
    assert header.quantization == kind.upper()
    assert next(iter(header.tensor_types)) == kind.upper()
    assert job.expected == pytest.approx(target.stat().st_size, rel=0.15)
    assert seen[-1][0] == seen[-1][1] == header.n_tensors
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.gguf"]


@pytest.mark.e2e
def test_dropping_layers(source: Path, tmp_path: Path) -> None:
    job = quantize.prepare(source, tmp_path / "half.gguf", None, prune="1,3", threads=1)
    header = quantize.run(job)
    assert header.block_count == 2
    assert header.quantization == "F32"
    whole = read_header(source)
    kept = {
        n.replace("blk.2.", "blk.1.") for n in whole.by_name if not n.startswith(("blk.1", "blk.3"))
    }
    assert set(header.by_name) == kept


def test_nothing_is_overwritten(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.gguf"
    target.write_text("precious")
    with pytest.raises(UsageError, match="not overwritten"):
        quantize.prepare(source, target, "q8_0")
    assert target.read_text() == "precious"
    with pytest.raises(UsageError, match="is a folder"):
        quantize.prepare(source, tmp_path, "q8_0")
    with pytest.raises(UsageError, match="there is no folder"):
        quantize.prepare(source, tmp_path / "no" / "x.gguf", "q8_0")


def test_nothing_to_do(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="say what to make"):
        quantize.prepare(source, tmp_path / "x.gguf", None)


def test_a_quantized_source_needs_consent(tmp_path: Path) -> None:
    source = ggufs.write_llama(tmp_path / "m.gguf", quant="Q4_0")
    with pytest.raises(UsageError, match="quantized already"):
        quantize.prepare(source, tmp_path / "x.gguf", "q8_0")
    assert quantize.prepare(source, tmp_path / "x.gguf", "q8_0", requantize=True).requantize
    assert quantize.prepare(source, tmp_path / "x.gguf", None, prune="0").type == "copy"


def test_layers_are_dropped_only_where_it_works(tmp_path: Path) -> None:
    mamba = ggufs.write_mamba(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModel, match="mamba"):
        quantize.prepare(mamba, tmp_path / "x.gguf", None, prune="0")
    arrays = ggufs.write_llama(tmp_path / "a.gguf", keys={"llama.attention.head_count": [2, 2]})
    with pytest.raises(UnsupportedModel, match="values per layer"):
        quantize.prepare(arrays, tmp_path / "x.gguf", None, prune="0")


def test_free_space_is_checked_first(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(SpecllamaError, match="are free there"):
        quantize.prepare(source, tmp_path / "x.gguf", "q8_0")


def test_a_quantizer_that_dies_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = quantize.prepare(source, tmp_path / "x.gguf", "q8_0")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(SpecllamaError, match="the quantizer stopped"):
        quantize.run(job)
    assert list(tmp_path.iterdir()) == []
