"""Make the recording that the app plays on its first launch, out of the log of a run.

``python record_first_look.py LOG NAME QUESTION``

The log is that of a reply that was surely faster than plain (``specllama run`` names it), made on
a quiet machine: the times are real. Folders and hashes are left out.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from specllama.store.rounds import read_run

OUT = Path(__file__).parents[2] / "tui" / "recorded.jsonl"
ROUNDED = 4  # digits after the point


def slim(value: object) -> object:
    """What is shown, without what takes room."""
    if isinstance(value, dict):
        return {k: slim(v) for k, v in value.items() if k not in ("sha256", "card")}
    if isinstance(value, list):
        return [slim(one) for one in value]
    return round(value, ROUNDED) if isinstance(value, float) else value


def main(log: str, name: str, question: str) -> None:
    finished = read_run(Path(log)).turns[0].finished
    if finished is None or finished.verdict is None or finished.verdict.answer != "faster":
        raise SystemExit("this reply was not surely faster than plain")
    with OUT.open("w", encoding="utf-8") as file:
        for line in Path(log).read_text("utf-8").splitlines():
            told = json.loads(line)
            if told["type"] == "run":
                kind = told["target"]["quantization"]
                told |= {"question": question, "what": name, "kind": kind}
                told["target"]["path"] = Path(told["target"]["path"]).name
            file.write(json.dumps(slim(told), ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{OUT}: {OUT.stat().st_size / 1e3:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
