"""``--head NAME``: a head that ships, by the name of its model."""

from __future__ import annotations

from pathlib import Path

import ggufs
import pytest

from specllama import paths
from specllama.cli import invoke
from specllama.errors import ModelUnavailable
from specllama.models import refs
from specllama.models.companions import HEADS, kind_of
from specllama.models.gguf import read_header

pytestmark = pytest.mark.usefixtures("nobody_else")


def test_a_model_name_stands_for_the_heads_that_ship_for_it() -> None:
    (head,) = refs.resolve_heads("smollm2-135m")
    assert head.parent == paths.bundled_dir()
    assert "smollm2-135m" in head.name
    both = refs.resolve_heads("tiny")
    assert {kind_of(read_header(path)) for path in both} == {"eagle3", "medusa"}
    for ref in ("smollm2-135m", "tiny"):
        assert all(kind_of(read_header(path)) in HEADS for path in refs.resolve_heads(ref))


def test_a_file_is_a_file_and_a_catalog_head_is_that_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = ggufs.write_llama(tmp_path / "mine.gguf")
    assert refs.resolve_heads(str(mine)) == [mine]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    pulled = paths.models_dir() / "ggml-org" / "gpt-oss-20b-GGUF" / "eagle3-gpt-oss-20b-Q8_0.gguf"
    pulled.parent.mkdir(parents=True)
    ggufs.write_llama(pulled)
    assert refs.resolve_heads("gpt-oss-20b") == [pulled]


def test_a_model_without_a_head_says_so_and_how_to_make_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ModelUnavailable, match="no drafting head for smollm2-1b7 ships"):
        refs.resolve_heads("smollm2-1b7")
    assert invoke(["run", "-m", "tiny", "--head", "smollm2-1b7", "-n", "1", "Hi"]) == 3
    assert "specllama train-draft smollm2-1b7" in capsys.readouterr().err


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_run_takes_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["run", "-m", "tiny", "--head", "tiny", "--proposer", name, "-n", "4", "Hi"]
    assert invoke(line) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.e2e
def test_a_head_of_another_model_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["run", "-m", "tiny", "--head", "smollm2-135m", "-n", "1", "Hi"]) == 4
    assert "smollm2-135m" in capsys.readouterr().err
