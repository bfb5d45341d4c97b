import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from app_driver import Driver, GatedEngine, Recipe, shown_source
from fakes import Reply, ScriptedEngine
from textual import events
from textual.widgets import Button

from specllama.errors import PromptTooLong
from specllama.events import Event, Notice
from specllama.interface import Message
from specllama.settings.params import GenerateParams
from specllama.store.message_tree import StoredMessage
from specllama.store.sessions import SessionStore
from specllama.tui.state import Preferences
from specllama.tui.widgets.message import AssistantMessage, UserMessage
from specllama.tui.widgets.stats_strip import MEASURE, StatsStrip
from specllama.verdict import brief

LONG = " ".join(f"word{i}" for i in range(120))


async def test_a_question_is_answered_shown_and_stored(start: Any) -> None:
    async with start("**Hello** there.") as d:
        await d.say("Hi")
        assert d.texts == [("user", "Hi"), ("assistant", "**Hello** there.")]
        assert "Hello there." in d.shown
        assert "tokens" in d.shown
        assert " tok/s" in d.shown
        assert d.app.store.summaries()[0].title == "Hi"
        assert d.app.chat.prompt.text == ""


async def test_the_first_frame_does_not_wait_for_the_model_and_early_words_are_kept(
    start: Any,
) -> None:
    gate = threading.Event()
    recipe = Recipe(ScriptedEngine(["Ready."]), gate=lambda: gate.wait(60))
    async with start(recipe=recipe, wait=False) as d:
        assert "loading" in d.shown
        await d.send("Early", until=lambda: d.app.chat.queue)
        assert "waiting: Early" in d.shown
        gate.set()
        await d.until(lambda: len(d.texts) == 2)
        assert d.texts[0] == ("user", "Early")


async def test_enter_does_not_overtake_the_keys_before_it(start: Any) -> None:
    async with start("Yes.") as d:
        await d.press(*"fast", "enter", until=lambda: len(d.texts) == 2)
        assert d.texts[0] == ("user", "fast")


async def test_messages_sent_during_a_reply_wait_their_turn(start: Any) -> None:
    engine = GatedEngine([LONG, "Two."])
    async with start(recipe=Recipe(engine)) as d:
        await d.send("first", until=lambda: d.rounds == 3)
        await d.send("second", until=lambda: "waiting: second" in d.shown)
        engine.gate.set()
        await d.until(lambda: len(d.texts) == 4)
        await d.idle()
        assert [t for _, t in d.texts] == ["first", LONG, "second", "Two."]


async def test_escape_stops_at_once_and_keeps_the_partial_reply(start: Any) -> None:
    async with start(recipe=Recipe(GatedEngine([LONG]))) as d:
        await d.send("go", until=lambda: d.rounds == 3)
        await d.pilot.press("escape")
        await d.idle()
        (_, (role, reply)) = d.texts
        assert role == "assistant"
        assert LONG.startswith(reply)
        assert 0 < len(reply) < len(LONG)
        assert "stopped" in d.shown
        assert d.app.chat.query(AssistantMessage).last().text == reply


async def test_continue_goes_on_where_the_reply_ended(start: Any) -> None:
    async with start(recipe=Recipe(GatedEngine([LONG, " and the rest."]))) as d:
        await d.send("go", until=lambda: d.rounds == 3)
        await d.pilot.press("escape")
        await d.idle()
        kept = d.texts[1][1]
        await d.press("ctrl+t", until=lambda: d.texts[-1][1] == kept + " and the rest.")
        await d.idle()
        assert d.engine.requests[-1].prompt[-1] == Message("assistant", kept)
        assert shown_source(d.app.chat.query(AssistantMessage).last()) == kept + " and the rest."


async def test_retry_replaces_the_reply(start: Any) -> None:
    async with start("One.", "Two.") as d:
        await d.say("Hi")
        await d.press("ctrl+r", until=lambda: d.texts[-1] == ("assistant", "Two."))
        await d.idle()
        assert len(d.texts) == 2
        assert "One." not in d.shown


