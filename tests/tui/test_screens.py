from dataclasses import replace
from typing import Any

import pytest
from app_driver import Driver, GatedEngine, Recipe
from demo_engine import DemoEngine
from fakes import Reply, ScriptedEngine, engine_info
from textual.widgets import Input, TextArea

from specllama.errors import DoesNotFit
from specllama.events import Notice
from specllama.interface import MethodInfo
from specllama.settings.params import EngineOptions, GenerateParams
from specllama.store.message_tree import StoredMessage
from specllama.tui.keymap import ACTIONS
from specllama.tui.screens.help_screen import HelpScreen
from specllama.tui.screens.inspector_screen import InspectorScreen
from specllama.tui.screens.race_screen import RaceScreen
from specllama.tui.screens.sessions_screen import SessionsScreen
from specllama.tui.screens.settings_screen import FIELDS, SettingsScreen
from specllama.tui.state import Preferences
from specllama.tui.widgets.race_tables import MethodList


async def opened(d: Driver, key: str, screen: type) -> Any:
    await d.press(key, until=lambda: isinstance(d.app.screen, screen))
    await d.pilot.pause()
    return d.app.screen


# ---------------------------------------------------------------------- inspector


async def test_the_inspector_walks_through_draft_verify_commit(start: Any) -> None:
    async with start(recipe=Recipe(DemoEngine())) as d:
        await d.say("q")
        screen = await opened(d, "f3", InspectorScreen)
        assert screen.at == 1
        assert "proposes" in d.shown
        await d.pilot.press("right")
        assert "checks all of them in one pass" in d.shown
        await d.pilot.press("right")
        assert " for " in d.shown
        assert "; plain " in d.shown
        await d.pilot.press("right")
        assert (screen.at, screen.stage) == (2, 0)
        await d.pilot.press("left")
        assert (screen.at, screen.stage) == (1, 2)
        await d.pilot.press("end")
        assert screen.at == len(screen.record.rounds) - 1
        await d.pilot.press("home", "p")
        assert screen.at == 0
        assert "plain step" in d.shown
        await d.press("escape", until=lambda: d.app.screen is d.app.chat)


async def test_the_inspector_draws_trees(start: Any) -> None:
    async with start(Reply("One two three four five six.", tree=True)) as d:
        await d.say("q")
        await opened(d, "f3", InspectorScreen)
        await d.pilot.press("right")
        assert "├─" in d.shown


async def test_the_inspector_follows_a_live_reply_until_one_steps_back_and_again_from_its_end(
    start: Any,
) -> None:
    engine = GatedEngine(["Old.", " ".join(f"word{i}" for i in range(90))], rounds=3)

    def newest(screen: InspectorScreen) -> bool:
        return screen.at == len(screen.record.rounds) - 1

    async def more(to: int) -> None:
        engine.rounds = to
        await d.until(lambda: len(screen.record.rounds) == to)

    async with start(recipe=Recipe(engine)) as d:
        engine.gate.set()
        await d.say("first")
        engine.gate.clear()
        await d.send("second", until=lambda: len(d.app.chat.live_record.rounds) == 3)
        screen = await opened(d, "f3", InspectorScreen)
        assert (screen.at, screen.stage) == (2, 2)
        assert "live" in d.shown
        await more(5)
        assert newest(screen)
        assert "Round 5 of 5" in d.shown
        await d.pilot.press("p")
        await more(7)
        assert screen.at == 3
        assert "live" not in d.shown
        await d.pilot.press("end")
        await more(9)
        assert newest(screen)
        await d.pilot.press("n")  # there is no newer one yet
        await more(11)
        assert newest(screen)
        await d.pilot.press("left", "left", "left")
        await more(13)
        assert screen.at == 9
        await d.pilot.press("n", "n", "n")
        assert "live" in d.shown
        await more(15)
        assert newest(screen)
        engine.gate.set()
        await d.idle()
        assert newest(screen)
        assert "live" not in d.shown


