"""What was checked of a pair: kept, found again, and asked for again when something changed."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

import pytest
from fakes import engine_info, model_info

from specllama import paths
from specllama.interface import EngineInfo
from specllama.store import checks
from specllama.store.checks import Finding, add, day, newest, rests_on

GOOD = Finding(True, "64 of 64 tokens identical")


@pytest.fixture
def pair(tmp_path: Path) -> EngineInfo:
    for name in ("target.gguf", "draft.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    return engine_info(
        target=model_info("target", path=str(tmp_path / "target.gguf")),
        draft=model_info("draft", path=str(tmp_path / "draft.gguf")),
    )


def test_the_newest_check_of_each_kind_counts(pair: EngineInfo) -> None:
    assert newest(pair) == {}
    assert add(pair, "prove", {"text": GOOD})
    add(pair, "race", {"text": Finding(False, "12 of 64"), "speed": Finding(True, "1.30×")})
    found = newest(pair)
    assert {what: check.by for what, check in found.items()} == {"text": "race", "speed": "race"}
    assert not found["text"].finding.ok
    assert found["text"].changes(rests_on(pair)) == []


def test_another_pair_has_checks_of_its_own(pair: EngineInfo) -> None:
    add(pair, "prove", {"text": GOOD})
    assert newest(engine_info(target=pair.target, draft=None)) == {}
    assert newest(engine_info(target=pair.draft, draft=pair.target)) == {}


def test_an_upgrade_another_file_and_another_device_ask_again(
    pair: EngineInfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(pair, "race", {"speed": GOOD})
    check = newest(pair)["speed"]
    monkeypatch.setattr(
        checks, "package_versions", lambda: {"specllama": "9.1", "llama-cpp-python": "9.2"}
    )
    was = check.rests_on["llama-cpp-python"]
    assert f"llama-cpp-python changed from {was} to 9.2" in check.changes(rests_on(pair))
    monkeypatch.undo()
    monkeypatch.setattr("specllama.backend.devices.library_files", lambda: ["libllama.so 1 2"])
    assert check.changes(rests_on(pair)) == ["the build of llama.cpp changed"]
    monkeypatch.undo()
    other = engine_info(target=pair.target, draft=pair.draft, device="CUDA", threads=3)
    assert check.changes(rests_on(other)) == [
        "the device changed from CPU (scripted) to CUDA",
        "the number of threads changed from 2 to 3",
    ]
    os.utime(pair.target.path, ns=(1, 1))
    assert check.changes(rests_on(pair)) == ["the target's file changed"]
    assert pair.draft is not None
    Path(pair.draft.path).unlink()
    assert check.changes(rests_on(pair))[-1] == "the draft model's file changed"


def test_lines_that_nobody_can_read_are_passed_over(pair: EngineInfo) -> None:
    add(pair, "race", {"speed": GOOD})
    file = paths.checks_file()
    whole = file.read_bytes()
    wrong = whole.replace(b'"when_s":', b'"when_s":1e300,"x":')
    file.write_bytes(b"[]\nnull\n{}\n\xff\n" + whole + wrong + whole[: len(whole) // 2])
    assert newest(pair)["speed"].finding == GOOD
    add(pair, "bench", {"speed": GOOD})  # behind a torn line
    assert newest(pair)["speed"].by == "bench"


def test_a_store_that_cannot_be_written_stops_nothing(pair: EngineInfo) -> None:
    paths.checks_file().parent.mkdir(parents=True)
    paths.checks_file().mkdir()
    assert not add(pair, "race", {"speed": GOOD})
    assert newest(pair) == {}


def test_a_day_in_words() -> None:
    now = datetime(2026, 11, 22, 20, 0).timestamp()
    assert day(datetime(2026, 11, 22, 9, 5).timestamp(), now) == "today 09:05"
    assert day(datetime(2026, 11, 2, 9, 5).timestamp(), now) == "2 Nov"
    assert day(datetime(2025, 11, 2, 9, 5).timestamp(), now) == "2 Nov 2025"
    assert day(time.time(), time.time()).startswith("today ")
