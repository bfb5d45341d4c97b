"""Which ways to draft a target has, told from headers; nothing is loaded."""

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from eagle_files import write_eagle3
from ggufs import write_llama, write_mamba

from specllama import paths
from specllama.engine.target_heads import bundled_heads, survey
from specllama.errors import PairIncompatible
from specllama.models import layer_inputs
from specllama.models.gguf import read_header
from specllama.models.refs import resolve
from specllama.settings.params import PROPOSERS
from specllama.training.training_card import METADATA, TrainingCard


def test_every_method_is_listed_with_a_reason_or_without(tmp_path: Path) -> None:
    target = read_header(write_llama(tmp_path / "target.gguf", blocks=4))
    head = write_eagle3(tmp_path / "head.gguf")
    ways = {way.name: way for way in survey(target, [str(head)], draft=True)}
    assert set(ways) | {"auto", "none"} == set(PROPOSERS)
    for name in ("draft", "mixed", "tree", "merged", "ngram", "suffix", "lookahead", "eagle3"):
        assert ways[name].available
        assert ways[name].reason == ""
    assert "--head" in ways["medusa"].reason
    assert not ways["mtp"].available
    bare = {way.name: way for way in survey(target)}
    free = [name for name, way in bare.items() if way.available]
    assert free == ["forced", "suffix", "ngram", "prediction", "mixed", "lookahead", "self"]
    assert all(way.available or way.reason for way in bare.values())


def test_targets_that_take_chains_only_have_no_trees(tmp_path: Path) -> None:
    target = read_header(write_mamba(tmp_path / "mamba.gguf"))
    have = {way.name for way in survey(target, draft=True) if way.available}
    assert have == {"draft", "forced", "mixed", "ngram", "suffix", "prediction"}


def test_a_named_head_must_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = read_header(write_llama(tmp_path / "target.gguf", blocks=4))
    with pytest.raises(PairIncompatible, match="width 128"):
        survey(target, [str(write_eagle3(tmp_path / "wide.gguf", target_width=128))])
    with pytest.raises(PairIncompatible, match="no drafting head"):
        survey(target, [str(target.path)])
    monkeypatch.setattr(layer_inputs, "LAYER_INPUT_ARCHITECTURES", frozenset({"qwen3"}))
    with pytest.raises(PairIncompatible, match="layer inputs of llama models"):
        survey(target, [str(write_eagle3(tmp_path / "head.gguf"))])


def test_bundled_heads_belong_to_the_bundled_target_only(tmp_path: Path) -> None:
    bundled = read_header(resolve("tiny-target"))
    found = bundled_heads(bundled)
    assert all(path.parent == bundled.path.parent for path in found)
    elsewhere = Path(shutil.copy(bundled.path, tmp_path))
    assert bundled_heads(read_header(elsewhere)) == []
    assert bundled_heads(read_header(resolve("tiny-draft"))) == []


def test_a_head_that_ships_for_another_model_is_that_of_one_very_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = read_header(write_llama(tmp_path / "model.gguf", blocks=4))
    head = write_eagle3(tmp_path / f"eagle3-some-{target.fingerprint}.gguf")
    monkeypatch.setattr(paths, "bundled_dir", lambda: tmp_path)
    assert bundled_heads(target) == [head]
    tuned = bytearray(target.path.read_bytes())
    tuned[-1] ^= 1
    (tmp_path / "tuned.gguf").write_bytes(tuned)
    assert bundled_heads(read_header(tmp_path / "tuned.gguf")) == []


def test_the_head_of_the_first_model_names_the_file_that_it_learned_from() -> None:
    head = next(paths.bundled_dir().glob("eagle3-smollm2-*.gguf"))
    card = msgspec.json.decode(read_header(head).metadata[METADATA], type=TrainingCard)
    assert head.stem.endswith(f"-{card.fingerprint}")
    assert head.stat().st_size <= 12_000_000


def test_looking_loads_no_llama_cpp(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "target.gguf", blocks=4)
    head = write_eagle3(tmp_path / "head.gguf")
    code = (
        "import sys; from specllama.engine.target_heads import survey; "
        "from specllama.models.gguf import read_header; "
        f"survey(read_header({str(path)!r}), [{str(head)!r}]); "
        "sys.exit('llama_cpp' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
