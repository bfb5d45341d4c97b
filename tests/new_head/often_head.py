"""A new kind of head, whole: a file that knows how often the target says each token.

Its line in ``models/companions.py``: "often": HeadKind("a list of frequent tokens", "medusa",
"often_head"). It drafts as Medusa heads do, so it needs no method of its own.
"""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specllama.arrays import Row, Rows
from specllama.backend.heads.medusa_head import MedusaPool
from specllama.errors import PairIncompatible
from specllama.models.companions import Head
from specllama.models.gguf import GgufHeader
from specllama.models.memory import ModelMemory
from specllama.models.tensors import read_tensor


class Often:
    """Guesses the same at every depth, whatever the state is."""

    def __init__(self, row: Row) -> None:
        self._row = row

    def __len__(self) -> int:
        return 3

    def logits(self, hidden: Rows, depth: int) -> Rows:
        return np.tile(self._row, (len(hidden), 1))

    def close(self) -> None:
        pass


def write_often(path: Path, often: Row) -> Path:
    writer = gguf.GGUFWriter(path, "often")
    writer.add_tensor("often", np.ascontiguousarray(often[None], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def check(head: GgufHeader, target: GgufHeader) -> None:
    n = head.by_name["often"].shape[0]
    if n != target.vocab_size:
        raise PairIncompatible(f"{head.path.name} knows {n} tokens", "give one of this target")


def open_often(head: GgufHeader, target: Any, facts: None) -> MedusaPool:
    return MedusaPool(Often(read_tensor(head, "often")[0]))


def memory(head: GgufHeader, target: GgufHeader, n_ctx: int) -> ModelMemory:
    return ModelMemory(head.tensor_bytes, 0, 0, 0, 0, 0, n_ctx)


HEAD = Head(check=check, open="often_head:open_often", memory=memory)
