"""Quantizing through the binding: what is refused, what comes out, what is never left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import gguf
import ggufs
import ggufs_nextn
import numpy as np
import pytest
from ggufs import with_tensor

from specllama.errors import BadGguf, SpecllamaError, UnsupportedModel, UsageError
from specllama.models import quantization
from specllama.models.gguf import read_header
from specllama.models.loadable import check_loadable
from specllama.models.quantization import read_imatrix
from specllama.models.tensors import Floats, read_tensor


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ggufs.write_llama(tmp_path_factory.mktemp("q") / "m-F32.gguf", blocks=4)


@pytest.mark.parametrize("name", ["fp8", "FP8", "f8", "e4m3", "fp8-e4m3"])
def test_there_is_no_fp8(name: str) -> None:
    with pytest.raises(UsageError, match="GGUF has no FP8 tensor type") as caught:
        quantization.check_type(name)
    assert caught.value.hint == "use --type q8_0"
    assert "16-bit scale for each 32 weights" in caught.value.message


@pytest.mark.parametrize(
    ("name", "instead"), [("int4", "q4_0"), ("q4", "q4_k_m"), ("int8", "q8_0"), ("q4_k", "q4_k_m")]
)
def test_loose_names_are_answered(name: str, instead: str) -> None:
    with pytest.raises(UsageError) as caught:
        quantization.check_type(name)
    assert instead in (caught.value.hint or "")


def test_real_names_in_any_case() -> None:
    assert quantization.check_type("Q4_K_M") == "q4_k_m"
    with pytest.raises(UsageError, match="unknown quantization"):
        quantization.check_type("zebra")


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["q8_0", "q4_0", "f16"])
def test_a_result_of_the_type_asked_for(source: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "out.gguf"
    seen: list[tuple[int, int]] = []
    job = quantization.prepare(source, target, kind, threads=1)
    header = quantization.run(job, lambda done, of: seen.append((done, of)))
    assert header.quantization == kind.upper()
    assert next(iter(header.tensor_types)) == kind.upper()
    assert job.expected == pytest.approx(target.stat().st_size, rel=0.15)
    assert seen[-1][0] == seen[-1][1] == header.n_tensors
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.gguf"]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["q4_0", "q4_k_m", "q6_k", "q3_k_m"])
@pytest.mark.parametrize(("tied", "width"), [(True, 96), (False, 256)])
def test_the_estimate_knows_the_types_that_the_quantizer_takes(
    tmp_path: Path, kind: str, tied: bool, width: int
) -> None:
    """The output matrix stays wide; rows that are no multiple of 256 take other types."""
    words = [f"w{i}" for i in range(3000)]
    source = ggufs.write_llama(
        tmp_path / "in.gguf", width=width, heads=4, heads_kv=4, hidden=2 * width, tied=tied,
        tokens=words, merges=["w 1"],
    )  # fmt: skip
    target = tmp_path / "out.gguf"
    job = quantization.prepare(source, target, kind, threads=1)
    quantization.run(job)
    assert job.expected == pytest.approx(target.stat().st_size, rel=0.06)


def write_imatrix(path: Path, sums: dict[str, Floats], counts: dict[str, Floats]) -> Path:
    """As ``llama-imatrix`` writes it."""
    writer = gguf.GGUFWriter(path, "")
    writer.add_type("imatrix")
    writer.add_uint32("imatrix.chunk_count", 4)
    for name in sums:
        writer.add_tensor(f"{name}.in_sum2", sums[name].astype(np.float32))
        writer.add_tensor(f"{name}.counts", counts[name].astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.e2e
def test_what_an_importance_matrix_calls_important_loses_less(source: Path, tmp_path: Path) -> None:
    model, name = read_header(source), "blk.0.ffn_up.weight"
    inputs = model.by_name[name].shape[0]
    sums = np.ones((1, inputs))
    sums[0, ::8] = 10_000.0
    matrix = write_imatrix(tmp_path / "i.gguf", {name: sums}, {name: np.full((1, 1), 4.0)})
    (mean,) = read_imatrix(matrix, model).values()
    assert mean.shape == (1, inputs)
    assert mean[0, :2].tolist() == [2500.0, 0.25]

    def lost(imatrix: Path | None) -> float:
        target = tmp_path / f"{imatrix is None}.gguf"
        quantization.run(quantization.prepare(source, target, "q4_0", threads=1, imatrix=imatrix))
        error = read_tensor(read_header(target), name) - read_tensor(model, name)
        return float(np.abs(error[:, ::8]).mean())

    assert lost(matrix) < 0.8 * lost(None)


def test_what_is_no_importance_matrix_of_this_model_is_refused(
    source: Path, tmp_path: Path
) -> None:
    name = "blk.0.ffn_up.weight"
    one = {name: np.ones((1, 1))}
    for at, (file, why) in enumerate((
        (source, "is no importance matrix"),
        (write_imatrix(tmp_path / "a.gguf", {"blk.9.x": np.ones((1, 8))}, {"blk.9.x": one[name]}),
         "names no matrix of"),
        (write_imatrix(tmp_path / "b.gguf", {name: np.ones((1, 7))}, one), "of another model"),
    )):  # fmt: skip
        with pytest.raises(UsageError, match=why):
            quantization.prepare(source, tmp_path / f"{at}.gguf", "q4_0", imatrix=file)


@pytest.mark.e2e
def test_dropping_layers(source: Path, tmp_path: Path) -> None:
    job = quantization.prepare(source, tmp_path / "half.gguf", None, prune=(1, 3), threads=1)
    header = quantization.run(job)
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
    with pytest.raises(UsageError, match="never overwritten"):
        quantization.prepare(source, target, "q8_0")
    assert target.read_text() == "precious"
    with pytest.raises(UsageError, match="is a folder"):
        quantization.prepare(source, tmp_path, "q8_0")
    with pytest.raises(UsageError, match="there is no folder"):
        quantization.prepare(source, tmp_path / "no" / "x.gguf", "q8_0")


def test_nothing_to_do(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is nothing to do"):
        quantization.prepare(source, tmp_path / "x.gguf", None)


def test_a_quantized_source_needs_consent(tmp_path: Path) -> None:
    source = ggufs.write_llama(tmp_path / "m.gguf", quant="Q4_0")
    with pytest.raises(UsageError, match="quantized already"):
        quantization.prepare(source, tmp_path / "x.gguf", "q8_0")
    assert quantization.prepare(source, tmp_path / "x.gguf", "q8_0", requantize=True).request[
        "requantize"
    ]
    assert (
        quantization.prepare(source, tmp_path / "x.gguf", None, prune=(0,)).request["type"]
        == "copy"
    )


def test_layers_are_dropped_only_where_it_works(tmp_path: Path) -> None:
    mamba = ggufs.write_mamba(tmp_path / "m.gguf")
    with pytest.raises(UnsupportedModel, match="mamba"):
        quantization.prepare(mamba, tmp_path / "x.gguf", None, prune=(0,))
    arrays = ggufs.write_llama(tmp_path / "a.gguf", keys={"llama.attention.head_count": [2, 2]})
    with pytest.raises(UnsupportedModel, match="values per layer"):
        quantization.prepare(arrays, tmp_path / "x.gguf", None, prune=(0,))


def test_the_sections_of_a_rotation_are_not_values_per_layer(tmp_path: Path) -> None:
    from specllama.models.pruned import why_not

    sections = {"llama.rope.dimension_sections": [8, 4, 4, 0]}
    plain = read_header(ggufs.write_llama(tmp_path / "s.gguf", keys=sections, blocks=4))
    assert why_not(plain) == ""
    hybrid = read_header(ggufs_nextn.write_nextn(tmp_path / "h.gguf"))
    assert why_not(hybrid).endswith("what a layer computes depends on its number")


NORMS = "blk.0.ple_norm_key.weight"  # as in qwen4exp: a norm of several rows


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["q4_0", "q8_0"])
def test_norms_of_several_rows_stay_as_they_are(source: Path, tmp_path: Path, kind: str) -> None:
    file = with_tensor(source, tmp_path / "n.gguf", NORMS)
    header = quantization.run(quantization.prepare(file, tmp_path / "out.gguf", kind, threads=1))
    assert header.by_name[NORMS].type == "F32"
    assert header.by_name["blk.0.attn_q.weight"].type == kind.upper()


def test_types_that_llama_cpp_would_give_to_norms_are_refused(source: Path, tmp_path: Path) -> None:
    file = with_tensor(source, tmp_path / "n.gguf", NORMS)
    with pytest.raises(UnsupportedModel, match=r"f16 of blk\.0\.ple_norm_key"):
        quantization.prepare(file, tmp_path / "out.gguf", "f16")
    for kind in ("F16", "Q8_0"):
        bad = read_header(with_tensor(source, tmp_path / f"{kind}.gguf", NORMS, kind))
        with pytest.raises(BadGguf, match=f"ple_norm_key.weight' has the type {kind}"):
            check_loadable(bad)


def test_free_space_is_checked_first(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(SpecllamaError, match="are free there"):
        quantization.prepare(source, tmp_path / "x.gguf", "q8_0")


def test_a_quantizer_that_dies_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = quantization.prepare(source, tmp_path / "x.gguf", "q8_0")
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(SpecllamaError, match="the quantizer stopped"):
        quantization.run(job)
    assert list(tmp_path.iterdir()) == []
