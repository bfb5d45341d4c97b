"""Kill a process while it writes states, again and again: nothing is lost, nothing wrong is read.

    python tests/lab/kill_writing.py [--kills 200] [--bytes 2000000] [--seed 1]

A child replaces one conversation's state over and over, each time by a larger number, and says so
when it is there. It is killed at a random moment, or, every second time, as soon as a file is seen
half written. Then the file must be whole, and of that number or a later one. POSIX only.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path

from specllama.store import states
from specllama.store.states import States

_NUMBER = struct.Struct("<q")


def content(number: int, n_bytes: int) -> list[bytes]:
    """Parts that only this number has."""
    return [random.Random(number).randbytes(64) * (n_bytes // 128), _NUMBER.pack(number) * 8]


def write(folder: Path, number: int, n_bytes: int, told: int) -> None:
    """Never returns."""
    there = States("key", most=1 << 40, folder=folder)
    while True:
        number += 1
        parts = content(number, n_bytes)
        there.write("c0ffee", "text", _NUMBER.pack(number), parts)
        os.write(told, _NUMBER.pack(number))


def begun(folder: Path) -> list[Path]:
    """List the files that are written and do not yet have their names."""
    return list(folder.glob("*/.*"))


def killed(folder: Path, number: int, n_bytes: int, wait_s: float, writing_only: bool) -> int:
    """Start a writer and kill it, after a while or in its writing; return its last number."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reading)
            write(folder, number, n_bytes, writing)
        finally:
            os._exit(1)
    os.close(writing)
    time.sleep(wait_s)
    while writing_only and not begun(folder):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the writer ended by itself"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    return _NUMBER.unpack(said[-8:])[0] if said else number


def kept(folder: Path, n_bytes: int) -> int:
    """The number of the state that another process finds, checked to the last byte."""
    found = States("key", most=1 << 40, folder=folder).found()
    if not found:
        return 0
    (one,) = found
    (number,) = _NUMBER.unpack(one.head)
    wanted = content(number, n_bytes)
    parts = states.read(one, [len(part) for part in wanted])
    assert [bytes(part) for part in parts] == wanted, f"{number} is not what was written"
    return int(number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--bytes", type=int, default=2_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    rng, number, torn = random.Random(args.seed), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "states"
        for kill in range(args.kills):
            number = killed(folder, number, args.bytes, rng.uniform(0.005, 0.08), bool(kill % 2))
            found = kept(folder, args.bytes)
            assert found >= number, f"{number} was written, and {found} is there"
            number = found
            torn += bool(left := begun(folder))
            for path in left:
                path.unlink()
    print(f"{args.kills} kills, {torn} in the middle of a file; {number} states written: none lost")
    return 0


if __name__ == "__main__":
    sys.exit(main())
