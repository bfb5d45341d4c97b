"""Medusa heads on ggml's kernels agree with the numpy definition."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggufs import write_llama
from medusa_numpy import load_heads

from specllama.backend.heads.medusa_head import GgmlHeads
from specllama.errors import CannotLoad
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.medusa_file import STATES, read_facts, vocabulary_digest, write_heads

WIDTH = 64


def random(*shape: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (0.3 * np.random.default_rng((seed, *shape)).standard_normal(shape)).astype(np.float32)


def write(
    path: Path, target: GgufHeader, *, kind: str, own: bool, blocks: int, ids: bool
) -> GgufHeader:
    arrays: dict[str, Any] = {}
    rows = 40 if ids else target.vocab_size
    if ids:
        arrays["ids"] = np.random.default_rng(1).permutation(target.vocab_size)[:rows]
    for h in range(3):
        for b in range(blocks):
            arrays[f"head.{h}.block.{b}.weight"] = random(WIDTH, WIDTH, seed=h + 10 * b)
            arrays[f"head.{h}.block.{b}.bias"] = random(WIDTH, seed=h + 10 * b)
        if h:  # one head without
            arrays[f"head.{h}.proj.weight"] = random(WIDTH, WIDTH, seed=100 + h)
        if own:
            arrays[f"head.{h}.output.weight"] = random(rows, WIDTH, seed=200 + h)
    write_heads(
        path,
        arrays,
        name="heads",
        heads=3,
        blocks=blocks,
        width=WIDTH,
        vocab=target.vocab_size,
        vocabulary=vocabulary_digest(target),
        kind=kind,
    )
    return read_header(path)


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("ids", [False, True])
@pytest.mark.parametrize(("blocks", "threads"), [(0, 1), (2, 1), (1, 2)])
def test_ggml_computes_what_numpy_does(
    tmp_path: Path, kind: str, own: bool, ids: bool, blocks: int, threads: int
) -> None:
    write_llama(tmp_path / "target.gguf", width=WIDTH, quant="Q8_0")
    target = read_header(tmp_path / "target.gguf")
    header = write(tmp_path / "h.gguf", target, kind=kind, own=own, blocks=blocks, ids=ids)
    compare(GgmlHeads(header, read_facts(header), target, threads), header, target)


def compare(heads: GgmlHeads, header: GgufHeader, target: GgufHeader) -> None:
    expected = load_heads(header.path, target)
    assert len(heads) == 3
    try:
        several = np.stack([random(WIDTH, seed=800 + i) * 5 for i in range(STATES)])
        for n in range(1, STATES + 1):  # each as alone
            rows = heads.logits(several[:n], 1 + n % 3).copy()
            alone = np.stack([heads.logits(state, 1 + n % 3).copy() for state in several[:n]])
            assert rows.shape == (n, target.vocab_size)
            spread = float(alone[np.isfinite(alone)].std())
            assert rows == pytest.approx(alone, rel=0, abs=0.06 * spread)
        for seed in range(3):
            hidden = random(WIDTH, seed=900 + seed) * 5
            for depth in (3, 1, 2):  # in any order, each its own
                row, wanted = heads.logits(hidden, depth), expected.logits(hidden, depth)
                assert row.shape == wanted.shape == (target.vocab_size,)
                said = np.isfinite(wanted)
                assert np.array_equal(np.isfinite(row), said)
                spread = float(wanted[said].std())
                # activations are rounded to 8 bits, or to halves
                assert np.abs(row[said] - wanted[said]).max() < 0.06 * spread
    finally:
        heads.close()
        heads.close()


def test_the_targets_matrix_may_be_of_types_that_numpy_does_not_read(tmp_path: Path) -> None:
    write_llama(tmp_path / "five.gguf", width=WIDTH, quant="Q5_1", seed=4)
    write_llama(tmp_path / "float.gguf", width=WIDTH, quant="F32", seed=4)
    five, full = read_header(tmp_path / "five.gguf"), read_header(tmp_path / "float.gguf")
    header = write(tmp_path / "h.gguf", full, kind="F32", own=False, blocks=1, ids=False)
    heads = GgmlHeads(header, read_facts(header), five, 1)
    hidden = random(WIDTH, seed=5) * 5
    row, wanted = heads.logits(hidden, 2), load_heads(header.path, full).logits(hidden, 2)
    assert np.corrcoef(row, wanted)[0, 1] > 0.99
    heads.close()


def test_types_that_would_end_the_process_are_refused(tmp_path: Path) -> None:
    write_llama(tmp_path / "target.gguf", width=WIDTH)
    target = read_header(tmp_path / "target.gguf")
    header = write(tmp_path / "h.gguf", target, kind="F32", own=False, blocks=1, ids=False)
    data = bytearray(header.path.read_bytes())
    name = b"head.1.block.0.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # name, dimensions, two extents
    assert data[at : at + 4] == (0).to_bytes(4, "little")
    data[at : at + 4] = (26).to_bytes(4, "little")  # 32-bit integers: as long, and no weights
    header.path.write_bytes(data)
    odd = read_header(header.path)
    with pytest.raises(CannotLoad, match="I32"):
        GgmlHeads(odd, read_facts(odd), target, 1)