async def test_retry_without_drafts_keeps_the_seed_and_another_key_takes_a_new_one(
    start: Any,
) -> None:
    async with start("One.", "One.", "Two.", "Two.") as d:
        await d.say("Hi")
        await d.press("f9", "ctrl+r", until=lambda: len(d.engine.requests) == 2)
        await d.idle()
        first, second = (r.params for r in d.engine.requests)
        assert (first.speculate, second.speculate) == (True, False)
        assert second.seed == d.app.store.get(d.app.session.id).messages[-1].stats["seed"]
        await d.send("/retry new", until=lambda: len(d.engine.requests) == 3)
        await d.idle()
        assert d.engine.requests[2].params.seed is None
        d.app.chat.query(AssistantMessage).last().focus()
        await d.press("alt+r", until=lambda: len(d.engine.requests) == 4)
        await d.idle()
        assert d.engine.requests[3].params.seed is None
        assert len(d.texts) == 2


async def test_undo_gives_the_question_back(start: Any) -> None:
    async with start("One.") as d:
        await d.say("Hi there")
        await d.send("/undo", until=lambda: not d.texts)
        await d.until(lambda: d.app.chat.prompt.text == "Hi there")
        assert "Guess, check, keep" in d.shown


async def test_edit_and_resend_an_earlier_question(start: Any) -> None:
    async with start("One.", "Two.", "Three.") as d:
        await d.say("a")
        await d.say("b")
        d.app.chat.query(UserMessage).first().focus()
        await d.press("enter", until=lambda: d.app.chat.editing == 0)
        assert "The old version is kept" in d.shown
        await d.send("changed", until=lambda: len(d.texts) == 2)
        await d.idle()
        assert d.texts == [("user", "changed"), ("assistant", "Three.")]
        assert len(d.app.chat.query(UserMessage)) == 1
        assert "You  ‹2/2› Alt+Left" in d.shown


async def test_versions_are_walked_from_the_prompt_and_gone_on_with(start: Any) -> None:
    async with start("One.", "Two.", "Three.", "Four.") as d:
        await d.say("a")
        await d.say("b")
        await d.press("ctrl+r", until=lambda: d.texts[-1] == ("assistant", "Three."))
        await d.idle()
        assert "‹2/2›" in d.shown
        rounds = d.app.chat.records[3].rounds
        await d.press("alt+left", until=lambda: d.texts[-1] == ("assistant", "Two."))
        assert "‹1/2›" in d.shown
        assert "Two." in d.shown
        assert d.app.chat.records[3].rounds != rounds
        await d.pilot.press("alt+left")
        assert d.texts[-1] == ("assistant", "Two.")
        await d.say("c")
        assert [t for _, t in d.texts] == ["a", "One.", "b", "Two.", "c", "Four."]
        await d.pilot.press("alt+right")
        await d.until(lambda: [t for _, t in d.texts] == ["a", "One.", "b", "Three."])
        assert d.app.chat.records[3].rounds == rounds  # the inspector still has them


async def test_versions_of_the_focused_message_are_walked_even_of_an_early_one(start: Any) -> None:
    async with start("One.", "Two.", "Three.") as d:
        await d.say("a")
        await d.say("b")
        d.app.chat.query(UserMessage).first().focus()
        await d.press("enter", until=lambda: d.app.chat.editing == 0)
        await d.send("changed", until=lambda: d.texts[-1] == ("assistant", "Three."))
        await d.idle()
        d.app.chat.query(UserMessage).first().focus()
        await d.press("alt+left", until=lambda: len(d.texts) == 4)
        assert d.app.focused is d.app.chat.query(UserMessage).first()
        assert "‹1/2›" in d.shown
        d.app.chat.query(AssistantMessage).first().focus()
        await d.pilot.press("alt+left")  # this one has no other
        await d.pilot.pause()
        assert len(d.texts) == 4


