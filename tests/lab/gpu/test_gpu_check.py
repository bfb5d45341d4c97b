"""The driver of ``make gpu-check`` on scripted commands: order, going on, failures, its report."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

import gpu_check
import gpu_command as command
import gpu_parts
import pytest
from gpu_check import Check, Done
from gpu_parts import Pair, Part

PAIR = Pair("tiny", "t.gguf", "d.gguf")
FACTS = {"devices": ["a card"], "build": {"llama.cpp": "abc"}}


class Clock:
    """Commands take the seconds that their script says; nothing else takes any."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(gpu_check.time, "monotonic", lambda: self.now)
        self.script: dict[str, list[Done | BaseException]] = {}
        self.ran: list[str] = []

    def run(self, argv: Sequence[str], seconds: float) -> Done:
        name = argv[-1]
        self.ran.append(name)
        outcomes = self.script.get(name) or [Done(0, 1.0, '{"found": 1}')]
        outcome = outcomes.pop(0) if len(outcomes) > 1 else outcomes[0]
        if isinstance(outcome, BaseException):
            raise outcome
        self.now += min(outcome.seconds, seconds)
        if outcome.seconds > seconds:
            return Done(None, seconds, outcome.output, outcome.errors)
        return outcome


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def part(name: str, step: str = "own", **more: object) -> Part:
    argv = (step, name)
    return Part(step, name, more.pop("pair", PAIR), argv, **more)  # type: ignore[arg-type]


def check(clock: Clock, *folders: Path, build: str = "abc") -> Check:
    facts = {**FACTS, "build": {"llama.cpp": build}}
    return Check(folders, facts, run=clock.run, say=lambda text: None)


def report(folder: Path) -> tuple[dict[str, dict[str, object]], str]:
    state = json.loads((folder / "gpu-check.json").read_text())
    return state["parts"], (folder / "gpu-check.md").read_text()


def test_parts_run_in_order_and_what_is_more_comes_last(clock: Clock, tmp_path: Path) -> None:
    parts = [part("a"), part("b", more=True), part("c")]
    assert check(clock, tmp_path).go(parts, 1000)
    assert clock.ran == ["a", "c", "b"]


def test_a_failure_is_kept_with_its_last_words_and_the_next_ones_run(
    clock: Clock, tmp_path: Path
) -> None:
    clock.script["a"] = [Done(1, 1.0, "", "well\nerror: no room on the card\n")]
    assert check(clock, tmp_path).go([part("a"), part("b")], 1000)
    parts, page = report(tmp_path)
    assert clock.ran == ["a", "b"]
    assert parts["own: a"]["said"] == ["well", "error: no room on the card"]
    assert parts["own: b"]["ok"]
    assert "no room on the card" in page
    assert "1 of 2 parts" in page


def test_a_call_goes_on_where_the_last_one_stopped_and_tries_failures_last(
    clock: Clock, tmp_path: Path
) -> None:
    clock.script["a"] = [Done(1, 1.0), Done(0, 1.0, "{}")]
    parts = [part(name) for name in "abcd"]
    assert not check(clock, tmp_path).go(parts, 17.0)  # 15 s are too few to begin one
    assert clock.ran == ["a", "b", "c"]
    assert check(clock, tmp_path).go(parts, 1000)
    assert clock.ran == ["a", "b", "c", "d", "a"]
    assert all(found["ok"] for found in report(tmp_path)[0].values())


@pytest.mark.parametrize("at", range(3))
def test_a_kill_in_any_part_loses_that_part_alone(clock: Clock, tmp_path: Path, at: int) -> None:
    parts = [part(name) for name in "abc"]
    name = parts[at].name
    clock.script[name] = [KeyboardInterrupt(), Done(0, 1.0, "{}")]
    with pytest.raises(KeyboardInterrupt):
        check(clock, tmp_path).go(parts, 1000)
    assert check(clock, tmp_path).go(parts, 1000)
    assert sorted(clock.ran) == sorted(["a", "b", "c", name])


def test_a_part_that_kills_every_call_comes_behind_the_others(clock: Clock, tmp_path: Path) -> None:
    clock.script["a"] = [KeyboardInterrupt()]
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            check(clock, tmp_path).go([part("a"), part("b"), part("c", more=True)], 1000)
    assert clock.ran == ["a", "a", "b", "c", "a"]


def test_a_part_that_the_deadline_stopped_is_no_failure(clock: Clock, tmp_path: Path) -> None:
    clock.script["b"] = [Done(0, 100.0, "{}")]
    parts = [part("a"), part("b")]
    assert not check(clock, tmp_path).go(parts, 60.0)
    assert list(report(tmp_path)[0]) == ["own: a"]
    assert check(clock, tmp_path).go(parts, clock.now + 200.0)
    assert report(tmp_path)[0]["own: b"]["ok"]


