"""``load_servers.py`` over a real server."""

import json

import pytest
from load_servers import COLUMNS, Wave, load_arm, load_command, rows, waves
from servers import Serving

from specllama.bench.experiment import RunFigures, Task
from specllama.bench.prompts import BenchPrompt
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
    asked = [plain, drafted, "--clients", "1", "--clients", "3", "-n", "4",
             "-r", "2", "--max-tokens", "12"]  # fmt: skip
    load_command([*asked, "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["arm"], row["clients"]) for row in found] == [
        (plain, 1), (drafted, 1), (plain, 3), (drafted, 3),
    ]  # fmt: skip
    for row in found:
        assert row["equal"] == row["compared"] == 4  # the waves of one number of clients share it
        assert row["tok_per_s"] > 0
        assert row["first_p50_s"] <= row["first_p95_s"]
    assert found[0]["ratio"]["ratio"] == 1.0
    load_command(asked, standalone_mode=False)
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 5
    assert "4 of 4" in out
    assert err.count("tok/s") == 8


def test_what_is_no_server() -> None:
    for text in ("over here", "http://here#sometimes"):
        with pytest.raises(UsageError):
            load_arm(text, GenerateParams())


def test_ratios_are_of_neighbours() -> None:
    def wave(arm: str, repetition: int, seconds: float, text: str = "a") -> Wave:
        # 29 tokens behind the first take half the wave
        answer = reply(repetition, 30, seconds / 2, text, first_s=0.1)
        return Wave(arm, 2, repetition, seconds, [answer])

    waves = [wave("a", 0, 1.0), wave("b", 0, 0.5), wave("a", 1, 4.0), wave("b", 1, 2.0, "b")]
    one, two = rows(waves, {("0", 0.0): "a", ("1", 0.0): "a"})
    assert (one.ratio.low, one.ratio.ratio, one.ratio.high) == (1.0, 1.0, 1.0)
    assert (two.ratio.low, two.ratio.ratio, two.ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (two.equal, two.compared) == (1, 2)
    assert (one.pace, two.pace) == (1.0, pytest.approx(2.0))
    assert rows(waves, {("1", 0.0): "a"})[1].compared == 1


def test_the_slowest_reply_is_compared_with_itself() -> None:
    def wave(arm: str, *took: float) -> Wave:
        return Wave(arm, 1, 0, 1.0, [reply(i, 31, seconds) for i, seconds in enumerate(took)])

    one, two = rows([wave("a", 1.0, 4.0), wave("b", 2.0, 4.0)], {})
    assert (one.pace, two.pace) == (1.0, 0.5)


def test_what_a_server_does_not_tell_is_no_zero() -> None:
    def wave(arm: str, tokens: int, draft: Drafted | None) -> Wave:
        return Wave(arm, 1, 0, 1.0, [reply(0, tokens, 1.0)], draft=draft)

    told, silent = rows([wave("a", 30, Drafted(8, 2)), wave("b", 0, None)], {})
    assert (told.tok_per_s, told.accepted) == (pytest.approx(30.0), 0.25)
    assert silent.tok_per_s is silent.ratio is silent.accepted is None
    assert [cell(silent) for cell in COLUMNS.values()][2:4] == ["–"] * 2
    assert COLUMNS["accepted"](silent) == COLUMNS["same text"](silent) == "–"


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
