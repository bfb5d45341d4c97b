"""Themes, and terminals with few colours."""

from __future__ import annotations

from typing import Any

import pytest
from textual.color import Color
from textual.theme import BUILTIN_THEMES

from specllama.tui import themes
from specllama.tui.state import Preferences
from specllama.tui.themes import DARK, LIGHT


@pytest.mark.parametrize("name", sorted({**BUILTIN_THEMES, DARK.name: DARK, LIGHT.name: LIGHT}))
async def test_what_carries_information_can_be_read(start: Any, name: str) -> None:
    """In every theme that has colours of its own, on everything that text stands on."""
    async with start() as d:
        d.app.theme = name
        if d.app.current_theme.ansi:
            assert d.app.ink.source("draft") != d.app.ink.source("suffix")
            colours = [themes.ANSI_VARIABLES[f"source-{one}"] for one in ("draft", "suffix")]
            assert colours[0] != colours[1]
            return
        variables = d.app.get_css_variables()
        for text in themes.READ:
            for behind in themes.BEHIND:
                pair = Color.parse(variables[text]), Color.parse(variables[behind])
                assert themes.contrast(*pair) >= 4.49, (text, behind, pair)


def test_contrast_is_that_of_the_standard() -> None:
    assert themes.contrast(Color(0, 0, 0), Color(255, 255, 255)) == pytest.approx(21.0)
    assert themes.contrast(Color.parse("#777777"), Color(255, 255, 255)) == pytest.approx(
        4.48, abs=0.01
    )


def test_sixteen_colours_tell_the_sources_apart() -> None:
    """The terminal's own are used where it has no more: ours would be rounded to one another."""
    used = [one for name, one in themes.ANSI_VARIABLES.items() if name.startswith("source-")]
    assert len(set(used)) == len(used)


async def test_damaged_settings_are_said_and_kept_aside(start: Any) -> None:
    path = Preferences.path()
    path.write_text('{"theme": "dracula", "keys": {"chat.re')
    async with start() as d:
        said = [one.message for one in d.app._notifications]
        assert any(str(path) in words and "are damaged" in words for words in said)
    assert path.with_name("tui.json.damaged").read_text().startswith('{"theme": "dracula"')
    assert Preferences.load().notice == ""
