"""``make gpu-pack OUT=DIR``: what ``make gpu-check`` needs, for a machine without a network.

    python3 tests/lab/gpu/gpu_pack.py DIR [--python 3.12] [--platform TAG]... [--source SDIST]

DIR gets wheels of everything that specllama and its build need, for a Python version and platform,
and llama-cpp-python's source packed small: what cmake reads stays, vocabularies, documents,
examples, tests and web pages go.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from gpu_build import BINDING, BUILDERS, PROJECT, ROOT, SCALING, commit, output

MOST_BYTES = 50 << 20
PLATFORMS = (
    *(f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)),
    "manylinux2014_x86_64",
)

# of llama.cpp's folders, those that its build reads
KEPT = ("cmake", "common", "ggml", "include", "licenses", "scripts", "src", "tools", "vendor")
SOURCES = (".c", ".cc", ".cpp", ".h", ".hpp", ".inc", ".S", ".m", ".metal", ".cl", ".py")
SUFFIXES = (*SOURCES, ".cu", ".cuh", ".comp", ".glsl", ".cmake", ".in", ".toml")
NAMES = ("CMakeLists.txt", "LICENSE", "LICENSE.md", "README.md")
DROPPED = frozenset({"docs", "examples", "tests", "test", "bench", "legacy-models", "ui"})


def wanted(name: str) -> bool:
    """Whether a file of the sdist is needed to build; ``name`` is its path there."""
    path = PurePosixPath(*PurePosixPath(name).parts[1:])
    inner = path.parts
    if inner[:2] != ("vendor", "llama.cpp"):
        return inner[0] in ("llama_cpp", "CMakeLists.txt", "pyproject.toml", *NAMES)
    path = path.relative_to("vendor/llama.cpp")
    if path.as_posix() in ("CMakeLists.txt", "LICENSE"):
        return True
    if path.parent.as_posix() == "tools/ui":  # the frame of a page that is left empty
        return path.suffix in (".in", ".cmake") or path.name == "CMakeLists.txt"
    if path.parts[0] not in KEPT or DROPPED.intersection(path.parts[:-1]):
        return False
    if path.parts[0] == "scripts":
        return path.suffix == ".cmake"
    plain = path.suffix in SUFFIXES or path.name in NAMES
    return plain or path.parts[0] == "licenses" or path.name.startswith("LICENSE")


def repack(sdist: Path, into: Path) -> Path:
    """The same source without what no build reads."""
    small = into / f"{sdist.name.partition('.tar')[0]}.tar.xz"
    with tarfile.open(sdist) as old, tarfile.open(small, "w:xz", preset=9) as new:
        for member in old:
            if member.isfile() and wanted(member.name):
                data = old.extractfile(member)
                new.addfile(member, io.BytesIO(data.read() if data else b""))
            elif not member.isfile() and not member.isdir() and wanted(member.name):
                new.addfile(member)
    return small


def requirements() -> Iterator[str]:
    """Everything but the binding itself, which comes as source."""
    yield from (need for need in PROJECT["dependencies"] if need != BINDING)
    yield from BUILDERS
    yield SCALING
    yield "pip"


def needs_of(sdist: Path) -> list[str]:
    """What the binding itself depends on."""
    with tarfile.open(sdist) as archive:
        name = next(n for n in archive.getnames() if n.count("/") == 1 and "pyproject" in n)
        file = archive.extractfile(name)
        found: list[str] = tomllib.loads(file.read().decode() if file else "")["project"][
            "dependencies"
        ]
    return found


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="3.12")
    parser.add_argument("--platform", action="append", default=[])
    parser.add_argument("--source", type=Path, help="the sdist; fetched unless given")
    options = parser.parse_args(given)
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    fetch = [sys.executable, "-m", "pip", "download", "-q", "-d", str(out)]
    if (sdist := options.source) is None:
        alone = ["--no-deps", "--no-binary", "llama-cpp-python"]
        subprocess.run([*fetch[:-1], str(out / "sdist"), *alone, BINDING], check=True)
        sdist = next((out / "sdist").glob("llama_cpp_python-*.tar.gz"))
    small = repack(sdist, out)
    tags = [word for tag in options.platform or PLATFORMS for word in ("--platform", tag)]
    for_it = ["--only-binary=:all:", "--implementation", "cp", "--python-version", options.python]
    subprocess.run([*fetch, *for_it, *tags, *requirements(), *needs_of(sdist)], check=True)
    if options.source is None:
        sdist.unlink()
        sdist.parent.rmdir()
    facts = {
        "python": options.python,
        "platforms": options.platform or PLATFORMS,
        "llama_cpp": commit(),
        "commit": output("git", "-C", str(ROOT), "rev-parse", "HEAD").strip(),
    }
    (out / "pack.json").write_text(json.dumps(facts, indent=1))
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"{out}: {size / 2**20:.1f} MiB, of which {small.stat().st_size / 2**20:.1f} MiB source")
    if size > MOST_BYTES:
        raise SystemExit("that is more than intended: pack into an empty folder")


if __name__ == "__main__":
    main()
