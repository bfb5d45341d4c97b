"""Terminals without colours or without anything but ASCII."""

from __future__ import annotations

from typing import Any

import pytest
from rich.segment import Segment
from textual.color import Color
from textual.style import Style

from specllama.tui.plain_signs import SIGNS, PlainSigns
from specllama.tui.state import Preferences

BLACK = Color(0, 0, 0)


def test_frames_and_scrollbars_become_ascii_of_the_same_width() -> None:
    style = Style(bold=True).rich_style
    drawn = [Segment("┌─┬─┐", style), Segment("│ é ▌", None), Segment("plain", style)]
    shown = PlainSigns().apply(drawn, BLACK)
    assert [s.text for s in shown] == ["+-+-+", "| é |", "plain"]
    assert [s.style for s in shown] == [style, None, style]


@pytest.mark.parametrize("sign", sorted(SIGNS))
def test_every_sign_is_replaced_by_one_of_ascii(sign: int) -> None:
    assert len(SIGNS[sign]) == 1
    assert SIGNS[sign].isascii()


async def test_damaged_settings_are_said_and_kept_aside(start: Any) -> None:
    path = Preferences.path()
    path.write_text('{"theme": "dracula", "keys": {"chat.re')
    async with start() as d:
        said = [one.message for one in d.app._notifications]
        assert any(str(path) in words and "are damaged" in words for words in said)
    assert path.with_name("tui.json.damaged").read_text().startswith('{"theme": "dracula"')
    assert Preferences.load().notice == ""
