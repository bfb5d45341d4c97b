"""A stranger's first minutes with an installed specllama, on a machine that has never seen it.

    PYTHONPATH=tests/support python tests/lab/stranger.py SPECLLAMA FOLDER [--size 80x24]
                                                           [--term xterm-256color]

SPECLLAMA is the installed command. It is started in tmux in an empty home, a question is asked,
then F4 and F6 are opened, and the page of a real pair. At each stage the screen is kept in FOLDER
as a picture (SVG) and as text once it stands still. Printed: the stage, seconds since it began
until the first change and until it stood still, and the words on the screen. Needs tmux.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

from panes import Pane
from rich.console import Console
from rich.text import Text

QUESTION = "What is speculative decoding?"
STILL_S, LIMIT_S = 3.0, 90.0


def still(pane: Pane, before: str) -> tuple[float, float]:
    """Seconds until the screen is another one, and until it has stood still for a while."""
    begun = time.monotonic()
    first, changed, seen = 0.0, begun, before
    while (now := time.monotonic()) < begun + LIMIT_S:
        if (screen := pane.screen) != seen:
            seen, changed = screen, now
            first = first or now - begun
        if first and now - changed > STILL_S:
            break
        time.sleep(0.05)
    return first, changed - begun


def keep(pane: Pane, path: Path, columns: int) -> None:
    drawn = pane.tmux("capture-pane", "-p", "-e", "-t", "walk")
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=columns, file=nowhere, force_terminal=True)
        console.print(Text.from_ansi(drawn), end="")
        console.save_svg(str(path.with_suffix(".svg")), title="specllama")
    path.with_suffix(".txt").write_text(pane.screen, "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("specllama")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", default="80x24")
    parser.add_argument("--term", default="xterm-256color")
    args = parser.parse_args()
    columns, rows = map(int, args.size.split("x"))
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        words = [f"SPECLLAMA_HOME={home}/home", f"TERM={args.term}", "LANG=C.UTF-8"]
        pane = Pane(Path(home), "env", *words, args.specllama, columns=columns, rows=rows)
        stages = {
            "first launch": (),
            "question": ("-l", QUESTION),
            "answer": ("Enter",),
            "does it pay (F4)": ("F4",),
            "back": ("Escape",),
            "models (F6)": ("F6",),
            "a real pair": ("-l", "qwen3"),
        }
        before = ""
        try:
            for n, (stage, keys) in enumerate(stages.items()):
                if keys:
                    pane.press(*keys)
                first, last = still(pane, before)
                before = pane.screen
                keep(pane, args.folder / f"{n}-{stage.split(' (')[0].replace(' ', '-')}", columns)
                print(f"{stage:18} {first:5.1f} s {last:5.1f} s {len(before.split()):4} words")
        finally:
            pane.tmux("kill-server")


if __name__ == "__main__":
    main()
