"""Token trees: the builder of all of them, and best-first growth for those that weigh nodes.

How a pass takes a tree is decided in ``backend.tree_layout``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias

from specllama.speculative.effects import Steps
from specllama.speculative.types import Draft, Law, Room

ROOT = -1  # the pending token

Path: TypeAlias = tuple[int, ...]  # drafted tokens, from the first on
Guess: TypeAlias = tuple[int, float, str, Law | None]  # token, share, source, q


class TreeBuilder:
    """A collector of nodes for a Draft; it joins equal children and keeps to the bounds of a pass.

    Args:
        max_nodes: most nodes of the draft.
        max_leaves: most leaves; 1 builds chains only.
    """

    def __init__(self, *, max_nodes: int, max_leaves: int) -> None:
        self._max_nodes = max_nodes
        self._max_leaves = max_leaves
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._q: list[Law | None] = []
        self._confidence: list[float | None] = []
        self._sources: list[str] = []
        self._scout: list[bool] = []
        self._depth: list[int] = []
        self._child: dict[tuple[int, int, bool], int] = {}
        self._has_child: set[int] = set()
        self._n_leaves = 1  # the pending token itself, until it has a child

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def room(self) -> int:
        """Nodes that may still be added."""
        return self._max_nodes - len(self._tokens)

    @property
    def spare_leaves(self) -> int:
        """Branches that may still be opened in addition to a first child."""
        return self._max_leaves - self._n_leaves

    def depth(self, node: int) -> int:
        """Count the drafted tokens on the path to ``node``, itself included; 0 for the root."""
        return self._depth[node] if node >= 0 else 0

    def token(self, node: int) -> int:
        return self._tokens[node]

    def parent(self, node: int) -> int:
        return self._parents[node]

    def is_leaf(self, node: int) -> bool:
        return node not in self._has_child

    def path(self, node: int) -> list[int]:
        """Return the drafted tokens from the first to ``node``."""
        tokens: list[int] = []
        while node >= 0:
            tokens.append(self._tokens[node])
            node = self._parents[node]
        return tokens[::-1]

    def add(
        self,
        parent: int,
        token: int,
        source: str,
        *,
        q: Law | None = None,
        confidence: float | None = None,
        scout: bool = False,
    ) -> int | None:
        """Add a node or find the equal one; return its index, None if it does not fit.

        Two sources that guess the same token share one node, which keeps the first one's law.
        """
        found = self._child.get((parent, token, scout))
        if found is not None:
            have = self._confidence[found]
            if confidence is not None and (have is None or confidence > have):
                self._confidence[found] = confidence
            return found
        branches = parent in self._has_child
        if self.room <= 0 or (branches and self._n_leaves >= self._max_leaves):
            return None
        index = len(self._tokens)
        self._tokens.append(int(token))
        self._parents.append(parent)
        self._q.append(q)
        self._confidence.append(confidence)
        self._sources.append(source)
        self._scout.append(scout)
        self._depth.append(self.depth(parent) + 1)
        self._child[(parent, token, scout)] = index
        self._has_child.add(parent)
        self._n_leaves += branches
        return index

    def build(self) -> Draft:
        """Return the draft, depth first and every node's first child first.

        A first child is the best guess (or the sampled one, which verification must try first).
        When it is accepted down to its leaf, the kept cells follow each other as in a chain.
        """
        return self.numbered()[0]

    def numbered(self) -> tuple[Draft, dict[int, int]]:
        """Return the draft and the place in it of each node (by its index here); -1 stays -1."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for i, parent in enumerate(self._parents):
            children[parent].append(i)  # -1, the pending token, is the last list
        order: list[int] = []
        waiting = children[-1][::-1]
        while waiting:
            node = waiting.pop()
            order.append(node)
            waiting += children[node][::-1]
        at = {node: i for i, node in enumerate(order)}
        at[-1] = -1
        draft = Draft(
            tokens=tuple(self._tokens[i] for i in order),
            parents=tuple(at[self._parents[i]] for i in order),
            q=tuple(self._q[i] for i in order),
            confidence=tuple(self._confidence[i] for i in order),
            sources=tuple(self._sources[i] for i in order),
            scout=tuple(self._scout[i] for i in order) if any(self._scout) else (),
        )
        return draft, at


