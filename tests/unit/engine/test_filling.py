"""The sampler for text that fills a gap, against llama.cpp's own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import llama_cpp as ll
import numpy as np
import pytest

from specllama import paths
from specllama.backend.llama_vocab import LlamaVocab
from specllama.engine.sampler_chains import SamplerChains
from specllama.settings.params import GenerateParams, SamplingParams

K = 40


@pytest.fixture(scope="module")
def vocab() -> Iterator[LlamaVocab]:
    params = ll.llama_model_default_params()
    params.vocab_only = True
    model = ll.llama_model_load_from_file(
        os.fsencode(paths.bundled_dir() / "tiny-target-q4_0.gguf"), params
    )
    yield LlamaVocab(model, "gpt-2")
    ll.llama_model_free(model)


def theirs(vocab: LlamaVocab, row: np.ndarray) -> dict[int, float]:
    """What llama.cpp may draw after top-k and the sampler, and how likely."""
    n = len(row)
    data = (ll.llama_token_data * n)(*((t, float(row[t]), 0.0) for t in range(n)))
    array = ll.llama_token_data_array(data, n, -1, False)
    for sampler in (ll.llama_sampler_init_top_k(K), ll.llama_sampler_init_infill(vocab.handle)):
        ll.llama_sampler_apply(sampler, array)
        ll.llama_sampler_free(sampler)
    kept = {array.data[i].id: array.data[i].logit for i in range(array.size)}
    weights = {token: float(np.exp(logit - max(kept.values()))) for token, logit in kept.items()}
    return {token: weight / sum(weights.values()) for token, weight in weights.items()}


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 2.0, 4.0])
def test_it_keeps_what_llama_cpp_keeps(vocab: LlamaVocab, sharpness: float) -> None:
    sampling = SamplingParams(temperature=1.0, top_k=K, top_p=1.0, min_p=0.0, infill=True)
    rng, chains, seen = np.random.default_rng(3), SamplerChains(vocab), set()
    ends = [t for t in range(vocab.n_tokens) if vocab.is_eog(t)]
    for case in range(120):
        row = (rng.standard_normal(vocab.n_tokens) * sharpness).astype(np.float32)
        row[ends] += case % 8 * sharpness / 2  # the end is more or less likely
        row[rng.integers(vocab.n_tokens)] = row.max() + rng.random()
        chain = chains.chain(GenerateParams(sampling=sampling), 1, [], 0)
        law, want = chain.law(row), theirs(vocab, row)
        got = dict(zip(law.ids.tolist(), law.probs.tolist(), strict=True))
        if len(want) == 1 and vocab.is_eog(next(iter(want))):
            assert all(map(vocab.is_eog, got))
        else:
            assert got == pytest.approx(want, abs=1e-5)
        seen.add((len(want), bool(want.keys() & set(ends))))
    assert len(seen) > 1
