"""Conversations whose state is kept on disk: found again by another engine, the text as if it had
gone on, and nothing taken that is not whole."""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import fake_info, fake_model, loaded
from requests_made import asked
from table_model import FakePool, FakeTable, FakeVocab

from specllama.backend.base import Opened, OpenedPair
from specllama.cancel import Cancel
from specllama.engine.engine import Engine
from specllama.engine.pair_loading import load
from specllama.engine.shelf import Shelf, StateKeys
from specllama.engine.slot import Slot
from specllama.errors import ModelUnavailable
from specllama.events import Finished, Notice, Started
from specllama.settings.params import SERVER, EngineOptions, GenerateParams
from specllama.speculative.drafting.method import Kit
from specllama.store.states import States

V = 24
N_CTX = 400
TABLE = FakeTable(V, seed=3, sharpness=2.0, eog_bias=-4.0)
DRAFT = FakeTable(V, seed=4, sharpness=2.0, of=TABLE, agreement=0.7)
TEXT = [1 + i * i % 20 for i in range(120)]


def flush(shelf: Any) -> None:
    """Wait until all is written."""
    with shelf._change:
        shelf._change.wait_for(lambda: not shelf._waiting)


def engine_of(
    folder: Path | None,
    *,
    slots: int = 1,
    tiles: bool = False,
    kv_ram: int = 0,
    key: str = "key",
    draft: str = "draft",
    most: int = 1 << 30,
    waiting: int = 1 << 30,
    owned: Callable[[str], bool] = lambda owner: True,
    reads: Callable[[Callable[[], object]], bool] | None = None,
) -> Engine:
    pool = FakePool(TABLE, n_ctx=N_CTX, lanes=slots, tiles=tiles)
    beside = FakePool(DRAFT, n_ctx=N_CTX, lanes=slots, in_order=False, by_order=False)

    def slot() -> Slot:
        lane = pool.open()
        return Slot(lane, Kit(lane, beside.open()).all())

    first, *more = [slot() for _ in range(slots)]
    parts = loaded(first.target, FakeVocab(V), info=fake_info(N_CTX, V), more=more)
    shelf = None
    if folder is not None:
        keys = StateKeys(key, [(beside, draft)])
        there = States(key, most=most, folder=folder)

        def opener(check: Callable[[], object] | None) -> tuple[States, StateKeys] | None:
            known = reads is None or (check is not None and reads(check))
            return (there, keys) if known else None

        shelf = Shelf(opener, owned, most=waiting)
    return Engine(replace(parts, slots=(first, *more), kv_ram=kv_ram, shelf=shelf))


def params(
    seed: int, *, owner: str = "c0ffee", method: str = "none", **more: object
) -> GenerateParams:
    return asked(method, 0.8, free=True, seed=seed, owner=owner, **more)


class Turn:
    def __init__(self, engine: Engine, prompt: list[int], asked: GenerateParams) -> None:
        events = list(engine.generate(prompt, asked))
        [started] = [e for e in events if isinstance(e, Started)]
        assert isinstance(events[-1], Finished)
        self.cached, self.ids = started.cached_n, list(events[-1].token_ids)
        self.drafted = events[-1].draft_n
        self.said = [e.message for e in events if isinstance(e, Notice)]


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/[!.]*"))


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize("method", ["none", "draft", "mixed", "tree", "lookahead"])
def test_a_conversation_reopens_as_if_it_had_gone_on(
    tmp_path: Path, method: str, tiles: bool
) -> None:
    with engine_of(tmp_path, tiles=tiles) as engine:
        again = [*TEXT, *Turn(engine, TEXT, params(1, method=method)).ids, 7, 8, 9]
        on = Turn(engine_with(engine), again, params(2, method=method))
    with engine_of(tmp_path / "other", tiles=tiles) as engine:
        Turn(engine, TEXT, params(1, method=method))
    with engine_of(tmp_path / "other", tiles=tiles) as engine:
        reopened, found = Turn(engine, again, params(2, method=method)), list[object]()
        shelf: Any = engine._seats.shelf
        take = shelf.take
        shelf.take = lambda *how: found.append(take(*how)) or found[-1]
        Turn(engine, again, params(3, method=method))
    assert found == [None], "a file of no more than a few tokens more is not read"
    assert reopened.ids == on.ids
    assert reopened.cached == on.cached >= len(TEXT) + 20
    assert reopened.said == []


def engine_with(engine: Engine) -> Engine:
    """The same, whose files are not looked at any more: what it holds is in its lanes."""
    engine._seats.shelf = None
    return engine


