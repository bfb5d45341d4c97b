"""Sets of prompts: the bundled held-out ones, or a user's file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from specllama.errors import UsageError
from specllama.files import read_file
from specllama.interface import Message
from specllama.paths import bundled_dir
from specllama.settings.params import GenerateParams

SLICES = ("chat", "code", "rag", "json")
Half = Literal["tune", "bench"]


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """One prompt: a conversation, or raw text when ``messages`` is empty.

    ``schema`` is the JSON schema of its reply, "" where nothing constrains it.
    """

    id: str
    slice: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    schema: str = ""

    @property
    def content(self) -> str | tuple[Message, ...]:
        return self.messages or self.text

    def bound(self, params: GenerateParams) -> GenerateParams:
        """Add the prompt's schema to the parameters of a request."""
        return params.replace(json_schema=self.schema) if self.schema else params


def schema_prompts() -> list[BenchPrompt]:
    """Load the bundled 16 whose replies must fit a JSON schema, among them calls of tools."""
    return load_prompts(bundled_dir() / "schemas.jsonl")


def load_prompts(path: Path | None = None) -> list[BenchPrompt]:
    """Load prompts of a file, or the bundled 200 (50 of each slice, slices alternating).

    A ``.jsonl`` line is an object with ``messages`` (role, content) or ``prompt`` text, and
    optionally ``id``, ``slice`` and a JSON ``schema``; in any other file each non-empty line is a
    user message.

    Raises:
        UsageError: the file is missing, empty or malformed; the message names the line.
    """
    source = path or bundled_dir() / "prompts.jsonl"
    lines = read_file(source, "the prompts").decode("utf-8", "replace").splitlines()
    structured = source.suffix in (".jsonl", ".json")
    prompts = [
        _structured(line, n, source) if structured else _line(line, n)
        for n, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise UsageError(f"{source} has no prompts")
    return prompts if path is not None else interleaved(prompts)


def half(prompts: Sequence[BenchPrompt], which: Half) -> list[BenchPrompt]:
    """Return every other prompt of each slice: tune learns on one half, bench runs the other."""
    return [prompt for n, prompt in numbered(prompts) if n % 2 == (which == "bench")]


def numbered(prompts: Sequence[BenchPrompt]) -> Iterator[tuple[int, BenchPrompt]]:
    """Yield each prompt with its number in its slice."""
    seen = Counter[str]()
    for prompt in prompts:
        yield seen[prompt.slice], prompt
        seen[prompt.slice] += 1


def interleaved(prompts: Sequence[BenchPrompt]) -> list[BenchPrompt]:
    """Return one of each slice in turn, so that any first N are a fair sample."""
    return [prompt for _, prompt in sorted(numbered(prompts), key=lambda one: one[0])]


def _line(line: str, n: int) -> BenchPrompt:
    return BenchPrompt(id=str(n), slice="own", messages=(Message("user", line.strip()),))


def _structured(line: str, n: int, source: Path) -> BenchPrompt:
    try:
        data = json.loads(line)
        name, kind = str(data.get("id", n)), str(data.get("slice", "own"))
        schema = json.dumps(data["schema"]) if "schema" in data else ""
        if "messages" in data:
            messages = tuple(Message(str(m["role"]), str(m["content"])) for m in data["messages"])
            return BenchPrompt(name, kind, messages, schema=schema)
        return BenchPrompt(name, kind, text=str(data["prompt"]), schema=schema)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{source.name} line {n} is not a prompt ({error})",
            'each line is {"messages": [{"role": "user", "content": "…"}]} or {"prompt": "…"}',
        ) from None
