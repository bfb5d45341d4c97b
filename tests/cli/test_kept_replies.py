"""The speed that the log says of a reply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


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