def test_a_part_that_takes_more_than_a_whole_call_fails(clock: Clock, tmp_path: Path) -> None:
    clock.script["a"] = [Done(0, 10_000.0, '{"so far": 1}', "reading")]
    assert not check(clock, tmp_path).go([part("a"), part("b")], 60.0)
    found = report(tmp_path)[0]["own: a"]
    assert found["said"] == ["reading", "stopped after 60 s"]
    assert found["answer"] == [{"so far": 1}]
    check(clock, tmp_path).go([part("a"), part("b")], clock.now + 60.0)
    assert clock.ran[1] == "b"


def test_a_report_is_continued_from_any_folder_but_not_for_another_build(
    clock: Clock, tmp_path: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    check(clock, here).go([part("a")], 1000)
    check(clock, there, here).go([part("a")], 1000)
    assert clock.ran == ["a"]
    assert check(clock, there, here).write()
    assert report(there) == report(here)
    check(clock, here, build="def").go([part("a")], 1000)
    assert clock.ran == ["a", "a"]


def test_a_damaged_report_is_not_continued(clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "gpu-check.json").write_text("{")
    assert check(clock, tmp_path).go([part("a")], 1000)


def test_files_are_made_once_and_go_with_the_last_part_of_their_pair(
    clock: Clock, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    made = folder / "1b.gguf"

    class Maker(Clock):
        def run(self, argv: Sequence[str], seconds: float) -> Done:
            if argv[-1] == "make":
                folder.mkdir()
                made.touch()
            else:
                assert made.exists() == (argv[-1] != "c")
            return super().run(argv, seconds)

    clock.__class__ = Maker
    pair = Pair("1b", str(made), None, ((str(made), ("make",)),), str(folder))
    parts = [part("a", pair=pair), part("b", pair=pair), part("c")]
    assert check(clock, tmp_path).go([*parts, part("late", pair=pair, more=True)], 1000)
    assert clock.ran == ["make", "a", "b", "c", "make", "late"]
    assert not folder.exists()


def test_a_pair_that_cannot_be_made_says_why(clock: Clock, tmp_path: Path) -> None:
    clock.script["make"] = [Done(1, 1.0, "", "error: the disk is full")]
    pair = Pair("7b", "x", None, ((str(tmp_path / "none.gguf"), ("make",)),))
    check(clock, tmp_path).go([part("a", pair=pair)], 1000)
    found = report(tmp_path)[0]["own: a"]
    assert found["command"] == "make"
    assert found["said"] == ["error: the disk is full"]


def test_a_proof_that_fails_is_a_finding(clock: Clock, tmp_path: Path) -> None:
    lines = [
        {"type": "case", "difference": None},
        {"type": "case", "difference": {"gap": 0.1}, "prompt": "p1", "token_ids": [1, 2]},
        {"type": "summary", "cases": 2, "identical": 1, "unexplained": 1, "finished": True},
    ]
    clock.script["a"] = [Done(1, 1.0, "\n".join(map(json.dumps, lines)))]
    check(clock, tmp_path).go([part("a", "prove")], 1000)
    parts, page = report(tmp_path)
    assert parts["prove: a"]["ok"]
    assert parts["prove: a"]["answer"] == [
        {"type": "case", "difference": {"gap": 0.1}, "prompt": "p1"},
        lines[2],
    ]
    assert "| a | 2 | 1 |  | 1 |" in page


def test_an_answer_that_nobody_understands_does_not_end_the_check(
    clock: Clock, tmp_path: Path
) -> None:
    for name in ("v(n), specllama", "v(n), llama-bench"):
        clock.script[name] = [Done(0, 1.0, '[{"n_prompt": 1}]')]
    clock.script["draft model"] = [Done(0, 1.0, '{"summaries": [{}]}')]
    clock.script["talk"] = [Done(0, 1.0, "no JSON at all\n[1, 2]\n")]
    parts = [part("v(n), specllama", "costs"), part("v(n), llama-bench", "costs")]
    assert check(clock, tmp_path).go([*parts, part("draft model", "bench"), part("talk")], 1000)
    found, page = report(tmp_path)
    assert all(one["ok"] for one in found.values())
    assert found["costs: v(n), llama-bench"]["answer"] == [[{"n_prompt": 1}]]
    assert page.count("not understood") == 3


def test_speeds_stand_beside_llama_servers_best(clock: Clock, tmp_path: Path) -> None:
    arms = {"plain": 50.0, "warm": 90.0, "llama-server -ngl 999 -ngld 999 2": 60.0,
            "llama-server -ngl 999 -ngld 999 4": 75.0}  # fmt: skip
    fields = dict.fromkeys(("ratio", "ttft_p50_s", "acceptance_rate", "other_share", "equal"))
    rows = [
        {**fields, "arm": arm, "group": group, "tok_per_s": speed}
        for arm, speed in arms.items()
        for group in ("all", "code T=0")
    ]
    clock.script["draft model"] = [Done(0, 1.0, json.dumps({"summaries": rows}))]
    check(clock, tmp_path).go([part("draft model", "bench")], 1000)
    _, page = report(tmp_path)
    assert "| draft model | warm | code T=0 | 90.0 |  | 1.20 |" in page
    assert "| draft model | llama-server 2 | code T=0 | 60.0 |  | 0.80 |" in page
    assert "| all |" not in page


def test_the_most_that_a_part_took_of_the_device_is_kept() -> None:
    free = iter([100, 70, 30, 60])
    over = []

    def left() -> int:
        value = next(free, 60)
        over.append(value)
        return value

    with gpu_check.Lowest(left) as lowest:
        while len(over) < 4:
            time.sleep(0.05)
    assert lowest.taken == 70


def test_a_command_is_interrupted_when_its_time_is_over() -> None:
    program = (
        "import time\n"
        "try:\n    print('at work', flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('ended what it started')"
    )
    done = gpu_check.run([sys.executable, "-c", program], 2.0, {})
    assert done.status is None
    assert done.output.split("\n")[:2] == ["at work", "ended what it started"]
    assert gpu_check.run(["/no/such/program"], 2.0, {}).status == 127
    done = gpu_check.run(
        [sys.executable, "-c", "import os; print(os.environ['A'])"], 60, {"A": "b"}
    )
    assert (done.status, done.output) == (0, "b\n")


def plan(tmp_path: Path, tools: dict[str, Path], devices: str | None = None) -> list[Part]:
    pairs = [
        gpu_parts.scaled(tmp_path, size, kind) for size in ("1b", "7b") for kind in ("q4_k_m",)
    ]
    return list(gpu_parts.parts(pairs, gpu_parts.write_texts(tmp_path), tools, devices, 10))


def test_the_parts_keep_the_order_of_the_steps_and_have_names_of_their_own(tmp_path: Path) -> None:
    parts = plan(tmp_path, {name: tmp_path / name for name in command.TOOLS})
    steps = [part.step for part in parts]
    assert tuple(dict.fromkeys(steps)) == command.STEPS
    assert steps == sorted(steps, key=command.STEPS.index)
    assert len({(part.step, part.name) for part in parts}) == len(parts)
    assert set(command.SIZES) == set(gpu_parts.SIZES)


def test_without_llama_cpps_programs_nothing_asks_for_them(tmp_path: Path) -> None:
    assert not [part for part in plan(tmp_path, {}) if part.tool or part.peer]


def test_peers_compute_where_we_do(tmp_path: Path) -> None:
    tools = {name: tmp_path / name for name in command.TOOLS}
    for devices, layers in {None: "999", "none": "0", "GPU0,GPU1": "999"}.items():
        parts = plan(tmp_path, tools, devices)
        benches = [" ".join(part.argv) + " " for part in parts if part.tool]
        servers = [" ".join(part.peer) + " " for part in parts if part.peer]
        drafting = [words for words in servers if "-md " in words]
        assert len(benches) > 3
        assert 0 < len(drafting) < len(servers) > 3
        for device, commands in (
            (devices and devices.replace(",", "/"), benches),
            (devices, servers),
        ):
            chosen = f"-dev {device} " if device else ""
            assert all(f"-ngl {layers} " in words and chosen in words for words in commands)
        chosen = f"-devd {devices} " if devices else ""
        assert all(f"-ngld {layers} " in words and chosen in words for words in drafting)


def test_a_server_is_asked_at_its_address_and_ended(tmp_path: Path) -> None:
    program = tmp_path / "server"
    program.write_text(
        f"#!{sys.executable}\nimport http.server, sys\n"
        "http.server.HTTPServer(('127.0.0.1', int(sys.argv[-1])), type('Ok', (http.server."
        "BaseHTTPRequestHandler,), {'do_GET': lambda s: (s.send_response(200), s.end_headers())})"
        ").serve_forever()\n"
    )
    program.chmod(0o755)
    asked: list[str] = []

    def run(argv: Sequence[str], seconds: float) -> Done:
        asked.extend(argv[-2:])
        with urlopen(f"{argv[-1]}/health") as answer:
            return Done(0 if answer.status == 200 else 1, 1.0, "{}")

    beside = part("beside", peer=(str(program),))
    broken = part("broken", peer=("/no/such",))
    work = Check([tmp_path], FACTS, run=run, say=lambda text: None)
    assert work.go([beside, broken], time.monotonic() + 1e3)
    assert work.state["parts"]["own: beside"]["ok"]
    assert asked[0] == "--against"
    with pytest.raises(OSError, match="refused"):
        urlopen(f"{asked[1]}/health")
    assert "could not be run" in work.state["parts"]["own: broken"]["said"][-1]
