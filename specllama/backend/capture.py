"""Hidden states out of llama.cpp's passes, switched on only for a proposer that reads them.

    final_hidden   after the last norm, what the output matrix reads; rows with logits only, since
                   llama.cpp makes every row an output where it gives this state away
    (1, 5, 9)      the residual stream as it enters these layers, side by side, every row
    (1, 5, FINAL)  the same with the final state, of passes that return all rows
    nextn          the state that NextN blocks read, every row

Taking a tensor out adds no arithmetic to a row. But with "nextn", llama.cpp computes the last block
of some architectures for every row, not for those with logits only: the logits keep their bits
where those of a row do not depend on how many there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp as ll
import numpy as np

from specllama.arrays import FINAL, HiddenNeed, Rows, with_final
from specllama.backend.symbols import function, rows
from specllama.errors import PairIncompatible
from specllama.models.layer_inputs import LAYER_INPUT_ARCHITECTURES, unexposed


class Capture:
    """The hidden states that one context exposes from its passes.

    Args:
        model, ctx: llama.cpp's pointers; the context must outlive this.
    """

    def __init__(self, model: Any, ctx: Any) -> None:
        self._needs: set[HiddenNeed] = set()
        self._model = model
        self._ctx = ctx
        self._width = int(ll.llama_model_n_embd(model))
        self._width_out = int(ll.llama_model_n_embd_out(model))

    def require_layers(self, layers: Sequence[int]) -> None:
        """Make sure that the inputs of these layers can be read.

        Raises:
            PairIncompatible: llama.cpp does not give these of this model.
            CannotLoad: this libllama lacks the functions.
        """
        layers = [layer for layer in layers if layer != FINAL]
        if not layers:
            return
        kind = metadata(self._model, "general.architecture")
        if kind not in LAYER_INPUT_ARCHITECTURES:
            raise unexposed(kind, ", which this head reads")
        n_layer = int(ll.llama_model_n_layer(self._model))
        beyond = [layer for layer in layers if not 0 <= layer < n_layer]
        if beyond:
            raise PairIncompatible(
                f"the head reads the input of layer {beyond[0]}, the target has layers 0 to "
                f"{n_layer - 1}",
                "use a head that was trained for this target",
            )
        function("llama_set_embeddings_layer_inp")

    def choose(self, needs: set[HiddenNeed]) -> None:
        """Give these states away from the next pass on, and no others."""
        final = any(map(with_final, needs))
        if final and int(ll.llama_pooling_type(self._ctx)) != 0:
            raise PairIncompatible("this target pools its hidden states")
        layers, before = _layers(needs), _layers(self._needs)
        self.require_layers(sorted(layers))
        for layer in layers ^ before:
            function("llama_set_embeddings_layer_inp")(self._ctx, layer, layer in layers)
        if ("nextn" in needs) != ("nextn" in self._needs):
            function("llama_set_embeddings_nextn")(self._ctx, "nextn" in needs, False)
        if not final and any(map(with_final, self._needs)):
            ll.llama_set_embeddings(self._ctx, False)
        self._needs = set(needs)

    def prepare(self, every_row: bool) -> None:
        """Prepare for a pass; ``every_row``: every token has logits, and its state is wanted."""
        if any(map(with_final, self._needs)):
            ll.llama_set_embeddings(self._ctx, every_row)

    def rows(self, need: HiddenNeed, n: int) -> Rows:
        """Return states [n, width] of the tokens of the last pass; those of layers are copies."""
        if isinstance(need, tuple):
            read = function("llama_get_embeddings_layer_inp")
            parts = [
                self.rows("final_hidden", n)
                if layer == FINAL
                else rows(read(self._ctx, layer), n, self._width)
                for layer in need
            ]
            return np.concatenate(parts, axis=1)
        if need == "nextn":
            states = function("llama_get_embeddings_nextn")(self._ctx)
        else:
            states = ll.llama_get_embeddings(self._ctx)
        found: Rows = rows(states, n, self._width_out)
        return found


def _layers(needs: set[HiddenNeed]) -> set[int]:
    return {layer for need in needs if isinstance(need, tuple) for layer in need} - {FINAL}


def metadata(model: Any, key: str) -> str:
    """Look a value up in the file of a loaded model; "" if it lacks one."""
    buffer = ctypes.create_string_buffer(128)
    n = int(ll.llama_model_meta_val_str(model, key.encode(), buffer, len(buffer)))
    return buffer.value.decode("utf-8", "replace") if n > 0 else ""
