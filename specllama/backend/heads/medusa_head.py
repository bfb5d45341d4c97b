"""Medusa heads computed by ggml on the CPU, on the weights as they are stored.

A head d (from 1) guesses the token d places behind the pending one, from the hidden state x that
the pending token was drawn from: x <- x + SiLU(W x + b) for every residual block, then (optionally)
a square matrix, then an output matrix, its own or the target's (Cai et al. 2024). A head is read
once for a pass, so memory traffic is its cost.
Activations may be rounded to 8 bits as in llama.cpp's own passes; a guess may differ by that, never
the text.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specllama.arrays import Rows
from specllama.backend.base import Part
from specllama.backend.devices import ggml
from specllama.backend.kernels import Kernels
from specllama.backend.llama_pool import LoadedModel
from specllama.errors import BadGguf, CannotLoad
from specllama.models.gguf import GgufHeader
from specllama.models.medusa_file import STATES, MedusaFacts, output_name, read_output_ids
from specllama.models.tensors import read_bytes

_F32 = 0
# what is multiplied with float32 activations
MATRICES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
_ALONE = 4 << 20  # bytes of a head up to which waking further threads costs more than it saves
_P = ctypes.c_void_p


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


# name -> (argument types, result type)
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "ggml_init": ([_InitParams], _P), "ggml_free": ([_P], None),
    "ggml_new_tensor_1d": ([_P, ctypes.c_int, ctypes.c_int64], _P),
    "ggml_new_tensor_2d": ([_P, ctypes.c_int, ctypes.c_int64, ctypes.c_int64], _P),
    "ggml_get_data": ([_P], _P), "ggml_mul_mat": ([_P, _P, _P], _P),
    "ggml_add": ([_P, _P, _P], _P), "ggml_silu": ([_P, _P], _P),
    "ggml_new_graph_custom": ([_P, ctypes.c_size_t, ctypes.c_bool], _P),
    "ggml_build_forward_expand": ([_P, _P], None),
    "ggml_graph_overhead_custom": ([ctypes.c_size_t, ctypes.c_bool], ctypes.c_size_t),
    "ggml_tensor_overhead": ([], ctypes.c_size_t), "ggml_backend_cpu_init": ([], _P),
    "ggml_backend_cpu_set_n_threads": ([_P, ctypes.c_int], None),
    "ggml_backend_get_default_buffer_type": ([_P], _P),
    "ggml_backend_alloc_ctx_tensors": ([_P, _P], _P), "ggml_backend_buffer_free": ([_P], None),
    "ggml_backend_graph_compute": ([_P, _P], ctypes.c_int), "ggml_backend_free": ([_P], None),
    "ggml_gallocr_new": ([_P], _P), "ggml_gallocr_reserve": ([_P, _P], ctypes.c_bool),
    "ggml_gallocr_alloc_graph": ([_P, _P], ctypes.c_bool), "ggml_gallocr_free": ([_P], None),
}  # fmt: skip


class _Graph(NamedTuple):
    """A head for some states: its arithmetic, the tensor that holds the states, and the logits."""

    graph: int
    states: int
    out: int


class GgmlHeads:
    """All heads of a file, ready to run.

    Args:
        header, facts: of a head file that was checked against ``target``.
        threads: most threads for one head; small heads take one.

    Raises:
        CannotLoad: ggml cannot be called here, or there is no memory.
        BadGguf: the file changed since it was checked.
    """

    def __init__(
        self, header: GgufHeader, facts: MedusaFacts, target: GgufHeader, threads: int
    ) -> None:
        self._g = g = {
            name: ggml(name, gives, *takes) for name, (takes, gives) in _FUNCTIONS.items()
        }
        self._ctx = self._backend = self._buffer = self._values = None
        self._facts = facts
        self._ids = read_output_ids(header, facts)
        sources = [(header, name) for name in header.by_name if name != "ids"]
        if facts.needs_target_output:
            sources.append((target, output_name(target)))
        for of, name in sources:
            kind = of.by_name[name].type
            if kind not in (MATRICES if of.by_name[name].is_matrix else ("F32",)):
                raise CannotLoad(f"{of.path.name}: {name} is stored as {kind}")
        try:
            self._backend = g["ggml_backend_cpu_init"]()
            self._nodes = 8 * facts.blocks + 8  # of a graph, more than it has
            graphs = facts.heads * STATES
            size = graphs * int(g["ggml_graph_overhead_custom"](self._nodes, False))
            size += (self._nodes * graphs + len(sources)) * int(g["ggml_tensor_overhead"]())
            self._ctx = g["ggml_init"](_InitParams(size, None, True))
            self._tensors: dict[str, int] = {}
            contents: list[tuple[int, Any]] = []
            for of, name in sources:
                rows = self._ids if of is target and of is not header else None
                tensor, data = self._tensor(of, name, rows)
                self._tensors[name if of is header else "target"] = tensor
                contents.append((tensor, data))
            self._buffer = g["ggml_backend_alloc_ctx_tensors"](self._ctx, self._backend)
            buffers = g["ggml_backend_get_default_buffer_type"](self._backend)
            self._values = g["ggml_gallocr_new"](buffers)
            built = [self._build(h, n) for h in range(facts.heads) for n in range(1, STATES + 1)]
            # their results share memory, as one graph runs at a time
            there = [g["ggml_gallocr_reserve"](self._values, one.graph) for one in built]
            there += [g["ggml_gallocr_alloc_graph"](self._values, one.graph) for one in built]
            if not self._buffer or not all(there):
                raise CannotLoad(f"no memory for {header.path.name}")
            for tensor, data in contents:
                ctypes.memmove(g["ggml_get_data"](tensor), data.ctypes.data, data.nbytes)
        except BaseException:
            self.close()
            raise
        self._graphs = [(one, self._rows(one.out, i % STATES + 1)) for i, one in enumerate(built)]
        weights = sum(data.nbytes for _, data in contents)
        n = threads if weights / facts.heads > _ALONE else 1
        g["ggml_backend_cpu_set_n_threads"](self._backend, n)

    def __len__(self) -> int:
        return self._facts.heads

    def logits(self, hidden: Rows, depth: int) -> Rows:
        """Compute the logits [..., n_vocab] of head ``depth`` (from 1) on at most ``STATES`` states
        [..., width]; a view until the next call."""
        x = np.ascontiguousarray(hidden, np.float32)
        n = x.size // self._facts.width
        g, (one, rows) = self._g, self._graphs[(depth - 1) * STATES + n - 1]
        ctypes.memmove(g["ggml_get_data"](one.states), x.ctypes.data, x.nbytes)
        if g["ggml_backend_graph_compute"](self._backend, one.graph) != 0:
            rows[:] = np.nan
        if self._ids is not None:
            said, rows = rows, np.full((n, self._facts.vocab), -np.inf, np.float32)
            rows[:, self._ids] = said
        return rows.reshape(*hidden.shape[:-1], -1)

    def close(self) -> None:
        """Free the weights; nothing may be computed afterwards."""
        for name, held in (
            ("ggml_gallocr_free", self._values),
            ("ggml_backend_buffer_free", self._buffer),
            ("ggml_free", self._ctx),
            ("ggml_backend_free", self._backend),
        ):
            if held:
                self._g[name](held)
        self._values = self._buffer = self._ctx = self._backend = None

    # -- building --

    def _rows(self, out: int, n: int) -> Rows:
        """View a head's logits in their tensor's memory."""
        data = ctypes.cast(self._g["ggml_get_data"](out), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(data, (n, self._facts.rows))

    def _tensor(self, header: GgufHeader, name: str, rows: Any) -> tuple[int, Any]:
        """Create a tensor for one of the file, or for some of its rows; return it and the data."""
        info = header.by_name[name]
        data = read_bytes(header, name)
        if len(info.shape) == 1:
            return int(self._g["ggml_new_tensor_1d"](self._ctx, info.type_id, info.shape[0])), data
        data = data.reshape(info.shape[1], -1)
        data = np.ascontiguousarray(data if rows is None else data[rows])
        new = self._g["ggml_new_tensor_2d"]
        return int(new(self._ctx, info.type_id, info.shape[0], len(data))), data

    def _build(self, h: int, n: int) -> _Graph:
        """Build the graph of a head on ``n`` states."""
        g, ctx, tensors = self._g, self._ctx, self._tensors
        states = x = g["ggml_new_tensor_2d"](ctx, _F32, self._facts.width, n)
        for b in range(self._facts.blocks):
            moved = g["ggml_mul_mat"](ctx, tensors[f"head.{h}.block.{b}.weight"], x)
            moved = g["ggml_add"](ctx, moved, tensors[f"head.{h}.block.{b}.bias"])
            x = g["ggml_add"](ctx, x, g["ggml_silu"](ctx, moved))
        proj = tensors.get(f"head.{h}.proj.weight")
        if proj is not None:
            x = g["ggml_mul_mat"](ctx, proj, x)
        output = tensors.get(f"head.{h}.output.weight", tensors.get("target"))
        if output is None:
            raise BadGguf("a head without an output matrix")
        graph = g["ggml_new_graph_custom"](ctx, self._nodes, False)
        out = g["ggml_mul_mat"](ctx, output, x)
        g["ggml_build_forward_expand"](graph, out)
        return _Graph(graph, states, out)


def open_medusa(header: GgufHeader, target: LoadedModel, facts: MedusaFacts) -> MedusaPool:
    """Open the heads of a file.

    Raises:
        BadGguf: damaged.
        CannotLoad: in types that ggml does not compute with here, or there is no memory.
    """
    return MedusaPool(GgmlHeads(header, facts, target.header, target.threads))


class MedusaPool:
    """A pool of heads, see ``base.Passes``: a part is a state [1, width] and its head.

    Nothing is kept between passes, so a lane is a name. A head reads its matrices once for the
    states of all conversations that are at its depth.
    """

    n_batch = max_rows = STATES
    free_leaves = 0
    kernels = Kernels()

    def __init__(self, heads: GgmlHeads) -> None:
        self.heads = heads

    def open(self, target: Any = None) -> MedusaLane:
        return MedusaLane(self)

    def close(self) -> None:
        self.heads.close()

    def run(self, parts: Sequence[Part]) -> None:
        depths: dict[int, list[Part]] = {}
        for part in parts:
            depths.setdefault(part.head, []).append(part)
        for head, together in depths.items():
            rows = self.heads.logits(np.concatenate([p.states for p in together]), head)
            rows = rows if len(depths) == 1 else rows.copy()
            for part, own in zip(together, np.split(rows, len(together)), strict=True):
                part.rows = own


class MedusaLane:
    """A lane of heads, see ``effects.HeadPlace``."""

    n_batch = max_rows = 1
    first = end = 0
    width = 0
    layers: tuple[int, ...] = ()

    def __init__(self, pool: MedusaPool) -> None:
        self.pool = pool
        self.heads = len(pool.heads)

    def copied(self) -> bytes:
        return b""

    def restore(self, state: memoryview, first: int, end: int) -> bool:
        return False

    def close(self) -> None:
        pass
