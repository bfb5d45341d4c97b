"""Lists that grow while a reply is written: what stands stays, and the end is the whole text's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from textual.app import App, ComposeResult
from textual.widget import Widget
from textual.widgets import Static
from textual.widgets._markdown import MarkdownBullet, MarkdownParagraph

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
