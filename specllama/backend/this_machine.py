"""The machine as ``models.judgement`` takes it: its memory, its cores, the use of a GPU."""

from __future__ import annotations

from specllama.models import memory
from specllama.models.judgement import Machine


def this_machine(cores: int | None = None, *, on_gpu: bool | None = None) -> Machine:
    """Describe this machine; missing values are looked up, which loads llama.cpp."""
    if cores is None:
        from specllama.backend.cores import physical_cores

        cores = physical_cores()
    if on_gpu is None:
        from specllama.backend import devices, trial

        trial.require()
        on_gpu = bool(devices.gpus(devices.devices()))
    return Machine(memory.total_memory(), cores, on_gpu)
