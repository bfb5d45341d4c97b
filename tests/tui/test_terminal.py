"""The app in a real pseudo-terminal: what a person's terminal sees, and what it is left with."""

import os
import signal
import sys
from pathlib import Path

import pytest
from terminals import DEMO, ENTER, LEAVE, MOUSE_OFF, terminal

from specllama import paths


def test_a_chat_and_a_clean_end(tmp_path: Path) -> None:
    with terminal(tmp_path) as t:
        t.until(lambda: "demo-target" in t.words)
        t.type("Hello\r")
        t.until(lambda: "tok/s" in t.words and "seed 1" in t.words)
        t.type("\x11")
        assert t.ended() == 0
        assert LEAVE in t.seen
        assert MOUSE_OFF in t.seen
        assert t.children() == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal(tmp_path: Path, number: signal.Signals) -> None:
    with terminal(tmp_path) as t:
        t.until(lambda: "demo-target" in t.words)
        t.process.send_signal(number)
        assert t.ended() == 128 + number
        assert LEAVE in t.seen
        assert MOUSE_OFF in t.seen


@pytest.mark.e2e
@pytest.mark.parametrize("words", [[], ["chat", "-m", "tiny"]])
def test_the_command_that_opens_the_app_ends_as_the_app_does(
    tmp_path: Path, words: list[str]
) -> None:
    """Not ``run`` of the app, but ``specllama`` as it is typed."""
    with terminal(tmp_path, command=[sys.executable, "-m", "specllama", *words]) as t:
        t.until(lambda: ENTER in t.seen and "tiny-target" in t.words)
        t.process.terminate()
        assert t.ended() == 143
        assert LEAVE in t.seen
        assert t.children() == []


def test_a_crash_of_the_app_is_a_failure_and_restores_the_terminal(tmp_path: Path) -> None:
    patch = DEMO + "    SpecllamaApp.action_show = lambda self, page: 1 / 0\n"
    with terminal(tmp_path, patch=patch) as t:
        t.until(lambda: "demo-target" in t.words)
        t.type("\x1bOP")
        assert t.ended() != 0
        assert LEAVE in t.seen


def test_a_killed_engine_leaves_the_terminal_and_the_app_alone(tmp_path: Path) -> None:
    with terminal(tmp_path) as t:
        t.until(lambda: "demo-target" in t.words)
        t.type("question\r")
        t.until(lambda: "Speculative" in t.words)
        (child,) = t.children()
        os.kill(child, signal.SIGKILL)
        t.until(lambda: "SIGKILL" in t.words)
        before = len(t.words)
        t.type("the next\r")
        t.until(lambda: "seed 1" in t.words[before:])
        t.type("\x11")
        assert t.ended() == 0
        assert t.children() == []


@pytest.mark.e2e
def test_the_bundled_pair_answers_in_a_terminal(tmp_path: Path) -> None:
    if not (paths.bundled_dir() / "tiny-target-q4_0.gguf").is_file():
        pytest.skip("the bundled pair is not there")
    one_thread = {
        "patch": "from specllama.settings.params import EngineOptions",
        "more": "options=EngineOptions(threads=1)",
    }
    with terminal(tmp_path, target="tiny", max_tokens=24, **one_thread) as t:
        t.until(lambda: "tiny-target" in t.words)
        t.type("Tell me about a fox\r")
        t.until(lambda: "tok/s" in t.words and "seed 1" in t.words)
        t.type("\x1bOR")
        t.until(lambda: "Round inspector" in t.words)
        t.type("\x11")
        assert t.ended() == 0
        assert t.children() == []
