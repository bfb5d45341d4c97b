"""The bundled pair with a draft model of a quarter of the words: same seed, same text."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from engines import measured, proved

from specllama.bench.prompts import BenchPrompt
from specllama.engine.engine import Engine
from specllama.events import RoundDone
from specllama.models import trimmed
from specllama.models.gguf import read_header
from specllama.models.refs import resolve_pair
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams, VerifyRule

pytestmark = pytest.mark.e2e

N = 1024


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    home = tmp_path_factory.mktemp("home")
    target, draft = resolve_pair("tiny", None)
    assert draft is not None
    whole = read_header(draft)
    copy = trimmed.write(whole, home / "few.gguf", trimmed.choose(whole, N, {}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(home))
        options = EngineOptions(threads=1, parallel=2, repack="off")
        with measured(target, copy.path, options) as found:
            yield found


@pytest.mark.parametrize("method", ["draft", "tree", "merged", "mixed", "auto"])
def test_a_text_is_what_plain_decoding_writes(
    engine: Engine, prompts: list[BenchPrompt], method: str
) -> None:
    drafted, accepted = proved(engine, prompts[:12:3], method, draft_max=(1, 4))
    assert accepted > 0.1 * drafted > 0


@pytest.mark.parametrize("verify", ["match", "rejection", "block"])
def test_it_guesses_the_words_that_it_has(
    engine: Engine, prompts: list[BenchPrompt], verify: VerifyRule
) -> None:
    info = engine.info.draft
    assert info is not None
    says = {*np.array(read_header(info.path).array("specllama.says")).tolist()}
    sampling = SamplingParams(temperature=1.0)
    params = GenerateParams(sampling=sampling, seed=3, max_tokens=40, verify=verify, window="fixed")
    rounds = [
        event
        for prompt in prompts[:3]
        for event in engine.generate(prompt.content, params.replace(proposer="draft"))
        if isinstance(event, RoundDone)
    ]
    guessed = {token for one in rounds for token in one.drafted}
    written = {token for one in rounds for token in one.emitted}
    assert guessed
    assert guessed <= says
    assert written - says, "the texts hold words that it does not know, and it follows them"
