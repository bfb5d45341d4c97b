"""Where the nodes of a token tree stand in a pass.

Every leaf gets a sequence id of its own, and a node carries the ids of all leaves below it, so a
query that looks for its first id sees exactly its ancestors (the layout of SpecInfer and Medusa, in
llama.cpp's terms). A chain is the special case of one leaf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specllama.arrays import IntArray


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the nodes of a pass stand.

    ``depth[i]`` counts the nodes above i, so its position is the cached length plus that;
    ``leaves[i]`` are the ascending numbers of the leaves below node i (of a leaf: its own).
    """

    depth: IntArray  # [n]
    leaves: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]  # the node that each leaf is

    @property
    def n_leaves(self) -> int:
        return len(self.ends)


def layout(parents: Sequence[int]) -> Layout:
    """The layout of a tree or forest; ``parents[i] == -1`` hangs node i on the cached prefix.

    Raises:
        ValueError: a parent does not precede its child.
    """
    n = len(parents)
    depth = np.zeros(n, np.int32)
    is_leaf = [True] * n
    for i, parent in enumerate(parents):
        if not -1 <= parent < i:
            raise ValueError("a node's parent must precede it")
        if parent >= 0:
            depth[i] = depth[parent] + 1
            is_leaf[parent] = False
    below: list[list[int]] = [[] for _ in range(n)]
    ends = [i for i in range(n) if is_leaf[i]]
    for leaf, end in enumerate(ends):
        below[end].append(leaf)
    for i in range(n - 1, -1, -1):
        if parents[i] >= 0:
            below[parents[i]] += below[i]
    return Layout(depth, tuple(tuple(sorted(leaves)) for leaves in below), tuple(ends))
