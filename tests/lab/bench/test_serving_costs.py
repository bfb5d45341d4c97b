"""What a token of a stream costs beside its pass, in processor time of the server and its engine.

``pytest -s tests/lab/bench/test_serving_costs.py`` prints it. A scripted engine sleeps as long
as a pass takes; what it computes itself is part of the engine's time. On two cores that a model
keeps busy every millisecond of it is one that a pass is longer. No clock is asked, so other
programs disturb little.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest
from fakes import Reply, ScriptedRecipe
from servers import serving

from specllama.settings.params import GenerateParams

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="threads are asked what they took"),
]
TOKENS = int(os.environ.get("SPECLLAMA_BENCH_TOKENS", "300"))
PASS_S = 0.022  # of a model of 1 B weights on two cores


def used(pid: int, *, but: int = 0) -> float:
    """Milliseconds of processor time of all threads of a process but one."""
    tasks = [task for task in Path(f"/proc/{pid}/task").iterdir() if task.name != str(but)]
    return sum(int((task / "schedstat").read_text().split()[0]) / 1e6 for task in tasks)


def test_a_token_of_a_stream() -> None:
    recipe = ScriptedRecipe((Reply(" ".join(f"word{i}" for i in range(TOKENS)), delay_s=PASS_S),))
    body = {"prompt": "Hi", "stream": True, "n_predict": TOKENS}
    with serving(recipe, params=GenerateParams(proposer="none", seed=1)) as server:
        server.frames("/completion", {**body, "n_predict": 8})
        client, child = threading.get_native_id(), server.host.pid
        assert child is not None
        mine, engine = used(os.getpid(), but=client), used(child)
        n = len(server.frames("/completion", body))
        mine, engine = used(os.getpid(), but=client) - mine, used(child) - engine
    print(f"\nserver {mine / n:.2f} ms, engine {engine / n:.2f} ms a token ({n} tokens)")