async def test_escape_leaves_editing_and_restores_what_was_being_written(start: Any) -> None:
    async with start("One.") as d:
        await d.say("question")
        await d.type("half a thought")
        await d.press(
            "shift+tab", "up", "enter", until=lambda: d.app.chat.prompt.text == "question"
        )
        await d.press("escape", until=lambda: d.app.chat.prompt.text == "half a thought")
        assert d.app.chat.editing is None
        assert len(d.texts) == 2


async def test_an_edited_reply_can_be_continued(start: Any) -> None:
    async with start("One two.", " three.") as d:
        await d.say("q")
        d.app.chat.query(AssistantMessage).first().focus()
        await d.press("enter", until=lambda: d.app.chat.editing == 1)
        await d.send("Uno", until=lambda: d.texts[-1] == ("assistant", "Uno"))
        await d.press("ctrl+t", until=lambda: d.texts[-1] == ("assistant", "Uno three."))
        await d.idle()


async def test_views_show_the_reply_as_drafted(start: Any) -> None:
    async with start(Reply("One two three four five six.", accept=(2, 0))) as d:
        await d.say("q")
        await d.press("f2", until=lambda: d.app.chat.view == "drafted")
        assert "ᵈ" in d.shown
        assert "wrong" not in d.shown
        await d.press("f2", until=lambda: "wrong" in d.shown)


async def test_the_strip_counts_what_the_engine_says(start: Any) -> None:
    params = GenerateParams(draft_max=4)
    async with start(Reply(LONG, accept=(2,)), size=(120, 36), params=params) as d:
        await d.say("q")
        strip = d.app.chat.strip
        done = d.app.session.last
        assert strip.verdict == done.verdict
        assert strip.used == done.prompt_n + len(done.token_ids)
        assert brief(done.verdict, MEASURE) in d.shown
        assert f"{done.verdict.accepted / done.verdict.drafted:.0%} kept" in d.shown
        assert d.shown.count("tok/s") == 1  # not below the reply, too
        assert "■■□·+" in d.shown


async def test_speculation_off_is_said_and_used(start: Any) -> None:
    async with start("One.", "Two.") as d:
        await d.pilot.press("f9")
        await d.say("q")
        assert d.engine.requests[-1].params.speculate is False
        assert "Drafting is off (F9 turns it on)" in d.shown
        await d.pilot.press("f9")
        await d.say("q")
        assert d.engine.requests[-1].params.speculate is True


async def test_slash_commands_and_paths_that_look_like_them(start: Any) -> None:
    async with start("Ok.") as d:
        await d.say("/usr/bin")
        assert d.texts[0] == ("user", "/usr/bin")
        await d.say("//undo")
        assert d.texts[2] == ("user", "/undo")
        await d.send("/draft", until=lambda: not d.app.session.params.speculate)
        assert len(d.texts) == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/undoo", "did you mean /undo?"),
        ("/xyzzy", "/help lists them"),
        ("/undo the last thing", "/undo takes no words"),
        (" /Settings now", "to send it as text, type //Settings"),
    ],
)
async def test_what_looks_like_a_command_never_goes_to_the_model(
    start: Any, text: str, words: str
) -> None:
    async with start("Ok.") as d:
        await d.send(text, until=lambda: any(words in n.message for n in d.app._notifications))
        assert d.app.chat.prompt.text == text
        assert not d.engine.requests


@pytest.mark.parametrize(
    "text", ["/usr/bin is full", "/* a comment */", "/etc.conf", "/a or\n/b", "//undo it", "//"]
)
async def test_paths_and_comments_are_messages(start: Any, text: str) -> None:
    async with start("Ok.") as d:
        await d.say(text)
        assert d.texts[0] == ("user", text.replace("//", "/"))


