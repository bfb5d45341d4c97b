"""Predictions of a reply by its caller: the model's own text before an edit, or another text.

A small model cannot rewrite a file that it is given. So the reply is what it writes by itself, and
the old text is that reply with a word changed: the measure of how an edit is followed, not of a
model that edits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from specllama.bench.arms import EngineArm, Task

Expected = Literal["edited", "wrong"]


def edited(text: str, every: int = 16) -> str:
    """Replace one of every ``every`` words in a text, at least one."""
    words = text.split(" ")
    for at in range(min(every, len(words)) // 2, len(words), every):
        words[at] = "otherwise"
    return " ".join(words)


def expecting(what: Expected, plain: EngineArm, tasks: Sequence[Task]) -> Callable[[Task], str]:
    """Return a predictor of each task's reply: the text of ``plain`` with one word changed, or the
    reply to the next prompt. Each text is written once, when it is first needed."""
    texts: dict[tuple[str, float], str] = {}

    def written(task: Task) -> str:
        key = task.prompt.id, task.temperature
        if key not in texts:
            texts[key] = plain.answer(task).end.text
        return texts[key]

    def found(task: Task) -> str:
        if what == "edited":
            text = written(task)
            return edited(text, len(text) + 1)
        alike = [one for one in tasks if one.temperature == task.temperature]
        return written(alike[(alike.index(task) + 1) % len(alike)])

    return found
