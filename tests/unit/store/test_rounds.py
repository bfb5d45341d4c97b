"""The round log: what is written can be read, whatever happens to the process, disk or file."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fakes
import pytest
from fakes import Reply, ScriptedEngine
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specllama.errors import StoreError, UsageError
from specllama.events import (
    Chance,
    Chances,
    Event,
    Finished,
    Notice,
    ReasoningDelta,
    RoundDone,
    Started,
    TextDelta,
)
from specllama.paths import rounds_dir
from specllama.settings.params import GenerateParams, SamplingParams
from specllama.store import texts
from specllama.store.codec import encode, encode_event, params_from_dict, params_to_dict
from specllama.store.rounds import SCHEMA, Logged, RoundLog, find_run, list_runs, read_run
from specllama.store.texts import read_texts

TEXT = "The target checks all guesses of a round in one pass, and keeps what agrees. " * 3


def write_run(reply: Reply | str = TEXT, turns: int = 1, **changes: object) -> tuple[Path, list]:
    engine = Logged(ScriptedEngine([reply]))
    params = GenerateParams(seed=7).replace(**changes)
    events = [event for _ in range(turns) for event in engine.generate("Hello", params)]
    log = engine.log
    engine.close()
    return log.path, events


def written_to(log: RoundLog, engine: ScriptedEngine) -> Iterator[Event]:
    """The events of a request that is kept in this log."""
    logged = Logged(engine)
    logged.log = log
    return logged.generate("x", GenerateParams())


def test_round_trip() -> None:
    path, events = write_run(Reply(TEXT, tree=True, near_tie_rounds=frozenset({2})), turns=2)
    record = read_run(path)
    assert record.skipped == 0
    assert record.header["schema"] == SCHEMA
    assert record.header["target"]["name"] == "scripted target"
    assert record.header["params"]["seed"] == 7
    assert set(record.header["versions"]) >= {"specllama", "llama-cpp-python", "python"}
    assert [turn.index for turn in record.turns] == [0, 1]
    assert record.rounds == [e for e in events if isinstance(e, RoundDone)]
    assert [t.started for t in record.turns] == [e for e in events if isinstance(e, Started)]
    assert [t.finished for t in record.turns] == [e for e in events if isinstance(e, Finished)]


def test_lines_are_what_the_design_page_promises() -> None:
    path, _ = write_run()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["type"] for line in lines[:3]] == ["run", "start", "round"]
    assert lines[-1]["type"] == "finish"
    assert {
        "turn",
        "index",
        "t_s",
        "n_past",
        "source",
        "draft_max",
        "window_reason",
        "drafted",
        "drafted_text",
        "confidence",
        "accepted",
        "target_token",
        "target_kind",
        "draft_ms",
        "verify_ms",
        "other_ms",
        "near_tie",
    } <= set(lines[2])


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 4000), junk=st.binary(max_size=40))
def test_a_torn_or_damaged_log_never_breaks_reading(tmp_path: Path, cut: int, junk: bytes) -> None:
    path, _ = write_run()
    data = path.read_bytes()
    path.unlink()
    torn = tmp_path / "x.jsonl"
    torn.write_bytes(data[: min(cut, len(data))] + b"\n" + junk + b"\n" + data)
    record = read_run(torn)
    assert len([t for t in record.turns if t.finished]) >= 1
    assert record.header["schema"] == SCHEMA


@pytest.mark.parametrize(
    "line",
    [
        {"type": "later", "turn": 0},
        {"type": "round", "turn": 0},
        {"type": "round", "drafted": 5},
        {"type": ["x"]},
        {"type": "finish", "turn": "x"},
        [1, 2],
        "text",
        None,
    ],
)
def test_unknown_lines_are_counted(line: object) -> None:
    path, _ = write_run()
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert read_run(path).skipped == 1


def test_rounds_that_contradict_themselves_are_skipped() -> None:
    path, events = write_run(Reply(TEXT, accept=(2,)))
    good = next(e for e in events if isinstance(e, RoundDone) and e.drafted).to_dict()
    for change in (
        {"accepted_path": [0, 99]},
        {"parents": [0, 0, 0, 0]},
        {"drafted_text": []},
        {"emitted_text": []},
        {"accepted": -1},
    ):
        with path.open("a") as file:
            file.write(json.dumps({**good, **change, "type": "round", "turn": 0}) + "\n")
    assert read_run(path).skipped == 5


def test_a_torn_tail_gets_a_new_line_first() -> None:
    engine = ScriptedEngine([TEXT])
    log = RoundLog(engine.info, GenerateParams())
    log.path.parent.mkdir(parents=True)
    log.path.write_bytes(b'{"type": "round", "tur')
    list(written_to(log, engine))
    log.close()
    record = read_run(log.path)
    assert record.skipped == 1
    assert record.turns[0].finished is not None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_gives_one_notice_and_every_event() -> None:
    engine = ScriptedEngine([TEXT])
    log = RoundLog(engine.info, GenerateParams())
    log.path.parent.mkdir(parents=True)
    log.path.symlink_to("/dev/full")
    events = list(written_to(log, engine))
    notices = [e for e in events if isinstance(e, Notice)]
    assert [n.level for n in notices] == ["warning"]
    assert "No space left" in notices[0].message
    assert isinstance(events[-1], Finished)
    assert events[-1].text == TEXT
    log.close()


def test_a_short_write_counts_as_full(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    calls = 0

    def short(fd: int, data: bytes) -> int:
        nonlocal calls
        calls += 1
        return real(fd, data[:10] if calls == 4 else data)

    monkeypatch.setattr("specllama.store.rounds.os.write", short)
    path, events = write_run()
    assert len([e for e in events if isinstance(e, Notice)]) == 1
    record = read_run(path)
    assert len(record.rounds) == 1
    assert record.skipped == 1


def test_a_folder_that_cannot_be_made_gives_one_notice(home: Path) -> None:
    home.mkdir()
    (home / "data").write_text("in the way")
    path, events = write_run()
    assert not path.exists()
    assert len([e for e in events if isinstance(e, Notice)]) == 1
    assert isinstance(events[-1], Finished)


def test_closing_early_closes_the_engine_stream() -> None:
    engine = ScriptedEngine([TEXT])
    stream = Logged(engine).generate("x", GenerateParams())
    next(stream)
    stream.close()
    assert engine.requests[0].closed_early


def test_a_killed_writer_loses_nothing_it_acknowledged(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys
        sys.path.insert(0, sys.argv[1])
        from fakes import Reply, ScriptedEngine
        from specllama.settings.params import GenerateParams
        from specllama.store.rounds import Logged
        engine = Logged(ScriptedEngine([Reply("word " * 900, accept=(2,))]))
        for event in engine.generate("x", GenerateParams()):
            if event.type == "started":
                print(engine.log.path, flush=True)
            print(event.type, flush=True)
    """)
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(Path(fakes.__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    path = Path(child.stdout.readline().strip())
    seen = 0
    while seen < 25:
        seen += child.stdout.readline().strip() == "round_done"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    record = read_run(path)
    assert len(record.rounds) >= 25
    assert record.header["schema"] == SCHEMA
    assert record.turns[0].finished is None


def test_listing_and_selection() -> None:
    with pytest.raises(StoreError, match="no round log yet"):
        find_run("last")
    first, _ = write_run()
    names = ["20200101-000000-aaaaaa", "20200102-000000-aabbbb"]
    for name in names:
        (rounds_dir() / f"{name}.jsonl").write_bytes(first.read_bytes())
    (rounds_dir() / "note.txt").write_text("x")
    assert [p.stem for p in list_runs()] == [first.stem, names[1], names[0]]
    assert find_run("last") == first
    assert find_run("20200101").stem == names[0]
    assert find_run("aabbbb").stem == names[1]
    assert find_run(str(first)) == first
    with pytest.raises(UsageError, match="fits 2"):
        find_run("202001")
    with pytest.raises(StoreError, match="no round log is named"):
        find_run("zzz")
    with pytest.raises(StoreError, match="cannot read"):
        read_run(rounds_dir() / "gone.jsonl")


def test_params_survive_and_bad_ones_are_left_out() -> None:
    params = GenerateParams(
        sampling=SamplingParams(temperature=0.3, logit_bias={5: -float("inf"), 7: 1.5}),
        stop=("a", "b"),
        seed=2**64 - 1,
        json_schema="{}",
    )
    data = json.loads(encode(params_to_dict(params)))
    assert params_from_dict(data) == params
    data.update(draft_max="many", verify="guess", future=1, seed=-1, stop="ab", ignore_eos=[])
    data["sampling"]["temperature"] = "hot"
    read = params_from_dict(data)
    assert read.draft_max == GenerateParams().draft_max
    assert read.verify == "match"
    assert read.seed is None
    assert read.stop == ()
    assert read.ignore_eos is False
    assert read.sampling.temperature == SamplingParams().temperature
    assert read.sampling.logit_bias == params.sampling.logit_bias
    assert params_from_dict(None) == GenerateParams()
    assert encode({"x": "\ud800"}) == b'{"x":"?"}'


# -- the quick way to write an event, byte for byte that of the slow one --


SAID = 'She said "é\n🦙" to the fox, and the fox \\ said nothing. ' * 3
EVENTS = [
    *ScriptedEngine([Reply(SAID, tree=True)]).generate("Hello", GenerateParams(seed=3)),
    TextDelta('a "b"\t\x00\x1b'),
    ReasoningDelta("\ud800 alone"),
]
ROUND = next(event for event in EVENTS if isinstance(event, RoundDone) and event.drafted)
ODD = [
    replace(ROUND, balance=math.inf),
    replace(ROUND, plain_ms=math.nan),
    replace(ROUND, q=(math.nan, *ROUND.q[1:])),
    replace(ROUND, p=(0.0, *ROUND.p[1:]), target_text="\ud83e"),
    replace(ROUND, chances=(Chances(1, -math.inf, (97,), (Chance(2, -0.5, (98,)),)),)),
]


@pytest.mark.parametrize("event", [*EVENTS, *ODD], ids=lambda event: event.type)
def test_a_line_is_that_of_the_events_fields(event: Event) -> None:
    assert encode_event(event) == encode(event.to_dict())
    line = encode_event(event, "round", turn=7)
    assert line == encode({**event.to_dict(), "type": "round", "turn": 7})
    assert b"\n" not in line
    assert json.loads(line)["turn"] == 7


# -- texts that a user names to draft from --


def write(path: Path, data: bytes, age: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def test_a_folder_is_read_oldest_first(tmp_path: Path) -> None:
    write(tmp_path / "a.py", b"newest")
    write(tmp_path / "below" / "b.md", "älter".encode(), age=2)
    write(tmp_path / "below" / "c.txt", b"between", age=1)
    assert read_texts([str(tmp_path)]) == (["älter", "between", "newest"], "")
    assert read_texts([str(tmp_path / "a.py")]) == (["newest"], "")
    assert read_texts([str(tmp_path), str(tmp_path / "a.py")])[0].count("newest") == 1


def test_what_is_no_text_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "MOST_FILE", 100)
    monkeypatch.setattr(texts, "MOST_BYTES", 150)
    write(tmp_path / "image.png", b"\x89PNG\0\0")
    write(tmp_path / "latin", b"\xe4")
    write(tmp_path / "data.csv", b"1" * 101)
    write(tmp_path / "new", b"n" * 90)
    write(tmp_path / "old", b"o" * 90, age=9)
    write(tmp_path / "small", b"s" * 20, age=10)
    for hidden in (".git/config", ".env", "node_modules/x.js", "__pycache__/x.py"):
        write(tmp_path / hidden, b"secret")
    found, without = read_texts([str(tmp_path)])
    assert found == ["s" * 20, "n" * 90]
    assert sorted(without.split(", ")) == [
        "1 beyond 8 MiB of newer ones", "1 larger than 1 MiB", "2 no text",
    ]  # fmt: skip


def test_a_name_of_nothing_is_refused() -> None:
    for name in ("/there/is/none", "~nobodyx9/none"):
        with pytest.raises(UsageError, match="no such file or folder"):
            read_texts([name])
