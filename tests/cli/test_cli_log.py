"""``specllama log``: every view of a run, and logs that are not as they should be."""

import json
import os
from pathlib import Path
from typing import Any

import click
import pytest
from fakes import Reply

from specllama.cli import charts
from specllama.cli.log import _visible
from specllama.errors import StoreError
from specllama.events import RoundDone
from specllama.figures import SpecStats
from specllama.paths import rounds_dir
from specllama.store import summary
from specllama.store.rounds import LoggedTurn, RunRecord, delete_run, list_runs, read_run

LONG = "The target reads all the guesses in a single pass and keeps those it agrees with. " * 3


@pytest.fixture
def logged(cli):
    """A command line with one run in the log: mixed sources, one near-tie."""
    cli.reply(
        Reply(LONG, accept=(2, 0, 4), sources=("draft", "ngram"), near_tie_rounds=frozenset({3}))
    )
    assert cli("run", "x", "--seed", "1").code == 0
    return cli


def test_an_empty_log_is_said(cli) -> None:
    result = cli("log", "ls")
    assert (result.code, result.out) == (0, "")
    assert "no round log yet" in result.err
    for verb in ("show", "stats", "plot"):
        result = cli("log", verb)
        assert (result.code, result.out) == (1, "")
        assert "no round log yet" in result.err


def test_ls(logged) -> None:
    head, row = logged("log", "ls").out.splitlines()
    assert head.split()[:3] == ["run", "command", "target"]
    assert "scripted target Q4_0" in row
    (run,) = logged("log", "ls", "--json").json[0]["runs"]
    record = read_run(list_runs()[0])
    assert run["run"] == record.run
    assert run["emitted"] == run["accepted"] + run["rounds"] - run["cut"]
    assert run["complete"] is True
    assert run["tok_per_s"] > 0


def test_show_marks_tokens_by_signs(logged) -> None:
    result = logged("log", "show")
    assert result.code == 0
    assert result.out.splitlines()[0].endswith(", weights repacked where llama.cpp can")
    rows = [line for line in result.out.splitlines() if "■" in line or "□" in line]
    record = read_run(list_runs()[0])
    drafting = [done for done in record.rounds if done.drafted]
    assert len(rows) == len(drafting)
    for row, done in zip(rows, drafting, strict=True):
        signs = "■" * done.accepted + "□" * (len(done.drafted) - done.accepted)
        assert signs + "+" * (1 - done.cut) in row
        assert row.count("□␣wrong") == len(done.drafted) - done.accepted
        assert ("≈near-tie" in row) == done.near_tie
    assert "\x1b" not in result.out
    assert len(logged("log", "show", "-n", "2").out.splitlines()) == 8
    assert "no request 5" in logged("log", "show", "--turn", "5").err


def test_show_json_is_the_log(logged) -> None:
    path = list_runs()[0]
    assert logged("log", "show", "--json").json == [
        json.loads(line) for line in path.read_text().splitlines()
    ]


def test_only_spaces_at_the_ends_of_a_token_are_marked() -> None:
    assert [_visible(one) for one in (" a b\n", "<F0 9F>", "  ")] == ["␣a b⏎", "<F0 9F>", "␣␣"]


def test_stats_agree_with_the_rounds(logged) -> None:
    (data,) = logged("log", "stats", "--json").json
    rounds = read_run(list_runs()[0]).rounds
    total = data["total"]
    assert total["drafted"] == sum(len(done.drafted) for done in rounds)
    assert total["accepted"] == sum(done.accepted for done in rounds)
    assert set(data["by_source"]) == {"none", "draft", "ngram"}
    for group in ("rounds", "drafted", "accepted", "emitted"):
        assert sum(part[group] for part in data["by_source"].values()) == total[group]
    assert sum(p["accepted"] for p in data["by_position"]) == total["accepted"]
    text = logged("log", "stats").out
    for title in ("by source", "by position in the draft"):
        assert title in text


def test_stats_over_every_run(logged) -> None:
    logged("run", "x")
    (one,) = logged("log", "stats", "--json").json
    (both,) = logged("log", "stats", "--all", "--json").json
    assert len(both["runs"]) == 2
    assert both["total"]["rounds"] == 2 * one["total"]["rounds"]
    assert "2 runs" in logged("log", "stats", "--all").out


