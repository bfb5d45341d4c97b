"""The Node clients of OpenAI, Anthropic and Ollama, where ``SPECLLAMA_NODE`` names a folder with
them: npm install openai @anthropic-ai/sdk ollama."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fakes import Reply, ScriptedRecipe
from servers import serving, table

CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Ulm"}}</tool_call>'
FOLDER = os.environ.get("SPECLLAMA_NODE", "")


@pytest.mark.skipif(not FOLDER, reason="SPECLLAMA_NODE is not set")
def test_node_clients(tmp_path: Path) -> None:
    script = shutil.copy(Path(__file__).parent / "node_clients.mjs", FOLDER)
    recipe = ScriptedRecipe((Reply(f"Well.\n{CALL}"),))
    with serving(table(tmp_path)) as server, serving(recipe) as caller:
        done = subprocess.run(
            ["node", script, server.url, caller.url],
            cwd=FOLDER, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ok  ") >= 20
    assert "FAIL" not in done.stdout, done.stdout
