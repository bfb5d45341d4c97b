"""Tables in Markdown."""

from collections.abc import Iterable, Sequence

from specllama.text import sanitize


def table_of(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table."""
    lines = (heads, ["---"] * len(heads), *rows)
    return "\n".join(f"| {' | '.join(map(_in_line, cells))} |" for cells in lines)


def _in_line(text: str) -> str:
    """Write a text within a line of Markdown."""
    return sanitize(text).replace("\n", " ").replace("|", "\\|")
