"""The EAGLE-3 and Medusa heads that ship beside the bundled target."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from eagle_files import NumpyHead
from engines import proved
from head_lanes import begin_at, encode, feed
from requests_made import asked

from specllama.backend.llama_pool import LlamaPool
from specllama.bench.prompts import load_prompts
from specllama.engine.engine import Engine
from specllama.errors import SpecllamaError
from specllama.events import Finished, Notice, RoundDone
from specllama.models import pruned
from specllama.models.gguf import read_header
from specllama.models.refs import resolve
from specllama.settings.params import EngineOptions, GenerateParams, SamplingParams


def head_file() -> Path:
    return resolve("tiny-target").with_name("tiny-eagle3-q8_0.gguf")


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_it_is_found_and_small(tiny: Engine, kind: str) -> None:
    assert next(m for m in tiny.info.methods if m.name == kind).available
    assert resolve("tiny-target").with_name(f"tiny-{kind}-q8_0.gguf").stat().st_size <= 1_300_000


def test_its_logits_are_those_of_numpy(tiny: Engine) -> None:
    """Known text, then the head's own states, on the weights that ship.

    llama.cpp rounds what enters a Q8_0 matrix to 8 bits; the guesses must not depend on it.
    """
    tiny.reset()
    target, head = tiny.target, tiny.drafters["eagle3"]._lane  # type: ignore[attr-defined]
    reference = NumpyHead(head_file(), resolve("tiny-target"))
    target.capture(head.layers)
    agreed = steps = 0
    for prompt in load_prompts()[::30][:6]:
        target.rollback(0)
        text = tiny.encode(prompt.content)[0][:60]
        target.forward(text[:-1], outputs="none")
        features = target.hidden.rows(0, len(text) - 1)
        assert features is not None
        states = reference.fuse(features)
        begin_at(head, 1)
        tokens = text[1:]
        row, state = feed(head, tokens, encode(head, features))
        for _ in range(4):
            logits, own = reference.run(tokens, states)
            assert np.abs(row - logits[-1]).max() < 0.25 * logits[-1].std()
            agreed += int(row.argmax() == logits[-1].argmax())
            steps += 1
            tokens = [*tokens, int(row.argmax())]
            states = np.concatenate((states, own[-1:]))
            row, state = feed(head, tokens[-1:], state[None])
    assert agreed >= 0.9 * steps
    target.capture("nothing")
    tiny.reset()


def test_it_loses_nothing_when_another_method_answered_before(tiny: Engine) -> None:
    """What is in the cache without its states is read again, and said; the rest is not."""
    prompt = next(p for p in load_prompts() if p.slice == "code").content
    params = GenerateParams(
        sampling=SamplingParams(temperature=0.0), max_tokens=48, window="fixed", draft_max=4
    )
    with_head = params.replace(proposer="eagle3")

    def ask(params: GenerateParams) -> tuple[Finished, list[str]]:
        events = list(tiny.generate(prompt, params))
        done = events[-1]
        assert isinstance(done, Finished)
        return done, [e.message for e in events if isinstance(e, Notice)]

    tiny.reset()
    ask(params.replace(proposer="ngram"))
    fresh, _ = ask(params.replace(proposer="ngram"))
    after, said = ask(with_head)
    assert any("again" in message for message in said)
    again, said = ask(with_head)
    assert not said
    tiny.reset()
    alone, said = ask(with_head)
    assert not said
    assert after.token_ids == again.token_ids == alone.token_ids == fresh.token_ids
    assert after.draft_n_accepted == alone.draft_n_accepted > 0
    assert again.cached_n > after.cached_n


# -- drafting with layers of the target itself, on the bundled target --


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.load(
        "tiny-target", None, EngineOptions(threads=1, repack="off", n_ctx=1024)
    ) as engine:
        yield engine


def greedy(**changes: object) -> GenerateParams:
    return asked("self", **changes)


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
        f"{header.read_contents()[:16]}-without-{pruned.names(pruned.middle_half(header.block_count))}.gguf"
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


def test_its_threads_are_chosen_like_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[LlamaPool] = []
    monkeypatch.setattr(LlamaPool, "choose_threads", lambda pool, *kept: chosen.append(pool))
    for threads, pools in ((None, 2), (1, 0)):
        chosen.clear()
        options = EngineOptions(threads=threads, repack="off", n_ctx=512)
        with Engine.load("tiny-target", None, options) as engine:
            assert list(engine.generate("Hello", greedy(max_tokens=4)))
        assert len({*map(id, chosen)}) == pools


def test_the_text_is_that_of_plain_decoding(engine: Engine) -> None:
    proved(engine, load_prompts()[::50][:4], "self", draft_max=(5,), max_tokens=24)


def test_a_damaged_draft_is_made_again() -> None:
    header = read_header(resolve("tiny-target"))
    made = pruned.make_draft(header, (1,), threads=1)
    good = made.path.read_bytes()
    assert made.block_count == header.block_count - 1
    made.path.write_bytes(good[:1000])
    assert pruned.make_draft(header, (1,), threads=1).path.read_bytes() == good
    shutil.rmtree(pruned.folder())
    pruned.folder().write_text("")
    with pytest.raises(SpecllamaError, match="self"):
        pruned.make_draft(header, (1,))


@pytest.mark.parametrize("kept", ['{"drop": [1, 3], "speed": 0.9}', "{", "[]"])
def test_a_choice_that_an_older_version_kept_changes_nothing(engine: Engine, kept: str) -> None:
    header = read_header(resolve("tiny-target"))
    old = pruned.folder() / f"{header.fingerprint}-layers.json"
    old.parent.mkdir(parents=True)
    old.write_text(kept)
    events = list(engine.generate(load_prompts()[0].content, greedy(max_tokens=8)))
    middle = pruned.names(pruned.middle_half(header.block_count))
    assert [path.name for path in pruned.folder().glob("*.gguf")] == [
        f"{header.read_contents()[:16]}-without-{middle}.gguf"
    ]
    said = " ".join(e.message for e in events if isinstance(e, Notice))
    assert f"without layers {middle}" in said
    assert old.read_text() == kept
