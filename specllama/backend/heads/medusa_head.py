"""Medusa heads computed by ggml, on the weights as they are stored, on any of its devices.

A head d (from 1) guesses the token d places behind the pending one, from the hidden state x that
the pending token was drawn from: x <- x + SiLU(W x + b) for every residual block, then (optionally)
a square matrix, then an output matrix, its own or the target's (Cai et al. 2024). A head is read
once for a pass, so memory traffic is its cost.
Activations may be rounded to 8 bits as in llama.cpp's own passes; a guess may differ by that, never
the text.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specllama.arrays import Rows
from specllama.backend.base import Part
from specllama.backend.devices import ggml, handles
from specllama.backend.kernels import Kernels
from specllama.backend.placement import CPU
from specllama.errors import BadGguf, CannotLoad
from specllama.models.gguf import GgufHeader
from specllama.models.medusa_file import (
    STATES,
    MedusaFacts,
    output_name,
    read_output_ids,
)
from specllama.models.tensors import read_bytes

if TYPE_CHECKING:
    from specllama.backend.llama_pool import LoadedModel

logger = logging.getLogger("specllama.backend.heads.medusa_head")

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
    "ggml_init": ([_InitParams], _P),
    "ggml_free": ([_P], None),
    "ggml_new_tensor_1d": ([_P, ctypes.c_int, ctypes.c_int64], _P),
    "ggml_new_tensor_2d": ([_P, ctypes.c_int, ctypes.c_int64, ctypes.c_int64], _P),
    "ggml_get_data": ([_P], _P),
    "ggml_nbytes": ([_P], ctypes.c_size_t),
    "ggml_mul_mat": ([_P, _P, _P], _P),
    "ggml_add": ([_P, _P, _P], _P),
    "ggml_silu": ([_P, _P], _P),
    "ggml_new_graph_custom": ([_P, ctypes.c_size_t, ctypes.c_bool], _P),
    "ggml_build_forward_expand": ([_P, _P], None),
    "ggml_graph_overhead_custom": ([ctypes.c_size_t, ctypes.c_bool], ctypes.c_size_t),
    "ggml_tensor_overhead": ([], ctypes.c_size_t),
    "ggml_graph_n_nodes": ([_P], ctypes.c_int),
    "ggml_graph_node": ([_P, ctypes.c_int], _P),
    "ggml_backend_dev_init": ([_P, ctypes.c_char_p], _P),
    "ggml_backend_dev_supports_op": ([_P, _P], ctypes.c_bool),
    "ggml_backend_dev_backend_reg": ([_P], _P),
    "ggml_backend_reg_get_proc_address": ([_P, ctypes.c_char_p], _P),
    "ggml_backend_alloc_ctx_tensors": ([_P, _P], _P),
    "ggml_backend_alloc_buffer": ([_P, ctypes.c_size_t], _P),
    "ggml_backend_get_alignment": ([_P], ctypes.c_size_t),
    "ggml_backend_buffer_get_base": ([_P], _P),
    "ggml_backend_tensor_alloc": ([_P, _P, _P], ctypes.c_int),
    "ggml_backend_buffer_is_host": ([_P], ctypes.c_bool),
    "ggml_backend_buffer_free": ([_P], None),
    "ggml_backend_tensor_set": ([_P, _P, ctypes.c_size_t, ctypes.c_size_t], None),
    "ggml_backend_tensor_get": ([_P, _P, ctypes.c_size_t, ctypes.c_size_t], None),
    "ggml_backend_graph_compute": ([_P, _P], ctypes.c_int),
    "ggml_backend_free": ([_P], None),
}


class _Graph(NamedTuple):
    """A head for some states: its tensors in the order of their arithmetic.

    The first one holds the states, the last one the logits, which are read in ``rows``.
    """

    graph: int
    tensors: list[int]
    rows: Rows


class GgmlHeads:
    """All heads of a file, ready to run.

    Args:
        header, facts: of a head file that was checked against ``target``.
        threads: most threads for one head on the CPU; small heads take one.
        device: where they run, by ggml's name.

    Raises:
        CannotLoad: ggml cannot be called here, the device does not compute them, or there is no
            memory.
        BadGguf: the file changed since it was checked.
    """

    def __init__(
        self,
        header: GgufHeader,
        facts: MedusaFacts,
        target: GgufHeader,
        threads: int,
        device: str = CPU,
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
            self._open(device)
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
            built = [self._build(h, n) for h in range(facts.heads) for n in range(1, STATES + 1)]
            self._values = self._place([tensors for _, tensors in built])
            if not self._buffer or not self._values:
                raise CannotLoad(f"no memory for {header.path.name} on {device}")
            for tensor, data in contents:
                g["ggml_backend_tensor_set"](tensor, data.ctypes.data, 0, data.nbytes)
        except BaseException:
            self.close()
            raise
        self._is_host = bool(g["ggml_backend_buffer_is_host"](self._values))
        self._graphs = [
            _Graph(graph, tensors, self._rows(tensors[-1], i % STATES + 1))
            for i, (graph, tensors) in enumerate(built)
        ]
        weights = sum(data.nbytes for _, data in contents)
        self._set_threads(threads if weights / facts.heads > _ALONE else 1)

    def __len__(self) -> int:
        return self._facts.heads

    def logits(self, hidden: Rows, depth: int) -> Rows:
        """Compute the logits [..., n_vocab] of head ``depth`` (from 1) on at most ``STATES`` states
        [..., width]; a view until the next call."""
        x = np.ascontiguousarray(hidden, np.float32)
        n = x.size // self._facts.width
        g, (graph, tensors, rows) = self._g, self._graphs[(depth - 1) * STATES + n - 1]
        g["ggml_backend_tensor_set"](tensors[0], x.ctypes.data, 0, x.nbytes)
        if g["ggml_backend_graph_compute"](self._backend, graph) != 0:
            rows[:] = np.nan
        elif not self._is_host:
            g["ggml_backend_tensor_get"](tensors[-1], rows.ctypes.data, 0, rows.nbytes)
        if self._ids is not None:
            said, rows = rows, np.full((n, self._facts.vocab), -np.inf, np.float32)
            rows[:, self._ids] = said
        return rows.reshape(*hidden.shape[:-1], -1)

    def close(self) -> None:
        """Free the weights; nothing may be computed afterwards."""
        for name, held in (
            ("ggml_backend_buffer_free", self._values),
            ("ggml_backend_buffer_free", self._buffer),
            ("ggml_free", self._ctx),
            ("ggml_backend_free", self._backend),
        ):
            if held:
                self._g[name](held)
        self._values = self._buffer = self._ctx = self._backend = None

    # -- building --

    def _open(self, device: str) -> None:
        self._device = handles().get(device)
        if self._device:
            self._backend = self._g["ggml_backend_dev_init"](self._device, None)
        if not self._backend:
            raise CannotLoad(f"there is no device {device}")

    def _set_threads(self, n: int) -> None:
        """Set the threads of a backend that has some."""
        registry = self._g["ggml_backend_dev_backend_reg"](self._device)
        found = self._g["ggml_backend_reg_get_proc_address"](
            registry, b"ggml_backend_set_n_threads"
        )
        if found:
            ctypes.CFUNCTYPE(None, _P, ctypes.c_int)(found)(self._backend, n)

    def _place(self, graphs: Sequence[Sequence[int]]) -> Any:
        """Allocate memory for the graphs' results, shared by all: one graph runs at a time."""
        g = self._g
        align = int(g["ggml_backend_get_alignment"](self._backend))
        sizes = [[-(-g["ggml_nbytes"](t) // align) * align for t in tensors] for tensors in graphs]
        values = g["ggml_backend_alloc_buffer"](self._backend, max(map(sum, sizes)))
        if not values:
            return None
        base = int(g["ggml_backend_buffer_get_base"](values))
        for tensors, own in zip(graphs, sizes, strict=True):
            for tensor, at in zip(tensors, accumulate(own, initial=base), strict=False):
                g["ggml_backend_tensor_alloc"](values, tensor, at)
        return values

    def _rows(self, out: int, n: int) -> Rows:
        """Return the array for a head's logits: the tensor's own memory if that is in RAM."""
        shape = (n, self._facts.rows)
        if not self._is_host:
            return np.empty(shape, np.float32)
        data = self._g["ggml_get_data"](out)
        return np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_float)), shape)

    def _tensor(self, header: GgufHeader, name: str, rows: Any) -> tuple[int, Any]:
        """Create a tensor for one of the file, or for some of its rows; return it and the data."""
        info = header.by_name[name]
        data = read_bytes(header, name)
        if len(info.shape) == 1:
            return int(self._g["ggml_new_tensor_1d"](self._ctx, info.type_id, info.shape[0])), data
        data = data.reshape(info.shape[1], -1)
        data = data if rows is None else np.ascontiguousarray(data[rows])
        new = self._g["ggml_new_tensor_2d"]
        return int(new(self._ctx, info.type_id, info.shape[0], len(data))), data

    def _build(self, h: int, n: int) -> tuple[int, list[int]]:
        """Build the graph of a head on ``n`` states, and its tensors: see ``_Graph``."""
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
        g["ggml_build_forward_expand"](graph, g["ggml_mul_mat"](ctx, output, x))
        nodes = [g["ggml_graph_node"](graph, i) for i in range(g["ggml_graph_n_nodes"](graph))]
        if not all(g["ggml_backend_dev_supports_op"](self._device, node) for node in nodes):
            raise CannotLoad("the device does not compute a head's matrices as they are stored")
        return graph, [states, *nodes]


def open_medusa(header: GgufHeader, target: LoadedModel, facts: MedusaFacts) -> MedusaPool:
    """Open the heads of a file on the device of the target's last layer; on the CPU if that device
    does not take them.

    Raises:
        BadGguf: damaged.
        CannotLoad: in types that ggml does not compute with here, or there is no memory.
    """
    device = target.model.last_device
    if device != CPU:
        try:
            return MedusaPool(GgmlHeads(header, facts, target.header, target.threads, device))
        except BadGguf:
            raise
        except CannotLoad as error:
            logger.info("%s; Medusa heads do not run on %s", error, device)
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
