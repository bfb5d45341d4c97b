"""A newcomer's first two minutes: the app as installed, in tmux, with the bundled pair.

Recorded as it goes: with ``SPECLLAMA_WALK=FILE`` the walk is left there as an asciinema recording
(https://docs.asciinema.org, version 2), to be played with ``asciinema play FILE``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specllama.tui.state import Preferences

LIMIT_S = 120.0  # a busy machine
COLUMNS, ROWS = 100, 30
QUESTION = "What is speculative decoding?"
WALK = os.environ.get("SPECLLAMA_WALK")  # before tests get a home of their own
RECORDER = """
import json, os, sys, time
out = open(sys.argv[1], "w", encoding="utf-8")
head = {"version": 2, "width": int(sys.argv[2]), "height": int(sys.argv[3]), "title": "specllama"}
print(json.dumps(head), file=out, flush=True)
begun = time.monotonic()
while data := os.read(0, 65536):
    text = data.decode("utf-8", "replace")
    print(json.dumps([round(time.monotonic() - begun, 3), "o", text]), file=out, flush=True)
"""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed"),
]


class Pane:
    """A terminal of its own tmux server, in which a command runs."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.socket = str(folder / "tmux")
        self.tmux(
            *("-f", os.devnull, "new-session", "-d", "-s", "walk", "-x", str(COLUMNS)),
            *("-y", str(ROWS), *command),
        )

    def tmux(self, *words: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self.socket, *words],
            capture_output=True,
            text=True,
            check=True,
            env=dict(os.environ),  # not the process's own: readline puts a size of its own there
        )
        return done.stdout

    def record(self, path: Path) -> None:
        words = [sys.executable, "-c", RECORDER, str(path), str(COLUMNS), str(ROWS)]
        quoted = " ".join(f"'{word}'" for word in words)
        self.tmux("pipe-pane", "-t", "walk", "-o", quoted)

    @property
    def screen(self) -> str:
        return self.tmux("capture-pane", "-p", "-t", "walk")

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", "walk", *keys)

    def until(self, true: Callable[[str], object]) -> str:
        end = time.monotonic() + LIMIT_S
        while not true(screen := self.screen):
            assert time.monotonic() < end, screen
            time.sleep(0.05)
        return screen

    def sees(self, *words: str) -> str:
        return self.until(lambda screen: all(word in screen for word in words))

    def ended(self) -> None:
        end = time.monotonic() + LIMIT_S
        while self.alive:
            assert time.monotonic() < end, "it did not leave"
            time.sleep(0.05)

    @property
    def alive(self) -> bool:
        asked = subprocess.run(
            ["tmux", "-S", self.socket, "has-session", "-t", "walk"], capture_output=True
        )
        return asked.returncode == 0


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
    pane.sees("drafts all the same", "/demo")  # no pair is fast with one thread

    # Does it answer?
    pane.press("-l", QUESTION)
    pane.press("Enter")
    screen = pane.sees("tok/s", "seed", "Enter sends")
    assert QUESTION in screen
    verdict = re.compile(r"(PAYS|LOSES|UNSURE) \d|OFF|NOT KNOWN YET")
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
