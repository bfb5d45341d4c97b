"""NextN layers in llama.cpp, on models that the recipe and the tests build.

The `glm4moe` model is the bundled target with a fitted block, so its drafts are often right. The
`qwen35` model has random weights: it shows that a hybrid target is followed, not that it pays.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import proved
from ggufs_nextn import write_nextn

from specllama.bench.prompts import load_prompts
from specllama.engine.engine import Engine
from specllama.events import Finished
from specllama.models.gguf import read_header
from specllama.models.memory import estimate_model
from specllama.models.nextn_blocks import trunk_blocks, why_not
from specllama.models.recipe.nextn import build, own_texts
from specllama.models.recipe.shape import TARGET_FILE
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
    asked = {"temperatures": (0.0, 0.7, 1.0), "draft_max": (1, 4, 12), "max_tokens": 40}
    drafted, accepted = proved(fitted, load_prompts()[:8:2], "mtp", **asked)
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


def test_the_caches_agree_with_the_text_after_every_request(fitted: Engine) -> None:
    for seed, prompt in enumerate(load_prompts()[:4]):
        params = GenerateParams(proposer="mtp", window="fixed", seed=seed, max_tokens=20)
        *_, finished = fitted.generate(prompt.content, params)
        assert isinstance(finished, Finished)
        nextn: Any = block(fitted)
        assert nextn.n_past == nextn.end
        assert fitted.target.n_past == finished.prompt_n + len(finished.token_ids) - 1


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
