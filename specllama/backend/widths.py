"""The widths of passes that compute a row alike, wherever it stands: measured.

Kernels are chosen by how many rows a pass has: CPUs compute four rows of a K-quant together and
what is left over one by one, GPUs take another kernel from some width on, or give each thread more
columns. Widths fall into groups: in passes of one group a row has the same bits, in those of
another it has others. Widths whose rows depend on their place belong to none.

A pass that is too narrow for its group is filled up with guesses that no drafter offered. So the
rows that all others are compared with are those of single steps, filled up to the narrowest width.
"""

from __future__ import annotations

from collections.abc import Sequence

from specllama.backend.exactness import Group
from specllama.backend.probed import LINE, TREE, Computed, Probe

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)  # as far as a window goes by itself


class _Steps:
    """The rows of a text, each in a pass of its own of ``width`` rows."""

    def __init__(self, probe: Probe, width: int, n: int) -> None:
        self.width = width
        self.members = [width]
        self.rows = probe.padded_steps(range(n), width)

    def takes(self, probe: Probe, width: int) -> bool:
        """True if passes of this width compute these rows, wherever they stand, and leave the cells
        that these leave."""
        for n in {1, width // 2 + 1, width}:
            probe.restart()
            found = probe.padded(range(n), width)
            found += probe.padded([n], width)
            if not all(a.same(b) for a, b in zip(self.rows, found, strict=False)):
                return False
        return True


def groups(probe: Probe, widths: Sequence[int]) -> list[list[int]]:
    """Divide the widths after one text into groups, each ascending."""
    n = max(widths) + 1
    found: list[_Steps] = []
    for width in widths:
        mine = next((one for one in found if one.takes(probe, width)), None)
        if mine is not None:
            mine.members.append(width)
            continue
        probe.restart()
        first = probe.padded([0], width)[0]
        if any(first.same(one.rows[0]) for one in found):
            continue  # only where it stands in front
        steps = _Steps(probe, width, n)
        if steps.takes(probe, width):
            found.append(steps)
    return [one.members for one in found]


def common(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the groups that two divisions of widths have in common."""
    shared = (tuple(w for w in a if w in b) for a in one for b in other)
    return sorted(group for group in shared if group)


def with_branches(probe: Probe, widths: tuple[int, ...]) -> Group:
    """Return a group of widths that knows if rows of branches are computed as steps are."""
    wide = next((w for w in widths if w >= len(TREE)), 0)
    if not wide or probe.context.max_leaves < 2:
        return Group(widths)
    along = probe.padded_steps([*LINE, 1], widths[0])
    probe.restart()
    tree = probe.padded(range(len(TREE)), wide, TREE)
    probe.context.keep_path(LINE)
    after: list[Computed] = [*(tree[node] for node in LINE), *probe.padded([1], widths[0])]
    return Group(widths, trees=all(a.same(b) for a, b in zip(along, after, strict=True)))
