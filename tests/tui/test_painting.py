"""What is drawn while a reply is written: once, what changed, and what Textual would draw."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from fakes import Reply
from textual._compositor import Compositor
from textual.app import App, ComposeResult
from textual.geometry import Region
from textual.widget import Widget
from textual.widgets import Static
from textual.widgets._markdown import MarkdownBullet, MarkdownParagraph

from specllama.tui.bridge import Rest
from specllama.tui.painting import LeanCompositor
from specllama.tui.widgets.growing import GrowingMarkdown

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


async def test_any_part_of_the_screen_is_drawn_as_textual_does(start: Any) -> None:
    async with start(Reply(REPLY), size=(120, 36)) as d:
        await d.say("q")
        await d.pilot.press("f1")
        await d.pilot.press("escape")
        screen = d.app.chat
        lean = screen._compositor
        assert isinstance(lean, LeanCompositor)
        width, height = lean.size
        whole = Compositor._render_chops(lean, lean.size.region, lambda y: True)
        assert lean._render_chops(lean.size.region, lambda y: True) == whole
        rng = random.Random(1)
        for _ in range(30):
            x, y = rng.randrange(width), rng.randrange(height)
            part = Region(x, y, rng.randint(1, width - x), rng.randint(1, height - y))
            screen._compositor._dirty_regions = {part}
            update = lean.render_partial_update()
            assert update is not None
            for line in part.line_range:
                for first, last in pairwise(lean.cuts[line]):
                    if first < part.right and part.x < last:
                        assert update.chops[line][first] == whole[line][first]


async def test_a_reply_never_has_the_whole_screen_drawn_anew(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    full = LeanCompositor.render_full_update

    def counted(self: LeanCompositor, simplify: bool = False) -> Any:
        drawn.append("full")
        return full(self, simplify)

    async with start(Reply(REPLY * 3, accept=(1,)), Reply(REPLY * 3, accept=(1,))) as d:
        await d.say("q")
        monkeypatch.setattr(LeanCompositor, "render_full_update", counted)
        await d.say("again")
        assert not drawn


class Bare(App[None]):
    def compose(self) -> ComposeResult:
        yield GrowingMarkdown()


def written(view: Widget) -> Iterator[tuple[str, str]]:
    """Every bullet and text in a view, in order."""
    for child in view.walk_children(Widget):
        if isinstance(child, MarkdownBullet):
            yield "bullet", child.symbol
        elif isinstance(child, MarkdownParagraph):
            yield "text", child._content.plain
        elif isinstance(child, Static):
            yield "static", str(child.render())


LISTS = (
    REPLY,
    "".join(f"{i}. item {i}\n" for i in range(1, 13)),
    "- a\n\n  more of a\n- b\n  ```\n  code\n  ```\n- c\n",
    "* a\n* b\n\n1) x\n2) y\n\nend",
    "- a\n  1. b\n     - c\n       d\n  2. e\n- f\n",
    "3. starts\n4. at three\n",
)


@pytest.mark.parametrize("text", LISTS)
async def test_a_list_that_grew_is_the_list_of_the_whole_text(text: str) -> None:
    app = Bare()
    async with app.run_test(size=(80, 40)) as pilot:
        whole = app.query_one(GrowingMarkdown)
        await whole.update(text)
        await pilot.pause()
        expected = list(written(whole))
        for step in (1, 5):
            grown = GrowingMarkdown()
            await app.mount(grown)
            for at in range(0, len(text), step):
                await grown.append(text[at : at + step])
            await pilot.pause()
            assert list(written(grown)) == expected
            heights = [[block.size.height for block in view.children] for view in (grown, whole)]
            assert heights[0] == heights[1]
            await grown.remove()


async def test_the_first_items_of_a_list_stay_as_they_are() -> None:
    app = Bare()
    async with app.run_test(size=(80, 24)) as pilot:
        view = app.query_one(GrowingMarkdown)
        await view.append("1. one\n2. tw")
        await pilot.pause()
        first = view.query(MarkdownParagraph).first()
        await view.append("o\n3. three")
        await pilot.pause()
        assert view.query(MarkdownParagraph).first() is first
        assert [p._content.plain for p in view.query(MarkdownParagraph)] == ["one", "two", "three"]


async def test_a_line_that_takes_no_more_room_is_not_laid_out() -> None:
    app = Bare()
    async with app.run_test(size=(80, 24)) as pilot:
        view = app.query_one(GrowingMarkdown)
        await view.append("A few words")
        await pilot.pause()
        laid = []
        app.screen.screen_layout_refresh_signal.subscribe(view, lambda _: laid.append(1), True)
        await view.append(" and some more")
        await pilot.pause()
        assert not laid
        await view.append(" words" * 20)
        await pilot.pause()
        assert laid
        assert view.query(MarkdownParagraph).first().size.height == 2


def test_figures_rest_but_the_last_ones_are_drawn() -> None:
    now = 0.0
    rest = Rest(1.0, clock=lambda: now)
    assert rest.over(True)
    now = 0.4
    assert not rest.over(True)
    now = 1.0
    assert rest.over(False)
    now = 9.0
    assert not rest.over(False)