async def test_ctrl_z_takes_back_a_word_not_the_whole_text(start: Any) -> None:
    async with start("Ok.") as d:
        await d.pilot.press(*"one", "space", *"two", "space", *"three")
        prompt = d.app.chat.prompt
        await d.pilot.press("ctrl+z")
        assert prompt.text == "one two "
        await d.pilot.press("ctrl+z")
        assert prompt.text == "one "
        await d.pilot.press("ctrl+y", "ctrl+y")
        assert prompt.text == "one two three"


async def test_history_walks_and_returns_to_what_was_being_written(start: Any) -> None:
    async with start("Ok.") as d:
        await d.say("one")
        await d.say("two")
        await d.type("new")
        prompt = d.app.chat.prompt
        seen = []
        for key in ("up", "up", "up", "down", "down"):
            await d.pilot.press(key)
            seen.append(prompt.text)
        assert seen == ["two", "one", "one", "two", "new"]
    async with start("Ok.") as d:
        await d.pilot.press("up")
        assert d.app.chat.prompt.text == "two"


async def test_a_megabyte_is_pasted_as_one_label_and_sent_whole(start: Any) -> None:
    big = "lorem ipsum\r\n" * 80_000
    text = big.replace("\r\n", "\n")
    async with start("Ok.") as d:
        d.app.chat.prompt.post_message(events.Paste(big))
        await d.until(lambda: "pasted text" in d.app.chat.prompt.text)
        assert f"{len(text):,} characters" in d.shown
        assert d.app.chat.prompt.full_text == text
        await d.pilot.press("enter")
        # More than the scripted context: refused as a whole, and nothing is lost.
        await d.until(lambda: d.notes)
        assert "context" in d.notes[0]
        await d.until(lambda: d.app.chat.prompt.full_text == text)
        assert d.texts == []


async def test_unsent_text_survives_a_crash(start: Any) -> None:
    async with start("Ok.") as d:
        await d.type("not yet sent")
        d.app.chat.prompt.save_draft()
    async with start("Ok.") as d:
        assert d.app.chat.prompt.text == "not yet sent"
        await d.say("sent now")
    async with start("Ok.") as d:
        assert d.app.chat.prompt.text == ""


async def test_a_dead_engine_is_one_note_and_the_next_message_works(start: Any) -> None:
    engine = ScriptedEngine([Reply(LONG, raise_at_round=4), "Alive."])
    async with start(recipe=Recipe(engine)) as d:
        await d.say("q")
        assert d.texts[1][0] == "assistant"
        assert LONG.startswith(d.texts[1][1])
        assert "The scripted engine failed" in d.notes[0] or "failed" in d.notes[0]
        assert "interrupted" in d.shown
        await d.say("again")
        assert d.texts[-1] == ("assistant", "Alive.")


async def test_a_refused_question_returns_to_the_prompt(start: Any) -> None:
    refusal = Reply(raise_first=PromptTooLong("too long", "shorten it"))
    async with start(refusal) as d:
        await d.send("my long question", until=lambda: d.notes)
        await d.until(lambda: d.app.chat.prompt.text == "my long question")
        assert d.texts == []
        assert not d.app.chat.query(UserMessage)


async def test_an_empty_reply_stays_in_the_conversation(start: Any) -> None:
    async with start("", "Words.") as d:
        await d.say("q")
        await d.until(lambda: "(the model ended at once)" in d.shown)
        assert d.texts == [("user", "q"), ("assistant", "")]
        await d.say("again")
        assert [m.content for m in d.app.session.messages] == ["q", "", "again", "Words."]
        await d.app.chat.show_conversation()
        await d.until(lambda: "(the model ended at once)" in d.shown)


class LingeringEngine(ScriptedEngine):
    """Its thread ends some time after the last event, as one does on a busy machine."""

    def generate(self, *args: Any, **named: Any) -> Iterator[Event]:
        yield from ScriptedEngine.generate(self, *args, **named)
        time.sleep(0.5)


