"""A conversation keeps what was said, whatever happens while it is said."""

import json
import threading

import pytest
from fakes import SEED, Reply, ScriptedEngine, engine_info, model_info

from specllama.cancel import Cancel
from specllama.errors import EngineError, PromptTooLong, StoreError, UsageError
from specllama.events import Finished, Notice, Started, TextDelta
from specllama.interface import Message
from specllama.paths import sessions_file
from specllama.session import Session
from specllama.settings.params import GenerateParams
from specllama.store.rounds import list_runs, read_run
from specllama.store.sessions import SessionStore

LONG = "The target reads all the guesses in a single pass and keeps those it agrees with. " * 4


def stopped_after(events, deltas: int, cancel: threading.Event) -> list:
    out = []
    for event in events:
        out.append(event)
        deltas -= isinstance(event, TextDelta)
        if deltas == 0:
            cancel.set()
    return out


def cut_short(session: Session) -> bool:
    """Whether the last message is a reply that was."""
    return list(session.stored.values())[-1].state == "partial"


@pytest.fixture
def store():
    with SessionStore.open() as opened:
        yield opened


def test_send_keeps_and_stores_both_turns(store: SessionStore) -> None:
    engine = ScriptedEngine(["First.", "Second."])
    session = Session(engine, store, system="Be brief.", params=GenerateParams(seed=5))
    events = list(session.send("One?"))
    list(session.send("Two?"))
    assert isinstance(events[-1], Finished)
    assert [m.content for m in session.messages] == ["One?", "First.", "Two?", "Second."]
    assert engine.requests[1].prompt == [
        Message("system", "Be brief."),
        Message("user", "One?"),
        Message("assistant", "First."),
        Message("user", "Two?"),
    ]
    stored = store.get(session.id or "")
    assert [m.message for m in stored.messages] == session.messages
    assert stored.title == "One?"
    assert stored.messages[1].stats["reason"] == "stop_token"
    assert session.last is not None
    session.close()
    record = read_run(list_runs()[0])
    assert len(record.turns) == 2
    assert record.header["command"] == "chat"


def test_the_question_is_stored_before_the_answer(store: SessionStore) -> None:
    session = Session(ScriptedEngine(["x"]), store)
    session.send("Anyone there?")
    assert [m.content for m in store.get(session.id or "").messages] == ["Anyone there?"]


