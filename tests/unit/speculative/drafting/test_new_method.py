"""What a new way to draft takes: one file (``new_method/repeat_line.py``) and one line.

Nothing else knows of it, and yet it is a choice, is listed and drawn, drafts, joins ``auto``, and
is booked and logged under its own name.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ggufs import write_llama

SHOWN = Path(__file__).parents[3] / "new_method" / "shown.py"


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("new-method")
    write_llama(folder / "target.gguf", blocks=4)
    env = {**os.environ, "SPECLLAMA_HOME": str(folder / "home"), "COLUMNS": "100"}
    command = [sys.executable, str(SHOWN), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_is_a_choice_and_is_listed(shown: dict[str, Any]) -> None:
    assert "--proposer METHOD" in shown["help"]
    ways = {way["name"]: way for way in json.loads(shown["pair"])["methods"]}
    assert ways["repeat"] == {"name": "repeat", "available": True, "reason": ""}
    row = next(row for row in shown["page"] if "Repeat the line" in row)
    assert "in use" in row
    assert "pays on tables and lists" in row
    assert (shown["glyph"], shown["label"]) == ("ʳ", "repeated line")


@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_it_drafts_and_changes_no_token(shown: dict[str, Any], temperature: str) -> None:
    plain, own = (shown["replies"][f"{name} {temperature}"] for name in ("none", "repeat"))
    assert own["tokens"] == plain["tokens"]
    assert own["proposer"] == "repeat"
    assert 0 < own["accepted"] <= own["drafted"]
    assert own["accepted"] < own["drafted"] or temperature == "0", "some were wrong"


def test_it_joins_what_auto_drafts_with(shown: dict[str, Any]) -> None:
    plain, auto = (shown["replies"][f"{name} 0.7"] for name in ("none", "auto"))
    assert auto["tokens"] == plain["tokens"]
    assert auto["proposer"] == "mixed"
    assert shown["mixed"] == ["forced", "suffix", "ngram", "prediction", "repeat"]


def test_it_is_booked_and_logged_under_its_own_name(shown: dict[str, Any]) -> None:
    assert shown["replies"]["repeat 0"]["sources"] == ["repeat"]
    assert "repeat" in shown["booked"]["balances"]
    assert set(shown["booked"]["sources"]) <= {"repeat"}
    assert shown["booked"]["tables"] == [], "it steps through nothing that is timed"
    assert "repeat" in shown["stats"]
    assert " repeat " in shown["rounds"]
