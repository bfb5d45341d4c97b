"""Words in stored conversations."""

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


def test_a_search_finds_what_python_finds_through_every_change() -> None:
    rng = random.Random(3)
    texts: dict[str, dict[int, str]] = {}

    def text() -> str:
        return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 5)))

    with SessionStore.open() as store:
        for _ in range(60):
            if len(texts) < 3 or rng.random() < 0.2:
                texts[store.create(title="t")] = {}
            session, seq = rng.choice(list(texts)), rng.randrange(4)
            if rng.random() < 0.2:
                store.drop(session, seq, START)
                texts[session].pop(seq, None)
            else:
                content, thought = text(), rng.choice(["", text()])
                store.put(session, seq, StoredMessage("user", content, reasoning=thought))
                texts[session][seq] = f"{content}\n{thought}".lower()
            for query in ASKED:
                wanted = {
                    id
                    for id, messages in texts.items()
                    if messages
                    and all(
                        any(term in part for part in messages.values()) or term in "t"
                        for term in search.terms(query)
                    )
                }
                assert set(ids(store, query)) == wanted, query


def test_words_are_in_any_order_and_message() -> None:
    with SessionStore.open() as store:
        session = store.create(title="Fruit")
        store.put(session, 0, user("About apples"))
        store.put(session, 1, StoredMessage("assistant", "They are red.", reasoning="Hm, colour"))
        assert ids(store, "red apple FRUIT colour") == [session]
        assert ids(store, "red pear") == []
        assert ids(store, '"are red"') == [session]
        assert ids(store, '"red are"') == []
        assert ids(store, "   ") == [session]
        (one,) = store.summaries(query="they red apples")
        assert one.found == "They are red."


def test_the_index_of_a_store_from_before_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    old = sqlite3.connect(path)
    for migration in database.MIGRATIONS[:4]:
        for statement in migration:
            old.execute(statement)
    old.execute("PRAGMA user_version = 4")
    try:
        old.execute("CREATE VIRTUAL TABLE found USING fts5(content, reasoning, tokenize=trigram)")
    except sqlite3.Error:
        pytest.skip("SQLite has no full-text search")
    old.execute("INSERT INTO found VALUES ('zebrafish', '')")
    old.commit()
    old.close()
    with SessionStore.open(path) as store:
        assert store.notices == []
        tables = "SELECT name FROM sqlite_master WHERE name LIKE 'found%' OR name = 'indexed'"
        assert store._rows(tables) == []
    assert b"zeb" not in path.read_bytes()


def test_deleted_words_leave_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with SessionStore.open(path) as store:
        for text in ("zebrafish", "all the others"):
            store.put(store.create(title="t"), 0, user(text))
        (one,) = ids(store, "zebrafish")
        store.delete(one)
        assert ids(store, "zebrafish") == []
        assert store.undelete() == one
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
