"""What a model may write: the view must show all of it, exactly, and none of it may act."""

import asyncio
import random
from typing import Any

import pytest
from app_driver import GatedEngine, Recipe, shown_source
from fakes import Reply, ScriptedEngine
from textual.app import App, ComposeResult
from textual.widgets import Collapsible, Markdown

from specllama.text import sanitize
from specllama.tui.widgets.markdown_parser import parser
from specllama.tui.widgets.message import AssistantMessage, PlainText

BLOCKS = (
    "# Heading\n\n",
    "A paragraph with **bold**, *italics* and `code`.\n\n",
    "- one\n- two\n  - nested\n- three\n\n",
    "1. first\n2. second\n\n",
    "```python\ndef f(x):\n    # not a heading\n    return {'a': [x]}\n```\n\n",
    "~~~\n~~ not struck ~~\n~~~\n\n",
    "| a | b |\n|---|--:|\n| 1 | 2 |\n| `|` | x |\n\n",
    "> quoted\n> > twice\n\n",
    "[link](https://example.com) and <b>html</b> and $x^2$\n\n",
    "---\n\n",
    "Ünïcödé 漢字 🦙 e\u0301\n\n",
    "    indented code\n\n",
    "- [ ] todo\n- [x] done\n\n",
)


def reply(seed: int) -> str:
    rng = random.Random(seed)
    text = "".join(rng.choice(BLOCKS) for _ in range(rng.randint(2, 4)))
    # Half of the replies end in the middle of something, as a stopped one does.
    return text[: rng.randint(len(text) // 2, len(text))] if seed % 2 else text


class Bare(App[None]):
    def compose(self) -> ComposeResult:
        yield Markdown(parser_factory=parser)


def outline(view: Markdown) -> list[tuple[str, str]]:
    """The blocks as they stand on the screen: kind, and text where a block has its own."""
    return [
        (type(w).__name__, getattr(getattr(w, "_content", None), "plain", ""))
        for w in view.children
    ]


async def test_fifty_streamed_replies_equal_the_text_and_the_view_of_the_whole(start: Any) -> None:
    async with start(*[reply(i) for i in range(50)], size=(80, 24)) as d:
        for i in range(50):
            text = reply(i)
            message = AssistantMessage(0, "x", live=True)
            await d.app.chat.transcript.fill([message])
            rng = random.Random(i)
            at = 0
            while at < len(text):
                size = rng.choice((1, 9, 40, 90))
                await message.stream(text[at : at + size], [])
                at += size
            assert shown_source(message) == sanitize(text)
            streamed = outline(message.query_one(Markdown))
            await message.settle(text)
            assert shown_source(message) == sanitize(text)
            if i % 2 == 0:
                assert streamed == outline(message.query_one(Markdown))


async def test_a_whole_reply_through_the_app_equals_the_engines_text(start: Any) -> None:
    text = "".join(BLOCKS)
    async with start(Reply(text, accept=(3, 0, 1))) as d:
        await d.say("q")
        assert d.texts[-1][1] == text
        assert shown_source(d.app.chat.query(AssistantMessage).last()) == text


async def test_an_open_fence_stays_code_when_a_reply_is_continued(start: Any) -> None:
    first, rest = "```py\nif x:\n", "    # comment\n    y()\n```\nafter"
    async with start(first, rest) as d:
        await d.say("q")
        await d.press("ctrl+t", until=lambda: d.texts[-1][1] == first + rest)
        await d.idle()
        app = Bare()
        async with app.run_test(size=(80, 24)) as pilot:
            await app.query_one(Markdown).update(first + rest)
            await pilot.pause()
            whole = outline(app.query_one(Markdown))
        shown = outline(d.app.chat.query(AssistantMessage).last().query_one(Markdown))
        assert [kind for kind, _ in shown] == [kind for kind, _ in whole]


async def test_escape_sequences_become_visible_and_nothing_reaches_the_terminal(start: Any) -> None:
    attack = "a\x1b[2Jb \x1b]52;c;aGk=\x07 c\x9bd \u202eevil\u202c [/nope] [bold]x[/]"
    async with start(attack, size=(120, 30)) as d:
        await d.say(attack)
        for _ in range(3):
            shown = d.shown
            assert "\x1b" not in shown
            assert "\x9b" not in shown
            assert "␛" in shown
            assert "[/nope]" in shown
            await d.pilot.press("f2")
            await d.pilot.pause()
        await d.press("f3", until=lambda: len(d.app.screen_stack) == 3)
        assert "\x1b" not in d.shown


@pytest.mark.parametrize(
    "bomb",
    [
        "> " * 2000 + "x",
        "\n".join("  " * i + "- x" for i in range(200)),
        "[" * 5000,
        "*a " * 3000,
        "|a" * 400 + "|\n" + "|-" * 400 + "|\n" + ("|x" * 400 + "|\n") * 8,
        "`" * 3000,
    ],
    ids=["quotes", "lists", "brackets", "stars", "table", "ticks"],
)
async def test_markdown_bombs_are_survived(start: Any, bomb: str) -> None:
    async with start("Ok.") as d:
        message = AssistantMessage(0, "x", live=True)
        await d.app.chat.transcript.fill([message])
        for at in range(0, len(bomb), 1500):
            await message.stream(bomb[at : at + 1500], [])
        await asyncio.wait_for(message.settle(bomb), 20)
        await d.pilot.pause()
        assert message.text == bomb


async def test_a_line_of_a_hundred_thousand_characters_is_shown_plain(start: Any) -> None:
    line = "x" * 100_000
    async with start("Ok.") as d:
        message = AssistantMessage(0, "x", live=True)
        await d.app.chat.transcript.fill([message])
        for at in range(0, len(line), 5000):
            await message.stream(line[at : at + 5000], [])
        await message.settle(line)
        assert message.query(PlainText)
        assert "".join(message.query_one(PlainText)._chunks) == line
        assert "too large for Markdown" in "".join(str(w.render()) for w in message.query("Static"))


async def test_thoughts_are_collapsed_and_apart_from_the_reply(start: Any) -> None:
    text = "<think>\nLet me see.\n</think>\n\nThe answer."
    async with start(text) as d:
        await d.say("q")
        box = d.app.chat.query_one(Collapsible)
        assert box.collapsed
        assert "Let me see." not in d.shown
        assert "The answer." in d.shown
        box.collapsed = False
        await d.until(lambda: "Let me see." in d.shown)
        assert d.texts[-1][1] == "The answer."
        assert d.app.session.messages[-1].reasoning == "Let me see."
        assert "3 words" in box.title


async def test_links_are_never_opened(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("textual.app.App.open_url", lambda self, url, **kw: opened.append(url))
    async with start("See [this](https://example.com/\x1b) now.") as d:
        await d.say("q")
        view = d.app.chat.query(AssistantMessage).last().query_one(Markdown)
        view.post_message(Markdown.LinkClicked(view, "https://example.com/\x1b"))
        await d.until(lambda: d.app._notifications)
        assert not opened


async def test_scrolling_away_is_respected_while_a_reply_grows(start: Any) -> None:
    engine = GatedEngine(["\n\n".join(f"Paragraph {i}." for i in range(80))], rounds=40)
    async with start(recipe=Recipe(engine), size=(80, 24)) as d:
        await d.send("go")
        await d.until(
            lambda: len(d.app.chat.live_record.rounds) == 40 if d.app.chat.live_record else False
        )
        transcript = d.app.chat.transcript
        await d.until(lambda: transcript.max_scroll_y > 20)
        transcript.scroll_to(y=3, animate=False, immediate=True)
        await d.pilot.pause()
        engine.gate.set()
        await d.idle()
        assert transcript.scroll_y < 10


async def test_model_names_cannot_act_either(start: Any) -> None:
    from fakes import engine_info, model_info

    info = engine_info(target=model_info("target", name="\x1b[31m[/x] evil"))
    async with start(recipe=Recipe(ScriptedEngine(["Ok."], info=info))) as d:
        await d.say("q")
        assert "\x1b" not in d.shown
        assert "[/x] evil" in d.shown


# -- lists that grow while a reply is written --


REPLY = """\
A paragraph that is long enough to be broken into several lines on this screen, *with* **marks**.

1. one
2. two with `code` in it
   - inside
   - and deeper
     1. still
3. three

```python
def f(x):
    return x
```

| a | b |
|---|---|
| 1 | 2 |

- last
"""
