"""The ways to draft, a line each: the name, and the file of this folder that holds it.

Such a file ends with its entry, ``METHOD``. Everything that lists, names or weighs methods asks
here. The order is that of every menu, and of preference where ``auto`` has a choice. Names cost no
import; a file is loaded when somebody asks for its entry.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specllama.speculative.drafting.method import Method

FILES = {
    "draft": "draft_model",
    "suffix": "suffix",
    "ngram": "ngram",
    "mixed": "mixed",
    "tree": "draft_tree",
    "merged": "merged",
    "lookahead": "lookahead",
    "mtp": "mtp",
    "eagle3": "eagle3",
    "medusa": "medusa",
    "self": "own_layers",
}


def names() -> tuple[str, ...]:
    """Every method, without importing one."""
    return tuple(FILES)


def find(name: str) -> Method | None:
    """The entry of a method; None for any other word, such as "auto" and "none"."""
    file = FILES.get(name)
    if file is None:
        return None
    method: Method = importlib.import_module(f"{__package__}.{file}").METHOD
    return method


def methods() -> tuple[Method, ...]:
    """All entries, in order."""
    return tuple(method for name in FILES if (method := find(name)) is not None)


def books_own(name: str) -> bool:
    """Whether the steps of a method have a cost table of their own."""
    method = find(name)
    return method is not None and method.cost == "own"