def test_plot(logged) -> None:
    text = logged("log", "plot").out
    rounds = len(read_run(list_runs()[0]).rounds)
    rows = text.partition("over time\n")[2].splitlines()[:10]
    assert [row[:6].strip() for row in rows[:8]] == ["100%", "", "", "50%", "", "", "", "0%"]
    assert {len(row) for row in rows[:9]} == {8 + rounds}
    assert rows[9].endswith(" s")
    assert "accepted by position" in text
    assert "     1 │█" in text
    (data,) = logged("log", "plot", "--json").json
    assert len(data["over_time"]) == rounds
    assert all(rate is None or 0 <= rate <= 1 for _, rate in data["over_time"])
    assert data["by_position"][0][0] == 1


def test_plot_without_drafts(cli) -> None:
    cli("run", "x", "--no-spec")
    result = cli("log", "plot")
    assert result.code == 0
    assert "nothing was drafted" in result.out
    assert "0% │····" in result.out


def test_path(logged) -> None:
    assert logged("log", "path").out == f"{rounds_dir()}\n"
    assert logged("log", "path", "last").out == f"{list_runs()[0]}\n"


def test_damage_and_the_future_never_break_it(logged) -> None:
    path = list_runs()[0]
    lines = path.read_bytes().splitlines(keepends=True)
    lines[3] = b'{"type": "round", "drafted": "no"}\n'
    lines.insert(2, b'{"type": "from the future", "x": 1}\n')
    path.write_bytes(b"".join(lines) + b'{"type": "round", "torn')
    for args in (["ls"], ["show"], ["stats"], ["plot"]):
        result = logged("log", *args)
        assert result.code == 0, args
        assert "Traceback" not in result.err
    assert "3 damaged or unknown lines skipped" in logged("log", "show").err
    for content in (b"", b"\n\n", b"\xff\xfe\x00", b"[]\n{}\n", lines[0]):
        path.write_bytes(content)
        for args in (["ls"], ["show"], ["stats"]):
            assert logged("log", *args).code == 0, (content, args)
        result = logged("log", "plot")
        assert result.code == 1
        assert "has no rounds to draw" in result.err


def test_a_hostile_log_cannot_reach_the_terminal(logged) -> None:
    path = list_runs()[0]
    path.write_text(path.read_text().replace(" wrong", r" \u001b[2J\u009b"))
    assert "\x1b" not in logged("log", "show").out
    assert "␛[2J⟦9B⟧" in logged("log", "show").out


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads all")
def test_a_log_that_may_not_be_read(logged) -> None:
    list_runs()[0].chmod(0)
    assert logged("log", "show").code == 1


def round_at(t_s: float, **changes: object) -> RoundDone:
    values = {
        "index": 0, "t_s": t_s, "n_past": 5, "source": "draft", "draft_max": 2,
        "window_reason": "", "drafted": (1, 2), "parents": (-1, 0), "drafted_text": ("a", "b"),
        "confidence": (None, None), "p": (None, None), "q": (None, None), "accepted": 1,
        "accepted_path": (0,), "target_token": 3, "target_text": "c", "target_kind": "recovered",
        "emitted": (1, 3), "emitted_text": ("a", "c"), "cut": 0, "draft_ms": 100.0,
        "verify_ms": 300.0, "other_ms": 100.0,
    }  # fmt: skip
    return RoundDone(**{**values, **changes})


def over_time(*turns: tuple[float, ...]) -> list[tuple[float, float, float | None]]:
    """Four slices of requests whose rounds end then and keep one guess of two."""
    logged = [LoggedTurn(n, rounds=[round_at(end) for end in t]) for n, t in enumerate(turns)]
    return summary.over_time(RunRecord(Path("log"), turns=logged), 4)


def test_slices_of_time() -> None:
    slices = over_time((0.5, 1.0, 1.5, 4.0))
    assert slices == [(0, 1, 0.5), (1, 2, 0.5), (2, 3, None), (3, 4, 0.5)]
    # one request after the other, without the time between them
    assert over_time((0.5, 1.0), (0.6, 3.0)) == slices
    # a clock that jumps back stands still
    assert over_time((0.5, 1.5, 1.0, 4.0)) == slices
    assert over_time((0.0,))[0][2] == over_time((-9.0,))[0][2] == 0.5


def test_the_chart_of_a_time() -> None:
    times = [(0.0, 1.0, 0.0), (1.0, 2.0, None), (2.0, 3.0, 0.5), (3.0, 4.0, 0.6875), (4.0, 5.0, 1)]
    assert charts.time_chart(times).splitlines() == [
        "  100% │    █",
        "       │    █",
        "       │   ▄█",
        "   50% │   ██",
        "       │  ███",
        "       │  ███",
        "       │  ███",
        "    0% │▁·███",
        "       └─────",
        "        0.0 5.0 s",
    ]


