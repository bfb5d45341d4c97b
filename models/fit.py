"""The catalog's pairs that this machine can run, judged from sizes alone."""

from __future__ import annotations

from typing import Literal

from specllama.models import memory
from specllama.models.catalog import CatalogPair

Verdict = Literal["yes", "tight", "no"]

# added to the files: KV caches at 8k context, buffers, tokenizer, Python; a rule of thumb, until
# there is a header to compute it from
OVERHEAD = 1.15
FIXED_BYTES = 1.0e9


def machine_memory() -> int:
    """Return the RAM of this machine in bytes, 0 when unknown."""
    return memory.total_memory()


def needed(pair: CatalogPair) -> float:
    """Estimate the bytes to run a pair at 8k context."""
    return pair.bytes * OVERHEAD + FIXED_BYTES


def judge(pair: CatalogPair, machine: float) -> Verdict:
    """Judge whether it runs alongside a desktop ("yes"), with little else open ("tight"), or
    not."""
    if machine <= 0:
        return "tight"
    if pair.memory_gb * 1e9 <= machine * 1.05:
        return "yes"
    return "tight" if needed(pair) <= machine * 0.9 else "no"
