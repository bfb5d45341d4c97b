"""Draft models of fewer words that an engine makes at rest, and opens the next time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ggufs import write_llama

from specllama.backend import verdicts
from specllama.backend.same_rows import Tried
from specllama.cancel import Cancel
from specllama.cli import invoke
from specllama.engine import fewer_words
from specllama.engine.engine import Engine
from specllama.engine.fewer_words import DraftMaker
from specllama.engine.gguf_pair import read_pair
from specllama.errors import UnsupportedModel
from specllama.events import Event, Finished, Measuring
from specllama.models import receipts, trimmed
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.library import LocalModel, single
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.store.message_tree import StoredMessage
from specllama.store.sessions import SessionStore, last_replies
from specllama.text import size

pytestmark = pytest.mark.usefixtures("tried_home")  # copies are tried in a process

N = 200
OPTIONS = EngineOptions(threads=1, n_ctx=256, kv_disk="off")
GREEDY = GenerateParams(seed=1, max_tokens=24, ignore_eos=True, window="fixed", draft_max=3)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of a vocabulary of 332, chosen by one reply."""
    monkeypatch.setattr(fewer_words, "SIZES", (N,))
    monkeypatch.setattr(trimmed, "work", lambda header, n: n / 332)  # so small a model's is 0.99
    monkeypatch.setattr(fewer_words, "TOKENS", 20)
    monkeypatch.setattr(fewer_words, "LOST", 1.0)  # random models repeat no words


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    target = write_llama(tmp_path / "target.gguf", blocks=3)
    return target, write_llama(tmp_path / "draft.gguf", seed=2)


def written(engine: Engine) -> Finished:
    params = GREEDY.choose("temperature", 0.0).replace(proposer="draft")
    last = list(engine.generate("the time and", params))[-1]
    assert isinstance(last, Finished)
    return last


def at_rest(engine: Engine) -> Iterator[Event]:
    """Everything that is said until nothing is left to measure or to make."""
    said: list[Event] = []
    while engine.unmeasured:
        assert engine.measure(said.append)
    yield from said


def test_it_is_made_at_rest_and_drafts_from_the_next_time_on(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fewer_words, "PAYS", 99.0)
    with Engine.load(*pair, OPTIONS) as engine:
        assert engine.measure()
        assert not trimmed.copies(), "nothing was drafted yet"
        first = written(engine)
        what = [event.what for event in at_rest(engine) if isinstance(event, Measuring)]
        assert fewer_words.WHAT in what
        assert engine.info.draft is not None
        assert engine.info.draft.draft_tokens is None
    ((copy, n_bytes),) = trimmed.copies()
    assert read_header(copy).rows == N
    assert invoke(["pair", *map(str, pair), "-t", "1"]) == 0
    assert f"a copy of {N} words drafts: " in capsys.readouterr().out
    with Engine.load(*pair, OPTIONS) as engine:
        assert engine.info.draft is not None
        assert engine.info.draft.draft_tokens == N
        assert f"{N} words" in engine.info.draft.label
        here, whole = engine.info.here, read_header(pair[1])
        assert fewer_words.brief(whole, OPTIONS, here) == f"{size(n_bytes)}, copy of {N} words"
        again = written(engine)
        assert (again.token_ids, again.draft_n > 0) == (first.token_ids, True)
        assert not [*at_rest(engine)]
        assert trimmed.copies() == [(copy, n_bytes)], "it is not made again"
    monkeypatch.setattr(fewer_words, "PAYS", 0.0)
    with Engine.load(*pair, OPTIONS) as engine:
        assert engine.info.draft is not None
        assert engine.info.draft.draft_tokens is None
    assert read_pair(*pair, EngineOptions(draft_tokens="all")).whole is None


def test_a_request_ends_it_and_nothing_is_left(pair: tuple[Path, Path]) -> None:
    stop = Cancel()
    stop.set()
    with Engine.load(*pair, OPTIONS) as engine:
        assert engine.measure()
        written(engine)
        assert engine.unmeasured
        assert not engine.measure(cancel=stop)
        assert not trimmed.copies()
        assert engine.unmeasured, "it is tried again"


class Words:
    """A vocabulary; nobody's replies were stored."""

    def tokenize(self, text: str, **how: bool) -> list[int]:
        raise AssertionError(text)


def maker(whole: GgufHeader, options: EngineOptions = OPTIONS) -> DraftMaker:
    """One that has heard a reply of every token."""
    made = DraftMaker(whole, options, Words())  # type: ignore[arg-type]
    for token in range(whole.vocab_size):
        made.hear([token])
    return made


def refused(*args: object, **more: object) -> Tried:
    raise UnsupportedModel("its logits differ")


def dear(*args: object, **more: object) -> Tried:
    return Tried(N, share=0.97)