def test_positions_of_trees_and_cuts() -> None:
    stats = SpecStats()
    stats.observe(round_at(0.1))
    tree = {"drafted": (1, 2, 3), "parents": (-1, -1, 1), "accepted": 2, "accepted_path": (1, 2)}
    stats.observe(round_at(0.2, **tree))
    positions = stats.by_depth
    assert [(p.drafted, p.accepted, p.rounds) for p in positions] == [(2, 2, 2), (2, 1, 2)]
    assert positions[1].of_rounds == 0.5


# -- ``specllama log rm``: nothing goes without being asked for --


def answer(monkeypatch: pytest.MonkeyPatch, said: bool) -> list[str]:
    """Somebody is there to answer; returns what they are asked."""
    asked: list[str] = []

    def reply(question: str, **options: object) -> None:
        asked.append(question)
        assert options["default"] is False  # Enter deletes nothing
        if not said:
            raise click.Abort

    monkeypatch.setattr("specllama.cli.log.confirm", reply)
    return asked


@pytest.fixture
def three(cli):
    for _ in range(3):
        assert cli("run", "x", "--seed", "1").code == 0
    assert len(list_runs()) == 3
    return cli


def test_rm_deletes_what_was_named(three) -> None:
    newest, middle, oldest = list_runs()
    result = three("log", "rm", "last", newest.stem, oldest.stem, "--yes")
    assert (result.code, result.out) == (0, "")
    assert "deleted 2 round logs" in result.err
    assert list_runs() == [middle]
    assert three("log", "rm", "--all", "-y").code == 0
    assert list_runs() == []
    assert "no round log to delete" in three("log", "rm", "--all").err


def test_rm_asks_first(three, monkeypatch: pytest.MonkeyPatch) -> None:
    result = three("log", "rm", "--all")
    assert result.code == 2
    assert "there is no terminal to ask on" in result.err
    asked = answer(monkeypatch, False)
    assert three("log", "rm", "last").code != 0
    assert list_runs()[0].stem in asked[0]
    assert len(list_runs()) == 3
    answer(monkeypatch, True)
    assert three("log", "rm", "last").code == 0
    assert len(list_runs()) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "give the runs to delete"),
        (("last", "--all"), 2, "give the runs to delete"),
        (("nobody", "-y"), 1, "no round log is named"),
        (("mine.jsonl", "-y"), 2, "not in the log folder"),
    ],
)
def test_rm_refuses(three, tmp_path: Path, arguments, code: int, words: str) -> None:
    (tmp_path / "mine.jsonl").write_text("{}")
    result = three("log", "rm", *arguments)
    assert (result.code, result.out) == (code, "")
    assert words in result.err
    assert len(list_runs()) == 3
    assert (tmp_path / "mine.jsonl").exists()


def test_a_log_that_is_gone_or_cannot_go(tmp_path: Path) -> None:
    assert delete_run(tmp_path / "gone.jsonl") == 0
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(StoreError, match="cannot delete"):
        delete_run(tmp_path / "folder.jsonl")


# -- the speed that the log says of a reply --


def test_run_and_log_state_one_speed(cli: Any) -> None:
    done = cli("run", "--json", "Hi")
    finish = [line for line in map(json.loads, done.out.splitlines()) if line["type"] == "finish"]
    speed = finish[0]["timings"]["tok_per_s"]
    timings, n = finish[0]["timings"], len(finish[0]["token_ids"])
    (run,) = cli("log", "ls", "--json").json[0]["runs"]
    stats = json.loads(cli("log", "stats", "--json").out)
    assert (
        run["tok_per_s"]
        == stats["tok_per_s"]
        == pytest.approx(1000 * (n - 1) / timings["decode_ms"])
    )
    assert speed is not None


def test_the_speed_of_a_reply_that_never_finished(cli: Any, tmp_path: Path) -> None:
    from specllama import paths

    cli("run", "Hi")
    (log,) = paths.rounds_dir().glob("*.jsonl")
    lines = log.read_text().splitlines()
    log.write_text("\n".join(line for line in lines if '"finish"' not in line) + "\n")
    rounds = [one for one in map(json.loads, lines) if one["type"] == "round"]
    (run,) = cli("log", "ls", "--json").json[0]["runs"]
    tokens = sum(len(one["emitted"]) for one in rounds[1:])
    assert run["tok_per_s"] == pytest.approx(tokens / (rounds[-1]["t_s"] - rounds[0]["t_s"]))
