"""The corpus of the `tiny` family: four seeded slices of text written for it alone."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from typing import Any

from specllama.models.recipe.corpus.base import SLICES, Check, Message, Sample, Source, Split
from specllama.models.recipe.corpus.chat import chat_sample
from specllama.models.recipe.corpus.code import code_sample, unfence
from specllama.models.recipe.corpus.extract import json_sample
from specllama.models.recipe.corpus.rag import rag_sample

__all__ = [
    "MIX",
    "SLICES",
    "Check",
    "Message",
    "Sample",
    "chatml",
    "check_answer",
    "heldout_prompts",
    "sample",
    "stream",
]

MIX = {"chat": 0.16, "code": 0.24, "rag": 0.34, "json": 0.26}
"""Share of samples per slice in training."""


def sample(slice_: str, src: Source, *, size: str = "mixed") -> Sample:
    """Make one sample of a slice; `size` matters to the passage slice only."""
    if slice_ == "chat":
        return chat_sample(src)
    if slice_ == "code":
        return code_sample(src)
    if slice_ == "json":
        return json_sample(src)
    if slice_ == "rag":
        return rag_sample(src, size)
    raise ValueError(f"unknown slice {slice_!r}; known: {', '.join(SLICES)}")


def stream(seed: int | str, split: Split = "train", slice_: str | None = None) -> Iterator[Sample]:
    """Yield samples without end, deterministically, mixed unless a slice is named."""
    src = Source(seed, split)
    names, weights = list(MIX), list(MIX.values())
    while True:
        yield sample(slice_ or src.r.choices(names, weights)[0], src)


def heldout_prompts(
    slice_: str, n: int, seed: int | str = 0, *, long: int = 0, size: str = "mixed"
) -> list[tuple[list[Message], Check, str]]:
    """Make `n` held-out prompts with their check and reference answer; the last `long` have a long
    context if the slice has one, the others as many passages as `size` gives."""
    src = Source(f"prompts/{slice_}/{seed}", "heldout")
    rows = []
    for i in range(n):
        s = sample(slice_, src, size="long" if i >= n - long else size)
        rows.append((s.prompt, s.check, s.reference))
    return rows


def chatml(messages: list[Message], *, open_reply: bool = False) -> str:
    """Write messages in ChatML; `open_reply` starts the assistant's turn."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if open_reply else "")


def check_answer(check: Check | dict[str, Any], answer: str) -> bool:
    """True if an answer passes its check: parses, compiles, or contains every asked span."""
    kind = check.kind if isinstance(check, Check) else check["kind"]
    value: Any = check.value if isinstance(check, Check) else check.get("value")
    if kind == "json":
        try:
            json.loads(answer)
        except ValueError:
            return False
        return True
    if kind == "code":
        try:
            ast.parse(unfence(answer))
        except (SyntaxError, ValueError):
            return False
        return bool(unfence(answer).strip())
    if kind == "span":
        return all(str(span) in answer for span in value)
    return True
