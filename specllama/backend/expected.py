"""How fast a placement should be: reading the active weights once a step, from where they lie.

Rules of thumb, good for choosing between placements of one pair on one machine, not for promises:
what a machine really does is measured once the pair is loaded.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

# bytes a second, read by a device of the last years
GPU_BANDWIDTH = 450e9
SHARED_BANDWIDTH = 200e9  # memory that GPU and CPU share
RAM_BANDWIDTH = 50e9
CORE_BANDWIDTH = 7e9  # quantized weights that one core computes with, whatever its memory gives
CPU_ROW = 0.2  # a further row of a pass, of the cost of the first one: CPUs compute slowly
GPU_ROW = 0.02
ACCEPTANCE = 0.7  # of a draft model's tokens, where nothing was measured
MOST_DRAFTED = 8

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # as llama.cpp names them
_EXPERTS = re.compile(EXPERTS)


def is_expert(name: str) -> bool:
    """Whether a tensor holds experts, of which a token uses a few."""
    return _EXPERTS.search(name) is not None


@dataclass(frozen=True, slots=True)
class Reading:
    """What one step of a model reads: bytes of weights, by kind and by where they lie.

    Attributes:
        gpu, ram: dense weights.
        gpu_experts, ram_experts: all of them; a row uses the share ``used``.
    """

    gpu: float
    ram: float
    gpu_experts: float
    ram_experts: float
    used: float
    shared: bool

    def seconds(self, rows: int) -> float:
        """Seconds that a pass of N rows takes; each row picks its own experts."""
        touched = 1.0 - (1.0 - self.used) ** rows
        fast = SHARED_BANDWIDTH if self.shared else GPU_BANDWIDTH
        on_gpu = (self.gpu + touched * self.gpu_experts) / fast
        in_ram = (self.ram + touched * self.ram_experts) / RAM_BANDWIDTH
        further = rows - 1
        return on_gpu * (1.0 + GPU_ROW * further) + in_ram * (1.0 + CPU_ROW * further)


def used_share(header: GgufHeader) -> float:
    """The share of its experts that a token uses; 1 without experts."""
    used = max(header.per_layer(header.own("expert_used_count")), default=0)
    return min(used / header.expert_count, 1.0) if header.expert_count and used else 1.0


def plain_speed(n_bytes: float, cores: int, *, on_gpu: bool = False) -> float:
    """Plain tokens a second of a model, estimated from its size in bytes alone."""
    there = SHARED_BANDWIDTH if on_gpu else min(RAM_BANDWIDTH, cores * CORE_BANDWIDTH)
    return there / n_bytes


def tokens_per_second(
    target: Reading, draft: Reading | None, acceptance: float = ACCEPTANCE
) -> float:
    """With the draft length that pays best, none included.

    Args:
        acceptance: of every drafted token, given that those before it were accepted.
    """
    best = 1.0 / target.seconds(1)
    if draft is None:
        return best
    step = draft.seconds(1)
    for k in range(1, MOST_DRAFTED + 1):
        written = sum(acceptance**i for i in range(k + 1))
        best = max(best, written / (target.seconds(k + 1) + k * step))
    return best
