"""The ways to draft, a line each: the name, and its file in ``speculative/drafting``.

Such a file ends with its entry, ``METHOD``; ``drafting.method.find`` reads it. Everything that
lists, names, weighs or opens methods derives from these lines. Their order is that of every menu,
and of preference where ``auto`` has a choice. Nothing is imported here, so that names cost nothing.
"""

from __future__ import annotations

FILES = {
    "draft": "draft_model", "forced": "forced", "suffix": "suffix", "ngram": "ngram",
    "prediction": "prediction", "mixed": "mixed", "tree": "draft_tree", "merged": "merged",
    "lookahead": "lookahead", "mtp": "mtp", "eagle3": "eagle3", "dflash": "dflash",
    "medusa": "medusa", "self": "own_layers",
}  # fmt: skip


def names() -> tuple[str, ...]:
    """Return every method, in order."""
    return tuple(FILES)
