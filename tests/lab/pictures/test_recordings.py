"""What a command printed in a terminal is kept, and drawn without running it again."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

import pytest
from pictures.recordings import Recording, main, picture, record
from pictures.screenshots import draw_recordings

from specllama import __version__
from specllama.errors import UsageError


def drawn_text(svg: str) -> str:
    texts = re.findall(r"<text [^>]*>(.*?)</text>", svg, re.S)
    return html.unescape(" ".join(texts)).replace("\xa0", " ")


def test_a_command_is_recorded_as_a_terminal_shows_it() -> None:
    seen = record(["--version"], columns=70)
    assert seen.command == "specllama --version"
    assert seen.columns == 70
    assert __version__ in "\n".join(seen.lines)
    # Help is as wide as the terminal it is asked for in.
    narrow, wide = record(["tune", "--help"], 50), record(["tune", "--help"], 78)
    assert len(narrow.lines) > len(wide.lines)


def test_a_command_that_fails_leaves_no_recording(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "data" / "x.json"
    assert main([str(kept), "tune", "no-such-model.gguf"]) == 1
    assert "exit code 3" in capfd.readouterr().err
    assert not kept.exists()
    assert main([str(kept)]) == 1


def test_folders_of_the_person_are_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    seen = record(["log", "path"])
    assert str(tmp_path) not in "\n".join(seen.lines)
    assert seen.lines[0].startswith(f"~{os.sep}home")


def test_a_picture_has_every_line_and_is_the_same_each_time(tmp_path: Path) -> None:
    recording = Recording("specllama tune", 60, ["    1   0.50 ms  █▌", "", "\x1b[32mgood\x1b[0m"])
    recording.save(tmp_path / "data" / "tune.json")
    assert Recording.load(tmp_path / "data" / "tune.json") == recording
    (drawn,) = draw_recordings(tmp_path)
    assert drawn == tmp_path / "tune.svg"
    svg = drawn.read_text("utf-8")
    assert svg == picture(recording)
    text = drawn_text(svg)
    for words in ("specllama tune", "    1   0.50 ms  █▌", "good"):
        assert words in text
    assert "\x1b" not in svg


def test_a_file_that_is_no_recording_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.json").write_text('{"command": 3}')
    with pytest.raises(UsageError, match=r"x\.json is no recording"):
        draw_recordings(tmp_path)