def test_the_draft_model_need_not_read_it_again(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        one = Turn(engine, TEXT, params(1, method="draft"))
    again = [*TEXT, *one.ids, 7, 8, 9]
    for draft in ("draft", "another"):
        with engine_of(tmp_path, draft=draft) as engine:
            passes = engine._slots[0].beside[0].pool.fake.passes  # type: ignore[union-attr]
            assert Turn(engine, again, params(2, method="draft")).cached >= len(TEXT)
            assert (max(passes) > 100) is (draft == "another")


def test_a_request_without_an_owner_leaves_nothing_and_finds_nothing(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        Turn(engine, TEXT, params(1, owner=""))
    assert files(tmp_path) == []
    with engine_of(tmp_path) as engine:
        Turn(engine, TEXT, params(1))
    with engine_of(tmp_path) as engine:
        assert Turn(engine, TEXT, params(1, owner="")).cached == 0


@pytest.mark.parametrize("most", [0, 4096, 1 << 30])
def test_what_waits_for_a_slow_disk_is_bounded(tmp_path: Path, most: int) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def owned(owner: str) -> bool:
        begun.set()
        assert go_on.wait(60)
        return True

    with engine_of(tmp_path, owned=owned, waiting=most) as engine:
        shelf = engine._seats.shelf
        for n in range(8):
            Turn(engine, TEXT, params(n, owner=f"owner{n}"))
            assert begun.wait(60)
        assert sum(one.n_bytes for one in shelf._waiting[1:-1]) <= most
        waiting = [one.held.owner for one in shelf._waiting]
        assert (waiting[0], waiting[-1]) == ("owner0", "owner7")
        assert (len(waiting) == 2) is (most == 0)
        assert (len(waiting) == 8) is (most > 1 << 20)
        go_on.set()
    assert len(files(tmp_path)) == len(waiting)


@pytest.mark.parametrize("when", ["before", "while it is written"])
def test_of_a_deleted_conversation_nothing_is_left(tmp_path: Path, when: str) -> None:
    asked: list[str] = []

    def owned(owner: str) -> bool:
        asked.append(owner)
        return when != "before" and len(asked) == 1

    with engine_of(tmp_path, owned=owned) as engine:
        Turn(engine, TEXT, params(1))
    assert set(asked) == {"c0ffee"}
    assert files(tmp_path) == []


def test_a_conversation_has_one_text_and_a_server_many(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        for owner in ("c0ffee", SERVER):
            one = Turn(engine, TEXT, params(1, owner=owner))
            Turn(engine, [*TEXT, *one.ids, 7, 8], params(2, owner=owner))
            Turn(engine, [5, *TEXT], params(3, owner=owner))
    assert [path.name.partition(".")[0] for path in files(tmp_path)] == ["c0ffee", SERVER, SERVER]


@pytest.mark.parametrize("damage", ["torn", "flipped", "moved"])
def test_what_is_not_whole_is_read_again_and_said(tmp_path: Path, damage: str) -> None:
    """A state of another model is no loss: nothing is said."""
    with engine_of(tmp_path) as engine:
        one = Turn(engine, TEXT, params(1))
    [file] = files(tmp_path)
    data = bytearray(file.read_bytes())
    key = "key"
    if damage == "torn":
        del data[-100:]
    elif damage == "flipped":
        data[-100] ^= 1
    else:
        key = "of another build"
    file.write_bytes(data)
    again = [*TEXT, *one.ids, 7, 8]
    with engine_of(tmp_path, key=key) as engine:
        turn = Turn(engine, again, params(2))
        after = Turn(engine, again, params(2))
    assert turn.cached == 0
    assert len(turn.said) == (damage != "moved")
    assert all("read again" in said for said in turn.said)
    assert after.said == []
    with engine_of(None) as engine:
        assert turn.ids == Turn(engine, again, params(2)).ids


def test_a_file_in_another_folder_is_not_taken(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        one = Turn(engine, TEXT, params(1))
    [file] = files(tmp_path)
    (tmp_path / "key2").mkdir()
    file.rename(tmp_path / "key2" / file.name)
    with engine_of(tmp_path, key="key2") as engine:
        assert Turn(engine, [*TEXT, *one.ids, 7], params(2)).cached == 0


def test_a_scope_is_kept_apart(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        Turn(engine, TEXT, params(1, owner=SERVER, scope="key 1"))
    for scope, cached in (("", 0), ("key 2", 0), ("key 1", len(TEXT) - 1)):
        with engine_of(tmp_path) as engine:
            assert Turn(engine, TEXT, params(2, owner=SERVER, scope=scope)).cached == cached
    assert b"key 1" not in files(tmp_path)[0].read_bytes()


@pytest.mark.parametrize("kv_ram", [0, 2000])
def test_what_leaves_the_memory_goes_to_disk_first(tmp_path: Path, kv_ram: int) -> None:
    """Three conversations in two lanes, all at once, and no moment of rest."""
    engine = engine_of(tmp_path, slots=2, kv_ram=kv_ram)
    texts = [[1 + i, *TEXT] for i in range(3)]
    replies = {}
    for i, text in enumerate(texts):
        id = engine.submit(text, params(i, owner=SERVER))
        said = [event for events in iter(engine.step, []) for _, event in events]
        replies[i] = next(event.token_ids for event in said if isinstance(event, Finished))
        assert id >= 0
    flush(engine._seats.shelf)
    assert len(files(tmp_path)) >= (1 if kv_ram == 0 else 0)
    engine.close()
    assert len(files(tmp_path)) == 3
    with engine_of(tmp_path, slots=2, kv_ram=kv_ram) as engine:
        for i, text in enumerate(texts):
            turn = Turn(engine, [*text, *replies[i], 3], params(9, owner=SERVER))
            assert turn.cached >= len(text) + 20


def read_ahead(engine: Engine, typed: list[int], asked: GenerateParams) -> int:
    """Read what is typed; how much of it was cached."""
    engine.begin(replace(engine.prepare([*typed, 1, 2, 3], asked), stable=len(typed)))
    events = [event for events in iter(engine.step, []) for _, event in events]
    assert isinstance(events[0], Started)
    return events[0].cached_n


@pytest.mark.parametrize("tiles", [False, True])
def test_what_is_typed_in_a_reopened_conversation_goes_on_from_disk(
    tmp_path: Path, tiles: bool
) -> None:
    with engine_of(tmp_path / "on", tiles=tiles) as engine:
        text = [*TEXT, *Turn(engine, TEXT, params(1)).ids]
        message = [4 + i % 19 for i in range(90)]
        on = Turn(engine_with(engine), [*text, *message, 1, 2, 3], params(2))
    with engine_of(tmp_path, tiles=tiles) as engine:
        Turn(engine, TEXT, params(1))
    with engine_of(tmp_path, tiles=tiles) as engine:
        other = Turn(engine, [3, *TEXT], params(5, owner="another"))
        assert read_ahead(engine, text + message[:20], params(2)) >= len(TEXT) + 20
        assert read_ahead(engine, text + message[:75], params(2)) >= len(TEXT) + 20
        turn = Turn(engine, [*text, *message, 1, 2, 3], params(2))
        assert turn.ids == on.ids
        assert turn.cached >= on.cached
        back = Turn(engine, [3, *TEXT, *other.ids, 9], params(5, owner="another"))
        assert back.cached >= len(TEXT) + 20


def test_what_is_typed_pushes_nothing_out_that_is_not_on_disk(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        one = Turn(engine, TEXT, params(1))
    with engine_of(tmp_path) as engine:
        mine = Turn(engine, [3, *TEXT], params(5, owner=""))
        assert read_ahead(engine, [*TEXT, *one.ids, 5, 6, 7], params(2)) <= 1
        assert Turn(engine, [3, *TEXT, *mine.ids, 9], params(5, owner="")).cached > len(TEXT)


def test_a_full_disk_ends_no_conversation(tmp_path: Path) -> None:
    (tmp_path / "states").write_text("no folder")
    with engine_of(tmp_path / "states") as engine:
        one = Turn(engine, TEXT, params(1))
        flush(engine._seats.shelf)
        two = Turn(engine, [*TEXT, *one.ids, 7], params(2))
        three = Turn(engine, [*TEXT, *one.ids, 7, 8], params(2))
    assert two.cached > len(TEXT)
    assert len(two.said) == 1
    assert "cannot keep" in two.said[0]
    assert three.said == [], "said once"


def test_nothing_is_kept_beyond_the_bound(tmp_path: Path) -> None:
    with engine_of(tmp_path, most=100) as engine:
        Turn(engine, TEXT, params(1))
    assert files(tmp_path) == []


def test_what_there_was_no_memory_to_copy_is_written_later(tmp_path: Path) -> None:
    engine = engine_of(tmp_path)
    free = 1
    engine._seats._free_memory = lambda: free
    Turn(engine, TEXT, params(1))
    flush(engine._seats.shelf)
    assert files(tmp_path) == []
    free = 1 << 40
    engine.close()
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize(
    ("said", "pair", "most"),
    [(None, 5 << 20, 5 << 20), (None, 9 << 30, 1 << 30), (2048, 5 << 20, 2 << 30), (0, 5, 0)],
)
def test_idle_texts_take_as_much_memory_as_the_pair_unless_more_was_said(
    said: int | None, pair: int, most: int
) -> None:
    assert EngineOptions(kv_ram=said).idle_bytes(pair) == most


def test_another_model_reads_a_conversation_once_and_the_first_only_what_is_new(
    tmp_path: Path,
) -> None:
    with engine_of(tmp_path, key="first") as engine:
        text = [*TEXT, *Turn(engine, TEXT, params(1)).ids, 7]
    with engine_of(tmp_path, key="second") as engine:
        one = Turn(engine, text, params(2))
        known = len(text)
        text += [*one.ids, 8]
        two = Turn(engine, text, params(3))
        text += [*two.ids, 9]
    assert one.cached == 0
    assert two.cached >= known
    with engine_of(tmp_path, key="second") as engine:
        assert Turn(engine, text, params(4)).cached >= known + len(one.ids)
    with engine_of(tmp_path, key="first") as engine:
        assert Turn(engine, text, params(4)).cached >= len(TEXT)


def test_nothing_is_read_to_its_end_before_the_engine_rests(tmp_path: Path) -> None:
    """Hashing the weights begins with a reply on its way out, and waits for the next one."""
    at, waits, go_on = list[str](), threading.Event(), threading.Event()

    def reads(check: Callable[[], object]) -> bool:
        at.append("begun")
        waits.set()
        assert go_on.wait(60)
        check()
        at.append("ended")
        return True

    with engine_of(tmp_path, reads=reads) as engine:
        Turn(engine, TEXT, params(1))
        assert waits.wait(60)
        shelf: Any = engine._seats.shelf
        for event in engine.generate([*TEXT, 3, 4], params(2)):
            if isinstance(event, Started):
                go_on.set()
                assert not shelf.resting.wait(0.3)
                assert at == ["begun"], "the reply goes first"
        flush(shelf)
        assert at == ["begun", "ended"]
    assert files(tmp_path) != []


def test_what_was_never_read_is_read_when_the_engine_closes(tmp_path: Path) -> None:
    with engine_of(tmp_path, reads=lambda check: check() is None) as engine:
        Turn(engine, TEXT, params(1))
    with engine_of(tmp_path) as engine:
        assert Turn(engine, TEXT, params(2)).cached >= len(TEXT) - 1


def test_nothing_is_taken_before_all_files_were_read(tmp_path: Path) -> None:
    with engine_of(tmp_path) as engine:
        Turn(engine, TEXT, params(1))
    with engine_of(tmp_path, reads=lambda check: False) as engine:
        assert Turn(engine, TEXT, params(2)).cached == 0


def test_a_file_that_changed_since_it_was_loaded_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    def reads(check: Callable[[], object]) -> bool:
        raise ModelUnavailable("m.gguf has changed since it was opened")

    with engine_of(tmp_path, reads=reads) as engine:
        Turn(engine, TEXT, params(1))
        flush(engine._seats.shelf)
        said = Turn(engine, TEXT[::-1], params(2)).said
        assert said == [
            "cannot keep a conversation's state: m.gguf has changed since it was opened"
        ]
    assert files(tmp_path) == []


def test_a_limit_that_holds_no_text_is_said(tmp_path: Path) -> None:
    with engine_of(tmp_path, most=10) as engine:
        Turn(engine, TEXT, params(1))
        flush(engine._seats.shelf)
        (said,) = Turn(engine, TEXT[::-1], params(2)).said
    assert "it takes more than 0 kB, the limit (--kv-disk)" in said


@pytest.mark.parametrize(
    ("parallel", "said", "most"),
    [(1, None, 0), (1, 512, 512 << 20), (1, 0, 0), (2, 3, 3 << 20), (2, 0, 0)],
)
def test_kv_ram_is_what_was_set(parallel: int, said: int | None, most: int) -> None:
    pool = FakePool(TABLE, n_ctx=N_CTX, lanes=parallel)
    opened = OpenedPair(Opened(pool, FakeVocab(V), fake_model(N_CTX, V)))
    opening: Any = SimpleNamespace(
        pair=lambda: opened, options=EngineOptions(parallel=parallel, kv_ram=said),
        on_progress=None, stop=Cancel(), begun=0.0,
    )  # fmt: skip
    parts = load(opening)
    assert parts.kv_ram == parts.info.idle_bytes == most


def test_with_one_lane_and_kv_ram_a_text_comes_back_from_memory() -> None:
    other = TEXT[::-1]
    for kv_ram, least in ((0, 0), (1 << 30, len(TEXT) - 1)):
        engine = engine_of(None, kv_ram=kv_ram)
        first = Turn(engine, TEXT, params(1))
        Turn(engine, other, params(2))
        again = Turn(engine, TEXT, params(1))
        assert again.cached == least
        assert again.ids == first.ids
