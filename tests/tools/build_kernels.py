"""The build of the kernels: a C++17 compiler and some seconds; neither cmake nor llama.cpp.

setuptools calls it (``cmdclass`` in pyproject.toml) for a wheel and for an editable install. Where
no compiler is found, the package is built without kernels: llama.cpp's own compute then. A compiler
that fails ends the build. ``CXX`` names another compiler, ``SPECLLAMA_KERNELS=off`` builds none.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

HERE = Path(__file__).parents[2] / "specllama" / "kernels"
NAME = "libspecllama_kernels.so"
# one order of sums: products and sums are joined only where the source says so
FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)
# the door first: the others are built without llama.cpp, too
PLAIN = ("door", "product", "attention", "pack", "reference")
SETS = {
    "x86_64": {
        "avx2": "-mavx2 -mfma -mf16c",
        "avxvnni": "-mavx2 -mfma -mf16c -mavxvnni",
        "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512vnni -mfma -mf16c",
    },
    "aarch64": {"neon": "-march=armv8.2-a+dotprod+fp16"},
}
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def compiler() -> list[str] | None:
    """Return the command of a C++ compiler, None if there is none or no kernels are wanted."""
    if os.environ.get("SPECLLAMA_KERNELS") == "off" or sys.platform == "win32":
        return None
    if named := os.environ.get("CXX"):
        return named.split()
    found = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    return next(([path] for path in found if path), None)


def build(to: Path, command: list[str]) -> None:
    """Compile the kernels for this machine into ``to``, a library.

    Raises:
        subprocess.CalledProcessError: the compiler failed; it said why.
    """
    machine = platform.machine().lower()
    sets = SETS.get(MACHINES.get(machine, machine), {})
    with tempfile.TemporaryDirectory(prefix="specllama-kernels-") as name:
        folder = Path(name)
        known = {one: flags for one, flags in sets.items() if _knows(command, flags, folder)}
        named = [f"-DHAVE_{one.upper()}" for one in known]
        units = {**dict.fromkeys(PLAIN, ""), "all": " ".join(named), **known}

        def compile_one(unit: str) -> str:
            out = str(folder / f"{unit}.o")
            source = str(HERE / f"{unit}.cpp")
            subprocess.run(
                [*command, *FLAGS, *units[unit].split(), "-c", source, "-o", out], check=True
            )
            return out

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, units))
        dl = [] if sys.platform == "darwin" else ["-ldl"]
        subprocess.run(
            [*command, "-shared", "-pthread", *objects, *dl, "-o", str(folder / NAME)],
            check=True,
        )
        to.parent.mkdir(parents=True, exist_ok=True)
        beside = to.with_name(f"{NAME}.new")  # programs that have the old one loaded keep it
        shutil.copyfile(folder / NAME, beside)
        beside.replace(to)


def _knows(command: list[str], flags: str, folder: Path) -> bool:
    """True if the compiler has these instructions."""
    empty = folder / "empty.cpp"
    empty.write_text("int x;\n")
    tried = [*command, *flags.split(), "-c", str(empty), "-o", str(folder / "empty.o")]
    return subprocess.run(tried, capture_output=True).returncode == 0


class BuildWithKernels(build_py):
    """The step that collects the package's files, and compiles the kernels among them."""

    def run(self) -> None:
        super().run()
        command = compiler()
        if command is None:
            print("no C++ compiler: specllama is built without its CPU kernels", file=sys.stderr)
            return
        folder = HERE if self.editable_mode else Path(self.build_lib, "specllama", "kernels")
        build(folder / NAME, command)


class WheelWithKernels(bdist_wheel):
    """The wheel: for this platform if it has kernels, and for every CPython 3."""

    def finalize_options(self) -> None:
        if compiler() is not None:  # else it would go where pure packages go
            self.distribution.has_ext_modules = lambda: True
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        _, _, platform_name = super().get_tag()
        return "py3", "none", platform_name
