"""Kill ``train-draft`` again and again at random: it goes on, and loses two minutes at most.

    python tests/lab/kill_training.py TARGET FOLDER [--kills 20] [--longest 90] [--seed 1]

After each kill, the seconds since something was last put on disk (a reply, features, weights) are
what the kill cost at most. The card must be whole, with as many replies as before at least. In the
end, the command runs for a minute and writes its head. POSIX only; needs PyTorch.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from specllama.training.training_card import NAME, read_training_card

LOSES_S = 120.0


def newest(folder: Path) -> float:
    """The time of the last thing that lasts."""
    return max(path.stat().st_mtime for path in folder.iterdir() if path.name != NAME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--longest", type=float, default=90.0, help="seconds before a kill")
    parser.add_argument("--seed", type=int, default=1)
    a = parser.parse_args()
    dice, out, worst, written = random.Random(a.seed), a.folder / "head.gguf", 0.0, 0
    training = a.folder / "training"
    words = [sys.executable, "-m", "specllama", "train-draft", a.target, str(out)]
    words += ["--folder", str(training), "--yes", "--minutes"]
    for number in range(1, a.kills + 1):
        with subprocess.Popen([*words, "600"], stderr=subprocess.DEVNULL) as process:
            time.sleep(dice.uniform(3, a.longest))
            assert process.poll() is None, "it ended by itself"
            process.send_signal(signal.SIGKILL)
            lost = time.time() - newest(training) if training.exists() else 0.0
        card = read_training_card(training / NAME)
        if card is None and not written:  # killed before it began
            continue
        assert card is not None, "the card is damaged"
        assert card.written >= written, "replies are lost"
        worst, written = max(worst, lost), card.written
        print(
            f"{number:3} {lost:6.1f} s since the disk  {card.spent_s / 60:6.1f} min "
            f"{card.written:8,} tokens of replies  {card.trained:10,} learned",
            flush=True,
        )
    done = subprocess.run([*words, "1"], check=False)
    assert done.returncode == 0, "it does not go on"
    print(f"at most {worst:.0f} s lost")
    assert worst <= LOSES_S


if __name__ == "__main__":
    main()
