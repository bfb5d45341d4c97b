"""The layout of a target's weights on a CPU, decided from its file and the processor.

llama.cpp rearranges ("repacks") weights of some types for wide products. In one of the two layouts
a pass of several rows may compute them as single steps would, in the other not: that one is taken,
see ``backend/exactness.py``. The rows of the two layouts differ in their last bits, so nothing that
is timed decides: a text must not depend on what a measurement found.
"""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

from specllama.backend import trial
from specllama.models.memory import repacked_bytes, repacked_types

if TYPE_CHECKING:
    from specllama.engine.gguf_pair import Pair

# In wide passes their rows differ from single steps where they are repacked (x86, llama-cpp-python
# 0.3.36: the table in exactness.md, which tests/e2e/test_layouts.py compares with the kernels).
# IQ4_NL differs as stored instead, all others in neither.
ROUNDS_REPACKED = frozenset({"Q4_K", "Q2_K"})


def repacks(pair: Pair) -> bool:
    """True if the target of a pair is loaded with its weights repacked."""
    if not trial.repacks():
        return False
    if pair.options.repack != "auto":
        return pair.options.repack == "on"
    return pair.on_gpu or not _rounds_repacked(pair)


def line(pair: Pair) -> str:
    """Explain how the target's weights will lie in memory, and why."""
    if not trial.repacks():
        return "as stored: repacked, they end this build of llama.cpp here"
    if pair.options.repack != "auto":
        return "repacked where llama.cpp can" if pair.options.repack == "on" else "as stored"
    if repacks(pair):
        return "as llama.cpp lays them out"
    return "as stored: repacked, its Q4_K or Q2_K weights would round wide passes"


def _rounds_repacked(pair: Pair) -> bool:
    on_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return on_x86 and repacked_bytes(pair.target, ROUNDS_REPACKED & repacked_types()) > 0
