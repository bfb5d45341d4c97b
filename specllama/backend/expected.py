"""The expected speed of a pair: a step reads the active weights once, wherever they lie.

Rules of thumb, good for choosing between pairs on one machine, not for promises: what a machine
really does is measured once the pair is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specllama.models import catalog, fit

if TYPE_CHECKING:
    from specllama.models.gguf import GgufHeader

# bytes a second, read by a device of the last years
SHARED_BANDWIDTH = 200e9  # memory that GPU and CPU share
RAM_BANDWIDTH = 50e9
CORE_BANDWIDTH = 7e9  # quantized weights that one core computes with, whatever its memory gives
CPU_ROW = 0.2  # a further row of a pass, of the cost of the first one: CPUs compute slowly
GPU_ROW = 0.02
ACCEPTANCE = 0.7  # of a draft model's tokens, where nothing was measured
MOST_DRAFTED = 8
LEAST_BYTES = 100e6  # a smaller model does not wait for memory: nothing is foretold of it
FAST_ENOUGH = 8.0  # plain tokens a second: one reads 5, and thoughts and code are skimmed

EXPERTS = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"  # as llama.cpp names them
_EXPERTS = re.compile(EXPERTS)


def is_expert(name: str) -> bool:
    """True if a tensor holds experts, of which a token uses a few."""
    return _EXPERTS.search(name) is not None


@dataclass(frozen=True, slots=True)
class Reading:
    """The bytes of weights that one step of a model reads, by kind.

    Attributes:
        experts: all of them; a row uses the share ``used``.
    """

    dense: float
    experts: float
    used: float
    on_gpu: bool

    def seconds(self, rows: int) -> float:
        """Return the seconds of a pass of N rows; each row picks its own experts."""
        touched = 1.0 - (1.0 - self.used) ** rows
        speed, row = (SHARED_BANDWIDTH, GPU_ROW) if self.on_gpu else (RAM_BANDWIDTH, CPU_ROW)
        return (self.dense + touched * self.experts) / speed * (1.0 + row * (rows - 1))


def used_share(header: GgufHeader) -> float:
    """Return the share of its experts that a token uses; 1 without experts."""
    used = max(header.per_layer(header.own("expert_used_count")), default=0)
    return min(used / header.expert_count, 1.0) if header.expert_count and used else 1.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Facts about a machine before a model is loaded: bytes of memory, cores, and the use of a
    GPU."""

    memory: float
    cores: int
    on_gpu: bool = False

    def speed(self, n_bytes: float) -> float:
        """Return the plain tokens a second of a model whose step reads N bytes."""
        cpu = min(RAM_BANDWIDTH, self.cores * CORE_BANDWIDTH)
        return (SHARED_BANDWIDTH if self.on_gpu else cpu) / n_bytes

    def speeds(self, pair: catalog.CatalogPair) -> tuple[float, float | None]:
        """Estimate the speed of a pair that is not here: plain, and with its draft model if that
        pays at ``ACCEPTANCE``."""
        draft = pair.draft
        return self.both(
            (pair.target.bytes, pair.target.active / pair.target.params),
            None if draft is None else (draft.bytes, draft.active / draft.params),
        )

    def both(
        self, target: tuple[float, float], draft: tuple[float, float] | None
    ) -> tuple[float, float | None]:
        """Estimate the same for models of N bytes of which a token uses this share."""
        n_bytes, used = target
        plain = self.speed(n_bytes * used)
        if draft is None:
            return plain, None
        reading = self._reading(*target)
        gain = tokens_per_second(reading, self._reading(*draft)) * reading.seconds(1)
        return plain, plain * gain if gain > 1.0 else None

    def _reading(self, n_bytes: float, used: float) -> Reading:
        dense = 0.0 if used < 1.0 else n_bytes
        return Reading(dense, n_bytes - dense, used, self.on_gpu)

    def recommended(
        self, pairs: Iterable[catalog.CatalogPair] | None = None
    ) -> catalog.CatalogPair | None:
        """Return the largest pair of the catalogue that has a draft model, runs comfortably here
        and is fast enough to chat with; None if there is none."""
        found = [
            pair
            for pair in pairs or catalog.load().values()
            if pair.draft is not None
            and "coder" not in pair.name  # who begins wants to chat
            and fit.judge(pair, self.memory) == "yes"
            and self.speeds(pair)[0] >= FAST_ENOUGH
        ]
        return max(found, key=lambda p: (p.target.params, -p.bytes), default=None)


def this_machine(cores: int | None = None, *, on_gpu: bool | None = None) -> Machine:
    """Describe this machine; missing values are looked up, which loads llama.cpp."""
    if cores is None:
        from specllama.backend.cores import physical_cores

        cores = physical_cores()
    if on_gpu is None:
        from specllama.backend import devices, trial

        trial.require()
        on_gpu = bool(devices.gpus(devices.devices()))
    return Machine(fit.machine_memory(), cores, on_gpu)


def speed_words(pair: catalog.CatalogPair, machine: Machine) -> str:
    """Return words such as "about 12 tok/s, 20 with its draft"."""
    return _words(*machine.speeds(pair))


def headers_words(target: GgufHeader, draft: GgufHeader | None, machine: Machine) -> str:
    """Return the same words for files; "" if they are too small."""
    if target.tensor_bytes < LEAST_BYTES:
        return ""

    def read(header: GgufHeader) -> tuple[float, float]:
        return header.tensor_bytes, used_share(header)

    return _words(*machine.both(read(target), None if draft is None else read(draft)))


def _words(plain: float, drafted: float | None) -> str:
    more = "" if drafted is None else f", {figure(drafted)} with its draft"
    return f"about {figure(plain)} tok/s{more}"


def figure(speed: float) -> str:
    """Format an estimated speed with two digits at most."""
    return f"{speed:.{0 if speed >= 9.5 else 1}f}"


def tokens_per_second(
    target: Reading, draft: Reading | None, acceptance: float = ACCEPTANCE
) -> float:
    """Return the speed with the draft length that pays best, possibly none.

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
