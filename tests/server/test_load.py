"""``bench load`` over a real server."""

from __future__ import annotations

import json

import pytest
from servers import Serving

from specllama.bench.load import Answer, Target, Wave, rows
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
        assert row["equal"] == row["compared"] == 4  # of repetition 0 with the same clients
        assert row["tok_per_s"] > 0
        assert row["first_p50_s"] <= row["first_p95_s"]
    assert found[0]["ratio"] == 1.0
    assert invoke(asked) == 0
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 5
    assert "8 of 8" in out
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
        return Wave(arm, 2, repetition, seconds, [Answer(0, text, 10, 0.1, 0.55)])

    waves = [wave("a", 0, 1.0), wave("b", 0, 0.5), wave("a", 1, 4.0), wave("b", 1, 2.0, "b")]
    one, two = rows(waves)
    assert (one.ratio, two.ratio, two.ratio_low, two.ratio_high) == (1.0, 2.0, 2.0, 2.0)
    assert (two.equal, two.compared) == (1, 2)
    assert two.slowest == pytest.approx(20.0)
