"""The memory estimate against a real process and against what llama.cpp says that it allocates.

The whole is right within ten percent, a cache exactly, a buffer within a tenth or 0.3 MB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specllama.engine.target_heads import bundled_heads
from specllama.models.gguf import read_header
from specllama.models.judgement import pair_memory
from specllama.models.memory import MIB, PairMemory
from specllama.models.refs import resolve_pair
from specllama.settings.params import EngineOptions

CHILD = """
import ctypes, json, logging, re, sys
from specllama.engine.engine import Engine
from specllama.settings.params import EngineOptions, GenerateParams

sizes = []
class Sizes(logging.Handler):
    def emit(self, record):
        found = re.search(r"CPU (KV|compute) buffer size = +([0-9.]+) MiB", record.getMessage())
        if found:
            sizes.append((found[1], float(found[2])))
logging.getLogger("specllama.llama").addHandler(Sizes())
logging.getLogger("specllama.llama").setLevel(logging.DEBUG)

n_ctx, parallel = map(int, sys.argv[1:])
with Engine.load("tiny", None, EngineOptions(n_ctx=n_ctx, parallel=parallel, threads=1)) as engine:
    params = GenerateParams(max_tokens=40, seed=1, proposer="draft", ignore_eos=True)
    for k in range(parallel):
        n = n_ctx // parallel - 80
        engine.submit([5 + (i * 7 + 100 * k) % 4000 for i in range(n)], params)
    while engine.step():
        pass
    ctypes.CDLL(None).malloc_trim(0)  # what was freed, and the C library keeps, is not held
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            print(json.dumps({"resident": int(line.split()[1]) * 1024, "sizes": sizes}))
"""


def measured(n_ctx: int, parallel: int = 1) -> tuple[int, dict[str, list[float]]]:
    """Resident bytes, and the sizes of caches and buffers in MiB, in the order of their making."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(n_ctx), str(parallel)],
        capture_output=True,
        text=True,
        check=True,
    )
    said = json.loads(done.stdout)
    sizes: dict[str, list[float]] = {"KV": [], "compute": []}
    for kind, size in said["sizes"]:
        sizes[kind].append(size)
    return said["resident"], sizes


def estimated(n_ctx: int, parallel: int = 1) -> PairMemory:
    target, draft = resolve_pair("tiny")
    assert draft is not None
    # the heads that ship with the target are open beside the pair
    heads = [read_header(path) for path in bundled_heads(read_header(target))]
    assert heads
    options = EngineOptions(parallel=parallel)
    return pair_memory(read_header(target), read_header(draft), options, n_ctx, heads=heads)


pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc"),
]


@pytest.mark.parametrize("n_ctx", [512, 2048])
def test_the_tiny_pair(n_ctx: int) -> None:
    resident, sizes = measured(n_ctx)
    estimate = estimated(n_ctx)
    assert estimate.total == pytest.approx(resident, rel=0.10)
    for part, kv, compute in zip(estimate.parts, sizes["KV"], sizes["compute"], strict=False):
        assert part.kv == kv * MIB
        assert part.compute == pytest.approx(compute * MIB, rel=0.10, abs=0.3 * MIB)
        if part is estimate.draft:
            break


def test_conversations_side_by_side() -> None:
    """Long prompts are read in a second cache, as large as the longest text needs."""
    resident, sizes = measured(4096, parallel=3)
    estimate = estimated(4096, parallel=3)
    assert estimate.target.kv == sizes["KV"][0] * MIB
    last = (sizes["KV"][-1] + sizes["compute"][-1]) * MIB
    assert last <= estimate.target.reading
    assert estimate.total == pytest.approx(resident, rel=0.10)
