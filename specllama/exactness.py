"""How far passes of several rows equal single steps here: measured once, kept between runs.

A verdict belongs to one file, one build of llama.cpp, one machine and the settings that choose
kernels; anything else is measured anew. One small JSON file per verdict.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from specllama.params import DRAFT_MAX

logger = logging.getLogger("specllama.exactness")

SCHEMA = "specllama.exactness.v1"


class Exactness(msgspec.Struct, frozen=True):
    """What was measured of a target on this machine.

    Attributes:
        rows: widest pass whose every row equals a single step bit for bit; 1 if none does.
        trees: whether rows of branches do, too.
        widths: rows of the passes that were compared. cells: lengths of the cache they ran on.
        differs: the narrowest of ``widths`` that differed, 0 if none; by ``by`` in logits.
        inside: whether the sums inside the passes were compared, not only the logits.
        why_not: why nothing was measured, "" if it was.
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

    @property
    def label(self) -> str:
        """What this means for the promise of the same text, in a few words."""
        if self.rows > DRAFT_MAX:
            return f"bitwise up to {self.rows} rows"
        beyond = f" beyond {self.rows} rows" if self.rows > 1 else ""
        return f"near-ties possible{beyond}" + (" (not measured)" if self.why_not else "")

    @property
    def measured(self) -> str:
        """What was compared, in one line; "" where nothing had to be."""
        if self.why_not:
            return f"passes were not compared: {self.why_not}"
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
        return text


def _and(numbers: tuple[int, ...]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


def measured(
    key: Mapping[str, Any], measure: Callable[[], Exactness], folder: Path | None = None
) -> Exactness:
    """The verdict kept under ``key``, or a new one, which is then kept.

    Args:
        key: everything that the verdict depends on, as plain values.
    """
    from specllama.paths import profiles_dir, replace_file

    whole = {"schema": SCHEMA, **key}
    text = msgspec.json.encode(whole, order="sorted")
    name = f"{hashlib.sha256(text).hexdigest()[:16]}.json"
    path = (folder or profiles_dir() / "exactness") / name
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=_Kept)
        if msgspec.json.encode(kept.key, order="sorted") == text:
            return kept.found
    except (OSError, msgspec.DecodeError):
        pass
    found = measure()
    try:
        replace_file(path, msgspec.json.encode(_Kept(whole, found)))
    except OSError as error:
        logger.info("cannot keep what was measured: %s", error)
    return found


class _Kept(msgspec.Struct):
    key: dict[str, Any]
    found: Exactness