async def test_the_inspector_follows_into_the_next_reply(start: Any) -> None:
    engine = GatedEngine([" ".join(f"word{i}" for i in range(40)), "Another reply."], rounds=3)
    async with start(recipe=Recipe(engine)) as d:
        await d.send("first")
        await d.type("second")
        await d.pilot.press("enter")  # waits its turn
        await d.until(lambda: d.app.chat.live_record and d.app.chat.live_record.rounds)
        screen = await opened(d, "f3", InspectorScreen)
        first = screen.record
        engine.gate.set()
        await d.idle()
        assert screen.record is not first
        assert screen.record is d.app.chat.records[3]
        assert "second" in d.shown


async def test_the_inspector_with_nothing_to_show_says_what_to_do(start: Any) -> None:
    async with start("Ok.") as d:
        await opened(d, "f3", InspectorScreen)
        assert "Send a message" in d.shown
        await d.pilot.press("right", "n", "space", "end")


# ---------------------------------------------------------------------- methods


async def test_methods_are_switched_live_and_missing_ones_say_why(start: Any) -> None:
    methods = (
        *engine_info().methods,
        MethodInfo("medusa", "Medusa", "Heads that guess.", False, "no head is loaded"),
    )
    engine = ScriptedEngine(["Ok."], info=engine_info(methods=methods))
    async with start(recipe=Recipe(engine)) as d:

        async def choose(name: str) -> RaceScreen:
            screen = await opened(d, "f5", RaceScreen)
            options = screen.query_one(MethodList)
            options.highlighted = options.get_option_index(name)
            await d.pilot.press("enter")
            await d.pilot.pause()
            return screen

        screen = await choose("medusa")
        assert "no head is loaded" in d.shown
        assert d.app.screen is screen
        await d.pilot.press("escape")
        for name in ("ngram", "auto"):
            await choose(name)
            await d.until(lambda: d.app.screen is d.app.chat)
            await d.say("q")
            assert engine.requests[-1].params.proposer == name
            assert engine.requests[-1].params.speculate is True
        await choose("none")
        await d.until(lambda: d.app.screen is d.app.chat)
        await d.say("q")
        assert engine.requests[-1].params.speculate is False


# ---------------------------------------------------------------------- sessions


async def test_sessions_search_resume_rename_delete_and_undo(start: Any) -> None:
    async with start("Apples.", "Pears.") as d:
        await d.say("about apples")
        await d.press("ctrl+n", until=lambda: not d.texts)
        await d.say("about pears")
        screen = await opened(d, "f7", SessionsScreen)
        await d.press(*"apples", until=lambda: len(screen._found) == 1)
        await d.pilot.press("ctrl+e")
        screen.query_one(Input).value = "Fruit [/x]"
        await d.press("enter", until=lambda: len(screen._found) == 2)
        assert "Fruit [/x]" in d.shown
        await d.press(*"Fruit", until=lambda: len(screen._found) == 1)
        await d.press("ctrl+d", until=lambda: not screen._found)
        assert "no match" in d.shown
        await d.press("ctrl+z", until=lambda: len(screen._found) == 1)
        await d.press("enter", until=lambda: d.texts and d.texts[0][1] == "about apples")
        assert "Apples." in d.shown


async def test_deleting_keeps_the_place_in_the_list(start: Any) -> None:
    async with start("Ok.") as d:
        for title in ("a", "b", "c", "d"):
            d.app.store.put(d.app.store.create(title=title), 0, StoredMessage("user", title))
        screen = await opened(d, "f7", SessionsScreen)
        order = [s.title for s in screen._found]
        await d.press("down", "ctrl+d", until=lambda: len(screen._found) == 3)
        assert screen._selected.title == order[2]
        await d.press("down", "ctrl+d", until=lambda: len(screen._found) == 2)
        assert screen._selected.title == order[2]
        await d.press("delete", "ctrl+d", until=lambda: not screen._found)


async def test_delete_is_the_fields_own_key_while_it_has_text_to_delete(start: Any) -> None:
    async with start("Ok.") as d:
        await d.say("one")
        screen = await opened(d, "f7", SessionsScreen)
        await d.pilot.press("ctrl+e", "home", "delete")
        assert screen.query_one(Input).value == "ne"
        await d.press("enter", until=lambda: screen._found[0].title == "ne")
        await d.pilot.press("n", "e", "home", "delete")
        assert screen.query_one(Input).value == "e"
        assert len(screen._found) == 1


