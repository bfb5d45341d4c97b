"""The memory estimate against the resident size of a real process: within ten percent."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specllama.engine.heads import bundled_heads
from specllama.models.gguf import read_header
from specllama.models.memory import estimate_pair
from specllama.models.refs import resolve_pair

CHILD = """
import sys
from specllama.engine.engine import Engine
from specllama.params import EngineOptions, GenerateParams
n_ctx = int(sys.argv[1])
with Engine.load("tiny", None, EngineOptions(n_ctx=n_ctx)) as engine:
    prompt = [5 + (i * 7) % 4000 for i in range(n_ctx - 80)]
    params = GenerateParams(max_tokens=40, seed=1, proposer="draft", ignore_eos=True)
    for _ in engine.generate(prompt, params):
        pass
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            print(int(line.split()[1]) * 1024)
"""


@pytest.mark.e2e
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("n_ctx", [512, 2048])
def test_the_tiny_pair(n_ctx: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(n_ctx)], capture_output=True, text=True, check=True
    )
    measured = int(done.stdout)
    target, draft = resolve_pair("tiny")
    assert draft is not None
    # the heads that ship with the target are open beside the pair
    heads = [read_header(path) for path in bundled_heads(target)]
    assert heads
    estimate = estimate_pair(
        read_header(target), read_header(draft), heads=heads, n_ctx=n_ctx, n_outputs=65
    )
    assert estimate.total == pytest.approx(measured, rel=0.10)
