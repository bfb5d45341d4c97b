"""llama.cpp's sampler for text that fills a gap: it ends a reply early rather than guess on.

Source: llama_sampler_infill_apply in llama.cpp (src/llama-sampler.cpp).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specllama.arrays import FloatArray, IntArray

_MOST = 256  # tokens that are compared with one another; clients keep 40 by top-k
_LEAST = 0.2  # a token that is not as likely is left out
_END = 3.0  # so many times the mean probability of a token ends the reply


def fillers(
    ids: IntArray,
    logits: FloatArray,
    piece: Callable[[int], bytes],
    is_end: Callable[[int], bool],
    end: Callable[[], int],
) -> tuple[IntArray, FloatArray]:
    """Return those of some tokens that may fill a gap, ids ascending, and their logits.

    Of tokens of which one begins another, the likelier one stands for both.

    Args:
        end: names the token that is left where none is likely.
    """
    order = np.lexsort((ids, -logits))[:_MOST]
    weights = np.exp(logits - logits.max())
    tokens: list[int] = ids[order].tolist()
    chances: list[float] = (weights[order] / weights.sum()).tolist()
    ends = [is_end(token) for token in tokens]
    ending = sum(chance for chance, ended in zip(chances, ends, strict=True) if ended)
    if _END * ending * len(ids) > 1.0 - ending:
        keep = ends
    else:
        _merge(chances, [b"" if e else piece(t) for t, e in zip(tokens, ends, strict=True)])
        keep = [e or c >= _LEAST for c, e in zip(chances, ends, strict=True)]
        n_text = sum(keep) - sum(ends)
        if not n_text:
            return np.array([end()], np.int32), np.zeros(1)
        whole = sum(c for c, kept in zip(chances, keep, strict=True) if kept)
        bar = whole / (n_text + 1)
        keep = [kept and (e or c >= bar) for c, e, kept in zip(chances, ends, keep, strict=True)]
    left = np.sort(order[keep])
    return ids[left], logits[left]


def _merge(chances: list[float], pieces: list[bytes]) -> None:
    """Add the chance of a token to that of another if one of the two begins the other."""
    for i, begins in enumerate(pieces):
        for j, text in enumerate(pieces):
            if not begins or not chances[i]:
                break
            if i != j and chances[j] and text.startswith(begins):
                stays, goes = (j, i) if chances[j] > chances[i] else (i, j)
                chances[stays] += chances[goes]
                chances[goes] = 0.0