class BestFirst(TreeBuilder):
    """A tree of the nodes that the target most likely reaches.

        heap    guesses that could join, and nodes that could be read, by the probability that the
                target follows the path there
        join    the likeliest guess becomes a node
        read    the drafter looks at a node and offers what may follow it

    A child is never likelier than its parent, so the first n guesses to leave the heap make the
    best n nodes there are (EAGLE-2, OPT-Tree; Sequoia's dynamic programme finds the same). A node
    is read only when no likelier guess is waiting. What reads in passes reads ``coming`` nodes in
    the same one: those alone can be read later, whatever is found in it, so a tree takes no more
    passes than it is deep, and does not depend on the passes that it took.

    Args:
        room: bounds the nodes, and is asked for those off the path of the best guesses.
        leaves: most of them.
        is_end: nothing follows such a token.
        floor: probability below which no node joins; the first one always may.

    Attributes:
        weight: probability that the target comes to a node.
        trunk: the end of the path of best guesses, ``best`` the token that is expected after it.
    """

    def __init__(
        self, room: Room, *, leaves: int, is_end: Callable[[int], bool], floor: float = 0.0
    ) -> None:
        super().__init__(max_nodes=room.n, max_leaves=leaves)
        self.weight = {ROOT: 1.0}
        self.trunk = ROOT
        self.best: int | None = None
        self.judge = room.judge
        self._is_end = is_end
        self._floor = floor
        self._heap: list[tuple[float, int, int, Guess | None]] = []
        self._pushed = 0

    def read(self, node: int) -> Steps[None]:
        """Offer the guesses after ``node``."""
        raise NotImplementedError

    def wants(self, parent: int, token: int, weight: float) -> bool:
        """True if a guess is worth a row; called when it is the likeliest that is left."""
        return self.is_best(parent, token) or self.judge.row(weight)

    def is_best(self, parent: int, token: int) -> bool:
        """True if a guess continues the path of best guesses."""
        return parent == self.trunk and token == self.best

    def offer(
        self, parent: int, token: int, share: float, source: str, q: Law | None = None
    ) -> None:
        """Add a guess: the target continues ``parent`` with it at probability ``share``."""
        self._pushed += 1
        guess = token, share, source, q
        heapq.heappush(self._heap, (-self.weight[parent] * share, self._pushed, parent, guess))

    def join(
        self, parent: int, token: int, share: float, source: str, q: Law | None = None
    ) -> int | None:
        """Add a node whatever its weight; return None if it does not fit."""
        known = len(self)
        node = self.add(parent, token, source, q=q, confidence=share)
        if node is not None and self.is_best(parent, token):
            self.trunk, self.best = node, None
        if node == known:
            self.weight[node] = self.weight[parent] * share
            if not self._is_end(token):
                self._read_later(node)
        return node

    def _read_later(self, node: int) -> None:
        # before guesses of the same weight: what follows may be likelier than they are
        self._pushed += 1
        heapq.heappush(self._heap, (-self.weight[node], -self._pushed, node, None))

    def stop(self) -> None:
        """Drop all waiting guesses: none is worth its row."""
        self._heap.clear()

    def coming(
        self, known: Callable[[Path], Iterable[tuple[int, float]]]
    ) -> Iterator[tuple[Path, float]]:
        """Yield paths that join and could be read if nothing better is found, and their weights.

        Likelier ones come first, and parents before their children.

        Args:
            known: tokens and shares of what may follow a path that is asked for here.
        """
        heap: list[tuple[float, int, int | Path, Guess | None]] = [*self._heap]
        room, leaves, pushed = self.room, self.spare_leaves, self._pushed
        joined: set[Path] = set()
        opened: set[Path] = set()
        while heap:
            minus, _, above, guess = heapq.heappop(heap)
            path = above if isinstance(above, tuple) else tuple(self.path(above))
            if guess is not None:
                branches = path in opened or above in self._has_child
                child = (*path, guess[0])
                if child in joined or (above, guess[0], False) in self._child:
                    continue
                if branches and not leaves:
                    continue
                leaves -= branches
                room -= 1
                opened.add(path)
                joined.add(child)
                path = child
            if room <= 0 or -minus < self._floor:
                return
            yield path, -minus
            for token, share in known(path):
                pushed += 1
                heapq.heappush(heap, (minus * share, pushed, path, (token, share, "", None)))

    def grow(self) -> Steps[Draft]:
        """Grow the tree, from the pending token or from the nodes that have joined already."""
        if not len(self):
            self._read_later(ROOT)
        while self._heap and self.room > 0:
            minus, _, node, guess = heapq.heappop(self._heap)
            if -minus < self._floor and len(self):
                break
            if guess is None:
                yield from self.read(node)
            elif self.wants(node, guess[0], -minus):
                self.join(node, *guess)
        return self.build()
