"""The passes of several rows that equal single steps here, measured once (see ``verdicts``).

Where ``--exact`` asks for it, widths of passes are divided into groups in which a row has the same
bits, and passes are kept to the widths of one of them, plain ones too (see ``backend.probe``).
"""

from __future__ import annotations

import msgspec

from specllama.errors import UsageError
from specllama.settings.params import DRAFT_MAX, DRAFT_MAX_EXACT

SCHEMA = "specllama.exactness.v2"


class Group(msgspec.Struct, frozen=True):
    """Widths of passes, ascending, in which a row has the same bits wherever it stands.

    Attributes:
        trees: rows of branches have them, too.
        ms: of a pass of each width.
    """

    widths: tuple[int, ...]
    trees: bool = False
    ms: tuple[float, ...] = ()

    @property
    def price(self) -> float:
        """Milliseconds of a token at its best width: v(w) / (1 + 1/2 + ... + 1/w).

        The sum is what w - 1 guesses and the target's token give on average, where every rate of
        acceptance a from 0 to 1 is as likely as another: the mean of 1 + a + ... + a^(w-1).
        """
        return min(
            ms / sum(1 / n for n in range(1, w + 1))
            for w, ms in zip(self.widths, self.ms, strict=True)
        )

    def __str__(self) -> str:
        first, last = self.widths[0], self.widths[-1]
        if len(self.widths) > 2 and last - first == len(self.widths) - 1:
            return f"{first} to {last}"
        return _and(self.widths)


class Exactness(msgspec.Struct, frozen=True):
    """The measured exactness of a target on this machine.

    Attributes:
        rows: widest pass whose every row equals a single step bit for bit; 1 if none does, 0 if
            that was not measured yet.
        trees: whether rows of branches do, too.
        widths: rows of the passes that were compared. cells: lengths of the cache they ran on.
        differs: the narrowest of ``widths`` that differed, 0 if none; by ``by`` in logits.
        inside: whether the sums inside the passes were compared, not only the logits.
        why_not: why nothing was measured, "" if it was.
        costs: of passes, (rows, in single ones).
        groups: of widths, where they were looked for. kept: the one that passes are kept to.
    """

    rows: int = 1
    trees: bool = False
    widths: tuple[int, ...] = ()
    cells: tuple[int, ...] = ()
    differs: int = 0
    by: float = 0.0
    inside: bool = False
    seconds: float = 0.0
    why_not: str = ""
    costs: tuple[tuple[int, float], ...] = ()
    groups: tuple[Group, ...] = ()
    kept: Group | None = None

    def keeping(self, wish: str) -> Exactness:
        """Return a copy whose passes keep to one group.

        Args:
            wish: "off", "on" for the group that costs least, or the most rows of a pass.

        Raises:
            UsageError: no group has passes of so many rows.
        """
        if wish == "off":
            return self
        if wish == "on":
            alike = Group(tuple(range(1, self.rows + 1)), self.trees)
            kept = min(self.groups, key=lambda group: group.price, default=alike)
            return msgspec.structs.replace(self, kept=kept)
        most = int(wish)
        if most <= self.rows:
            group: Group | None = Group(tuple(range(1, most + 1)), self.trees)
        else:
            group = next((one for one in self.groups if most in one.widths), None)
        if group is None:
            found = "; ".join(str(one) for one in self.groups) or f"1 to {self.rows}"
            raise UsageError(
                f"--exact {most}: passes of {most} rows do not compute a row alike wherever it "
                "stands in them",
                f"widths that agree here: {found}",
            )
        n = group.widths.index(most) + 1
        cut = Group(group.widths[:n], group.trees, group.ms[:n])
        return msgspec.structs.replace(self, kept=cut)

    @property
    def label(self) -> str:
        """The strength of the promise of the same text, in a few words."""
        if self.kept is not None:
            return _kept_label(self.kept)
        if self.rows > DRAFT_MAX:
            return f"bitwise up to {self.rows} rows"
        beyond = f" beyond {self.rows} rows" if self.rows > 1 else ""
        without = " (not measured)" if self.rows else " (not measured yet)"
        return f"near-ties possible{beyond}" + (without if self.why_not else "")

    @property
    def measured(self) -> str:
        """The comparison that was made, in one line; "" if none was needed."""
        if self.why_not:
            return f"passes were not compared{'' if self.rows else ' yet'}: {self.why_not}"
        if not self.widths:
            return ""
        what = "every product and attention" if self.inside else "logits"
        text = (
            f"passes of {_and(self.widths)} rows against single steps over {_and(self.cells)} cells"
            f" ({what}, in {self.seconds:.1f} s)"
        )
        if self.differs:
            text += f": {self.differs} rows differ "
            text += f"by up to {self.by:.1g} in logits" if self.by else "inside, in the last bits"
        if self.groups:
            text += f"; widths that agree: {'; '.join(str(group) for group in self.groups)}"
        elif self.kept is not None and self.rows > DRAFT_MAX_EXACT:
            text += "; --exact changes nothing here"
        return text


def _kept_label(group: Group) -> str:
    *_, most = group.widths
    if group.widths == tuple(range(1, most + 1)):
        return f"bitwise up to {most} {'row' if most == 1 else 'rows'}"
    if group.widths == (most,):
        return f"bitwise, constant width {most}"
    return f"bitwise, constant widths {group}"


def _and(numbers: tuple[int, ...]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