async def test_the_end_is_explained_however_late_the_thread_ends(start: Any) -> None:
    engine = LingeringEngine([Reply("One two.", reason="context")])
    async with start(recipe=Recipe(engine)) as d:
        await d.say("q")
        await d.until(lambda: "context is full" in d.shown and "Ctrl+N" in d.shown)


async def test_notices_of_the_engine_are_shown(start: Any) -> None:
    warning = Notice("the round log is off: disk full", "warning", "log")
    async with start(Reply("Ok.", notices=(warning,))) as d:
        await d.say("q")
        assert "disk full" in d.shown


async def test_new_chat_keeps_the_old_one(start: Any) -> None:
    async with start("One.") as d:
        await d.say("first chat")
        await d.press("ctrl+n", until=lambda: not d.texts)
        assert "Guess, check, keep" in d.shown
        await d.say("second chat")
        assert [s.title for s in d.app.store.summaries()] == ["second chat", "first chat"]


async def test_a_resumed_chat_knows_how_full_its_context_is(start: Any) -> None:
    def context(d: Driver) -> str:
        return d.app.chat.query_one(StatsStrip).render().plain.partition("context ")[2].strip()

    async with start(LONG, LONG, size=(80, 24)) as d:
        await d.say("one")
        first = context(d)
        await d.say("two")
        second, session = context(d), d.app.session.id
        await d.send("/undo", until=lambda: len(d.texts) == 2)
        await d.until(lambda: context(d) == first)
        await d.send("two")
        await d.idle()
        await d.until(lambda: len(d.texts) == 4)
        await d.idle()
    assert first not in ("", second)
    async with start("Ok.", size=(80, 24), session_id=session) as d:
        await d.until(lambda: context(d) == second)
        await d.press("ctrl+n", until=lambda: context(d) == "")


async def test_a_context_that_nobody_counted_is_not_called_empty(start: Any) -> None:
    with SessionStore.open() as store:
        session = store.create(title="old")
        store.put(session, 0, StoredMessage("user", "q"))
        store.put(session, 1, StoredMessage("assistant", "cut", "partial"))
    async with start("Ok.", size=(80, 24), session_id=session) as d:
        await d.until(lambda: d.texts)
        assert "context " not in d.app.chat.query_one(StatsStrip).render().plain


