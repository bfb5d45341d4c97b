"""Two processes go on with one conversation: nobody's turns are lost."""

from pathlib import Path

from fakes import ScriptedEngine

from specllama.events import Notice
from specllama.session import Session
from specllama.store.sessions import SessionStore


def resumed(path: Path, *replies: str) -> Session:
    session = Session(ScriptedEngine(replies), SessionStore.open(path), log_rounds=False)
    session.load("last")
    return session


def begun(path: Path) -> Session:
    session = Session(ScriptedEngine(("one",)), SessionStore.open(path), log_rounds=False)
    list(session.send("First?"))
    return session


def texts(path: Path) -> dict[str, list[str]]:
    with SessionStore.open(path) as store:
        stored = [store.get(one.id) for one in store.summaries()]
    return {one.title: [m.content for m in one.messages] for one in stored}


def test_the_second_to_write_goes_on_as_a_copy_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    begun(path)
    a, b = resumed(path, "of a", "more of a"), resumed(path, "of b", "more of b")
    assert a.id == b.id
    assert not [e for e in a.send("A?") if isinstance(e, Notice)]
    (notice,) = [e for e in b.send("B?") if isinstance(e, Notice)]
    assert "continued elsewhere" in notice.message
    assert "First? (copy)" in notice.message
    assert b.id != a.id
    assert b.id is not None
    assert b.id in notice.message
    for session, question in ((a, "A again?"), (b, "B again?")):
        assert not [e for e in session.send(question) if isinstance(e, Notice)]
    assert texts(path) == {
        "First?": ["First?", "one", "A?", "of a", "A again?", "more of a"],
        "First? (copy)": ["First?", "one", "B?", "of b", "B again?", "more of b"],
    }


def test_what_is_taken_back_in_one_stays_in_the_other(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    begun(path)
    a, b = resumed(path, "of a"), resumed(path, "of b")
    list(a.send("A?"))
    assert b.undo() == "First?"
    list(b.send("B?"))
    assert sorted(texts(path).values()) == [["B?", "of b"], ["First?", "one", "A?", "of a"]]
    b.show_version(0, -1)
    assert [m.content for m in b.messages] == ["First?", "one"]


def test_a_copy_has_every_version(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    list(begun(path).retry())
    a, b = resumed(path, "of a"), resumed(path, "of b")
    a.show_version(1, -1)
    b.show_version(1, -1)
    assert b.id != a.id
    again = resumed(path)
    again.load(b.id or "")
    assert again.version(1) == (1, 2)
    assert again.title.endswith("(copy)")


def test_a_copy_begins_in_the_middle_of_a_reply(tmp_path: Path) -> None:
    """The other process wrote while this one's reply was on its way."""
    path = tmp_path / "s.db"
    begun(path)
    a, b = resumed(path, "of a"), resumed(path, "of b")
    events = a.send("A?")
    next(events)
    assert a.id is not None
    b._store.put(a.id, 2, b.stored[0])  # as an older version would, unasked
    rest = list(events)
    assert [e for e in rest if isinstance(e, Notice)]
    assert texts(path)["First? (copy)"] == ["First?", "one", "A?", "of a"]


def test_alone_nothing_is_copied(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    list(begun(path).send("Second?"))
    session = resumed(path, "three", "four", "five")
    list(session.send("Third?"))
    session.params = session.params.replace(seed=4)
    session._store.rename(session.id or "", "named")
    list(session.retry())
    session.undo()
    list(session.edit(0, "Zero?"))
    assert list(texts(path)) == ["named"]
