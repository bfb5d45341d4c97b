"""The writer of `prompts.jsonl`: held-out prompts shipped for tests and benchmarks."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specllama.models.recipe.corpus import SLICES, heldout_prompts
from specllama.models.recipe.shape import BUNDLED

PER_SLICE = 50
LONG = 12


def prompt_rows(per_slice: int = PER_SLICE, seed: str = "shipped") -> list[dict[str, Any]]:
    """Make one row per prompt: id, slice, messages and check; the last passages are long."""
    rows: list[dict[str, Any]] = []
    for name in SLICES:
        prompts = heldout_prompts(name, per_slice, seed, long=LONG if name == "rag" else 0)
        for i, (messages, check, _) in enumerate(prompts):
            rows.append(
                {
                    "id": f"{name}-{i:02d}",
                    "slice": name,
                    "messages": messages,
                    "check": asdict(check),
                }
            )
    return rows


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=BUNDLED / "prompts.jsonl")
    a = parser.parse_args()
    lines = [json.dumps(row, ensure_ascii=False) for row in prompt_rows()]
    a.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
