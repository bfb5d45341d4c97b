"""Where passes round by their widths, a drafted reply owes its bits to these widths alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ggufs import write_windows
from replayed import replayed

from specllama.backend.llama_cache import LlamaCache
from specllama.engine.engine import Engine
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.told import Told

pytestmark = pytest.mark.e2e

PROMPT = [20 + (i * i) % 7 for i in range(90)]  # longer than its windows, and full of copies


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """F16 weights: kernels of one row and of several add up in other orders."""
    file = write_windows(tmp_path_factory.mktemp("files") / "windows.gguf", quant="F16")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(tmp_path_factory.mktemp("home")))
        options = EngineOptions(n_ctx=512, threads=1, check_memory=False)
        with Engine.load(file, None, options) as engine:
            yield engine


def written(engine: Engine, proposer: str) -> Told:
    engine.reset()
    params = GenerateParams(
        seed=3, proposer=proposer, window="fixed", draft_max=5, max_tokens=60, ignore_eos=True
    )  # fmt: skip
    params = params.choose("temperature", 6.0).replace(chances=0)
    return Told.of(engine.generate(PROMPT, params))


@pytest.mark.parametrize("proposer", ["none", "ngram", "suffix", "lookahead", "mixed"])
def test_other_guesses_in_refused_places_change_no_bit(windows: Engine, proposer: str) -> None:
    told = written(windows, proposer)
    pairs = replayed(windows, PROMPT, told)
    assert len(pairs) == len(told.end.token_ids) - 1
    assert [(a, b) for a, b in pairs if a != b] == []
    if proposer != "none":
        assert told.end.draft_n > told.end.draft_n_accepted


def test_a_cell_of_another_token_is_found_out(
    windows: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = LlamaCache.decode

    def spoilt(self: LlamaCache, *, tiled: bool) -> None:
        if 1 < self.batch.n < 8:
            self.batch.token[1] = 9
        decode(self, tiled=tiled)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaCache, "decode", spoilt)
        told = written(windows, "ngram")
    assert told.end.draft_n_accepted > 0
    assert any(a != b for a, b in replayed(windows, PROMPT, told))
