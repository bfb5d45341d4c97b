"""NextN layers in llama.cpp, on models that the recipe and the tests build.

The `glm4moe` model is the bundled target with a fitted block, so its drafts are often right. The
`qwen35` model has random weights: it shows that a hybrid target is followed, not that it pays.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggufs_nextn import write_nextn
from head_lanes import begin_at, feed

from specllama.bench.prompts import load_prompts
from specllama.bench.proof import prove
from specllama.engine.engine import Engine
from specllama.events import Finished
from specllama.models.gguf import read_header
from specllama.models.memory import estimate_model
from specllama.models.nextn import trunk_blocks, why_not
from specllama.models.recipe.nextn import Reader, build, own_texts
from specllama.models.recipe.shape import TARGET_FILE
from specllama.models.tensors import read_tensor
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.speculative.drafting.mtp import MtpDrafter
from specllama.speculative.effects import HeadPlace

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nextn") / "nextn.gguf"
    build(TARGET_FILE, path, own_texts(TARGET_FILE, 6, 48))
    return path


def opened(path: Path, home: Path, **options: Any) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(home))
        with Engine.load(path, None, EngineOptions(threads=1, repack="off", **options)) as engine:
            yield engine


@pytest.fixture(scope="module")
def fitted(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    yield from opened(file, tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("hybrid")
    yield from opened(write_nextn(folder / "q.gguf"), folder, n_ctx=256)


def block(engine: Engine) -> HeadPlace:
    proposer = engine.drafter("mtp")
    assert isinstance(proposer, MtpDrafter)
    return proposer._lane


def test_the_text_with_mtp_is_that_of_plain_decoding(fitted: Engine) -> None:
    cases = list(
        prove(
            fitted,
            load_prompts()[:8:2],
            proposers=("mtp",),
            temperatures=(0.0, 0.7, 1.0),
            draft_max=(1, 4, 6),
            max_tokens=40,
        )
    )
    assert [c for c in cases if not c.identical] == []
    assert all(c.law_holds for c in cases)
    drafted, accepted = (sum(getattr(c, name) for c in cases) for name in ("drafted", "accepted"))
    assert 0 < accepted < drafted


def test_it_loses_nothing_when_another_method_answered_before(fitted: Engine) -> None:
    prompt = load_prompts()[1].content
    params = GenerateParams(
        sampling=SamplingParams(temperature=0.0), max_tokens=48, window="fixed", draft_max=4
    )

    def ask(name: str) -> Finished:
        *_, done = fitted.generate(prompt, params.replace(proposer=name))
        assert isinstance(done, Finished)
        return done

    fitted.reset()
    alone = ask("mtp")
    ask("ngram")
    after, again = ask("mtp"), ask("mtp")
    assert alone.token_ids == after.token_ids == again.token_ids
    assert alone.draft_n_accepted == after.draft_n_accepted == again.draft_n_accepted > 0


def test_wide_drafts_are_identical(fitted: Engine) -> None:
    cases = list(
        prove(
            fitted,
            load_prompts()[8:12],
            proposers=("mtp",),
            temperatures=(0.0, 1.0),
            draft_max=(12,),
            max_tokens=32,
        )
    )
    assert [c for c in cases if not c.identical] == []


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_it_drafts_under_the_other_rules(fitted: Engine, rule: Any) -> None:
    accepted = drafted = 0
    for prompt in load_prompts()[:4]:
        params = GenerateParams(proposer="mtp", verify=rule, window="fixed", seed=5, max_tokens=32)
        *_, finished = fitted.generate(prompt.content, params)
        assert isinstance(finished, Finished)
        accepted, drafted = accepted + finished.draft_n_accepted, drafted + finished.draft_n
    assert 0 < accepted < drafted


def test_the_caches_agree_with_the_text_after_every_request(fitted: Engine) -> None:
    for seed, prompt in enumerate(load_prompts()[:4]):
        params = GenerateParams(proposer="mtp", window="fixed", seed=seed, max_tokens=20)
        *_, finished = fitted.generate(prompt.content, params)
        assert isinstance(finished, Finished)
        nextn: Any = block(fitted)
        assert nextn.n_past == nextn.end
        assert fitted.target.n_past == finished.prompt_n + len(finished.token_ids) - 1


def test_the_block_computes_what_numpy_computes(fitted: Engine, file: Path) -> None:
    reader, target, nextn = Reader(TARGET_FILE), fitted.target, block(fitted)
    ids = fitted.encode(load_prompts()[0].content)[0][:20]
    fitted.reset()
    context: Any = target
    context.capture("nextn")
    target.forward(ids, outputs="none")
    held = context.hidden.rows(0, len(ids) - 1)
    _, final = reader.states(ids)
    assert np.abs(held - final[:-1]).max() < 0.05 * np.abs(final).max()
    states = np.concatenate((np.zeros((1, nextn.width), np.float32), held))
    begin_at(nextn, 0)
    logits, state = feed(nextn, ids, states)
    last = reader.shape.layers
    joint = read_tensor(read_header(file), f"blk.{last}.nextn.eh_proj.weight")
    embedded = reader.w["token_embd.weight"][ids]
    x = np.concatenate((reader.norm(embedded), reader.norm(states)), 1) @ joint.T
    after = reader.norm(reader.block(last - 1, x), reader.w["output_norm.weight"])[-1]
    assert np.abs(after - state).max() < 0.05 * np.abs(after).max()
    expected = reader.w["output.weight"] @ after
    assert np.abs(expected - logits).max() < 0.05 * np.abs(expected).max()
    context.capture("nothing")
    fitted.reset()


def test_rollbacks_of_the_block_leave_no_trace(fitted: Engine) -> None:
    rng, nextn = random.Random(1), block(fitted)
    ids = [rng.randrange(4, 400) for _ in range(64)]
    states = np.random.default_rng(1).normal(size=(64, nextn.width)).astype(np.float32)
    other = -states
    begin_at(nextn, 0)
    fresh = [feed(nextn, [token], states[i : i + 1])[0].copy() for i, token in enumerate(ids)]
    for _ in range(60):
        nextn.rollback(rng.randrange(nextn.end + 1))
        while nextn.end < 60 and rng.random() < 0.8:
            n, at = rng.randrange(1, 5), nextn.end
            feed(nextn, ids[at : at + n], states[at : at + n])
            assert np.array_equal(feed(nextn, ids[nextn.end :][:1], states[nextn.end :][:1])[0],
                                  fresh[nextn.end - 1])  # fmt: skip
        keep = nextn.end
        for i in range(min(3, 64 - keep)):  # drafts, on states that are not the text's
            feed(nextn, [5], other[i : i + 1])
        nextn.rollback(keep)
    begin_at(nextn, 0)


def test_a_hybrid_target_is_followed(hybrid: Engine) -> None:
    accepted = 0
    for temperature in (0.0, 0.7, 1.0):
        texts = []
        for proposer in ("none", "mtp"):
            params = GenerateParams(
                sampling=SamplingParams(temperature=temperature, top_k=0),
                proposer=proposer,
                ignore_eos=True,
                window="fixed",
                draft_max=3,
                max_tokens=60,
                seed=3,
            )
            *_, finished = hybrid.generate("def return the model", params)
            assert isinstance(finished, Finished)
            texts.append(finished.token_ids)
            if proposer == "mtp":
                assert finished.draft_n > 0
                accepted += finished.draft_n_accepted
        assert texts[0] == texts[1]
    assert accepted > 0


def test_what_the_header_says(file: Path, tmp_path: Path) -> None:
    header, source = read_header(file), read_header(TARGET_FILE)
    assert why_not(header) == ""
    assert trunk_blocks(header) == source.block_count
    # one layer more, and a second context
    with_block, without = estimate_model(header), estimate_model(source)
    assert with_block.kv == without.kv * header.block_count // source.block_count
    assert with_block.compute > without.compute
    stacked = read_header(write_nextn(tmp_path / "two.gguf", nextn=2))
    assert "this file has 2" in why_not(stacked)
    # layers that will not be loaded need no cache
    plain = read_header(write_nextn(tmp_path / "none.gguf", nextn=0))
    assert estimate_model(stacked).kv == estimate_model(plain).kv
