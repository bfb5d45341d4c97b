"""Stored conversations: every change survives, and no disk trouble stops a conversation."""

import json
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from specllama.errors import StoreError, UsageError
from specllama.paths import sessions_file
from specllama.replies import attach
from specllama.store import database, sessions
from specllama.store.message_tree import START, StoredMessage
from specllama.store.open_session import to_json, to_markdown
from specllama.store.sessions import UNTITLED, ContinuedElsewhere, SessionStore


def user(text: str) -> StoredMessage:
    return StoredMessage("user", text)


def fill(store: SessionStore, question: str, answer: str = "Yes.") -> str:
    session = store.create(system="Be brief.", settings={"params": {"seed": 3}})
    store.put(session, 0, user(question))
    store.put(session, 1, StoredMessage("assistant", answer, stats={"rounds": 2}))
    return session


def test_round_trip_over_two_openings() -> None:
    with SessionStore.open() as store:
        session = fill(store, "What is\n a draft?")
        assert store.notices == []
    with SessionStore.open() as store:
        read = store.get(session)
    assert read.title == "What is a draft?"
    assert read.system == "Be brief."
    assert read.settings == {"params": {"seed": 3}}
    assert read.messages == (
        user("What is\n a draft?"),
        StoredMessage("assistant", "Yes.", stats={"rounds": 2}),
    )
    assert read.messages[0].message.role == "user"


def test_titles() -> None:
    with SessionStore.open() as store:
        session = store.create()
        assert store.get(session).title == UNTITLED
        store.put(session, 0, user("x" * 100))
        assert len(store.get(session).title) == 60
        store.put(session, 2, user("second"))
        assert store.get(session).title.startswith("xxx")
        store.rename(session, " My\ttalk ")
        assert store.get(session).title == "My talk"
        with pytest.raises(UsageError):
            store.rename(session, "  ")


def test_put_replaces_and_drop_forgets() -> None:
    with SessionStore.open() as store:
        session = fill(store, "Count")
        store.put(session, 1, StoredMessage("assistant", "one, tw", "partial"))
        assert store.get(session).messages[1].state == "partial"
        store.drop(session, 1, 0)
        assert store.get(session).messages == (user("Count"),)
        assert store.get(session).tree.messages == {0: user("Count")}
        store.configure(session, system="Other.", settings={"a": 1})
        assert (store.get(session).system, store.get(session).settings) == ("Other.", {"a": 1})


def test_versions_share_a_parent_and_one_path_is_chosen() -> None:
    with SessionStore.open() as store:
        session = fill(store, "Count", "one, two")
        store.put(session, 2, StoredMessage("assistant", "uno, dos"), parent=0)
        store.put(session, 3, user("And in French?"))
        store.put(session, 4, user("Number"), parent=START)
    with SessionStore.open() as store:
        tree = store.get(session).tree
        assert [m.content for m in tree.chosen] == ["Number"]
        assert [one.messages for one in store.summaries(query="uno")] == [1]
        assert tree.versions(START) == [0, 4]
        assert tree.versions(0) == [1, 2]
        assert (tree.version(2), tree.version(3)) == ((2, 2), (1, 1))
        assert tree.end_of(0) == 3
        store.choose(session, 1)
        assert [m.content for m in store.get(session).messages] == ["Count", "one, two"]
        assert [one.messages for one in store.summaries()] == [2]
        store.choose(session, 3)
        assert [m.content for m in store.get(session).messages] == [
            *("Count", "uno, dos", "And in French?")
        ]


def test_a_damaged_tree_ends_somewhere() -> None:
    with SessionStore.open() as store:
        session = fill(store, "Count")
        store._db.execute("UPDATE messages SET parent = 1 WHERE seq = 0")
        assert [m.content for m in store.get(session).messages] == ["Count", "Yes."]
        store._db.execute("UPDATE sessions SET leaf = 77")
        assert store.get(session).messages == ()


