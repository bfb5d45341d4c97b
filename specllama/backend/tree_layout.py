"""The positions of a token tree's nodes in the cache; the tree may grow pass by pass.

Every leaf gets a sequence of its own, and a node is in the sequences of all leaves below it, so a
query that looks into its first one sees exactly its ancestors (the layout of SpecInfer and Medusa,
in llama.cpp's terms). A chain is the special case of one leaf.

A node after the end of a leaf goes on with that leaf. Any other opens a new leaf: what lies above
it in the cache already is copied to the new sequence, what comes in the same pass is put into both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """A tree, or forest, that continues a text.

    Attributes:
        parents: of every node; -1 hangs it on the text.
        depth: nodes above each one: its position is the length of the text plus that.
        ends: the node at which each leaf ends.
        leaves: of the nodes of the last pass, the leaves below each; the leaf that ends at a node,
            or goes on after it, is the first.
        copies: of the leaves that the last pass opened, (the leaf that has what lies above in the
            cache, how many nodes that is).
    """

    parents: tuple[int, ...] = ()
    depth: tuple[int, ...] = ()
    ends: tuple[int, ...] = (-1,)
    leaves: tuple[tuple[int, ...], ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def n_leaves(self) -> int:
        return len(self.ends)

    @property
    def new_depth(self) -> tuple[int, ...]:
        """The depth of the nodes of the last pass."""
        return self.depth[len(self.depth) - len(self.leaves) :]

    def grown(self, parents: Sequence[int]) -> Layout:
        """Return a tree with the nodes of a further pass.

        Raises:
            ValueError: a parent does not precede its child.
        """
        known = len(self.parents)
        above, depth, ends = [*self.parents], [*self.depth], [*self.ends]
        leaves: list[list[int]] = []
        copies: list[tuple[int, int]] = []
        for node, parent in enumerate(parents, known):
            if not -1 <= parent < node:
                raise ValueError("a node's parent must precede it")
            above.append(parent)
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
            if parent in ends:
                leaf = ends.index(parent)
                ends[leaf] = node
            else:
                leaf = len(ends)
                ends.append(node)
                while parent >= known:
                    leaves[parent - known].append(leaf)
                    parent = above[parent]
                copies.append((self.leaf_at(parent), depth[parent] + 1 if parent >= 0 else 0))
            leaves.append([leaf])
        return Layout(
            tuple(above), tuple(depth), tuple(ends), tuple(map(tuple, leaves)), tuple(copies)
        )

    def above(self, node: int) -> list[int]:
        """Return the nodes from the root to one, itself included; none for -1."""
        found: list[int] = []
        while node >= 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def leaf_at(self, node: int) -> int:
        """Return a leaf at or below a node; for -1 the first."""
        return next(i for i, end in enumerate(self.ends) if node in (-1, *self.above(end)))