async def test_deleting_the_open_conversation_begins_a_new_one(start: Any) -> None:
    async with start("Ok.") as d:
        await d.say("gone soon")
        screen = await opened(d, "f7", SessionsScreen)
        await d.press("ctrl+d", until=lambda: not screen._found)
        await d.press("escape", until=lambda: not d.texts)


# ---------------------------------------------------------------------- settings


def typed(screen: SettingsScreen, **values: Any) -> None:
    for name, value in values.items():
        screen.query_one("#system" if name == "system" else f"#set-{name}").value = value


async def saved(d: Driver) -> None:
    await d.press("ctrl+s", until=lambda: d.app.screen is d.app.chat)


async def test_settings_apply_and_a_bad_value_is_named_at_its_field(start: Any) -> None:
    async with start("Ok.", size=(100, 40)) as d:
        screen = await opened(d, "f8", SettingsScreen)
        typed(screen, temperature="-1", top_k="many")
        await d.until(lambda: "temperature must be in" in d.shown)
        lines = d.shown.splitlines()
        at = next(i for i, line in enumerate(lines) if "must be in" in line)
        assert "temperature" in lines[at - 1]
        assert "top-k must be a whole number" in d.shown
        await d.pilot.press("ctrl+s")
        assert d.app.screen is screen
        assert d.app.focused is screen.query_one("#set-temperature")
        typed(screen, temperature="0", top_k="40", seed="5", proposer="ngram")
        screen.query_one("#system", TextArea).text = "Be brief."
        await d.until(lambda: "must be" not in d.shown)
        await saved(d)
        params = d.app.session.params
        assert (params.sampling.temperature, params.seed, params.proposer) == (0.0, 5, "ngram")
        await d.say("q")
        assert d.engine.requests[-1].prompt[0].content == "Be brief."


async def test_the_chat_stays_visible_and_goes_on_beside_the_settings(start: Any) -> None:
    engine = GatedEngine([" ".join(f"word{i}" for i in range(40))])
    async with start(recipe=Recipe(engine), size=(120, 36)) as d:
        await d.send("go", until=lambda: "word2" in d.shown)
        await opened(d, "f8", SettingsScreen)
        assert "word2" in d.shown
        assert "word31" not in d.shown
        engine.gate.set()
        await d.until(lambda: "word31" in d.shown)


@pytest.mark.parametrize("key", ["escape", "f7"])
async def test_unsaved_settings_are_dropped_only_when_asked_twice(start: Any, key: str) -> None:
    async with start("Ok.", size=(100, 40)) as d:
        screen = await opened(d, "f8", SettingsScreen)
        await d.press(key, until=lambda: d.app.screen is not screen)
        if key == "f7":
            await d.pilot.press("escape")
        screen = await opened(d, "f8", SettingsScreen)
        typed(screen, seed="5")
        await d.until(lambda: "1 changed" in d.shown)
        await d.press(key, until=lambda: "1 change not saved" in d.shown)
        assert d.app.screen is screen
        typed(screen, seed="6")
        await d.until(lambda: "not saved" not in d.shown)
        await d.press(key, until=lambda: "not saved" in d.shown)
        await d.press(key, until=lambda: d.app.screen is not screen)
        assert d.app.session.params == GenerateParams()


async def test_every_key_of_the_form_moves_and_turns(start: Any) -> None:
    async with start("Ok.", size=(100, 40)) as d:
        screen = await opened(d, "f8", SettingsScreen)
        names = []
        for _ in range(len(FIELDS)):
            names.append((d.app.focused.id or "").removeprefix("set-"))
            await d.pilot.press("tab" if names[-1] == "system" else "down")
            await d.pilot.pause()
        assert set(names) == set(FIELDS)
        for name in ("speculate", "default_system"):
            before = screen.query_one(f"#set-{name}").value
            screen.query_one(f"#set-{name}").focus()
            await d.pilot.press("space")
            assert screen.query_one(f"#set-{name}").value is not before
        screen.query_one("#set-on_full").focus()
        await d.pilot.press("enter", "down", "enter")
        await d.until(lambda: screen.query_one("#set-on_full").value == "shift")
        await saved(d)
        params = d.app.session.params
        assert (params.speculate, params.on_full) == (False, "shift")


