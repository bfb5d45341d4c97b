"""The NextN blocks of a target, in a second context on the same model.

The context holds their keys and values only, and rolls back like any attention cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp as ll

from specllama.backend.heads.head_pool import HeadGraph, HeadPool, load_head
from specllama.models.nextn_blocks import GRAPHS, nextn_blocks

if TYPE_CHECKING:
    from specllama.backend.llama_pool import LoadedModel
    from specllama.models.gguf import GgufHeader
    from specllama.models.nextn_file import HeadWords


def open_nextn(header: GgufHeader, target: LoadedModel, words: HeadWords | None = None) -> HeadPool:
    """Open the NextN layers of a file: the target's own, or one that belongs to it.

    ``words``: its tokens, where it knows only some of the target's.

    ``nextn_blocks.why_not`` has nothing against the header, or llama.cpp ends the process.

    Raises:
        BadGguf, UnsupportedModel, CannotLoad: damaged, or refused by llama.cpp.
        DoesNotFit: not enough memory is free beside the target.
    """
    model, pool, lanes = target.model, target.pool, target.options.parallel
    if header is not target.header:
        model = load_head(header, target)
    params = pool.settings()
    params.ctx_type = ll.LLAMA_CONTEXT_TYPE_MTP
    params.n_ctx = pool.n_ctx
    heads, leaves = nextn_blocks(header), pool.max_leaves
    # llama.cpp makes room for one of each sequence; of several heads each reads all above
    params.n_outputs_max = max(lanes + leaves - 1, leaves * heads)
    params.swa_full = True  # so that any depth of rollback is possible
    width = int(ll.llama_model_n_embd_out(model.handle))
    masked = GRAPHS[header.architecture].outputs_only
    graph = HeadGraph(reads=width, gives=width, masked=masked, heads=heads)
    return HeadPool(model, params, graph, lanes=lanes, leaves=leaves, words=words)
