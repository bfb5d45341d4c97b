"""Lookahead decoding: the target guesses ahead in parallel and keeps its guesses for later.

It takes no draft model and no training (Fu et al. 2024).

    window    W columns of a Jacobi iteration: column i of level j guesses the token at j + i places
              after the pending one, knowing level 0 up to its column and its own levels below j
    pool      every round each column yields one n-gram: what the target would write along it
    drafts    up to G n-grams of the pool that start with the pending token are checked

Both fit the draft tree, where every node sees its ancestors only. Level 0 is a chain of scouts
below the pending token, the higher levels of a column hang on its level 0, and the n-grams of the
pool are ordinary nodes; scouts are evaluated and never accepted. With n-grams of N tokens that is
at most (W + G)(N - 1) rows a round for one to N tokens. It pays where rows are free: on a GPU with
compute to spare. On a CPU every row costs, and it loses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specllama.arrays import Row
from specllama.speculative.drafting.drafter import Drafter, Request
from specllama.speculative.drafting.method import Method, with_trees
from specllama.speculative.effects import Steps
from specllama.speculative.sampling import SamplerChain
from specllama.speculative.tree import TreeBuilder
from specllama.speculative.types import EMPTY_DRAFT, Draft, Room, Verdict
from specllama.text_history import Follower

MIN_ROWS = 5  # below this a pass has no place for a window of two columns and one guess


class LookaheadDrafter(Drafter):
    """A drafter from the target's own parallel guesses.

    Args:
        window: W, columns of the Jacobi window.
        ngram: N, tokens of an n-gram, its first included; at least 3.
        guesses: G, n-grams checked per round and kept per first token.
    """

    name = "lookahead"

    def __init__(self, *, window: int = 8, ngram: int = 4, guesses: int = 6) -> None:
        self._shape = (window, ngram, guesses)
        self._pool: dict[int, list[tuple[int, ...]]] = {}
        self._levels: list[list[int]] = []  # [N - 1][W]; level 0, column 0 is the pending token
        self._seen = Follower()
        self._columns: list[list[int]] = []  # this round: the nodes of each column, level 0 first
        self._sent = 0  # this round: nodes of the draft

    def draft(self, tokens: Sequence[int], chain: SamplerChain, room: Room) -> Steps[Draft]:
        yield from ()
        request, self._columns = self.request, []
        if request.leaves < 3:
            return EMPTY_DRAFT
        rows = min(request.pass_rows - 1, request.n_ctx - len(tokens))
        rows = min(room.judge.read("", rows), rows)
        if rows < MIN_ROWS:
            return EMPTY_DRAFT
        self._follow(tokens)
        width, n, _ = self._shape
        tree = TreeBuilder(max_nodes=rows, max_leaves=request.leaves)
        # what can be accepted first; at least a window of two columns must fit after it
        self._add_guesses(tree, tokens[-1], min(room.n, rows - (2 * n - 3)), request)
        width = min(width, (tree.room + 1) // (n - 1), tree.spare_leaves)
        if width >= 2:
            self._add_window(tree, width)
        draft, at = tree.numbered()
        self._columns = [[at[node] for node in column] for column in self._columns]
        self._sent = len(draft)
        return draft

    def _add_guesses(self, tree: TreeBuilder, token: int, most: int, request: Request) -> None:
        """Add n-grams that start with the pending token, the newest first, sharing prefixes."""
        for gram in reversed(self._pool.get(token, ())):
            node = -1
            for guess in gram:
                if len(tree) >= most:
                    return
                if tree.spare_leaves <= 2 and not tree.is_leaf(node):
                    return  # the window needs leaves too
                found = tree.add(node, guess, self.name)
                if found is None or request.is_eog(guess):
                    break
                node = found

    def _add_window(self, tree: TreeBuilder, width: int) -> None:
        _, n, _ = self._shape
        above = -1
        columns: list[list[int]] = []
        for i in range(width):
            if i > 0:
                node = tree.add(above, self._levels[0][i], self.name, scout=True)
                if node is None:
                    return
                above = node
            column = [above]
            for j in range(1, n - 1):
                node = tree.add(column[-1], self._levels[j][i], self.name, scout=True)
                if node is None:
                    return
                column.append(node)
            columns.append(column)
        self._columns = columns

    # -- what the target made of the window --

    def read_rows(self, draft: Draft, row: Callable[[int], Row]) -> None:
        """Take the target's best token after every column as the newest level and n-gram.

        Args:
            row: the logits after a node of the draft, -1 for the pending token.
        """
        newest = []
        if len(draft) < self._sent:  # cut: nothing can be said of the window
            self._columns = []
        for column in self._columns:
            token = int(np.argmax(row(column[-1])))
            newest.append(token)
            first = draft.tokens[column[0]] if column[0] >= 0 else self._seen.text[-1]
            self._learn(first, (*(draft.tokens[node] for node in column[1:]), token))
        if newest:
            kept = self._levels[-1][len(newest) :]
            self._levels = [*self._levels[1:], [*newest, *kept]]

    def _learn(self, first: int, rest: tuple[int, ...]) -> None:
        known = self._pool.setdefault(first, [])
        if rest in known:
            known.remove(rest)
        known.append(rest)
        del known[: -self._shape[2]]

    def commit(self, tokens: Sequence[int], draft: Draft, verdict: Verdict) -> None:
        """Move the window to the new pending token.

        ``read_rows`` raised every level by one, which is one place; the rest is columns.
        """
        moved = len(verdict.path)
        if self._columns and moved:
            for level in self._levels:
                # new columns start from what was written last
                level[:] = [*level[moved:], *_repeat(tokens, moved)][: len(level)]

    def _follow(self, tokens: Sequence[int]) -> None:
        """Start a new text with its own tokens as first guesses; the pool stays."""
        width, n, _ = self._shape
        keep, edited = self._seen.follow(tokens)
        if not self._levels or edited:
            self._levels = [_repeat(tokens[: len(tokens) - j], width) for j in range(n - 1)]
            keep = 0
        # every n-gram of the text is one the target has seen written
        for i in range(max(keep - n, 0), len(tokens) - n + 1):
            self._learn(tokens[i], tuple(tokens[i + 1 : i + n]))

    def forget(self) -> None:
        self._pool.clear()
        self._levels, self._columns = [], []


def _repeat(tokens: Sequence[int], n: int) -> list[int]:
    """Return the last n tokens; a shorter text is repeated."""
    if not tokens:
        return [0] * n
    last = list(tokens[-n:])
    return (last * (n // len(last) + 1))[:n]


METHOD = Method(
    name="lookahead",
    label="Lookahead",
    short="lookahead",
    letter="l",
    blurb="The target guesses several tokens ahead in parallel and checks them itself. "
    "Pays on GPUs with spare compute, not on CPUs.",
    why_not=with_trees,
    open=lambda kit: LookaheadDrafter(),
    branches="must",
)
