"""Drafting with layers of the target itself, on the bundled target."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import proved

from specllama.bench.prompts import load_prompts
from specllama.engine.engine import Engine
from specllama.errors import SpecllamaError
from specllama.events import Finished, Notice, RoundDone
from specllama.models import pruned
from specllama.models.gguf import read_header
from specllama.models.refs import resolve
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams

pytestmark = pytest.mark.e2e


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.load(
        "tiny-target", None, EngineOptions(threads=1, repack="off", n_ctx=1024)
    ) as engine:
        yield engine


def greedy(**changes: object) -> GenerateParams:
    params = GenerateParams(
        sampling=SamplingParams(temperature=0.0),
        proposer="self",
        window="fixed",
        draft_max=4,
        max_tokens=24,
        seed=1,
        ignore_eos=True,  # some replies are short
    )
    return params.replace(**changes)


def test_the_draft_is_made_at_first_use_and_found_again(engine: Engine) -> None:
    header = read_header(resolve("tiny-target"))
    assert next(m for m in engine.info.methods if m.name == "self").available
    assert not pruned.folder().exists()
    prompt = load_prompts()[0].content
    plain = list(engine.generate(prompt, greedy(speculate=False)))
    assert not pruned.folder().exists()
    events = list(engine.generate(prompt, greedy()))
    (path,) = pruned.folder().iterdir()
    assert path.name == (
        f"{header.fingerprint}-without-"
        f"{pruned.layer_list(pruned.middle_half(header.block_count))}.gguf"
    )
    said = [e.message for e in events if isinstance(e, Notice)]
    work = pruned.draft_work(header, pruned.middle_half(header.block_count))
    assert any(f"reads {work:.0%} of the bytes" in message for message in said)
    rounds = [e for e in events if isinstance(e, RoundDone)]
    assert {e.source for e in rounds} <= {"self", "none"}
    assert sum(len(e.drafted) for e in rounds) > 20

    def ids(found: list) -> tuple[int, ...]:
        return next(e.token_ids for e in found if isinstance(e, Finished))

    assert ids(events) == ids(plain)
    made = path.stat().st_mtime_ns
    engine.reset()
    with Engine.load(
        "tiny-target", None, EngineOptions(threads=1, repack="off", n_ctx=512)
    ) as again:
        other = list(again.generate(prompt, greedy()))
    assert path.stat().st_mtime_ns == made
    assert ids(other) == ids(plain)


def test_the_text_is_that_of_plain_decoding(engine: Engine) -> None:
    proved(engine, load_prompts()[::50][:4], "self", draft_max=(5,), max_tokens=24)


def test_a_damaged_draft_is_made_again(tmp_path: Path) -> None:
    header = read_header(resolve("tiny-target"))
    made = pruned.make_draft(header, (1,), into=tmp_path, threads=1)
    good = made.path.read_bytes()
    assert made.block_count == header.block_count - 1
    made.path.write_bytes(good[:1000])
    assert pruned.make_draft(header, (1,), into=tmp_path, threads=1).path.read_bytes() == good
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecllamaError, match="file"):
        pruned.make_draft(header, (1,), into=tmp_path / "file")


@pytest.mark.parametrize("kept", ['{"drop": [1, 3], "speed": 0.9}', "{", "[]"])
def test_a_choice_that_an_older_version_kept_changes_nothing(engine: Engine, kept: str) -> None:
    header = read_header(resolve("tiny-target"))
    old = pruned.folder() / f"{header.fingerprint}-layers.json"
    old.parent.mkdir(parents=True)
    old.write_text(kept)
    events = list(engine.generate(load_prompts()[0].content, greedy(max_tokens=8)))
    middle = pruned.layer_list(pruned.middle_half(header.block_count))
    assert [path.name for path in pruned.folder().glob("*.gguf")] == [
        f"{header.fingerprint}-without-{middle}.gguf"
    ]
    said = " ".join(e.message for e in events if isinstance(e, Notice))
    assert f"without layers {middle}" in said
    assert old.read_text() == kept
