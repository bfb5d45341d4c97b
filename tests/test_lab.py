"""A smoke test of each program in ``tests/lab``, which measure, draw or play longer than the suite.

Their own tests run by name: ``pytest tests/lab/gpu``.
"""

import random
import re
import runpy
import sys
from pathlib import Path

import pytest
from engines import measured
from pictures.recordings import Recording, picture
from pictures.screenshots import draw_recordings

from specllama.bench.prompts import load_prompts
from specllama.settings.params import EngineOptions

LAB = Path(__file__).parent / "lab"
PROGRAMS = [
    path
    for path in sorted(LAB.rglob("*.py"))
    if not path.name.startswith("test_")
    and re.search(r"ArgumentParser\(|click\.command\(", path.read_text("utf-8"))
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(LAB)))
def test_a_program_finds_its_modules_and_shows_its_help(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(program), "--help"])
    monkeypatch.setattr(sys, "path", [str(program.parent), *sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(program), run_name="__main__")
    assert ended.value.code in (0, None)
    assert "usage:" in capsys.readouterr().out.lower()


def test_a_picture_has_every_line_and_is_the_same_each_time(tmp_path: Path) -> None:
    recording = Recording("specllama tune", 60, ["    1   0.50 ms  █▌", "", "\x1b[32mgood\x1b[0m"])
    recording.save(tmp_path / "data" / "tune.json")
    [drawn] = draw_recordings(tmp_path)
    svg = drawn.read_text("utf-8")
    assert svg == picture(recording)
    assert "good" in " ".join(re.findall(r"<text [^>]*>(.*?)</text>", svg, re.S))
    assert "\x1b" not in svg


def test_clients_that_leave_or_do_not_read_leave_nothing_behind(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    from abuse import figures
    from servers import table

    found = figures(table(tmp_path), cancels=96, readers=24, asks=4)
    assert found["wrong"] == []
    assert found["cancels"]["after"]["going on"] == 0
    assert found["dead readers"]["after"]["cells"] <= 2048


@pytest.mark.e2e
def test_every_reply_of_a_storm_is_the_one_of_its_request_alone() -> None:
    from under_load import Storm

    one = EngineOptions(n_ctx=512, threads=1)
    many = EngineOptions(n_ctx=512, threads=1, parallel=4, kv_ram=8)
    with measured("tiny", None, many) as engine, measured("tiny", None, one) as alone:
        texts = [engine.encode(prompt.content)[0] for prompt in load_prompts()[::20]]
        methods = [name for name in engine.drafters if name != "none"]
        storm = Storm(engine, texts, methods, random.Random(5), longest=24)
        storm.run(30)
        assert storm.check(alone) == []
    counts = storm.counts
    assert counts["equal"] == len(storm.done) == 30 - counts["dropped"]
    assert counts["most at once"] > 1
    for what in ("fork", "park", "accepted", "goes on"):
        assert counts[what] > 0, what


@pytest.mark.e2e
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="kills and /proc")
def test_every_reply_of_a_day_is_the_one_of_a_fresh_engine(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    from day_in_life import lived

    told = lived(tmp_path, conversations=4, turns=2, events=1, seed=2)
    assert told["wrong"] == []
    assert told["equal"] == told["replies"] == 8
    for name in ("rests", "engines killed", "servers killed", "full disks", "sleeps"):
        assert told[name] == 1
    begin, *_, end = told["MB at rest"]
    assert end < begin + 30, "memory goes back to its floor"
