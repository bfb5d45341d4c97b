"""Models whose K and V lie in one cache (DeepSeek, Kimi, GLM-4.7-Flash, Mistral 4)."""

from __future__ import annotations

from pathlib import Path

import pytest
from ggufs_latent import write_latent

from specllama.engine.engine import Engine
from specllama.errors import UsageError
from specllama.events import Finished
from specllama.models.gguf import read_header
from specllama.models.memory import kv_bytes
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

pytestmark = pytest.mark.e2e


@pytest.mark.parametrize("times", [1, 40])
def test_it_loads_and_drafts_write_what_plain_decoding_writes(tmp_path: Path, times: int) -> None:
    path = write_latent(tmp_path / "latent.gguf", quant="Q8_0")
    header = read_header(path)
    assert header.one_kv_type
    with Engine.load(path, path, EngineOptions(n_ctx=2048, threads=1)) as engine:
        assert engine.target.pool.kernels.any_width  # type: ignore[attr-defined]
        replies = []
        for proposer in ("none", "draft", "ngram"):
            params = GenerateParams(
                sampling=SamplingParams(temperature=0.8),
                seed=3,
                max_tokens=24,
                ignore_eos=True,
                proposer=proposer,
                window="fixed",
            )
            last = list(engine.generate("the cat and the hat and the cat " * times, params))[-1]
            assert isinstance(last, Finished)
            replies.append(last)
        assert len({r.token_ids for r in replies}) == 1
        assert replies[1].draft_n_accepted > 0


def test_its_cache_holds_each_cell_once(tmp_path: Path) -> None:
    header = read_header(write_latent(tmp_path / "latent.gguf"))
    assert kv_bytes(header, 256, type_k="bf16", type_v="bf16") == 2 * 256 * (64 + 32) * 2


def test_two_types_for_one_cache_are_refused_by_name(tmp_path: Path) -> None:
    path = write_latent(tmp_path / "latent.gguf")
    with pytest.raises(UsageError, match="cannot be q8_0 and f16"):
        Engine.load(path, None, EngineOptions(kv_type_k="q8_0", kv_type_v="f16", threads=1))
    with Engine.load(path, None, EngineOptions(kv_type_k="q8_0", n_ctx=256, threads=1)) as engine:
        assert engine.info.flash_attn
