"""The kernels' bits on processors that are not here, under qemu-user (Debian: qemu-user
g++-aarch64-linux-gnu):   PYTHONPATH=tests/tools python tests/lab/kernels_elsewhere.py"""

import subprocess
import tempfile
from pathlib import Path

import build_kernels as build

DRIVER = Path(__file__).parents[1] / "unit" / "kernels" / "bits.cpp"
CASES = (  # compiler, emulator, machine, unit, name
    (
        "aarch64-linux-gnu-g++",
        ["qemu-aarch64", "-L", "/usr/aarch64-linux-gnu"],
        "aarch64",
        "neon",
        "neon-dotprod",
    ),
    ("g++", ["qemu-x86_64", "-cpu", "Haswell"], "x86_64", "avx2", "avx2"),
)


def main():
    for compiler, emulator, machine, unit, name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            objects, flags = [], [*build.FLAGS, "-I", str(build.HERE)]
            for file in (*build.PLAIN[1:], "all", unit):
                more = (
                    build.SETS[machine][unit].split()
                    if file == unit
                    else [f"-DHAVE_{unit.upper()}"]
                )
                objects.append(f"{folder}/{file}.o")
                source = str(build.HERE / f"{file}.cpp")
                subprocess.run(
                    [compiler, *flags, *more, "-c", source, "-o", objects[-1]], check=True
                )
            program = f"{folder}/bits"
            subprocess.run([compiler, *flags, str(DRIVER), *objects, "-o", program], check=True)
            for threads in "14":
                subprocess.run([*emulator, program, name, threads, "quick"], check=False)


if __name__ == "__main__":
    main()
