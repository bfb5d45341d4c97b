"""Drafts cut out of a target: names, costs and what cannot be cut."""

from pathlib import Path

import ggufs
import pytest

from specllama.models import pruned
from specllama.models.gguf import read_header


@pytest.mark.parametrize(("n", "dropped"), [(4, (1, 2)), (7, (2, 3, 4)), (3, (1,))])
def test_the_first_and_the_last_layers_stay(n: int, dropped: tuple[int, ...]) -> None:
    assert pruned.middle_half(n) == dropped


def test_work_counts_layers_and_output(tmp_path: Path) -> None:
    header = read_header(ggufs.write_llama(tmp_path / "m.gguf", blocks=4))
    sizes = {tensor.name: tensor.n_bytes for tensor in header.tensors}
    layers = [sum(n for name, n in sizes.items() if name.startswith(f"blk.{i}.")) for i in range(4)]
    head = sum(n for name, n in sizes.items() if not name.startswith("blk."))
    if "output.weight" in sizes:
        head -= sizes["token_embd.weight"]
    assert pruned.draft_work(header, ()) == 1
    assert pruned.draft_work(header, (1, 2)) == pytest.approx(
        (layers[0] + layers[3] + head) / (sum(layers) + head)
    )


def test_a_fingerprint_is_that_of_the_contents(tmp_path: Path) -> None:
    paths = []
    for i in range(3):
        (tmp_path / str(i)).mkdir()
        paths.append(ggufs.write_llama(tmp_path / str(i) / "m.gguf", seed=i % 2))
    one, two, same = (read_header(path).fingerprint for path in paths)
    assert one == same != two


def test_why_layers_cannot_be_dropped(tmp_path: Path) -> None:
    assert "mamba" in pruned.why_not(read_header(ggufs.write_mamba(tmp_path / "m.gguf")))
    single = read_header(ggufs.write_llama(tmp_path / "one.gguf", blocks=1))
    assert pruned.why_not(single) == "the target has 1 layer"
    assert pruned.why_not(read_header(ggufs.write_llama(tmp_path / "two.gguf", blocks=2))) == ""


@pytest.mark.parametrize(
    ("keys", "architecture"), [({}, "smollm3"), ({"llama.attention.sliding_window": 128}, "llama")]
)
def test_layers_that_differ_by_their_number_stay(
    tmp_path: Path, keys: dict[str, int], architecture: str
) -> None:
    path = ggufs.write_llama(tmp_path / "m.gguf", architecture=architecture, keys=keys)
    assert "depends on its number" in pruned.why_not(read_header(path))