@pytest.mark.parametrize(
    ("compare", "why"),
    [
        (refused, "its logits differ"),
        (dear, "with 200 words a step takes 0.97 of the time"),
    ],
)
def test_what_comes_to_nothing_is_kept_and_not_looked_for_again(
    pair: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compare: Any,
    why: str,
) -> None:
    whole = read_header(pair[1])
    with monkeypatch.context() as patch:
        patch.setattr(fewer_words, "compare", compare)
        mine = maker(whole)
        assert mine.wanted
        mine.make(None, Cancel())
    assert not trimmed.copies()
    assert not mine.wanted
    assert fewer_words.chosen(whole, OPTIONS) is None
    assert fewer_words.words(whole, OPTIONS) == f"the whole model drafts: {why}"
    assert fewer_words.brief(whole, OPTIONS, "").endswith(", whole")
    assert invoke(["hub", "ls"]) == 0
    assert "fewer words" not in capsys.readouterr().err
    assert maker(whole).wanted, "other replies may hold other words"
    maker(whole).make(None, Cancel())
    assert not trimmed.copies(), "the same words are not tried again"
    assert not maker(whole).wanted, "nor looked for"
    assert maker(whole, replace(OPTIONS, threads=2)).wanted
    monkeypatch.setattr(verdicts, "here", lambda: {"build": "a new one"})
    assert maker(whole).wanted


def test_a_full_disk_is_no_reason_against_a_copy(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fewer_words, "PAYS", 99.0)
    whole = read_header(pair[1])
    for _ in range(fewer_words.LOOKS):
        with monkeypatch.context() as patch:
            patch.setattr(trimmed, "write", full)
            maker(whole).make(None, Cancel())
    assert not trimmed.copies()
    assert not fewer_words.words(whole, OPTIONS)
    maker(whole).make(None, Cancel())
    assert len(trimmed.copies()) == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("SIZES", (300,)), ("PAYS", 0.5), ("_TRIED", 1e9), ("_SPARE", 1 << 62), ("TOKENS", 999)],
)
def test_what_would_not_pay_or_fit_is_not_made(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(fewer_words, name, value)
    mine = maker(read_header(pair[1]))
    if mine.wanted:
        mine.make(None, Cancel())
    assert not trimmed.copies()


def test_the_whole_model_stays_where_that_is_asked_for(pair: tuple[Path, Path]) -> None:
    whole = read_header(pair[1])
    assert maker(whole).wanted
    assert not maker(whole, EngineOptions(draft_tokens="all")).wanted


def test_a_copy_is_made_anew_where_replies_hold_other_words(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fewer_words, "PAYS", 99.0)
    whole = read_header(pair[1])
    mine = maker(whole)
    mine.make(None, Cancel())
    ((copy, _),) = trimmed.copies()
    monkeypatch.setattr(fewer_words, "LOST", 0.02)
    old = read_header(copy)
    missing = sorted({*range(whole.vocab_size)} - {*old.array("specllama.says")})
    assert missing
    for words, anew in (([9, 10], False), (missing[:20], True)):
        running = DraftMaker(whole, OPTIONS, Words())  # type: ignore[arg-type]
        for _ in range(20):
            running.hear(words)
        running.make(None, Cancel())
        assert ({*missing[:20]} <= {*read_header(copy).array("specllama.says")}) is anew


def test_the_words_are_as_many_as_other_replies_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fewer_words, "LOST", 0.02)
    places = np.arange(1000, dtype=np.int32)
    common, rare = Counter([*range(50)] * 8), Counter(range(900, 950))
    smallest = fewer_words.smallest
    assert smallest(places, common, (40, 60, 500)) == 60
    assert smallest(places, rare + rare, (40, 60, 500)) == 60, "they are counted"
    assert smallest(places, common + rare, (40, 60, 990)) == 990
    assert smallest(places, common + rare, (40, 60)) == 0


def test_its_words_are_those_of_the_newest_replies(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with SessionStore.open(path) as store:
        for i in range(3):
            one = store.create()
            store.put(one, 0, StoredMessage("user", "asked"))
            store.put(one, 1, StoredMessage("assistant", f"reply {i}"))
    assert sorted(last_replies(path=path)) == ["reply 0", "reply 1", "reply 2"]
    assert len(last_replies(15, path)) == 2
    assert last_replies(path=tmp_path / "none.db") == []


def _with_it(path: Path) -> tuple[LocalModel, dict[str, list[Path]]]:
    return single(path), receipts.belongings(single(path))


def test_it_is_listed_bounded_and_deleted_with_its_model(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fewer_words, "PAYS", 99.0)
    for model in pair:
        maker(read_header(model)).make(None, Cancel())
    assert len(trimmed.copies()) == 2
    assert invoke(["hub", "ls"]) == 0
    assert "2 drafts of fewer words, made here: " in capsys.readouterr().err
    newest = trimmed.copies()[0][0]
    trimmed.keep_within(1, newest)
    assert [copy for copy, _ in trimmed.copies()] == [newest]
    monkeypatch.setattr("specllama.paths.models_dir", lambda: pair[0].parent)
    kind = "copy with fewer words or layers"
    local, more = next((one, more) for one, more in map(_with_it, pair) if kind in more)
    assert more[kind] == [newest.parent]
    object.__setattr__(local, "source", "specllama")
    receipts.remove(local, more[kind])
    assert not trimmed.copies()
    assert not local.path.exists()
