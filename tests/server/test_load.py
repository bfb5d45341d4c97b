"""``bench load`` over a real server."""

from __future__ import annotations

import json
import os
import sys

import pytest
from servers import Serving

from specllama.bench.load import Answer, ClientLoad, Question, Target, Wave, rows
from specllama.bench.processes import cpu_seconds, server_of
from specllama.cli import invoke
from specllama.errors import UsageError


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
    for text in ("here", "http://here#sometimes"):
        with pytest.raises(UsageError):
            Target.parse(text)
        assert invoke(["bench", "load", text]) == 2
    assert invoke(["bench", "load", "http://127.0.0.1:9", "-n", "1", "-r", "1"]) == 1
    assert invoke(["bench", "load", server.url, "-n", "1", "--max-tokens", "3000000000"]) == 1


def test_ratios_are_of_neighbours() -> None:
    def wave(arm: str, repetition: int, seconds: float, text: str = "a") -> Wave:
        # 29 tokens behind the first take half the wave
        answer = Answer(repetition, text, 30, 0.1, 0.1 + seconds / 2)
        return Wave(arm, 2, repetition, seconds, [answer], cpu_s=2 * seconds)

    waves = [wave("a", 0, 1.0), wave("b", 0, 0.5), wave("a", 1, 4.0), wave("b", 1, 2.0, "b")]
    one, two = rows(waves, {0: "a", 1: "a"})
    assert (one.ratio.low, one.ratio.ratio, one.ratio.high) == (1.0, 1.0, 1.0)
    assert (two.ratio.low, two.ratio.ratio, two.ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert two.cpu_ratio is not None
    assert (one.cpu_ms, two.cpu_ratio.ratio) == pytest.approx((5000 / 30, 2.0))
    assert (two.equal, two.compared) == (1, 2)
    assert (one.pace, two.pace) == (1.0, pytest.approx(2.0))
    assert rows(waves, {1: "a"})[1].compared == 1


def test_the_slowest_reply_is_compared_with_itself() -> None:
    def wave(arm: str, *took: float) -> Wave:
        answers = [Answer(i, "a", 31, 0.0, seconds) for i, seconds in enumerate(took)]
        return Wave(arm, 1, 0, 1.0, answers)

    one, two = rows([wave("a", 1.0, 4.0), wave("b", 2.0, 4.0)], {})
    assert (one.pace, two.pace) == (1.0, 0.5)
    assert two.cpu_ms is two.cpu_ratio is None


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not show it")
def test_processor_time_of_whoever_listens(server: Serving) -> None:
    assert server_of(server.url) == os.getpid()
    before = cpu_seconds(os.getpid())
    server.chat(max_tokens=8)
    assert cpu_seconds(os.getpid()) >= before > 0.0
    assert server_of("http://127.0.0.1:9") is None
    assert server_of("http://example.org:80") is None


def test_every_wave_has_prompts_of_its_own(server: Serving) -> None:
    questions = [Question([{"role": "user", "content": str(i)}], i, 0.0, 4) for i in range(5)]
    with ClientLoad([Target(server.url)], questions, 2) as load:
        waves = list(load.waves((1, 2), 2))
    assert [(wave.clients, wave.repetition) for wave in waves] == [(1, 0), (2, 0), (1, 1), (2, 1)]
    asked = [[answer.question for answer in wave.answers] for wave in waves]
    assert asked == [[0, 1], [2, 3], [4, 0], [1, 2]]
