"""A stranger's first five minutes with an installed specllama, on a machine that never saw it.

    PYTHONPATH=tests/support python tests/lab/stranger.py SPECLLAMA FOLDER [--size 80x24]
                                             [--term xterm-256color] [--minutes 5]

SPECLLAMA is the installed command. In a shell in tmux and an empty home, the app is started, gets
its first real model (Ctrl+L) and answers a question; its guesses (F2), the race (F4) and the models
(F6) are looked at. Then a head is trained for that model for some minutes, and the question is
asked again. At each stage the screen is kept in FOLDER as a picture (SVG) and as text once it
stands still. Printed: the stage, seconds since it began until the first change and until it stood
still, and the words on the screen. Needs tmux.
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

QUESTION = "Write a Python function that counts the vowels in a string."
MODEL = "smollm2-135m"
STILL_S, LIMIT_S = 3.0, 90.0
READY = "$ "  # of the shell, once a command is over


def still(pane: Pane, before: str, limit_s: float, ends: str) -> tuple[float, float]:
    """Seconds until the screen is another one, and until it has stood still for a while, with
    ``ends`` behind all else."""
    begun = time.monotonic()
    first, changed, seen = 0.0, begun, before
    while (now := time.monotonic()) < begun + limit_s:
        if (screen := pane.screen) != seen:
            seen, changed = screen, now
            first = first or now - begun
        if first and now - changed > STILL_S and screen.rstrip().endswith(ends):
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
    parser.add_argument("--minutes", type=float, default=5.0)
    args = parser.parse_args()
    columns, rows = map(int, args.size.split("x"))
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        words = [f"HOME={home}", f"SPECLLAMA_HOME={home}/home", f"TERM={args.term}", f"PS1={READY}"]
        words += ["LANG=C.UTF-8", f"PATH={Path(args.specllama).parent}:{os.environ['PATH']}"]
        pane = Pane(Path(home), "env", *words, "bash", "--norc", columns=columns, rows=rows)
        run = f"specllama run -m {MODEL} --temp 0 -n 96 '{QUESTION}'"
        train = f"specllama train-draft {MODEL} --minutes {args.minutes:g} --yes"
        stages: dict[str, tuple[str, ...]] = {
            "first launch": ("specllama", "Enter"),
            "a real model (Ctrl+L)": ("C-l",),
            "question": (QUESTION,),
            "answer": ("Enter",),
            "guesses (F2)": ("F2",),
            "does it pay (F4)": ("Escape", "F4"),
            "models (F6)": ("Escape", "F6"),
            "shell": ("Escape", "C-q"),
            "asked before": ("clear; " + run, "Enter"),
            "training": ("clear; " + train, "Enter"),
            "asked after": ("clear; " + run, "Enter"),
            "heads": (f"clear; specllama pair {MODEL}", "Enter"),
        }
        before = ""
        try:
            for n, (stage, keys) in enumerate(stages.items()):
                for key in keys:
                    pane.press(*(("-l", key) if " " in key else (key,)))
                    time.sleep(0.3)
                limit_s = LIMIT_S + 60 * args.minutes * (stage == "training")
                in_shell = n >= [*stages].index("shell")
                first, last = still(pane, before, limit_s, READY.strip() if in_shell else "")
                before = pane.screen
                name = f"{n:02}-{stage.split(' (')[0].replace(' ', '-')}"
                keep(pane, args.folder / name, columns)
                print(f"{stage:22} {first:5.1f} s {last:5.1f} s {len(before.split()):4} words")
        finally:
            pane.tmux("kill-server")


if __name__ == "__main__":
    main()
