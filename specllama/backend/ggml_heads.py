"""Medusa heads computed by ggml's CPU kernels, on the weights as they are stored.

The same arithmetic as ``medusa_heads.Heads`` at a quarter of the memory traffic of float32 (a head
is read once per guess, so traffic is its cost), on several threads, and with any tensor type that
llama.cpp knows. Activations are rounded to 8 bits as in llama.cpp's own passes; a guess may differ
by that, never the text.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from specllama.arrays import Row
from specllama.backend.symbols import ggml
from specllama.errors import BadGguf, CannotLoad
from specllama.models.gguf import GgufHeader
from specllama.models.medusa_file import MedusaFacts, output_name, read_output_ids
from specllama.models.tensors import read_bytes

_F32 = 0
# what ggml's CPU kernels multiply with float32 activations
MATRICES = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
_NODES = 256  # of a graph: more than any head has
_SLACK = 1 << 20  # bytes for the activations and the graphs of all heads, besides their rows
_ALONE = 4 << 20  # bytes of a head up to which waking further threads costs more than it saves
_P = ctypes.c_void_p


class _InitParams(ctypes.Structure):
    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        ("work_size", ctypes.c_size_t),
        ("work_data", ctypes.c_void_p),
        ("n_threads", ctypes.c_int),
        ("threadpool", ctypes.c_void_p),
        ("abort_callback", ctypes.c_void_p),
        ("abort_callback_data", ctypes.c_void_p),
        ("use_ref", ctypes.c_bool),
    )


# name -> (library, argument types, result type)
_FUNCTIONS: dict[str, tuple[str, list[Any], Any]] = {
    "ggml_init": ("ggml-base", [_InitParams], _P),
    "ggml_free": ("ggml-base", [_P], None),
    "ggml_new_tensor_1d": ("ggml-base", [_P, ctypes.c_int, ctypes.c_int64], _P),
    "ggml_new_tensor_2d": ("ggml-base", [_P, ctypes.c_int, ctypes.c_int64, ctypes.c_int64], _P),
    "ggml_get_data": ("ggml-base", [_P], _P),
    "ggml_mul_mat": ("ggml-base", [_P, _P, _P], _P),
    "ggml_add": ("ggml-base", [_P, _P, _P], _P),
    "ggml_silu": ("ggml-base", [_P, _P], _P),
    "ggml_new_graph_custom": ("ggml-base", [_P, ctypes.c_size_t, ctypes.c_bool], _P),
    "ggml_build_forward_expand": ("ggml-base", [_P, _P], None),
    "ggml_graph_overhead_custom": ("ggml-base", [ctypes.c_size_t, ctypes.c_bool], ctypes.c_size_t),
    "ggml_tensor_overhead": ("ggml-base", [], ctypes.c_size_t),
    "ggml_graph_plan": ("ggml-cpu", [_P, ctypes.c_int, _P], _Plan),
    "ggml_graph_compute": ("ggml-cpu", [_P, ctypes.POINTER(_Plan)], ctypes.c_int),
}


@cache
def _ggml() -> dict[str, Callable[..., Any]]:
    """ggml's functions, from the libraries that the binding has loaded.

    Raises:
        CannotLoad: they are built in another way here.
    """
    return {name: ggml(name, *where) for name, where in _FUNCTIONS.items()}


class GgmlHeads:
    """All heads of a file, ready to run; see ``medusa_heads.Heads`` for what they compute.

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
        self._g = _ggml()
        self._ctx = None
        self._facts = facts
        self._ids = read_output_ids(header, facts)
        self.measured = facts.measured
        sources = [(header, name) for name in header.by_name if name != "ids"]
        if facts.needs_target_output:
            sources.append((target, output_name(target)))
        for of, name in sources:
            kind = of.by_name[name].type
            if kind not in (MATRICES if of.by_name[name].is_matrix else ("F32",)):
                raise CannotLoad(f"{of.path.name}: {name} is stored as {kind}")
        weights = sum(of.by_name[name].n_bytes + 512 for of, name in sources)
        values = 4 * facts.heads * ((8 * facts.blocks + 4) * facts.width + facts.rows)
        graphs = facts.heads * int(self._g["ggml_graph_overhead_custom"](_NODES, False))
        nodes = (8 * facts.blocks + 8) * facts.heads + len(sources)
        size = weights + values + graphs + 2 * nodes * int(self._g["ggml_tensor_overhead"]())
        self._ctx = self._g["ggml_init"](_InitParams(size + _SLACK, None, False))
        if not self._ctx:
            raise CannotLoad(f"no memory for the {size >> 20} MB of {header.path.name}")
        self._tensors: dict[str, int] = {}
        for of, name in sources:
            key = name if of is header else "target"
            rows = self._ids if of is target and of is not header else None
            self._tensors[key] = self._copy(of, name, rows)
        self._x = self._g["ggml_new_tensor_1d"](self._ctx, _F32, facts.width)
        self._input = self._view(self._x, facts.width)
        self._graphs: list[tuple[int, _Plan, Any, Row]] = []
        threads = threads if weights / facts.heads > _ALONE else 1
        for h in range(facts.heads):
            self._graphs.append(self._build(h, threads))

    def __len__(self) -> int:
        return self._facts.heads

    def logits(self, hidden: Row, depth: int) -> Row:
        """Logits [n_vocab] of head ``depth`` (from 1); a view until the next call."""
        graph, plan, _, rows = self._graphs[depth - 1]
        self._input[:] = hidden
        if self._g["ggml_graph_compute"](graph, ctypes.byref(plan)) != 0:
            rows[:] = np.nan
        if self._ids is None:
            return rows
        row = np.full(self._facts.vocab, -np.inf, np.float32)
        row[self._ids] = rows
        return row

    def close(self) -> None:
        """Free the weights; nothing may be computed afterwards."""
        if self._ctx:
            self._graphs = []
            self._g["ggml_free"](self._ctx)
            self._ctx = None

    # -- building --

    def _view(self, tensor: int, n: int) -> Row:
        data = self._g["ggml_get_data"](tensor)
        return np.ctypeslib.as_array(ctypes.cast(data, ctypes.POINTER(ctypes.c_float)), (n,))

    def _copy(self, header: GgufHeader, name: str, rows: Any) -> int:
        info = header.by_name[name]
        data = read_bytes(header, name)
        if len(info.shape) == 1:
            tensor = self._g["ggml_new_tensor_1d"](self._ctx, info.type_id, info.shape[0])
        else:
            data = data.reshape(info.shape[1], -1)
            data = data if rows is None else np.ascontiguousarray(data[rows])
            tensor = self._g["ggml_new_tensor_2d"](
                self._ctx, info.type_id, info.shape[0], len(data)
            )
        ctypes.memmove(self._g["ggml_get_data"](tensor), data.ctypes.data, data.nbytes)
        return int(tensor)

    def _build(self, h: int, threads: int) -> tuple[int, _Plan, Any, Row]:
        g, ctx, tensors = self._g, self._ctx, self._tensors
        x = self._x
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
        x = g["ggml_mul_mat"](ctx, output, x)
        graph = g["ggml_new_graph_custom"](ctx, _NODES, False)
        g["ggml_build_forward_expand"](graph, x)
        plan = g["ggml_graph_plan"](graph, threads, None)
        work = ctypes.create_string_buffer(max(int(plan.work_size), 1) + 64)
        plan.work_data = ctypes.addressof(work)
        return graph, plan, work, self._view(x, self._facts.rows)
