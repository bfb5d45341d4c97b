"""``config show -m MODEL`` names what comes from the model's card; ``run`` samples by it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import ggufs


def test_config_show_names_the_card(cli, tmp_path: Path) -> None:
    model = ggufs.write_llama(
        tmp_path / "m.gguf",
        keys={"general.sampling.temp": 0.6, "general.sampling.mirostat": 2},
    )
    shown = cli("config", "show", "--origin", "-m", str(model))
    assert shown.code == 0
    assert [line.split() for line in shown.out.splitlines()] == [
        ["temperature", "=", "0.6", "#", "the", "model's", "card"]
    ]
    assert "mirostat" in shown.err
    listed = json.loads(cli("config", "show", "temperature", "-m", str(model), "--json").out)
    assert listed["settings"][0]["origin"] == "the model's card"
    assert listed["settings"][0]["default"] == 0.8
    assert cli("config", "show", "-m", str(tmp_path / "none.gguf")).code == 3


def test_run_samples_as_the_card_says(cli) -> None:
    info = cli.engine.info
    target = replace(info.target, card={"temperature": 0.6, "top_k": 20})
    cli.engine.info = replace(info, target=target)
    assert cli("run", "Hi", "--top-k", "5").code == 0
    sampling = cli.engine.requests[-1].params.sampling
    assert (sampling.temperature, sampling.top_k) == (0.6, 5)


def test_verbose_says_what_was_decided(tmp_path: Path) -> None:
    model = ggufs.write_llama(tmp_path / "m.gguf", keys={"general.sampling.mirostat": 2})
    command = [sys.executable, "-m", "specllama", "-v", "run", "-n", "2", "-t", "1"]
    command += ["-m", str(model), "Hi"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stderr
    assert "context: 512 tokens, the trained length" in said
    assert "mirostat" in said
    assert "llama_model_loader" not in said
    quiet = subprocess.run(
        [*command[:3], *command[4:]], capture_output=True, text=True, timeout=120
    )
    assert "context: " not in quiet.stderr
