"""The table of benchmarks.md, as Markdown: the speed of every method by kind of text.

    python tests/lab/speed_table.py REPORT.json… [--temperature T]

The reports are what `bench run --json` prints. `make speed` ends with this.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from markdown_table import table_of

from specllama.bench.report import SCHEMA
from specllama.errors import UsageError
from specllama.files import DAMAGE


def read_report(path: Path) -> dict[str, Any]:
    """A report printed by ``bench run --json``.

    Raises:
        UsageError: the file is missing or is not such a report.
    """
    try:
        data = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except DAMAGE as error:
        raise UsageError(f"{path} is not a report of specllama bench ({error})") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise UsageError(f"{path} is not a report of specllama bench")
    return data


def by_kind(reports: Sequence[dict[str, Any]], temperature: float = 0.0) -> list[str]:
    """A Markdown table of the speed over plain of every method, by kind of text: cold → warm.

    If several reports have a method, the last one counts.
    """
    speeds: dict[str, dict[str, dict[str, float]]] = {}  # method, kind, state
    kinds: dict[str, str] = {}  # the group of each
    for report in reports:
        for name in dict.fromkeys(run["slice"] for run in report["runs"]):
            kinds[name] = f"{name} T={temperature:g}"
        several = any(s["group"] == f"T={temperature:g}" for s in report["summaries"])
        kinds["all"] = f"T={temperature:g}" if several else "all"
        for s in report["summaries"]:
            method, _, state = f" {s['arm']}".rpartition(" ")
            if state in ("cold", "warm") and s["ratio"] is not None:
                rows = speeds.setdefault(method.strip() or "auto", {})
                for kind, group in kinds.items():
                    if group == s["group"]:
                        rows.setdefault(kind, {})[state] = s["ratio"]
    heads = ["all", *(kind for kind in kinds if kind != "all")]

    def cell(states: dict[str, float]) -> str:
        return " → ".join(f"{states[s]:.2f}" for s in ("cold", "warm") if s in states) or "–"

    table = [
        [f"`{method}`", *(cell(found.get(kind, {})) for kind in heads)]
        for method, found in speeds.items()
    ]
    return table_of(["", *heads], table).splitlines()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("reports", nargs="+", type=Path)
    parser.add_argument("--temperature", type=float, default=0.0)
    asked = parser.parse_args()
    print(*by_kind([read_report(path) for path in asked.reports], asked.temperature), sep="\n")


if __name__ == "__main__":
    main()
