"""Files that specllama wrote for itself, read back, whatever has become of them.

A crash cuts a file, a disk flips bits, another version writes other fields. Every reader of such a
file catches ``DAMAGE``, the one list of what decoding foreign bytes can raise.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

# UnicodeDecodeError is a ValueError; msgspec's own errors are not
DAMAGE = (
    msgspec.MsgspecError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
)


def read_json(path: Path, kind: Any = Any) -> Any:
    """What a JSON file holds, as a ``kind``; None without a file.

    Raises:
        OSError: it cannot be read.
        one of ``DAMAGE``: it holds something else.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return msgspec.json.decode(data, type=kind)
