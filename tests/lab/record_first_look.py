"""Make the recording that the app plays on its first launch.

``python record_first_look.py [-m MODEL] [--name WORDS] [QUESTION]``, in short ``make hero``

Asks MODEL the question twice, with logs of their own, and keeps the second reply. Without -m it is
the very file that ``make chat`` and Ctrl+L get: then the app shows the result beside that offer, of
another file it does not. The reply has to be surely faster than plain; take a quiet machine, the
times are real. Folders and hashes are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from specllama.models import catalog
from specllama.paths import HOME_VARIABLE
from specllama.store.rounds import read_run

OUT = Path(__file__).parents[2] / "tui" / "recorded.jsonl"
ROUNDED = 4  # digits after the point
QUESTION = "What is the water cycle?"


def slim(value: object) -> object:
    """What is shown, without what takes room."""
    if isinstance(value, dict):
        return {k: slim(v) for k, v in value.items() if k not in ("sha256", "card")}
    if isinstance(value, list):
        return [slim(one) for one in value]
    return round(value, ROUNDED) if isinstance(value, float) else value


def asked(question: str, run: list[str]) -> list[str]:
    """The log of the second of two replies: the first one finds out what drafts cost."""
    from specllama.models.refs import resolve

    place = run.index("-m") + 1
    run[place] = str(resolve(run[place]))  # the home of the run knows no other models
    with tempfile.TemporaryDirectory() as home:
        line = [sys.executable, "-P", "-m", "specllama", "run", *run, question]
        for _ in range(2):
            subprocess.run(
                line, check=True, stdout=subprocess.DEVNULL, env=os.environ | {HOME_VARIABLE: home}
            )
        logs = Path(home).glob("**/rounds/*.jsonl")
        log = max(logs, key=lambda path: path.stat().st_mtime_ns)
        finished = read_run(log).turns[0].finished
        if finished is None or finished.verdict is None or finished.verdict.answer != "faster":
            raise SystemExit("this reply was not surely faster than plain: nothing was kept")
        return log.read_text("utf-8").splitlines()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-m", "--model", default=catalog.FIRST)
    parser.add_argument("--name", default="SmolLM2 135M Instruct with its head")
    parser.add_argument("--head", default=catalog.FIRST)
    parser.add_argument("question", nargs="?", default=QUESTION)
    given = parser.parse_args(arguments)
    run = ["-m", given.model, "--head", given.head, "--temperature", "0", "--seed", "7"]
    lines = asked(given.question, [*run, "-n", "112"])
    with OUT.open("w", encoding="utf-8") as file:
        for line in lines:
            told = json.loads(line)
            if told["type"] == "run":
                kind = told["target"]["quantization"]
                told |= {"question": given.question, "what": given.name, "kind": kind}
                told["target"]["path"] = Path(told["target"]["path"]).name
            file.write(json.dumps(slim(told), ensure_ascii=False, separators=(",", ":")) + "\n")
    print(f"{OUT}: {OUT.stat().st_size / 1e3:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