def test_a_growing_reply_is_stored(store: SessionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specllama.session.FLUSH_S", -1.0)
    session = Session(ScriptedEngine([LONG]), store)
    shown = ""
    for event in session.send("Tell me"):
        if isinstance(event, TextDelta):
            shown += event.text
            reply = store.get(session.id or "").messages[1]
            assert (reply.content, reply.state) == (shown, "partial")
    assert store.get(session.id or "").messages[1].state == "done"


def test_cancel_and_close_keep_the_partial_reply(store: SessionStore) -> None:
    session = Session(ScriptedEngine([LONG, LONG]), store)
    cancel = Cancel()
    events = stopped_after(session.send("Go", cancel=cancel), 2, cancel)
    shown = "".join(e.text for e in events if isinstance(e, TextDelta))
    assert session.messages[-1] == Message("assistant", shown)
    assert cut_short(session)
    assert store.get(session.id or "").messages[1].state == "partial"

    stream = session.send("Again")
    seen = ""
    for event in stream:
        if isinstance(event, TextDelta):
            seen += event.text
            break
    stream.close()
    assert session.messages[-1] == Message("assistant", seen)


def test_continue_goes_on_in_place(store: SessionStore) -> None:
    engine = ScriptedEngine(["one two", " three"])
    session = Session(engine, store)
    list(session.send("Count"))
    list(session.continue_reply())
    assert engine.requests[1].prompt[-1] == Message("assistant", "one two")
    assert session.messages[-1] == Message("assistant", "one two three")
    assert len(store.get(session.id or "").messages) == 2


def test_continue_that_brings_nothing_keeps_the_reply(store: SessionStore) -> None:
    cancel = Cancel()
    session = Session(ScriptedEngine(["one two", " three"]), store)
    list(session.send("Count"))
    cancel.set()
    list(session.continue_reply(cancel=cancel))
    assert session.messages[-1] == Message("assistant", "one two")


def test_retry_keeps_the_seed_and_can_be_taken_back(store: SessionStore) -> None:
    engine = ScriptedEngine(["first try", "second try", "third try"])
    session = Session(engine, store, params=GenerateParams(seed=10))
    list(session.send("Go"))
    list(session.retry())
    assert session.messages[-1].content == "second try"
    assert [r.params.seed for r in engine.requests] == [10, 10]
    cancel = Cancel()
    cancel.set()
    list(session.retry(cancel=cancel))
    assert session.messages[-1].content == "second try"
    assert [m.content for m in store.get(session.id or "").messages] == ["Go", "second try"]


def seeds(engine: ScriptedEngine) -> list[int | None]:
    return [request.params.seed for request in engine.requests]


def test_a_drawn_seed_is_kept_until_another_is_asked_for(store: SessionStore) -> None:
    engine = ScriptedEngine(["some text"])  # it reports SEED when it may draw
    session = Session(engine, store)
    list(session.send("Go"))
    session.params = session.params.replace(speculate=False)
    list(session.retry())
    list(session.retry(new_seed=True))
    assert seeds(engine) == [None, SEED, None]
    resumed = Session(engine, store)
    resumed.load()
    list(resumed.retry())
    assert seeds(engine)[3:] == [SEED]


def test_a_fixed_seed_moves_on_when_another_is_asked_for_and_stays_there(
    store: SessionStore,
) -> None:
    engine = ScriptedEngine(["some text"])
    session = Session(engine, store, params=GenerateParams(seed=10))
    list(session.send("Go"))
    list(session.retry(new_seed=True))
    list(session.retry(new_seed=True))
    list(session.retry())
    assert seeds(engine) == [10, 11, 12, 12]


def test_a_seed_that_was_set_since_is_taken(store: SessionStore) -> None:
    engine = ScriptedEngine(["some text"])
    session = Session(engine, store)
    list(session.send("Go"))
    session.params = session.params.replace(seed=42)
    list(session.retry())
    assert seeds(engine) == [None, 42]


def test_a_reply_that_was_cut_short_keeps_its_seed_too(store: SessionStore) -> None:
    engine = ScriptedEngine([Reply(LONG, raise_at_round=3), "fine"])
    session = Session(engine, store)
    with pytest.raises(EngineError):
        list(session.send("Go"))
    resumed = Session(engine, store)
    resumed.load()
    list(resumed.retry())
    assert seeds(engine) == [None, SEED]


def test_an_edited_question_keeps_the_seed_of_its_reply(store: SessionStore) -> None:
    engine = ScriptedEngine(["one", "two", "three", "four", "five"])
    session = Session(engine, store)
    list(session.send("Hello"))
    list(session.edit(0, "Hello!"))
    session.undo()
    list(session.send("Hello again"))
    assert seeds(engine) == [None, SEED, SEED]
    list(session.send("And now?"))
    session.params = session.params.replace(seed=42)
    list(session.edit(0, "Hello"))
    assert seeds(engine)[3:] == [None, 42]


def test_a_reply_that_was_cut_goes_on_with_its_seed(store: SessionStore) -> None:
    engine = ScriptedEngine([Reply("one two", reason="length"), " three"])
    session = Session(engine, store)
    list(session.send("Count"))
    list(session.continue_reply())
    assert seeds(engine) == [None, SEED]


def test_a_reply_that_ended_goes_on_with_another_seed(store: SessionStore) -> None:
    engine = ScriptedEngine(["one two", " three"])
    session = Session(engine, store)
    list(session.send("Count"))
    list(session.continue_reply())
    assert seeds(engine) == [None, None], "with its own it would end again"


def test_an_earlier_reply_is_written_again_with_its_own_seed(store: SessionStore) -> None:
    engine = ScriptedEngine(["a", "b", "c"])
    session = Session(engine, store, params=GenerateParams(seed=5))
    list(session.send("one"))
    session.params = session.params.replace(seed=6)
    list(session.send("two"))
    list(session.retry(1))
    assert seeds(engine) == [5, 6, 5]
    assert [m.content for m in store.get(session.id or "").messages] == ["one", "c"]
    with pytest.raises(UsageError):
        session.retry(9)


def test_an_answer_that_is_never_begun_changes_nothing(store: SessionStore) -> None:
    session = Session(ScriptedEngine(["one two"]), store)
    list(session.send("Count"))
    session.continue_reply()
    session.retry()
    assert [m.content for m in session.messages] == ["Count", "one two"]


def test_retry_after_a_failure_asks_again(store: SessionStore) -> None:
    session = Session(ScriptedEngine([Reply(LONG, raise_at_round=0), "fine"]), store)
    with pytest.raises(EngineError):
        list(session.send("Go"))
    assert session.messages == [Message("user", "Go")]
    list(session.retry())
    assert [m.content for m in session.messages] == ["Go", "fine"]


def test_an_empty_reply_is_a_reply(store: SessionStore) -> None:
    engine = ScriptedEngine(["", "Second."])
    session = Session(engine, store)
    list(session.send("One?"))
    assert session.messages == [Message("user", "One?"), Message("assistant", "")]
    assert cut_short(session) is False
    stored = store.get(session.id or "").messages
    assert (stored[1].content, stored[1].state) == ("", "done")
    assert stored[1].stats["reason"] == "stop_token"

    other = Session(engine, store)
    other.load("last")
    list(other.send("Two?"))
    assert [m.role for m in engine.requests[1].prompt] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    assert [m.content for m in other.messages] == ["One?", "", "Two?", "Second."]


def test_an_empty_reply_can_be_written_again_or_gone_on_with(store: SessionStore) -> None:
    session = Session(ScriptedEngine(["", "", "", "words", ""]), store)
    list(session.send("One?"))
    list(session.retry())
    assert session.messages[1:] == [Message("assistant", "")]
    list(session.continue_reply())
    assert session.messages[1:] == [Message("assistant", "")]
    list(session.continue_reply())
    assert session.messages[1:] == [Message("assistant", "words")]
    list(session.retry())
    assert session.messages[1:] == [Message("assistant", "")]


def test_roles_alternate_for_the_model_also_after_a_question_without_reply(
    store: SessionStore,
) -> None:
    engine = ScriptedEngine([Reply(LONG, raise_at_round=0), LONG, "Third."])
    session = Session(engine, store, system="Be brief.")
    with pytest.raises(EngineError):
        list(session.send("One?"))
    cancel = Cancel()
    cancel.set()
    list(session.send("Two?", cancel=cancel))
    list(session.send("Three?"))
    said = [(m.role, m.content) for m in engine.requests[-1].prompt]  # type: ignore[union-attr]
    assert said == [
        ("system", "Be brief."),
        ("user", "One?"),
        ("assistant", ""),
        ("user", "Two?"),
        ("assistant", ""),
        ("user", "Three?"),
    ]
    assert [m.role for m in session.messages] == ["user", "user", "user", "assistant"]


def test_an_engine_that_fails_midway_leaves_the_part(store: SessionStore) -> None:
    session = Session(ScriptedEngine([Reply(LONG, raise_at_round=3)]), store)
    with pytest.raises(EngineError):
        list(session.send("Go"))
    assert LONG.startswith(session.messages[-1].content)
    assert cut_short(session)


def test_a_refused_question_is_taken_back(store: SessionStore) -> None:
    session = Session(ScriptedEngine([Reply(raise_first=PromptTooLong("too long")), "ok"]), store)
    with pytest.raises(PromptTooLong):
        list(session.send("word " * 10))
    assert session.messages == []
    assert store.get(session.id or "").messages == ()
    list(session.send("short"))
    assert [m.content for m in session.messages] == ["short", "ok"]


def test_undo_and_edit(store: SessionStore) -> None:
    session = Session(ScriptedEngine(["a", "b", "edited answer"]), store)
    list(session.send("One"))
    list(session.send("Two"))
    assert session.undo() == "Two"
    assert [m.content for m in session.messages] == ["One", "a"]
    list(session.edit(0, "Uno"))
    assert [m.content for m in session.messages] == ["Uno", "edited answer"]
    assert list(session.edit(1, "edited")) == []
    assert cut_short(session)
    assert [m.content for m in store.get(session.id or "").messages] == ["Uno", "edited"]
    session.undo()
    for refused in (session.undo, session.retry, session.continue_reply):
        with pytest.raises(UsageError):
            refused()
    with pytest.raises(UsageError):
        session.edit(0, "x")
    with pytest.raises(UsageError):
        session.send("  \n")


def said(session: Session) -> list[str]:
    return [m.content for m in session.messages]


def test_an_edit_keeps_the_other_branch_and_either_is_gone_on_with(store: SessionStore) -> None:
    engine = ScriptedEngine(["a", "b", "c", "d", "e"])
    session = Session(engine, store)
    list(session.send("One"))
    list(session.send("Two"))
    list(session.edit(0, "Uno"))
    assert said(session) == ["Uno", "c"]
    assert (session.version(0), session.version(1)) == ((2, 2), (1, 1))
    session.show_version(0, -1)
    assert said(session) == ["One", "a", "Two", "b"]
    list(session.send("Three"))
    assert [m.content for m in engine.requests[-1].prompt] == ["One", "a", "Two", "b", "Three"]
    session.show_version(0, 1)
    list(session.send("Dos"))
    assert said(session) == ["Uno", "c", "Dos", "e"]
    resumed = Session(engine, store)
    resumed.load()
    assert said(resumed) == said(session)
    resumed.show_version(0, -1)
    assert said(resumed) == ["One", "a", "Two", "b", "Three", "d"]
    assert resumed.show_version(None, 1) == 0  # the one that was walked last
    resumed.show_version(None, -1)
    for step, where in ((-1, 0), (1, 1), (1, 7)):
        with pytest.raises(UsageError):
            resumed.show_version(where, step)


def test_every_reply_to_a_question_is_kept(store: SessionStore) -> None:
    session = Session(ScriptedEngine(["a", "b", "c", "d"]), store)
    list(session.send("One"))
    list(session.send("Two"))
    list(session.retry(1))
    assert said(session) == ["One", "c"]
    assert session.version(1) == (2, 2)
    assert session.version(2) == (1, 1)  # still to come
    list(session.retry())
    assert session.version(1) == (3, 3)
    session.show_version(1, -1)
    session.show_version(1, -1)
    assert said(session) == ["One", "a", "Two", "b"]
    assert said(session) == [m.content for m in store.get(session.id or "").messages]


def test_what_brings_nothing_new_leaves_the_path_as_it_was(store: SessionStore) -> None:
    refusal = Reply(raise_first=PromptTooLong("too long"))
    session = Session(ScriptedEngine(["a", "b", "c", refusal]), store)
    list(session.send("One"))
    list(session.send("Two"))
    cancel = Cancel()
    cancel.set()
    list(session.retry(0, cancel=cancel))
    assert said(session) == ["One", "a", "Two", "b"]
    with pytest.raises(PromptTooLong):
        list(session.edit(0, "word " * 99))
    assert said(session) == ["One", "a", "Two", "b"]
    assert session.version(0) == (1, 1)
    assert len(store.get(session.id or "").tree.messages) == 4


def test_what_was_taken_back_is_a_version_of_what_is_asked_next(store: SessionStore) -> None:
    session = Session(ScriptedEngine(["a", "b"]), store)
    list(session.send("One"))
    session.undo()
    assert session.messages == []
    assert session.version(0) == (2, 2)
    other = Session(ScriptedEngine(["c"]), store)
    other.load()
    assert said(other) == ["One", "a"]  # not an empty conversation
    list(session.send("Uno"))
    assert session.version(0) == (2, 2)


def test_a_reply_that_others_follow_is_not_changed_by_going_on_with_it(store: SessionStore) -> None:
    session = Session(ScriptedEngine(["one two", "b", " three"]), store)
    list(session.send("Count"))
    list(session.send("More"))
    session.undo()
    list(session.continue_reply())
    assert said(session) == ["Count", "one two three"]
    session.show_version(1, -1)
    assert said(session) == ["Count", "one two", "More", "b"]


def test_a_reply_stopped_by_a_kill_is_a_version_beside_the_former(
    store: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specllama.session.FLUSH_S", -1.0)
    session = Session(ScriptedEngine(["a", LONG]), store)
    list(session.send("One"))
    events = session.retry()
    for event in events:
        if isinstance(event, TextDelta):
            break
    next(events)
    killed = store.get(session.id or "").tree  # what is on disk at this moment
    assert killed.chosen[1].state == "partial"
    assert killed.version(killed.leaf) == (2, 2)
    assert killed.messages[killed.versions(0)[0]].content == "a"


def test_save_load_export(store: SessionStore) -> None:
    session = Session(ScriptedEngine(["Yes."]), store, system="S")
    session.params = session.params.replace(seed=9)
    list(session.send("Really?"))
    identity = session.id or ""
    store.rename(identity, "My talk")
    assert session.title == "My talk"
    other = Session(ScriptedEngine(["Go on."]), store)
    other.load(identity[:5])
    assert other.messages == session.messages
    assert (other.system, other.params.seed) == ("S", 9)
    list(other.send("More"))
    assert len(store.get(identity).messages) == 4
    assert "## Assistant\n\nYes." in session.export()
    assert json.loads(other.export("json"))["messages"][3]["content"] == "Go on."
    with pytest.raises(StoreError):
        other.load("nothing")
    other.clear()
    assert other.messages == []
    list(other.send("New"))
    assert other.id != identity


def test_a_store_in_memory_keeps_a_conversation_as_long_as_it_is_open() -> None:
    with SessionStore.unstored() as store:
        session = Session(ScriptedEngine(["Yes."]), store, log_rounds=False)
        list(session.send("Really?"))
        store.rename(session.id or "", "T")
        assert session.title == "T"
        assert session.export().startswith("# T\n")
        assert session.id is not None
        session.clear()
        assert (session.id, session.messages) == (None, [])
        session.load()
        assert (session.title, len(session.messages)) == ("T", 2)
    assert list_runs() == []
    assert not sessions_file().exists()


def test_settings_are_stored_when_they_change(store: SessionStore) -> None:
    session = Session(ScriptedEngine(["Yes."]), store)
    list(session.send("Really?"))
    session.params = session.params.replace(draft_max=2)
    session.system = "Other."
    stored = store.get(session.id or "")
    assert stored.settings == {"set": {"draft_max": 2}}
    assert stored.system == "Other."


def test_what_was_given_at_the_start_is_not_stored(store: SessionStore) -> None:
    """Flags hold for one start: neither this conversation nor a later one remembers them."""
    flags = GenerateParams(window="fixed", draft_max=4).choose("temperature", 0.0)
    session = Session(ScriptedEngine(["Yes."]), store, params=flags)
    list(session.send("Really?"))
    later = Session(ScriptedEngine(["Yes."]), store)
    later.load(session.id or "")
    assert later.params == GenerateParams()
    session.params = session.params.replace(window="auto").choose("top_k", 5)
    later.load(session.id or "")
    assert later.params == GenerateParams().choose("top_k", 5)
    assert json.loads(session.export("json"))["settings"]["params"]["draft_max"] == 4


def test_a_new_conversation_takes_what_was_set_by_hand_and_not_what_was_loaded(
    store: SessionStore,
) -> None:
    first = Session(ScriptedEngine(["Yes."]), store, system="Be brief.")
    first.params = first.params.replace(window="fixed")
    list(first.send("Really?"))
    session = Session(ScriptedEngine(["Yes.", "No."]), store, system="Be kind.")
    session.params = session.params.replace(speculate=False)
    session.load(first.id or "")
    assert (session.params.window, session.params.speculate) == ("fixed", True)
    session.clear()
    assert session.params == GenerateParams(speculate=False)
    assert session.system == "Be kind."
    list(session.send("Really?"))
    assert store.get(session.id or "").settings == {"set": {"speculate": False}}


def test_a_card_is_taken_again_where_it_was_chosen_again(store: SessionStore) -> None:
    session = Session(
        ScriptedEngine(["Yes."]), store, params=GenerateParams().choose("temperature", 0.2)
    )
    session.params = session.params.choose("temperature", None).choose("min_p", 0.2)
    list(session.send("Really?"))
    other = Session(ScriptedEngine([]), store, params=GenerateParams().choose("temperature", 0.9))
    other.load(session.id or "")
    sampling = other.params.on_card({"temperature": 0.6, "min_p": 0.0}).sampling
    assert (sampling.temperature, sampling.min_p) == (0.6, 0.2)


def test_store_trouble_shows_once_in_the_stream() -> None:
    store = SessionStore.open()
    session = Session(ScriptedEngine(["a", "b"]), store)
    list(session.send("One"))
    (pages,) = store._db.execute("PRAGMA page_count").fetchone()
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    events = list(session.send("much text " * 400))
    events += list(session.send("much text " * 400))
    assert len([e for e in events if isinstance(e, Notice) and e.topic == "store"]) == 1
    assert len(session.messages) == 6


def test_another_engine_begins_another_log(store: SessionStore) -> None:
    session = Session(ScriptedEngine(["a"]), store)
    list(session.send("One"))
    session.engine = ScriptedEngine(["b"], info=engine_info(target=model_info(name="other")))
    list(session.send("Two"))
    session.close()
    names = {read_run(path).header["target"]["name"] for path in list_runs()}
    assert names == {"scripted target", "other"}


def test_old_turns_are_left_out_only_if_asked(store: SessionStore) -> None:
    engine = ScriptedEngine(["word " * 40], info=engine_info(target=model_info(n_ctx=200)))
    session = Session(engine, store, params=GenerateParams(on_full="shift", max_tokens=40))
    for n in range(6):
        events = list(session.send(f"Question {n} " + "and more " * 10))
        assert isinstance(events[-1], Finished)
    assert "no longer fit" in next(e for e in events if isinstance(e, Notice)).message
    assert isinstance(events[1], Started)
    assert len(session.messages) == 12
    assert engine.requests[-1].prompt[0].role == "user"
    session.params = session.params.replace(on_full="stop")
    with pytest.raises(PromptTooLong):
        list(session.send("one more"))
    assert len(session.messages) == 12
