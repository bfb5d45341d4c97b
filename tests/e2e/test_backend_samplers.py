"""Our sampler chain against llama.cpp's own samplers, on random logits.

llama.cpp builds ``common_sampler`` from the same pieces; here each piece and their combination in
the same order is applied through the low-level API. Same surviving ids, same probabilities.

Where the two differ on purpose:

- ties at the edge of top-k, top-p and typical: ours go to the lowest ids, llama.cpp's to whatever
  its partial sort leaves in front, so rows here have no exact ties at an edge;
- temperature 0: ours is the argmax of the adjusted row, llama.cpp's the argmax of what typical and
  XTC left over;
- typical after a bias of -inf: llama.cpp's entropy becomes NaN (0 * log 0), ours leaves the
  forbidden tokens out;
- XTC: ours draws its coin from (seed, position), so that speculative and plain decoding agree;
- DRY: a breaker that spans tokens stops a match only where one token contains all of it;
- -1 for a penalty window is the whole text here and in llama.cpp's command line; its API now wants
  the number.
"""

import ctypes
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp as ll
import numpy as np
import pytest
from ggufs import write_llama

from specllama.arrays import Row
from specllama.backend.llama import LlamaModel
from specllama.settings.params import SamplingParams
from specllama.speculative.sampling import SamplerChain

OFF = SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
FLOAT32_TINY = 1e-30  # below this llama.cpp's probabilities vanish
_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("models") / "samplers.gguf"
    model = LlamaModel(write_llama(path, blocks=1), pre="gpt-2")
    yield model
    model.close()


def theirs(
    row: Row, p: SamplingParams, history: Sequence[int], model: LlamaModel
) -> dict[int, float]:
    """token -> probability after llama.cpp's samplers, in the order of ``common_sampler``."""
    n = len(row)
    samplers: list[Any] = []
    if p.logit_bias:
        bias = (ll.llama_logit_bias * len(p.logit_bias))(
            *(ll.llama_logit_bias(t, b) for t, b in p.logit_bias.items())
        )
        samplers.append(ll.llama_sampler_init_logit_bias(n, len(p.logit_bias), bias))
    last_n = p.repeat_last_n if p.repeat_last_n >= 0 else len(history)
    samplers.append(
        ll.llama_sampler_init_penalties(
            n, last_n, p.repeat_penalty, p.frequency_penalty, p.presence_penalty
        )
    )
    if p.dry_multiplier > 0:
        samplers.append(
            ll.llama_sampler_init_dry(
                model.vocab.handle,
                p.dry_multiplier,
                p.dry_base,
                p.dry_allowed_length,
                p.dry_penalty_last_n if p.dry_penalty_last_n >= 0 else len(history),
                (ctypes.c_char_p * 1)(b"\n"),
                1,
            )
        )
    if p.top_k > 0:
        samplers.append(ll.llama_sampler_init_top_k(p.top_k))
    if p.typical_p < 1:
        samplers.append(ll.llama_sampler_init_typical(p.typical_p, 1))
    if p.top_p < 1:
        samplers.append(ll.llama_sampler_init_top_p(p.top_p, 1))
    if p.min_p > 0:
        samplers.append(ll.llama_sampler_init_min_p(p.min_p, 1))
    samplers.append(ll.llama_sampler_init_temp(p.temperature))
    samplers.append(ll.llama_sampler_init_dist(1))  # its apply computes the probabilities

    data = np.zeros(n, _DATA)
    data["id"] = np.arange(n)
    data["logit"] = row
    array = ll.llama_token_data_array(
        data=data.ctypes.data_as(ll.llama_token_data_p), size=n, selected=-1, sorted=False
    )
    for sampler in samplers:
        assert sampler
        for token in history:
            ll.llama_sampler_accept(sampler, token)
        ll.llama_sampler_apply(sampler, ctypes.byref(array))
        ll.llama_sampler_free(sampler)
    kept = [array.data[i] for i in range(array.size)]
    return {t.id: t.p for t in kept if t.p > FLOAT32_TINY}


def ours(
    row: Row, p: SamplingParams, history: Sequence[int], breakers: frozenset[int]
) -> dict[int, float]:
    law = SamplerChain(p, tokens=history, breakers=breakers).law(row)
    kept = zip(law.ids.tolist(), law.probs.tolist(), strict=True)
    return {token: q for token, q in kept if q > FLOAT32_TINY}


def rows(n: int, count: int, scales: Sequence[float] = (0.5, 2.0, 5.0)) -> list[Row]:
    rng = np.random.default_rng(11)
    return [
        (rng.standard_normal(n) * scales[i % len(scales)]).astype(np.float32) for i in range(count)
    ]


