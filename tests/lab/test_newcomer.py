"""A newcomer's first two minutes: the app as installed, in tmux, with the bundled pair.

Recorded as it goes: with ``SPECLLAMA_WALK=FILE`` the walk is left there as an asciinema recording
(https://docs.asciinema.org, version 2), to be played with ``asciinema play FILE``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from panes import COLUMNS, ROWS, Pane

from specllama.tui.state import Preferences

QUESTION = "What is speculative decoding?"
WALK = os.environ.get("SPECLLAMA_WALK")  # before tests get a home of their own
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


@pytest.fixture
def pane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pane]:
    Preferences.path().unlink()  # as on a machine that has never seen specllama
    monkeypatch.setenv("LANG", "C.UTF-8")
    monkeypatch.setenv("SPECLLAMA_THREADS", "1")  # a busy machine makes two wait for each other
    pane = Pane(tmp_path, sys.executable, "-m", "specllama")
    try:
        yield pane
    finally:
        if pane.alive:
            pane.tmux("kill-server")


def test_the_first_two_minutes(pane: Pane, tmp_path: Path) -> None:
    recording = Path(WALK or tmp_path / "walk.cast")
    pane.record(recording)

    # What is this? A labelled recording: guess, check, keep.
    pane.sees("A recording: the bundled model at the cost of", "guess")
    pane.sees("check", "the large model reads them all in one pass")
    pane.sees("keep", "it adds one token of its own")
    assert not re.search(r"\s[–-](\s[–-])+\s", pane.screen)  # no row of dashes

    # Why does the bundled pair not get faster, and what would?
    pane.sees("drafts all the same", "Ctrl+L")

    # Does it answer?
    pane.press("-l", QUESTION)
    pane.press("Enter")
    screen = pane.sees("tok/s", "seed", "Enter sends")
    assert QUESTION in screen
    verdict = re.compile(r"(PAYS|LOSES|UNSURE) \d|Drafting off|Not known yet")
    assert verdict.search(screen), screen

    # Does it pay? The race says so, with its proof.
    pane.press("F4")
    screen = pane.sees("plain", "drafted", "tokens identical")
    same, of = re.search(r"(\d+) of (\d+) tokens identical", screen).groups()  # type: ignore[union-attr]
    assert same == of
    pane.press("Escape")
    pane.sees("Write a message")

    # What did it guess? The inspector, round by round.
    pane.press("F3")
    pane.sees("Round inspector", "draft", "verify", "commit")
    pane.press("Right", "Right")
    pane.until(lambda screen: re.search(r"saved \d|lost \d|price of one target pass", screen))
    pane.press("Escape")

    # How do I leave?
    pane.sees("Write a message")
    pane.press("C-q")
    pane.ended()
    head, *frames = [json.loads(line) for line in recording.read_text("utf-8").splitlines()]
    assert (head["width"], head["height"]) == (COLUMNS, ROWS)
    assert any(QUESTION[:8] in text for _, _, text in frames)
