"""The draft of ``--proposer self``: the target without the middle half of its layers.

It is a separate file, cut out of the target's (``models.pruned``), so that every model whose layers
can be dropped works without a special pass. It is made and loaded when the first request asks for
it: merely having the choice costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specllama.models import memory, pruned

if TYPE_CHECKING:
    from specllama.backend.base import Lane, Pool
    from specllama.backend.loaded_target import LoadedTarget

MUCH = 0.5  # of a target step; a draft that costs more hardly ever pays


class OwnLayers:
    """The opener of the draft, when its first lane is needed.

    The draft takes over the target's settings and is freed before it.
    """

    def __init__(self, target: LoadedTarget) -> None:
        self._target = target
        self._pool: Pool | None = None
        self._said = ""

    def open(self) -> tuple[Lane, str]:
        """Open a lane of the draft, and describe it and its cost; make its file if there is none.

        Raises:
            DoesNotFit, CannotLoad: no memory for a second model.
            SpecllamaError: the file cannot be written.
        """
        if self._pool is None:
            self._pool = self._load()
        return self._pool.open(), self._said

    def _load(self) -> Pool:
        from specllama.backend.llama import LlamaModel
        from specllama.backend.llama_pool import open_pool

        target = self._target
        options = target.options
        drop = pruned.middle_half(target.header.block_count)
        self._said = _advice(drop, pruned.draft_work(target.header, drop))
        header = pruned.make_draft(target.header, drop, threads=target.threads)
        if options.check_memory and not target.model.gpu_layers:
            memory.require_fit(
                memory.estimate_model(
                    header,
                    n_ctx=target.pool.n_ctx,
                    type_k=options.kv_type_k,
                    type_v=options.kv_type_v,
                    n_ubatch=target.pool.n_batch,
                    n_outputs=1,
                )
            )
        model = LlamaModel(
            header.path,
            pre=header.pre_tokenizer or "",
            gpu_layers=str(target.model.gpu_layers),
            devices=target.model.devices,
            use_mmap=options.use_mmap,
            use_mlock=options.use_mlock,
        )
        target.on_close.callback(model.close)
        return open_pool(
            model,
            lanes=options.parallel,
            n_ctx=target.pool.n_ctx,
            max_rows=1,
            threads=target.threads,
            options=options,
            flash=target.pool.kernels.flash,
            any_width=False,
        )


def _advice(drop: Sequence[int], work: float) -> str:
    said = (
        f"the draft is the target without layers {pruned.layer_list(drop)}: "
        f"one of its steps reads {work:.0%} of the bytes of the target's"
    )
    return f"{said}, which hardly ever pays" if work > MUCH else said
