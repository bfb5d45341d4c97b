"""Kill ``train-draft`` again and again at random: it goes on, and loses two minutes at most.

    python tests/lab/kill_training.py TARGET FOLDER [--kills 20] [--longest 60] [--seed 1]

A kill costs at most the seconds since the command began, or since something of it was last put on
disk (a reply, features, weights), whichever is less. Replies that were on disk before it have to be
there after it, and the card has to be whole. In the end, the command runs for a minute and writes
its head. Twelve minutes as it stands. POSIX only; needs PyTorch.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from specllama.training.corpus import TEXTS
from specllama.training.training_card import NAME, read_training_card

LOSES_S = 120.0


def newest(folder: Path) -> float:
    """The time of the last thing that lasts: the card says nothing, files in the making go."""
    lasts = [one for one in folder.glob("[!.]*") if one.name != NAME and one.suffix != ".part"]
    return max((one.stat().st_mtime for one in lasts), default=0.0)


def replies(folder: Path) -> set[str]:
    """The replies that are on disk, by their ids."""
    path = folder / TEXTS
    whole = path.read_text("utf-8").split("\n")[:-1] if path.exists() else []
    return {str(json.loads(line)["id"]) for line in whole if line}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--longest", type=float, default=60.0, help="seconds before a kill")
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    dice, out, worst, gone = random.Random(a.seed), a.folder / "head.gguf", 0.0, 0
    training, before = a.folder / "training", set[str]()
    words = [sys.executable, "-P", "-m", "specllama", "train-draft", a.target, str(out)]
    # in short runs, writing and training come in turn every half minute
    words += ["--folder", str(training), "--yes", "--minutes"]
    print("kill | after s | lost s | minutes in all | replies | replies lost | tokens learned")
    for number in range(1, a.kills + 1):
        began, longest = time.time(), dice.uniform(3, a.longest)
        with subprocess.Popen([*words, "1.2"], stderr=subprocess.DEVNULL) as process:
            time.sleep(longest)
            assert process.poll() is None, "it ended by itself"
            process.send_signal(signal.SIGKILL)
            process.wait()
            lost = time.time() - max(began, newest(training) if training.exists() else 0.0)
        there, card = replies(training), read_training_card(training / NAME)
        assert card is not None or not before, "the card is damaged"
        gone, worst = gone + len(before - there), max(worst, lost)
        spent, learned = (card.spent_s / 60, card.trained) if card else (0.0, 0)
        print(
            f"{number:4} | {longest:7.1f} | {lost:6.1f} | {spent:14.1f} | "
            f"{len(there):7} | {len(before - there):12} | {learned:14,}",
            flush=True,
        )
        before = there
    done = subprocess.run([*words, "1"], check=False)
    assert done.returncode == 0, "it does not go on"
    gone += len(before - replies(training))
    print(f"most lost by a kill: {worst:.0f} s; replies lost: {gone} of {len(before)}")
    assert worst <= LOSES_S
    assert not gone


if __name__ == "__main__":
    main()