async def test_copying_takes_the_source_not_the_picture(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[str] = []
    monkeypatch.setattr(
        "specllama.tui.clipboard.copy", lambda text, osc52: copied.append(text) or "Copied"
    )
    async with start("Text\n\n```py\nx = 1\n```\n\nmore **bold**") as d:
        await d.say("q")
        await d.press("ctrl+o", until=lambda: len(copied) == 1)
        d.app.chat.query(AssistantMessage).last().focus()
        await d.press("alt+o", until=lambda: len(copied) == 2)
        await d.send("/copy chat", until=lambda: len(copied) == 3)
    assert copied[0].endswith("more **bold**")
    assert copied[1] == "x = 1"
    assert "## User" in copied[2]


async def test_flags_of_one_start_do_not_travel_with_a_conversation(start: Any) -> None:
    async with start("One.", params=GenerateParams(window="fixed", draft_max=4)) as d:
        await d.say("q")
        session = d.app.session.id
    async with start("Two.") as d:
        d.app.resume_session(session)
        await d.until(lambda: d.texts)
        assert d.app.session.params == GenerateParams()
        await d.pilot.press("f9")
        await d.press("ctrl+n", until=lambda: not d.texts)
        # what was chosen by hand goes on, and the strip says so
        assert d.app.session.params == GenerateParams(speculate=False)
        d.app.resume_session(session)
        await d.until(lambda: d.texts)
        await d.until(lambda: d.app.chat.strip.speculate is False)


async def test_ctrl_c_stops_a_reply_before_it_offers_to_leave(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    async with start(recipe=Recipe(GatedEngine([LONG]))) as d:
        monkeypatch.setattr(d.app, "notify", lambda words, **_: said.append(words))
        await d.send("go", until=lambda: d.rounds == 3)
        await d.send("next", until=lambda: d.app.chat.queue)
        await d.pilot.press("ctrl+c")
        await d.idle()
        assert d.app.chat.prompt.text == "next"
        assert "stopped" in d.shown
        assert said == []
        await d.press("ctrl+c", until=lambda: said == ["Ctrl+Z brings the text back"])
        assert d.app.chat.prompt.text == ""
        await d.press("ctrl+c", until=lambda: said[1:] == ["Press Ctrl+C again to leave"])


async def test_a_reply_that_a_kill_cut_short_says_so(start: Any) -> None:
    with SessionStore.open() as store:
        session = store.create(title="old")
        cut = {"seed": 7, "emitted": 12}
        store.put(session, 0, StoredMessage("user", "q"))
        store.put(session, 1, StoredMessage("assistant", "half of", "partial", cut))
        store.put(session, 2, StoredMessage("user", "q2"))
        store.put(session, 3, StoredMessage("assistant", "mine", "partial"))
    gate = threading.Event()
    recipe = Recipe(ScriptedEngine(["Ok."]), gate=lambda: gate.wait(60))
    async with start(recipe=recipe, wait=False, session_id=session) as d:
        await d.until(lambda: "interrupted after 12 tokens" in d.shown)
        assert "edited: Ctrl+T continues" in d.shown
        assert "scripted-target" not in d.shown
        gate.set()
        await d.ready()
        name = d.app.loader.info.target.name
        await d.until(lambda: d.shown.count(name) == 3)  # the top, and both replies


async def test_a_waiting_message_outlives_the_app(start: Any) -> None:
    async with start(recipe=Recipe(GatedEngine([LONG]))) as d:
        await d.send("first", until=lambda: d.rounds == 3)
        for text in ("second", "third"):
            await d.send(text)
        await d.until(lambda: len(d.app.chat.queue) == 2)
        await d.type("being typed")
        d.app.chat.prompt.save_draft()
        # killed here: nothing more is written, as leaving sends nothing
    async with start("Ok.") as d:
        assert d.app.chat.prompt.text == "second\n\nthird\n\nbeing typed"
        await d.type("")
        d.app.chat.prompt.save_draft()
    async with start("Ok.") as d:
        assert d.app.chat.prompt.text == ""


async def test_ctrl_c_twice_leaves(start: Any) -> None:
    async with start("Ok.") as d:
        await d.pilot.press("ctrl+c")
        assert d.app.is_running
        await d.press("ctrl+c", until=lambda: d.app.return_value == 0)


async def test_a_full_disk_is_said_once_and_costs_nothing_else(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specllama.tui.state.write_atomically", lambda path, text: False)
    async with start("Ok.") as d:
        await d.type("x")
        d.app.chat.prompt.save_draft()
        d.app.chat.prompt.save_draft()
        await d.say("q")
        assert d.texts[-1] == ("assistant", "Ok.")
        told = {"unsent text", "prompt history", "settings of the app"}
        await d.until(lambda: d.app._told == told)


async def test_a_long_conversation_mounts_a_window(start: Any) -> None:
    with SessionStore.open() as store:
        session = store.create(title="long")
        for i in range(24):
            role = "assistant" if i % 2 else "user"
            store.put(session, i, StoredMessage(role, f"{role} {i}"))
    async with start("Ok.", session_id=session) as d:
        await d.until(lambda: d.app.chat.query("#earlier"))
        assert len(d.app.chat.query(UserMessage)) == 10
        d.app.chat.query_one("#earlier", Button).press()
        await d.until(lambda: len(d.app.chat.query(UserMessage)) == 12)
        assert d.app.chat.query(UserMessage).first().text == "user 0"


async def test_resizing_while_streaming(start: Any) -> None:
    async with start(LONG) as d:
        await d.send("go")
        for width, height in [(20, 5), (200, 60), (1, 1), (60, 16), (40, 12), (120, 36)]:
            await d.pilot.resize_terminal(width, height)
        await d.idle()
        assert d.texts[-1] == ("assistant", LONG)


async def test_keys_can_be_changed(start: Any) -> None:
    prefs = Preferences()
    prefs.keys = {"chat.retry": "f12"}
    prefs.save()
    async with start("One.", "Two.") as d:
        await d.say("Hi")
        await d.press("f12", until=lambda: d.texts[-1] == ("assistant", "Two."))


async def test_leaving_during_a_reply_keeps_what_was_written(start: Any) -> None:
    async with start(recipe=Recipe(GatedEngine([LONG]))) as d:
        await d.send("go", until=lambda: d.rounds == 3)
        session = d.app.session.id
        shown = d.app.chat.query(AssistantMessage).last().text
    with SessionStore.open() as store:
        kept = store.get(session).messages
    assert kept[-1].state == "partial"
    assert kept[-1].content.startswith(shown)


async def test_a_losing_window_is_said_to_lose(start: Any) -> None:
    params = GenerateParams(window="fixed", draft_max=4)
    async with start(Reply(LONG, accept=(0,)), params=params) as d:
        await d.say("go")
        assert d.app.chat.strip.loses
        assert "LOSES 0.8" in d.shown
        assert "F9 off" in d.shown
        await d.press("f9", until=lambda: "F9 off" not in d.shown)


async def test_a_thought_is_counted_and_can_be_ended(start: Any) -> None:
    engine = GatedEngine([f"<think>{LONG}", " So: yes."])
    async with start(recipe=Recipe(engine)) as d:
        await d.say("/think low")
        await d.send("go", until=lambda: d.rounds == 3)
        await d.until(lambda: "thinking" in d.shown)
        await d.press("alt+a", until=lambda: len(d.engine.requests) == 2)
        engine.gate.set()
        await d.idle()
        asked, answered = d.engine.requests
        assert (asked.params.think, asked.params.think_budget) == ("low", None)
        assert answered.params.think_budget == 0
        begun = answered.prompt[-1]
        assert begun.reasoning
        assert LONG.startswith(begun.reasoning)
        reply = d.app.session.messages[-1]
        assert (reply.reasoning, reply.content) == (begun.reasoning, " So: yes.")
        assert "thought" in d.shown
        await d.pilot.press("alt+a")
        await d.until(
            lambda: any(n.message == "There is no open thought" for n in d.app._notifications)
        )
        assert len(d.engine.requests) == 2


async def test_pages_turn_from_the_prompt_and_the_end_is_one_key_away(start: Any) -> None:
    text = "\n\n".join(f"Paragraph {i}." for i in range(60))
    async with start(text, size=(80, 24)) as d:
        await d.say("go")
        await d.until(lambda: "Paragraph 59." in d.shown)
        assert "more below" not in d.shown
        await d.press("pageup", "pageup", until=lambda: "Paragraph 59." not in d.shown)
        assert "↓ more below: Ctrl+End" in d.shown
        assert d.app.chat.prompt.has_focus
        await d.pilot.press("ctrl+end")
        await d.until(lambda: "Paragraph 59." in d.shown and "more below" not in d.shown)
        await d.press("pageup", until=lambda: "more below" in d.shown)
        await d.press("pagedown", until=lambda: "more below" not in d.shown)


async def test_new_text_below_is_said(start: Any) -> None:
    engine = GatedEngine(["\n\n".join(f"Paragraph {i}." for i in range(80))], rounds=60)
    async with start(recipe=Recipe(engine), size=(80, 24)) as d:
        await d.send("go", until=lambda: d.app.chat.transcript.max_scroll_y > 20)
        await d.press("pageup", "pageup", until=lambda: "↓ new text below: Ctrl+End" in d.shown)
        engine.gate.set()
        await d.idle()
        assert "↓ more below" in d.shown
