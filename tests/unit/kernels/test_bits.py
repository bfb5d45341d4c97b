"""The kernels' bits: every type, width and number of threads, as the scalar reference has them."""

import shutil
import subprocess
from pathlib import Path

import build_kernels as build
import pytest

from specllama import kernels

SOURCES = Path(kernels.__file__).parent
DRIVER = Path(__file__).with_name("bits.cpp")
COMPILER = build.compiler()
BEST = kernels.best() if not kernels.missing() else ""

pytestmark = pytest.mark.skipif(
    not COMPILER or not BEST, reason="no compiler, or no kernels for this processor"
)
UNIT = {"avx512vnni": "avx512", "avxvnni": "avxvnni", "avx2": "avx2", "neon-dotprod": "neon"}
MACHINE = "aarch64" if BEST.startswith("neon") else "x86_64"
# the set that compiles fastest stands for the skeletons that all share
ONE = "neon-dotprod" if MACHINE == "aarch64" else "avx2"


def made(
    folder: Path,
    name: str,
    *flags: str,
    change: tuple[str, str, str] | None = None,
    base: Path | None = None,
) -> Path:
    """Compile the driver for one instruction set; ``change``: (file, text, other text) of the
    sources before that. ``base``: a program of the same flags, of which all that the file is no
    part of is taken."""
    assert COMPILER is not None
    if change:
        shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        file, old, new = change
        text = (folder / file).read_text()
        assert text.count(old) == 1, change
        (folder / file).write_text(text.replace(old, new))
    folder.mkdir(exist_ok=True)
    source, unit, program = (folder if change else SOURCES), UNIT[name], folder / "bits"
    quick = [*COMPILER, *build.FLAGS, "-O1", "-I", str(source), *flags]
    objects = []
    for file in (*build.PLAIN[1:], "all", unit):
        if base and change and change[0] not in base.with_name(f"{file}.d").read_text():
            objects.append(str(base.with_name(f"{file}.o")))
            continue
        objects.append(str(folder / f"{file}.o"))
        # the reference too: without the instruction each of its products is a call
        own = file in (unit, "reference")
        more = build.SETS[MACHINE][unit].split() if own else [f"-DHAVE_{unit.upper()}"]
        command = [*quick, "-MD", *more, "-c", str(source / f"{file}.cpp"), "-o", objects[-1]]
        subprocess.run(command, check=True)
    subprocess.run([*quick, str(DRIVER), *objects, "-o", str(program)], check=True)
    return program


def outcome(program: Path, *arguments: str) -> tuple[int, str]:
    ended = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)
    return ended.returncode, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("plain"), ONE)


@pytest.mark.parametrize("threads", ["1", "2", "3", "4"])
def test_every_type_and_width_is_the_reference(driver: Path, threads: str) -> None:
    code, log = outcome(driver, ONE, threads)
    assert code == 0, log
    assert " 0 different" in log


def test_addresses_and_arithmetic_are_within_bounds(tmp_path: Path) -> None:
    flags = "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    code, log = outcome(made(tmp_path / "asan", ONE, *flags), ONE, "2", "quick")
    assert code == 0, log


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("tsan"), ONE, "-fsanitize=thread")


def test_threads_do_not_race(watched: Path) -> None:
    code, log = outcome(watched, ONE, "3", "quick")
    assert code == 0, log


# what a mistake would be: each must be seen
MISTAKES = {
    "a wrong scale": (
        "pack.cpp",
        "put_bytes(o.scale[j], s & 15)",
        "put_bytes(o.scale[j ^ 1], s & 15)",
    ),
    "a dropped block": ("k_quants.h", "i < blocks; i++, w++", "i + 1 < blocks; i++, w++"),
    "another order": (
        "blocks32.h",
        "f[k] = I::fma(I::to_float(sum[k]), I::times(d, dy), f[k]);",
        "f[k] = I::fma(d, I::times(I::to_float(sum[k]), dy), f[k]);",
    ),
    "another order of parts": (
        "attention.cpp",
        "for (int64_t p = 0; p < b.parts(); p++) {",
        "for (int64_t p = b.parts(); p-- > 0;) {",
    ),
    "a neighbour's cells": (
        "attention.cpp",
        "return same[r] >= p * PART + of_part(r - 1, p);",
        "return of_part(r, p) >= of_part(r - 1, p);",
    ),
    "a sum that overflows": ("avx2.cpp", "(2 * 127 * most) < 8", "(127 * most) < 8"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(driver: Path, tmp_path: Path, mistake: str) -> None:
    if mistake == "a sum that overflows" and ONE != "avx2":
        pytest.skip("only AVX2 has sums of 16 bits")
    program = made(tmp_path / "made", ONE, change=MISTAKES[mistake], base=driver)
    code, log = outcome(program, ONE, "1", "quick")
    assert code == 1, log


def test_a_race_is_seen(watched: Path, tmp_path: Path) -> None:
    change = ("product.h", "    wait();\n", "    static_cast<void>(wait);\n")
    program = made(tmp_path / "made", ONE, "-fsanitize=thread", change=change, base=watched)
    code, log = outcome(program, ONE, "3", "quick")
    assert code != 0
    assert "data race" in log or "different" in log