def compare(p: SamplingParams, model: LlamaModel, histories: int = 1, count: int = 15) -> int:
    """Compares over rows; returns how many tokens survived altogether."""
    rng = np.random.default_rng(3)
    newline = model.vocab.tokenize("\n", add_special=False, parse_special=False)
    breakers = frozenset(t for t in range(model.vocab.n_tokens) if b"\n" in model.vocab.piece(t))
    assert set(newline) <= breakers
    total = 0
    for row in rows(model.vocab.n_tokens, count):
        for _ in range(histories):
            history: list[int] = rng.integers(20, 26, 40).tolist()
            if rng.random() < 0.5:
                history[int(rng.integers(0, 40))] = newline[0]
            expected = theirs(row, p, history, model)
            got = ours(row, p, history, breakers)
            assert got.keys() == expected.keys()
            assert got == pytest.approx(expected, rel=2e-4, abs=1e-6)
            total += len(got)
    return total


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.3},
        {"temperature": 3.0},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 10_000},
        {"top_p": 0.05},
        {"top_p": 0.5},
        {"top_p": 0.95},
        {"min_p": 0.01},
        {"min_p": 0.05},
        {"min_p": 0.5},
        {"typical_p": 0.1},
        {"typical_p": 0.5},
        {"typical_p": 0.95},
        {"logit_bias": {5: 3.0, 6: -100.0, 7: -float("inf")}},
    ],
    ids=str,
)
def test_each_sampler(changes: dict[str, Any], model: LlamaModel) -> None:
    assert compare(dataclasses.replace(OFF, **changes), model) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"repeat_penalty": 1.3},
        {"repeat_penalty": 0.8},
        {"frequency_penalty": 0.4},
        {"presence_penalty": 0.9},
        {"repeat_penalty": 1.2, "frequency_penalty": 0.1, "repeat_last_n": 7},
        {"repeat_penalty": 1.2, "repeat_last_n": -1},
        {"repeat_penalty": 1.2, "repeat_last_n": 0},
        {"dry_multiplier": 0.8},
        {"dry_multiplier": 0.8, "dry_allowed_length": 1},
        {"dry_multiplier": 1.5, "dry_base": 1.2, "dry_penalty_last_n": 10},
        {"dry_multiplier": 0.8, "repeat_penalty": 1.1, "top_k": 30, "temperature": 0.7},
    ],
    ids=str,
)
def test_each_penalty(changes: dict[str, Any], model: LlamaModel) -> None:
    assert compare(dataclasses.replace(OFF, **changes), model, histories=6) > 0


@pytest.mark.parametrize("seed", range(6))
def test_combinations_in_the_default_order(seed: int, model: LlamaModel) -> None:
    rng = np.random.default_rng(seed)

    def pick(*values: Any) -> Any:
        return values[int(rng.integers(len(values)))]

    for _ in range(12):
        p = SamplingParams(
            temperature=pick(0.4, 0.8, 1.0, 1.7),
            top_k=pick(0, 5, 40, 100),
            top_p=pick(0.3, 0.8, 0.95, 1.0),
            min_p=pick(0.0, 0.02, 0.2),
            typical_p=pick(0.4, 0.9, 1.0, 1.0),
            repeat_penalty=pick(1.0, 1.15),
            frequency_penalty=pick(0.0, 0.2),
            presence_penalty=pick(0.0, 0.3),
            dry_multiplier=pick(0.0, 0.8),
            logit_bias=pick({}, {21: 2.0, 22: -float("inf")}),
        )
        if p.typical_p < 1.0:
            p = dataclasses.replace(p, logit_bias={21: 2.0})
        compare(p, model, count=4)


def test_the_defaults_are_common_samplers_defaults(model: LlamaModel) -> None:
    assert compare(SamplingParams(), model, histories=2) > 0


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_a_vocabulary_of_152_thousand(scale: float, model: LlamaModel) -> None:
    """The shortcuts for large vocabularies leave what llama.cpp leaves."""
    (row,) = rows(151_936, 1, (scale,))
    for changes in ({"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.03}, {"top_k": 500, "top_p": 0.8}):
        p = dataclasses.replace(OFF, **changes)
        expected, got = theirs(row, p, [], model), ours(row, p, [], frozenset())
        # over so many tokens float32 sums meet the edge of top-p some tokens apart
        slack = 3 if "top_p" in changes else 0
        assert len(got.keys() ^ expected.keys()) <= slack
        both = sorted(got.keys() & expected.keys())
        np.testing.assert_allclose(
            [got[t] for t in both], [expected[t] for t in both], rtol=1e-2 if slack else 2e-4
        )


def test_ties_at_an_edge_keep_the_same_number(model: LlamaModel) -> None:
    """Which of equal tokens survive is unspecified in llama.cpp; how many is not."""
    row = (np.round(rows(model.vocab.n_tokens, 1, (2.0,))[0] * 2) / 2).astype(np.float32)
    for changes in ({"top_k": 20}, {"top_p": 0.6}, {"min_p": 0.1}):
        p = dataclasses.replace(OFF, **changes)
        expected, got = theirs(row, p, [], model), ours(row, p, [], frozenset())
        assert sorted(got.values()) == pytest.approx(sorted(expected.values()), rel=2e-4)
