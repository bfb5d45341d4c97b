"""``bench load`` over a real server."""

import json
import os
import sys
from pathlib import Path

import pytest
from servers import Serving

from specllama.bench import load
from specllama.bench.experiment import RunFigures, Task
from specllama.bench.load import COLUMNS, Wave, cpu_seconds, load_arm, rows, server_of, waves
from specllama.bench.prompts import BenchPrompt
from specllama.cli import invoke
from specllama.errors import UsageError
from specllama.remote.answers import Drafted
from specllama.settings.params import GenerateParams


def reply(
    question: int, tokens: int, decode_s: float, text: str = "a", first_s: float = 0.0
) -> RunFigures:
    return RunFigures("arm", str(question), "chat", 0.0, 0, tokens, decode_s, first_s + decode_s,
                      first_s, text=text)  # fmt: skip


def test_servers_take_turns(server: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    plain, drafted = f"{server.url}#none", f"{server.url}#draft"
    asked = ["bench", "load", plain, drafted, "--clients", "1", "--clients", "3", "-n", "4",
             "-r", "2", "--max-tokens", "12"]  # fmt: skip
    assert invoke([*asked, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["arm"], row["clients"]) for row in found] == [
        (plain, 1), (drafted, 1), (plain, 3), (drafted, 3),
    ]  # fmt: skip
    for row in found:
        assert row["equal"] == row["compared"] == 4  # the waves of one number of clients share it
        assert row["tok_per_s"] > 0
        assert row["first_p50_s"] <= row["first_p95_s"]
    assert found[0]["ratio"]["ratio"] == 1.0
    assert invoke(asked) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 5
    assert "4 of 4" in out
    assert err.count("tok/s") == 8


def test_what_is_no_server(server: Serving) -> None:
    for text in ("over here", "http://here#sometimes"):
        with pytest.raises(UsageError):
            load_arm(text, GenerateParams())
        assert invoke(["bench", "load", text]) == 2
    assert invoke(["bench", "load", "http://127.0.0.1:9", "-n", "1", "-r", "1"]) == 1
    assert invoke(["bench", "load", server.url, "-n", "1", "--max-tokens", "3000000000"]) == 2


def test_ratios_are_of_neighbours() -> None:
    def wave(arm: str, repetition: int, seconds: float, text: str = "a") -> Wave:
        # 29 tokens behind the first take half the wave
        answer = reply(repetition, 30, seconds / 2, text, first_s=0.1)
        return Wave(arm, 2, repetition, seconds, [answer], cpu_s=2 * seconds)

    waves = [wave("a", 0, 1.0), wave("b", 0, 0.5), wave("a", 1, 4.0), wave("b", 1, 2.0, "b")]
    one, two = rows(waves, {("0", 0.0): "a", ("1", 0.0): "a"})
    assert (one.ratio.low, one.ratio.ratio, one.ratio.high) == (1.0, 1.0, 1.0)
    assert (two.ratio.low, two.ratio.ratio, two.ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (one.cpu_ms, two.cpu_ratio.ratio) == pytest.approx((5000 / 30, 2.0))
    assert (two.equal, two.compared) == (1, 2)
    assert (one.pace, two.pace) == (1.0, pytest.approx(2.0))
    assert rows(waves, {("1", 0.0): "a"})[1].compared == 1


def test_the_slowest_reply_is_compared_with_itself() -> None:
    def wave(arm: str, *took: float) -> Wave:
        return Wave(arm, 1, 0, 1.0, [reply(i, 31, seconds) for i, seconds in enumerate(took)])

    one, two = rows([wave("a", 1.0, 4.0), wave("b", 2.0, 4.0)], {})
    assert (one.pace, two.pace) == (1.0, 0.5)
    assert two.cpu_ms is two.cpu_ratio is None


def test_what_a_server_does_not_tell_is_no_zero() -> None:
    def wave(arm: str, tokens: int, draft: Drafted | None) -> Wave:
        return Wave(arm, 1, 0, 1.0, [reply(0, tokens, 1.0)], draft=draft)

    told, silent = rows([wave("a", 30, Drafted(8, 2)), wave("b", 0, None)], {})
    assert (told.tok_per_s, told.accepted) == (pytest.approx(30.0), 0.25)
    assert silent.tok_per_s is silent.ratio is silent.accepted is None
    assert [cell(silent) for cell in COLUMNS.values()][2:5] == ["–"] * 3
    assert COLUMNS["accepted"](silent) == COLUMNS["same text"](silent) == "–"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show it")
def test_processor_time_of_whoever_listens(server: Serving) -> None:
    assert server_of(server.url) == os.getpid()
    before = cpu_seconds(os.getpid())
    server.chat(max_tokens=8)
    assert cpu_seconds(os.getpid()) >= before > 0.0
    assert server_of("http://127.0.0.1:9") is None
    assert server_of("http://example.org:80") is None


def test_how_a_server_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/opt/vllm/bin/python", "-m", "vllm", "--model", "/home/me/models/target",
             "--api-key", "hush", "--hf-token=hush", "--max-num-batched-tokens", "64",
             "--tokenizer", "a/b", "--speculative-config",
             '{"model": "/home/me/draft"}']  # fmt: skip
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "cmdline").write_bytes("\0".join([*words, ""]).encode())
    monkeypatch.setattr(load, "_PROC", tmp_path)
    monkeypatch.setattr(load, "server_of", lambda url: 7 if "127" in url else None)
    assert load.command_of("http://127.0.0.1:9") == (
        "python -m vllm --model target --api-key … --hf-token=… --max-num-batched-tokens 64 "
        """--tokenizer a/b --speculative-config '{"model": "draft"}'"""
    )
    assert load.command_of("http://elsewhere:9") == ""


def test_a_child_with_a_smaller_number_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pid, parent, ticks in ((900, 1, 100), (30, 900, 20), (40, 30, 3), (50, 1, 5000)):
        (tmp_path / str(pid)).mkdir()
        line = f"{pid} (a b) S {parent} " + "0 " * 9 + f"{ticks} {ticks} 0"
        (tmp_path / str(pid) / "stat").write_text(line)
    monkeypatch.setattr(load, "_PROC", tmp_path)
    assert cpu_seconds(900) == pytest.approx(246 / os.sysconf("SC_CLK_TCK"))


def test_every_wave_has_prompts_of_its_own(server: Serving) -> None:
    tasks = [Task(BenchPrompt(str(i), "chat", text=str(i)), 0.0, 4, i) for i in range(5)]
    arm = load_arm(server.url, GenerateParams())
    try:
        found = list(waves([arm], tasks, 2, (1, 2), 2))
    finally:
        arm.close()
    assert [(wave.clients, wave.repetition) for wave in found] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    asked = [[answer.prompt for answer in wave.answers] for wave in found]
    assert asked == [["0", "1"], ["2", "3"], ["4", "0"], ["1", "2"]]
