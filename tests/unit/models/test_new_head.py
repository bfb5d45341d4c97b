"""A new kind of head is a file and a line: nothing else has to know it."""

from pathlib import Path

import numpy as np
import pytest

from specllama.engine.engine import Engine
from specllama.engine.target_heads import survey
from specllama.errors import PairIncompatible
from specllama.models import companions
from specllama.models.companions import HEADS, HeadKind
from specllama.models.gguf import read_header
from specllama.models.refs import resolve
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams


@pytest.fixture
def often(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "new_head"))
    monkeypatch.setenv("SPECLLAMA_HOME", str(tmp_path))
    kind = HeadKind("a list of frequent tokens", "medusa", "often_head")
    monkeypatch.setitem(HEADS, "often", kind)
    from often_head import write_often

    n = read_header(resolve("tiny-target")).vocab_size
    row = np.random.default_rng(1).normal(size=n).astype(np.float32)
    return write_often(tmp_path / "often.gguf", row)


def test_it_drafts_and_the_text_stays(often: Path) -> None:
    assert companions.kind_of(read_header(often)) == "often"
    texts = []
    with Engine.load("tiny-target", None, EngineOptions(threads=1, heads=(str(often),))) as engine:
        for proposer in ("none", "medusa"):
            params = GenerateParams(
                proposer=proposer, window="fixed", draft_max=3, max_tokens=24, seed=2,
                sampling=SamplingParams(temperature=0.8),
            )  # fmt: skip
            *_, done = engine.generate("The model", params)
            texts.append(done.token_ids)
            assert (done.draft_n > 0) is (proposer == "medusa")
    assert texts[0] == texts[1]


def test_one_of_another_target_is_refused(often: Path, tmp_path: Path) -> None:
    from often_head import write_often

    target = read_header(resolve("tiny-target"))
    assert {m.name: m.available for m in survey(target, (str(often),))}["medusa"]
    other = write_often(tmp_path / "other.gguf", np.zeros(7, np.float32))
    with pytest.raises(PairIncompatible, match="knows 7 tokens"):
        survey(target, (str(other),))
