"""The sums that llama.cpp computes inside a pass: rows of its matrix products and attention.

Logits hide differences: activations are rounded to 8 bits before each matrix product, and only now
and then does a last bit get through. To know whether two passes were computed alike
has to look at the products themselves. Looking costs a pause after each of them, so this is for a
context that is there to be looked at.
"""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp as ll
import numpy as np

from specllama.backend.devices import ggml

_F32 = 0
# what sums up: elsewhere rows are computed one by one, or only moved
_SUMS = frozenset({b"MUL_MAT", b"MUL_MAT_ID", b"FLASH_ATTN_EXT", b"CONT", b"SSM_SCAN"})


class _Tensor(ctypes.Structure):
    """The head of ``struct ggml_tensor``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


_TENSOR = ctypes.POINTER(_Tensor)


# name -> (argument types, result type)
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "ggml_op_desc": ([_TENSOR], ctypes.c_char_p),
    "ggml_get_name": ([_TENSOR], ctypes.c_char_p),
    "ggml_nelements": ([_TENSOR], ctypes.c_int64),
    "ggml_is_contiguous": ([_TENSOR], ctypes.c_bool),
    "ggml_backend_tensor_get": ([_TENSOR, ctypes.c_void_p, *[ctypes.c_size_t] * 2], None),
}


class Watch:
    """A recorder of the sums of every pass of one context.

    Raises:
        CannotLoad: ggml cannot be asked here.
    """

    def __init__(self) -> None:
        self._g = {name: ggml(name, gives, *takes) for name, (takes, gives) in _FUNCTIONS.items()}
        self._n = 0
        self._seen: dict[str, list[int]] = {}
        callback = ll.ggml_backend_sched_eval_callback
        self.function = callback(self._on_node)

    def expect(self, n: int) -> None:
        """Prepare for a pass of ``n`` tokens; 0 looks at nothing."""
        self._n = n
        self._seen = {}

    def take(self) -> dict[str, list[int]]:
        """Return, by tensor name, a hash of each token's row of the pass since ``expect``."""
        seen, self._n, self._seen = self._seen, 0, {}
        return seen

    def _on_node(self, pointer: Any, ask: bool, user_data: Any) -> bool:
        """Handle a tensor before (``ask``: is it wanted?) and after it was computed."""
        if self._n == 0:
            return not ask
        node = ctypes.cast(pointer, _TENSOR)
        if ask:
            return self._is_wanted(node)
        size = int(self._g["ggml_nelements"](node))
        rows = np.empty((self._n, size // self._n), np.float32)
        self._g["ggml_backend_tensor_get"](node, rows.ctypes.data, 0, rows.nbytes)
        name = self._g["ggml_get_name"](node).decode("utf-8", "replace")
        self._seen[name] = [hash(row.tobytes()) for row in rows]
        return True

    def _is_wanted(self, node: Any) -> bool:
        """True if it is a float32 sum whose last dimension counts the tokens of the pass."""
        if self._g["ggml_op_desc"](node) not in _SUMS or node.contents.type != _F32:
            return False
        ne = list(node.contents.ne)
        if int(np.prod(ne)) != self._g["ggml_nelements"](node):
            return False  # not the layout that is known here
        last = 1 if ne[2] == 1 else 2
        rows = ne[3] == 1 and ne[last] == self._n
        return rows and bool(self._g["ggml_is_contiguous"](node))
