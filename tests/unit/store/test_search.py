"""Words in stored conversations: an index finds what reading finds, whatever has changed."""

import random
import sqlite3
from pathlib import Path

import pytest

from specllama.store import database, search
from specllama.store.message_tree import START, StoredMessage
from specllama.store.sessions import SessionStore

WORDS = ["Draft", "draftée", "model", "k=4", "100%", "a_b", 'so "quoted"', "模型很好", "x", "Ärger"]
ASKED = ["dra", "DRAFT model", "model draft", "100%", "_b", "%", "型很好", "x", '"k=4 model"']
ASKED += ["äRG", 'quoted"', "*", "NOT model", "a* OR b"]


def user(text: str) -> StoredMessage:
    return StoredMessage("user", text)


def ids(store: SessionStore, query: str) -> list[str]:
    return [one.id for one in store.summaries(query=query)]


def index_all(store: SessionStore) -> None:
    while not store.index():
        pass
    stale = "SELECT id FROM sessions WHERE deleted_s IS NULL AND indexed_s IS NOT updated_s"
    assert not store._rows(stale)


def number_of_rows(store: SessionStore) -> int:
    return int(store._rows("SELECT count(*) FROM found")[0][0])


def test_both_ways_find_the_same_through_every_change(tmp_path: Path) -> None:
    rng = random.Random(3)

    def text() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 5)))

    stores = [SessionStore.open(tmp_path / name) for name in ("read.db", "indexed.db")]
    read, indexed = stores
    names: list[tuple[str, str]] = []
    for step in range(150):
        what = rng.randrange(8)
        if what < 2 or not names:
            names.append((read.create(), indexed.create()))
        pair = names[rng.randrange(len(names))]
        seq, content, thought = rng.randrange(4), text(), rng.choice(["", text()])
        for store, one in zip(stores, pair, strict=True):
            if what < 5:
                store.put(one, seq, StoredMessage("user", content, reasoning=thought))
            elif what == 5:
                store.drop(one, seq, START)
            elif what == 6:
                store.delete(one)
            else:
                store.undelete(one)
        if step % 3 == 0:
            index_all(indexed)
        numbers = [[pair[i] for pair in names] for i in range(2)]
        for query in ASKED:
            found = [
                [numbers[i].index(id) for id in ids(store, query)] for i, store in enumerate(stores)
            ]
            assert sorted(found[0]) == sorted(found[1]), query
    index_all(indexed)
    assert (
        number_of_rows(indexed)
        == indexed._rows(
            "SELECT count(*) FROM messages JOIN sessions ON id = session_id WHERE deleted_s IS NULL"
        )[0][0]
    )
    assert not read._rows("SELECT 1 FROM sqlite_master WHERE name = 'found'")
    for store in stores:
        store.close()


def test_words_are_in_any_order_and_message() -> None:
    with SessionStore.open() as store:
        session = store.create(title="Fruit")
        store.put(session, 0, user("About apples"))
        store.put(session, 1, StoredMessage("assistant", "They are red.", reasoning="Hm, colour"))
        for _ in range(2):
            assert ids(store, "red apple FRUIT colour") == [session]
            assert ids(store, "red pear") == []
            assert ids(store, '"are red"') == [session]
            assert ids(store, '"red are"') == []
            assert ids(store, "   ") == [session]
            index_all(store)
        (one,) = store.summaries(query="they red apples")
        assert one.found == "They are red."


def test_a_store_from_before_is_indexed_in_steps(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    old = sqlite3.connect(path)
    for migration in database.MIGRATIONS[:3]:
        for statement in migration:
            old.execute(statement)
    old.execute("PRAGMA user_version = 3")
    for i in range(30):
        row = (f"s{i}", f"t{i}", 1, "", "{}", 1.0, 5.0 + i, None, 0)
        old.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        row = (f"s{i}", 0, "user", f"number {i} of all", "done", None, 1.0, "", None, START)
        old.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    old.commit()
    old.close()
    with SessionStore.open(path) as store:
        steps = 1
        while not store.index(0.0):
            assert len(ids(store, "number all")) == 30, "what is not indexed yet is read"
            steps += 1
        assert steps == 31, "one conversation a step, where there is no time at all"
        assert number_of_rows(store) == 30
        assert ids(store, "number 17") == ["s17"]
    with SessionStore.open(path) as store:
        assert store.index(0.0), "once"


def test_without_an_index_words_are_read_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "_TABLE", "CREATE VIRTUAL TABLE found USING no_such_thing(a)")
    with SessionStore.open() as store:
        session = store.create()
        store.put(session, 0, user("About apples"))
        assert store.index()
        assert store.index()
        assert ids(store, "apples") == [session]
        assert len(store.notices) == 1
        assert "no full-text search" in store.notices[0]
        store.put(session, 1, user("And pears"))
        assert ids(store, "pears") == [session]
        store.delete(session)
        store.purge(-1.0)


def test_a_file_with_an_index_serves_a_python_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with SessionStore.open() as store:
        session = store.create()
        store.put(session, 0, user("About apples"))
        index_all(store)
    with SessionStore.open() as store, monkeypatch.context() as patch:
        patch.setattr(store._index, "_has", lambda: False)
        patch.setattr(store._index, "lacking", "no such module: fts5")
        store.put(session, 1, user("And pears"))
        assert ids(store, "pears apples") == [session]
    with SessionStore.open() as store:
        assert ids(store, "pears apples") == [session]
        index_all(store)
        assert ids(store, "pears apples") == [session]
        assert number_of_rows(store) == 2


def test_another_process_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with SessionStore.open(path) as store:
        session = store.create()
        store.put(session, 0, user("About apples"))
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        assert store.index()
        assert ids(store, "apples") == [session]
        other.execute("ROLLBACK")
        other.close()
        index_all(store)
        assert store.notices == []


def test_deleted_words_leave_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with SessionStore.open(path) as store:
        for text in ("zebrafish", "all the others"):
            store.put(store.create(title="t"), 0, user(text))
        index_all(store)
        (one,) = ids(store, "zebrafish")
        store.delete(one)
        assert number_of_rows(store) == 1
        assert store.undelete() == one
        index_all(store)
        assert ids(store, "zebra") == [one]
        store.delete(one)
        store.purge(-1.0)
    assert b"zeb" not in path.read_bytes()
    assert b"oth" in path.read_bytes()


@pytest.mark.parametrize(
    ("text", "words", "room", "said"),
    [
        ("one two three", ["two"], 40, "one two three"),
        ("one\n\ntwo  three", ["two"], 40, "one two three"),
        ("a " * 30 + "needle" + " b" * 30, ["needle"], 20, "…a a needle b b b b…"),
        ("needle" + " b" * 30, ["needle"], 12, "needle b b…"),
        ("a " * 30 + "needle", ["needle"], 12, "…a a needle"),
        ("x" * 50, ["y"], 10, "xxxxxxxxx…"),
        ("", ["y"], 10, ""),
    ],
)
def test_an_excerpt_is_one_line_around_the_first_hit(
    text: str, words: list[str], room: int, said: str
) -> None:
    found = search.excerpt(text, words, room)
    assert len(found) <= room
    assert found == said


def test_hits_are_in_order_and_the_longest_first() -> None:
    assert search.hits("Draft drafts (a+b)", ["draft", "drafts", "+"]) == [
        *((0, 5), (6, 12), (15, 16))
    ]
    assert search.hits("anything", []) == []


def test_a_store_that_was_closed_is_not_indexed() -> None:
    store = SessionStore.open()
    store.put(store.create(), 0, user("About apples"))
    store.close()
    assert store.index()