async def test_another_context_size_loads_the_model_again(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    recipe = Recipe(ScriptedEngine(["Ok."]))

    def load(target: str, draft: str | None, options: EngineOptions) -> Recipe:
        asked.append(options.n_ctx)
        recipe.error = DoesNotFit("too long", "-c") if options.n_ctx == 9999 else None
        return recipe

    monkeypatch.setattr("specllama.tui.app.LoadEngine", load)
    async with start(recipe=recipe, factory_for=None, size=(100, 40)) as d:
        for size, problem in (("4", "ctx-size must be"), ("9999", ""), ("512", ""), ("512", "")):
            before = len(asked)
            typed((await opened(d, "f8", SettingsScreen)), n_ctx=size)
            await d.until(lambda problem=problem: problem in d.shown)
            if problem:
                await d.pilot.press("ctrl+s", "escape", "escape")
                await d.until(lambda: d.app.screen is d.app.chat)
                assert len(asked) == before
                continue
            await saved(d)
            await d.until(lambda: d.app.loader.ready)
            if size == "9999":
                await d.until(lambda: "too long" in d.shown)
                assert d.app.options.n_ctx is None
    assert asked == [None, 9999, 512]


async def test_a_field_says_who_chose_it_and_empty_follows_the_card(start: Any) -> None:
    params = GenerateParams(from_card=("temperature", "top_k"))
    async with start("Ok.", size=(100, 40), params=params) as d:
        info = d.app.loader.info
        target = replace(info.target, card={"temperature": 0.6})
        d.app.loader.info = replace(info, target=target)
        screen = await opened(d, "f8", SettingsScreen)
        assert screen.query_one("#set-temperature", Input).value == "0.6"
        origins = [str(s.render()) for s in screen.query(".origin")]
        assert origins[:3] == ["the model's card", "default", "yours"]
        typed(screen, top_k="7", top_p="")
        await saved(d)
        params = d.app.session.params
        assert params.from_card == ("temperature", "top_p")
        assert (params.sampling.temperature, params.sampling.top_k) == (0.8, 7)


async def test_the_look_is_remembered(start: Any) -> None:
    async with start("Ok.") as d:
        typed((await opened(d, "f8", SettingsScreen)), theme="ansi-dark", animation="none")
        await saved(d)
        await d.until(lambda: d.app.theme == "ansi-dark")
        await d.say("q")
    prefs = Preferences.load()
    assert (prefs.theme, prefs.animation) == ("ansi-dark", "none")
    async with start("Ok.") as d:
        assert d.app.theme == "ansi-dark"


# ---------------------------------------------------------------------- help, palette


async def test_help_names_nine_keys_and_every_command(start: Any) -> None:
    async with start("Ok.", size=(120, 60)) as d:
        text = str((await opened(d, "f1", HelpScreen)).query_one("#help-text").render())
        for title, most in (("Keys", 9), ("Commands", 20)):
            rows = text.partition(f"\n{title}\n")[2].partition("\n\n")[0].split("\n")
            assert len([row for row in rows if row.strip()]) == most
        for action in ACTIONS:
            assert (f"/{action.slash}  " in text) == bool(action.slash)
        await d.pilot.press("escape")


def test_no_key_that_terminals_take_is_the_only_way() -> None:
    """Every function key, and every key of tmux or a desktop, has a command or a page's key."""
    of_page = {"app.methods"}  # F4, then 2
    on_message = {"chat.version_back", "chat.version_on"}  # left and right
    by_word = {f"{one.action}('{word}')" for one in ACTIONS for word in one.words}
    for action in ACTIONS:
        if action.keys.startswith(("f", "alt+")) or action.keys in ("ctrl+b", "ctrl+up"):
            has_command = action.slash or action.action in by_word
            assert has_command or action.id in of_page | on_message, action.id


async def test_a_question_mark_says_what_works_here(start: Any) -> None:
    async with start("Ok.", size=(100, 60)) as d:
        await d.press("question_mark", until=lambda: isinstance(d.app.screen, HelpScreen))
        assert "/retry" in d.shown
        await d.pilot.press("escape")
        await opened(d, "f4", RaceScreen)
        await opened(d, "question_mark", HelpScreen)
        assert "Keys here" in d.shown
        assert "Race all" not in d.shown  # that is the tab of methods
        assert "Longer" in d.shown
        assert "/retry" not in d.shown
        await d.press("escape", "escape", until=lambda: d.app.screen is d.app.chat)
        await d.type("why?")
        assert d.app.chat.prompt.text == "why?"


async def test_a_function_key_replaces_the_page_on_top(start: Any) -> None:
    async with start("Ok.") as d:
        await opened(d, "f4", RaceScreen)
        assert (await opened(d, "f5", RaceScreen)).tab == "methods"
        await opened(d, "f3", InspectorScreen)
        assert len(d.app.screen_stack) == 3
        await d.press("escape", until=lambda: d.app.screen is d.app.chat)


async def test_the_palette_finds_actions_methods_and_conversations(start: Any) -> None:
    async with start("Ok.") as d:
        await d.say("find me later")
        await d.press("ctrl+n", until=lambda: not d.texts)
        await d.press("ctrl+p", until=lambda: "CommandPalette" in type(d.app.screen).__name__)
        await d.press(*"find me", until=lambda: "Resume: find me later" in d.shown)
        await d.pilot.press("enter")
        await d.press("enter", until=lambda: bool(d.texts))


@pytest.mark.parametrize(
    ("words", "found", "at"),
    [
        ("temperature", "Setting: temperature", "set-temperature"),
        ("theme", "Setting: theme", "set-theme"),
        ("system prompt", "Setting: system prompt", "system"),
        ("context size", "Setting: context size", "set-n_ctx"),
    ],
)
async def test_the_palette_finds_every_setting_and_goes_there(
    start: Any, words: str, found: str, at: str
) -> None:
    async with start("Ok.") as d:
        await d.press("ctrl+p", until=lambda: "CommandPalette" in type(d.app.screen).__name__)
        await d.press(*words, until=lambda: found in d.shown)
        await d.press("enter", until=lambda: isinstance(d.app.screen, SettingsScreen))
        await d.until(lambda: d.app.focused is not None and d.app.focused.id == at)


async def test_the_palette_finds_each_action_by_its_command(start: Any) -> None:
    async with start("Ok.") as d:
        titles = [one.title for one in d.app.get_system_commands(d.app.screen)]
        for action in ACTIONS:
            if action.slash:
                assert any(f"/{action.slash})" in title for title in titles), action.slash
            for word in action.words:
                assert any(title.endswith(f": {word}") for title in titles), word
        for field in FIELDS.values():
            assert f"Setting: {field.label or 'system prompt'}" in titles


async def test_long_lines_of_code_are_wrapped(start: Any) -> None:
    long = "value = " + " + ".join(f"part{i}" for i in range(30))
    async with start(f"```python\n{long}\n```", size=(60, 20)) as d:
        await d.say("q")
        await d.until(lambda: "part29" in d.shown)


async def test_the_settings_turn_pages_and_say_what_an_empty_field_means(start: Any) -> None:
    async with start(size=(80, 24)) as d:
        await d.press("f8", until=lambda: isinstance(d.app.screen, SettingsScreen))
        form = d.app.screen.query_one("#settings")
        assert "random" in d.shown
        await d.press("pagedown", until=lambda: form.scroll_offset.y > 10)
        await d.press("pageup", until=lambda: form.scroll_offset.y == 0)


async def test_a_view_is_named_in_the_strip_and_covers_nothing(start: Any) -> None:
    async with start("Yes and no.", size=(120, 36)) as d:
        await d.say("q")
        await d.press("f2", until=lambda: "Replies as drafted" in d.shown)
        assert not d.app._notifications
        await d.press("f2", "f2", until=lambda: "Replies as" not in d.shown)


async def test_a_base_model_is_named_in_the_strip(start: Any) -> None:
    words = "this model has no chat template: messages are joined without roles"
    notice = Notice(words, level="warning", topic="template")
    async with start(Reply("On and on.", notices=(notice,)), size=(80, 24)) as d:
        await d.say("q")
        assert "a base model: it continues text" in d.shown
        assert not d.notes
