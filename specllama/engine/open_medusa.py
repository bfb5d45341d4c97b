"""Medusa heads from a file, joined to a loaded target."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from specllama.errors import BadGguf, CannotLoad
from specllama.models.gguf import GgufHeader, read_header
from specllama.models.medusa_file import (
    MedusaFacts,
    check_target,
    output_matrix,
    read_facts,
    read_output_ids,
)
from specllama.models.tensors import read_tensor
from specllama.speculative.drafting.medusa_heads import Heads, MedusaHead

if TYPE_CHECKING:
    from specllama.backend.heads.medusa_pool import MedusaPool
    from specllama.backend.loaded_target import LoadedTarget

logger = logging.getLogger("specllama.engine.open_medusa")


def open_medusa(header: GgufHeader, target: LoadedTarget) -> MedusaPool:
    """The heads of a file where the target's last layer runs; on the CPU where that device does not
    take them, in numpy where ggml cannot be called.

    Raises:
        BadGguf, UnsupportedModel: damaged, or in types that are not decoded here.
    """
    from specllama.backend.heads.medusa import GgmlHeads
    from specllama.backend.heads.medusa_pool import MedusaPool
    from specllama.backend.placement import CPU

    facts = read_facts(header)
    for device in dict.fromkeys((target.model.last_device, CPU)):
        try:
            heads = GgmlHeads(header, facts, target.header, target.threads, device)
        except CannotLoad as error:
            if isinstance(error, BadGguf):
                raise
            logger.info("%s; Medusa heads do not run on %s", error, device)
        else:
            target.on_close.callback(heads.close)
            return MedusaPool(heads)
    return MedusaPool(load_heads(header.path, target.header))


def load_heads(path: Path, target: GgufHeader) -> Heads:
    """The heads of a file, as float32.

    Heads without an output matrix share that of the target, which is then read from its file.

    Raises:
        PairIncompatible: not Medusa heads, or heads of another target.
        BadGguf, UnsupportedModel: damaged, or in types that are not decoded here.
    """
    header = read_header(path)
    facts = read_facts(header)
    check_target(facts, header, target)
    ids = read_output_ids(header, facts)
    return Heads(
        heads=tuple(_head(header, facts, h) for h in range(facts.heads)),
        output=output_matrix(target, ids) if facts.needs_target_output else None,
        ids=ids,
        n_vocab=facts.vocab,
        measured=facts.measured,
    )


def _head(header: GgufHeader, facts: MedusaFacts, h: int) -> MedusaHead:
    def tensor(name: str) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
        full = f"head.{h}.{name}"
        return read_tensor(header, full) if full in header.by_name else None

    blocks = tuple(
        (
            read_tensor(header, f"head.{h}.block.{b}.weight"),
            read_tensor(header, f"head.{h}.block.{b}.bias"),
        )
        for b in range(facts.blocks)
    )
    return MedusaHead(blocks, tensor("proj.weight"), tensor("output.weight"))
