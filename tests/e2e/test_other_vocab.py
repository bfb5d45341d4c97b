"""Draft models of another vocabulary on real weights: nothing they do changes what is said.

The draft with a tokenizer of its own is ``tests/data/other-draft-q8_0.gguf``; the draft that
shares nearly all tokens is the bundled one, renumbered, with every twentieth token renamed.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ggufs import with_tokens
from requests_made import asked, finish

from specllama.bench.prompts import BenchPrompt, load_prompts
from specllama.bench.proof import prove
from specllama.engine.engine import Engine
from specllama.errors import PairIncompatible
from specllama.events import Finished
from specllama.models.gguf import read_header
from specllama.models.pairing import compare
from specllama.models.refs import resolve
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams
from specllama.speculative.drafting.translate import RetokenizingDrafter

OTHER = Path(__file__).parent.parent / "data" / "other-draft-q8_0.gguf"
TARGET = resolve("tiny-target")
DRAFT = resolve("tiny-draft")
MULTIBYTE = "Grüße aus Köln – 漢字かな交じり文 🙂👩‍👩‍👧 naïve Ωmega"
# nearly every character is several tokens, in both vocabularies
ALPHABET = 'root ::= "Grüße 漢字 🙂: " [äöüß漢字かな🙂👧Ω \\n]{12,20}'
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},'
    ' "required": ["name", "n"], "additionalProperties": false}'
)


def renumbered(out: Path, every: int) -> Path:
    """The bundled draft with its tokens backwards, one in ``every`` with a text of its own."""
    n = read_header(DRAFT).vocab_size
    # the marks and the 256 bytes come first and stay
    return with_tokens(DRAFT, out, list(reversed(range(n))), range(300, n, every))


@pytest.fixture(scope="module", params=["own tokenizer", "95 % shared"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("other")
    own = request.param == "own tokenizer"
    draft = OTHER if own else renumbered(folder / "draft.gguf", 18)
    options = EngineOptions(
        n_ctx=2048, threads=1, repack="off", allow_other_vocab=True, check_memory=False
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECLLAMA_HOME", str(folder / "home"))
        with Engine.load(TARGET, draft, options) as opened:
            assert isinstance(opened.drafters["draft"], RetokenizingDrafter) == own
            yield opened


@pytest.fixture(scope="module")
def prompts() -> list[BenchPrompt]:
    """Three of every slice."""
    every = load_prompts()
    return [p for name in ("chat", "code", "rag", "json") for p in
            [q for q in every if q.slice == name][:3]]  # fmt: skip


def answer(engine: Engine, prompt: str, params: GenerateParams) -> Finished:
    engine.reset()
    return finish(engine, prompt, params)


def both(engine: Engine, prompt: str, temperature: float, **options: object) -> Finished:
    """The drafted answer, after it was compared with the plain one."""
    params = asked("none", temperature, seed=11, max_tokens=64, ignore_eos=False)
    params = params.replace(**options)
    plain = answer(engine, prompt, params.replace(proposer="none"))
    drafted = answer(engine, prompt, params.replace(proposer="draft"))
    assert drafted.token_ids == plain.token_ids
    assert drafted.text == plain.text
    assert drafted.reason == plain.reason
    assert drafted.draft_n > 0
    return drafted


def test_the_answer_is_token_identical_on_every_slice(
    engine: Engine, prompts: list[BenchPrompt]
) -> None:
    cases = list(
        prove(
            engine,
            prompts,
            proposers=("draft", "mixed"),
            temperatures=(0.0, 0.7, 1.0),
            draft_max=(4,),
            max_tokens=32,
        )
    )
    assert [c for c in cases if not c.identical] == []
    assert all(c.law_holds for c in cases)
    for name in ("chat", "code", "rag", "json"):
        assert sum(c.accepted for c in cases if c.slice == name and c.proposer == "draft") > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_characters_of_several_tokens_come_out_whole(engine: Engine, temperature: float) -> None:
    both(engine, MULTIBYTE, temperature, ignore_eos=True, max_tokens=40)
    forced = both(engine, MULTIBYTE, temperature, grammar=ALPHABET, max_tokens=120)
    assert forced.text.startswith("Grüße 漢字 🙂: ")
    assert "\ufffd" not in forced.text
    pieces = [engine.vocab.piece(t) for t in forced.token_ids]
    assert any(b >= 0x80 for piece in pieces for b in piece)
    assert forced.text.encode() in b"".join(pieces)


def test_stop_strings_end_both_alike(engine: Engine, prompts: list[BenchPrompt]) -> None:
    crossed = 0
    params = GenerateParams(sampling=SamplingParams(temperature=0.0), seed=11, max_tokens=40)
    for prompt in prompts:
        plain = answer(engine, prompt.content, params.replace(proposer="none"))
        if len(plain.text) < 40:
            continue
        stop = plain.text[25:31]
        done = both(engine, prompt.content, 0.0, stop=(stop,))
        assert done.reason == "stop_string"
        assert stop not in done.text
        crossed += stop.encode() not in {engine.vocab.piece(t) for t in done.token_ids}
    assert crossed


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_binds_both_alike(engine: Engine, temperature: float) -> None:
    both(engine, "Mira is 41 years old. As JSON: ", temperature, json_schema=SCHEMA, max_tokens=90)


def test_which_way_is_taken_follows_from_what_is_shared(tmp_path: Path) -> None:
    target = read_header(TARGET)
    nearly = compare(target, read_header(renumbered(tmp_path / "nearly.gguf", 18)))
    assert nearly.common == pytest.approx(0.95, abs=0.01)
    assert 0.75 < compare(target, read_header(renumbered(tmp_path / "fewer.gguf", 5))).common < 0.85
    assert compare(target, read_header(OTHER)).common < 0.9
    options = EngineOptions(n_ctx=256, threads=1, allow_other_vocab=True, check_memory=False)
    with Engine.load(TARGET, tmp_path / "fewer.gguf", options) as opened:
        assert isinstance(opened.drafters["draft"], RetokenizingDrafter)
        both(opened, "Hello there", 0.7, max_tokens=24)
    with pytest.raises(PairIncompatible):
        Engine.load(TARGET, tmp_path / "nearly.gguf", EngineOptions(n_ctx=256, threads=1))


def test_it_is_refused_until_it_is_allowed(tmp_path: Path) -> None:
    fewer = with_tokens(DRAFT, tmp_path / "fewer.gguf", range(4096), range(300, 4096, 5))
    for draft, number in ((OTHER, 5), (fewer, 300)):
        env = {**os.environ, "SPECLLAMA_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "specllama", "run", "-m", "tiny-target", "-d", str(draft)]
        command += ["--threads", "1", "--max-tokens", "12", "--seed", "1", "Hi there"]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
        assert done.returncode == 4, done.stderr
        assert done.stdout == ""
        assert f"token {number} is " in done.stderr
        assert "--allow-other-vocab" in done.stderr
        assert "Traceback" not in done.stderr
        command.insert(-1, "--allow-other-vocab")
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240)
        assert done.returncode == 0, done.stderr


def test_a_draft_that_has_other_padding_drafts_as_ever(tmp_path: Path) -> None:
    """Tokens that the target writes, too: guesses are checked by their ids."""
    padded = with_tokens(
        DRAFT, tmp_path / "padded.gguf", range(4096), range(300, 4096, 18), "[PAD{}]"
    )
    report = compare(read_header(TARGET), read_header(padded))
    assert "only padding differs: 211 unused tokens, the first is 300" in report.warnings
    kept = []
    for draft in (DRAFT, padded):
        with Engine.load(TARGET, draft, EngineOptions(n_ctx=512, threads=1)) as opened:
            assert not isinstance(opened.drafters["draft"], RetokenizingDrafter)
            ends = [both(opened, "Hello there", t, ignore_eos=True) for t in (0.0, 0.7)]
            kept.append([end.draft_n_accepted for end in ends])
    assert kept[0] == kept[1]
    assert min(kept[0]) > 0