def test_a_store_from_before_versions_opens_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    old = sqlite3.connect(path)
    for migration in database.MIGRATIONS[:2]:
        for statement in migration:
            old.execute(statement)
    old.execute("PRAGMA user_version = 2")
    for identity in ("a", "b"):
        row = (identity, "t", 1, "", "{}", 1.0, 5.0, None)
        old.execute("INSERT INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    for seq, text in ((0, "q"), (1, "a"), (5, "after a gap")):
        row = ("a", seq, "user", text, "done", None, 1.0, "", None)
        old.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
    old.commit()
    old.close()
    with SessionStore.open(path) as store:
        assert store.notices == []
        read = store.get("a")
        assert [m.content for m in read.messages] == ["q", "a", "after a gap"]
        assert read.tree.parents == {0: START, 1: 0, 5: 1}
        assert (read.updated_s, read.tree.leaf) == (5.0, 5)
        assert store.get("b").messages == ()


def test_listing_search_delete_and_undo() -> None:
    with SessionStore.open() as store:
        store.create()  # never used: not listed
        first = fill(store, "About 100% apples", "Red_ones")
        second = fill(store, "About pears")
        assert [s.id for s in store.summaries()] == [second, first]
        assert [s.id for s in store.summaries(query="100%")] == [first]
        assert [s.id for s in store.summaries(query="red_")] == [first]
        assert store.summaries(query="%zz") == []
        assert store.summaries()[0].messages == 2
        store.delete(second)
        assert [s.id for s in store.summaries()] == [first]
        assert store.find("last") == first
        assert store.undelete() == second
        assert store.undelete() is None
        assert len(store.summaries()) == 2
        store.delete(first)
        store.purge(older_than_s=3600)
        assert store.undelete() == first
        store.delete(first)
        store.purge(older_than_s=-1)
        assert store.undelete() is None
        with pytest.raises(StoreError):
            store.get(first)


def test_what_was_deleted_long_ago_is_removed_at_the_next_start(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with SessionStore.open(path) as store:
        old, new = (store.create(title=title) for title in ("old", "new"))
        store.delete(old)
        store.delete(new)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE sessions SET deleted_s = deleted_s - 31 * 86400 WHERE id = ?", (old,))
    db.close()
    with SessionStore.open(path) as store:
        with pytest.raises(StoreError):
            store.get(old)
        assert store.undelete() == new


def test_find() -> None:
    with SessionStore.open() as store:
        with pytest.raises(StoreError, match="no stored session yet"):
            store.find()
        first = fill(store, "One")
        second = fill(store, "Two")
        assert store.find() == second
        assert store.find(first[:6]) == first
        assert store.find("One") == first
        store.rename(second, "One")
        with pytest.raises(UsageError, match="fits 2"):
            store.find("One")
        with pytest.raises(StoreError):
            store.find("nothing")
        with pytest.raises(StoreError):
            store.find("")


def test_odd_text_is_kept() -> None:
    with SessionStore.open() as store:
        session = fill(store, "nul \0, esc \x1b, emoji 😀, quote ' and lone \ud800")
        content = store.get(session).messages[0].content
        assert content == "nul \0, esc \x1b, emoji 😀, quote ' and lone ?"


def test_exports() -> None:
    with SessionStore.open() as store:
        session = fill(store, "Count", "one, tw")
        store.put(session, 1, StoredMessage("assistant", "one, tw", "partial"))
        read = store.get(session)
    assert "## Assistant (interrupted)\n\none, tw\n" in to_markdown(read)
    assert to_markdown(read).startswith("# Count\n\n## System\n\nBe brief.\n\n## User\n\nCount")
    data = json.loads(to_json(read))
    assert data["messages"][1] == {
        "role": "assistant",
        "content": "one, tw",
        "state": "partial",
        "stats": None,
        "number": 1,
        "follows": 0,
    }
    assert (data["messages"][0]["follows"], data["other_versions"]) == (None, [])


def test_exports_hold_every_version() -> None:
    with SessionStore.open() as store:
        session = fill(store, "Count", "one, two")
        store.put(session, 2, user("Thanks"), parent=1)
        store.put(session, 3, StoredMessage("assistant", "uno"), parent=0)
        read = store.get(session)
    data = json.loads(to_json(read))
    assert [m["content"] for m in data["messages"]] == ["Count", "uno"]
    others = [(m["content"], m["number"], m["follows"]) for m in data["other_versions"]]
    assert others == [("one, two", 1, 0), ("Thanks", 2, 1)]
    chosen, _, rest = to_markdown(read).partition("# Other versions\n\n")
    assert "## User\n\nCount" in chosen
    assert "## Assistant (version 2 of 2)\n\nuno" in chosen
    assert rest == (
        "## Assistant (message 2, version 1 of 2)\n\none, two\n\n## User (message 3)\n\nThanks\n"
    )


def test_a_damaged_file_is_moved_aside() -> None:
    path = sessions_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(b"this is not a database, it is a text of some length" * 100)
    with SessionStore.open() as store:
        assert len(store.notices) == 1
        assert "moved to" in store.notices[0]
        fill(store, "Still here?")
        assert len(store.summaries()) == 1
    (aside,) = path.parent.glob("sessions.db.damaged-*")
    assert aside.read_bytes().startswith(b"this is not")


def test_a_page_of_rubbish_is_noticed() -> None:
    path = sessions_file()
    with SessionStore.open() as store:
        for n in range(200):
            fill(store, f"Question {n} " + "word " * 50)
    data = bytearray(path.read_bytes())
    data[4096 * 3 : 4096 * 5] = b"\xff" * 8192
    path.write_bytes(data)
    with SessionStore.open() as store:
        assert "damaged" in store.notices[0]
        assert store.summaries() == []


def test_a_newer_file_is_left_alone() -> None:
    SessionStore.open().close()
    db = sqlite3.connect(sessions_file())
    db.execute("PRAGMA user_version = 99")
    db.close()
    before = sessions_file().read_bytes()
    with SessionStore.open() as store:
        assert "newer specllama" in store.notices[0]
        fill(store, "In memory")
        assert len(store.summaries()) == 1
    assert sessions_file().read_bytes() == before


def test_no_folder_means_memory(home: Path) -> None:
    home.mkdir()
    (home / "data").write_text("in the way")
    with SessionStore.open() as store:
        assert "kept in memory" in store.notices[0]
        assert len(store.get(fill(store, "Hello")).messages) == 2


def test_a_full_disk_is_said_once() -> None:
    with SessionStore.open() as store:
        session = fill(store, "Hello")
        (pages,) = store._db.execute("PRAGMA page_count").fetchone()
        store._db.execute(f"PRAGMA max_page_count = {pages}")
        for n in range(2, 8):
            store.put(session, n, user("much text " * 5000))
        assert len(store.notices) == 1
        assert "no longer stored" in store.notices[0]
        assert len(store.get(session).messages) == 2


def test_migrations_run_in_order_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with SessionStore.open() as store:
        session = fill(store, "Old")
    added = ("ALTER TABLE sessions ADD COLUMN colour TEXT",)
    monkeypatch.setattr(database, "MIGRATIONS", (*database.MIGRATIONS, added))
    for _ in range(2):
        with SessionStore.open() as store:
            assert store.notices == []
            assert store.get(session).title == "Old"
            assert store._rows("PRAGMA user_version") == [(len(database.MIGRATIONS),)]


def test_thoughts_of_older_stores_are_split_off() -> None:
    path = sessions_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = {
        "<think>\nHm.\n</think>\n\nYes.": ("Hm.", "Yes."),
        "\n<think>Hm </think>": ("Hm", ""),
        "<think>\nHm, so": ("Hm, so", ""),
        "Yes, <think>no</think>": ("", "Yes, <think>no</think>"),
        "<think></think>Yes </think>": ("", "Yes </think>"),
    }
    old = sqlite3.connect(path)
    for statement in database.MIGRATIONS[0]:
        old.execute(statement)
    old.execute("PRAGMA user_version = 1")
    old.execute("INSERT INTO sessions VALUES ('a', 't', 1, '', '{}', 1, 1, NULL)")
    for seq, text in enumerate(texts):
        row = ("a", seq, "assistant", text, "done", None, 1.0)
        old.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?)", row)
    old.execute(
        "INSERT INTO messages VALUES ('a', 99, 'user', '<think>x</think>y', 'done', NULL, 1)"
    )
    old.commit()
    old.close()
    with SessionStore.open() as store:
        assert store.notices == []
        messages = store.get("a").messages
        assert [(m.reasoning, m.content) for m in messages[:-1]] == list(texts.values())
        assert messages[-1].content == "<think>x</think>y"
        assert [m.seams for m in messages] == [None] * 6


def test_thoughts_are_kept_apart() -> None:
    reply = StoredMessage("assistant", "Yes.", reasoning="Hm é.", seams=("<think>", "</think>\n"))
    with SessionStore.open() as store:
        session = fill(store, "Think")
        store.put(session, 1, reply)
        assert store.get(session).messages[1] == reply
        assert [s.id for s in store.summaries(query="Hm é")] == [session]
        assert "Hm é.\n\n</details>\n\nYes." in to_markdown(store.get(session))
        assert json.loads(to_json(store.get(session)))["messages"][1]["reasoning"] == "Hm é."


def test_a_failing_migration_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with SessionStore.open() as store:
        fill(store, "Old")
    bad = ("ALTER TABLE sessions ADD COLUMN colour TEXT", "CREATE NONSENSE")
    with monkeypatch.context() as patch:
        patch.setattr(database, "MIGRATIONS", (*database.MIGRATIONS, bad))
        with pytest.raises(sqlite3.OperationalError):
            database._connect(sessions_file())
    with SessionStore.open() as store:
        assert store.notices == []
        assert len(store.summaries()) == 1
        assert store._rows("PRAGMA user_version") == [(len(database.MIGRATIONS),)]


def test_threads_and_two_stores_share_a_file() -> None:
    stores = [SessionStore.open(), SessionStore.open()]

    def work(store: SessionStore, n: int) -> None:
        for i in range(10):
            fill(store, f"thread {n} number {i}")

    threads = [threading.Thread(target=work, args=(stores[n % 2], n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [store.notices for store in stores] == [[], []]
    assert len(stores[0].summaries()) == 40
    for store in stores:
        store.close()


def test_a_killed_process_loses_nothing_it_stored() -> None:
    program = textwrap.dedent("""
        from specllama.store.sessions import SessionStore
        from specllama.store.message_tree import StoredMessage
        store = SessionStore.open()
        session = store.create()
        store.put(session, 0, StoredMessage("user", "Count"))
        for n in range(10_000):
            store.put(session, 1, StoredMessage("assistant", "one " * n, "partial"))
            print(n, flush=True)
    """)
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    while int(child.stdout.readline()) < 30:
        pass
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    with SessionStore.open() as store:
        assert store.notices == []
        read = store.get(store.find("last"))
    assert read.messages[1].state == "partial"
    assert read.messages[1].content.count("one") >= 30


def held(path: Path) -> sqlite3.Connection:
    """Another program that writes to the file and does not let go."""
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    return other


def test_a_locked_file_is_written_to_as_soon_as_it_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_PATIENCE_MS", 1)
    monkeypatch.setattr(sessions, "_HURRY_MS", 1)
    path = tmp_path / "sessions.db"
    with SessionStore.open(path) as store:
        store._db.execute("PRAGMA busy_timeout = 1")
        session = store.create(system="Be kind.")
        seen = store.put(session, 0, StoredMessage("user", "before"))
        other = held(path)
        for text in ("dur", "during"):  # a reply that grows is one message
            seen = store.put(session, 1, StoredMessage("assistant", text), seen=seen)
        seen = store.put(session, 2, StoredMessage("user", "still"), seen=seen)
        assert [notice.split()[0] for notice in store.notices] == ["another"]
        other.execute("ROLLBACK")
        store.put(session, 3, StoredMessage("assistant", "after"), seen=seen)
        texts = [message.content for message in store.get(session).messages]
        assert texts == ["before", "during", "still", "after"]
        assert len(store.notices) == 1


def test_what_waits_is_written_when_the_store_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sessions, "_PATIENCE_MS", 1)
    path = tmp_path / "sessions.db"
    for let_go in (True, False):
        store = SessionStore.open(path)
        store._db.execute("PRAGMA busy_timeout = 1")
        other = held(path)
        store.put(store.create(title="kept" if let_go else "lost"), 0, StoredMessage("user", "Hi"))
        if let_go:
            other.execute("ROLLBACK")
        store.close()
        other.close()
    with SessionStore.open(path) as store:
        assert [one.title for one in store.summaries()] == ["kept"]
    assert "the last messages were not stored" in caplog.text


def test_who_waits_while_another_continues_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_PATIENCE_MS", 1)
    path = tmp_path / "sessions.db"
    with SessionStore.open(path) as store:
        store._db.execute("PRAGMA busy_timeout = 1")
        session = store.create()
        seen = store.put(session, 0, StoredMessage("user", "Hi"))
        other = held(path)
        seen = store.put(session, 1, StoredMessage("assistant", "waits"), seen=seen)
        other.execute("UPDATE sessions SET updated_s = updated_s + 9")
        other.execute("COMMIT")
        with pytest.raises(ContinuedElsewhere):
            store.put(session, 2, StoredMessage("user", "next"), seen=seen)
        assert len(store.get(session).messages) == 1


def test_peeking_makes_and_moves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sessions.db"
    with SessionStore.peek(path) as store:
        assert store.summaries() == []
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"no database" * 100)
    with SessionStore.peek(path) as store:
        assert store.summaries() == []
    assert [one.name for one in tmp_path.iterdir()] == ["sessions.db"]


def test_a_session_is_untitled_again_when_its_only_question_is_dropped() -> None:
    with SessionStore.open() as store:
        asked, named, kept = store.create(), store.create(title="Mine"), store.create()
        for session in (asked, named, kept):
            store.put(session, 0, StoredMessage("user", "much too long"))
        store.put(kept, 1, StoredMessage("user", "another"))
        store.drop(asked, 0, START)
        store.drop(named, 0, START)
        store.drop(kept, 1, 0)
        titles = [store.title(one) for one in (asked, named, kept)]
        assert titles == [UNTITLED, "Mine", "much too long"]
        store.put(asked, 0, StoredMessage("user", "short"))
        assert store.title(asked) == "short"


def test_a_title_is_what_was_typed_not_the_file_that_goes_with_it() -> None:
    question = attach.attach(
        "@notes.md what is missing?", {"notes.md": "# Notes\nThe launch is on"}
    )
    with SessionStore.open() as store:
        session = store.create()
        store.put(session, 0, user(question))
        assert store.get(session).title == "@notes.md what is missing?"
        store.drop(session, 0, START)
        assert store.get(session).title == UNTITLED
